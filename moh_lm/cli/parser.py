"""Parses the arguments of every command with argparse, but reports each mistake in one line with value and remedy."""

import argparse
import difflib
import re
from itertools import pairwise

from moh_lm.config import ConfigError, raise_any
from moh_lm.units import integer, real

# What other programs, or other commands of this one, call a flag.
OTHER_NAMES = {
    **dict.fromkeys(("--max-steps", "--max-train-steps", "--num-steps", "--steps"), "--train-iters"),
    **dict.fromkeys(("--bf16", "--fp16", "--fp32"), "--precision"),
    **dict.fromkeys(("--bs", "--per-device-train-batch-size", "--mbs"), "--micro-batch-size"),
    **dict.fromkeys(("--gbs", "--global-batch-size", "--gradient-accumulation-steps"), "--batch-tokens"),
    **dict.fromkeys(("--load", "--save", "--output-dir", "--resume", "--resume-from-checkpoint"), "--checkpoint-dir"),
    "--checkpoint": "--model",
    "--model": "--checkpoint",
}


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError: a line with the flag, its value, what is allowed and the remedy."""

    def __init__(self, **settings):
        super().__init__(**settings, allow_abbrev=False)
        self.problems = []
        self.strict = False  # whether unknown arguments are errors, not left to another parser
        self._negative_number_matcher = re.compile(r"-[.\d]")  # so that -5M is a value
        self.register("type", int, integer)
        self.register("type", float, real)

    def parse_args(self, texts):
        self.strict = not self._subparsers  # a command has flags of its own
        arguments, unknown = self.parse_known_args(texts)
        raise_any(self.all_problems(unknown))
        return arguments

    def all_problems(self, unknown=()):
        """Return sentences for values that cannot be read and for ``unknown`` arguments."""
        parsers = [self, *(parser for action in self._actions for parser in commands(action))]
        shown = [name for parser in parsers for name, action in parser._option_string_actions.items()
                 if action.help != argparse.SUPPRESS and action.dest != "help"]  # fmt: skip
        return [*(problem for parser in parsers for problem in parser.problems), *unknown_arguments(unknown, shown)]

    def parse_known_args(self, texts=None, namespace=None):
        self.texts = texts
        if "--" in texts:  # after which argparse takes flags for values
            raise ConfigError(["--: only flags may follow, so leave it out"])
        return super().parse_known_args(texts, namespace)

    def error(self, message):
        """argparse calls this if something is missing, or if flags exclude each other."""
        message = message.removeprefix("argument ").replace("not allowed with argument ", "excludes ")
        message = re.sub("expected (one|at least one) argument", "needs a value", message)
        _, required, names = message.partition("the following arguments are required: ")
        missing = names.split(", ") if required else []
        flags = [text for text in self.texts if text.startswith("--")]
        given = [text for text in flags if text.split("=")[0] not in self._option_string_actions]
        near = [*missing, *(other for other, name in OTHER_NAMES.items() if name in missing)]
        misspelt = [text for text in given if difflib.get_close_matches(text.split("=")[0], near, cutoff=0.7)]
        if problems := unknown_arguments(misspelt, missing):
            raise ConfigError([*self.all_problems(), *problems])
        message = f"{' and '.join(missing)}: must be given" if required else message
        choices = {argument_name(action): action.choices for action in self._actions if action.choices}
        allowed = [f"{name} is one of {', '.join(map(str, choices[name]))}" for name in missing if name in choices]
        remedy = ", ".join(allowed) or "--help says what is allowed"
        raise ConfigError([*self.all_problems(given * self.strict), f"{message}; {remedy}"])

    def _get_value(self, action, text):
        try:
            return self._registry_get("type", action.type, action.type)(text)
        except ValueError as error:
            self.problems.append(f"{argument_name(action)} {text}: {error}")
            return text

    def _check_value(self, action, value):
        if action.choices is not None and value not in action.choices:
            allowed = ", ".join(map(str, action.choices))
            self.problems.append(f"{argument_name(action)} {value}: choose one of {allowed}")
            if commands(action):  # the rest of the line is for the command
                raise ConfigError(self.all_problems())


def commands(action):
    """Return the parsers of the commands from which an action chooses, if it does."""
    return action.choices.values() if isinstance(action, argparse._SubParsersAction) else ()


def argument_name(action):
    return action.option_strings[-1] if action.option_strings else action.metavar or action.dest


def unknown_arguments(unknown, flags):
    """Return sentences for ``unknown`` arguments that none of the ``flags`` takes; values belong to unknown flags."""
    problems = []
    for before, text in pairwise(["", *unknown]):
        if text.startswith("--"):
            name = text.split("=")[0]
            problems.append(f"flag {name} is unknown: {nearest(name, flags)}")
        elif not before.startswith("--"):
            problems.append(f"argument {text!r} belongs to no flag: remove it")
    return problems


def nearest(name, names):
    """Return a sentence with the name that ``name`` may stand for.

    It may be another program's name, the beginning or the initials of a name, look like it, or have a word that only
    one name begins with.
    """
    name = name.replace("_", "-")
    found = [known for known in names if known == OTHER_NAMES.get(name)]
    found = found or [known for known in names if known.startswith(name)]
    found = found or sorted((known for known in names if initials(known).startswith(name.strip("-"))), key=initials)
    if not found:
        of_words = [[known for known in names if known.startswith(f"--{word}-")] for word in name.strip("-").split("-")]
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        found = list(dict.fromkeys([*near, *(only[0] for only in of_words if len(only) == 1)]))
    if not found:
        others = [OTHER_NAMES[other] for other in difflib.get_close_matches(name, OTHER_NAMES, n=1, cutoff=0.7)]
        found = [other for other in others if other in names]
    return f"did you mean {' or '.join(found[:3])}?" if found else "--help lists all of them"


def initials(name):
    """Return the initials of a name, such as lr for --learning-rate and learning_rate."""
    return "".join(word[:1] for word in re.split("[-_]", name.strip("-")))
