"""How every command reads its arguments: by argparse, but each mistake is one line, with the value and the remedy."""

import argparse
import difflib
import re
from itertools import pairwise

from moh_lm.config import ConfigError
from moh_lm.quantities import integer, real


class Parser(argparse.ArgumentParser):
    """A parser of argparse that raises ConfigError: a line with the flag, its value, what is allowed and the remedy."""

    def __init__(self, **settings):
        super().__init__(**settings, allow_abbrev=False)
        self.register("type", int, integer)
        self.register("type", float, real)

    def parse_args(self, texts):
        arguments, unknown = self.parse_known_args(texts)
        if problems := unknown_arguments(unknown, self.flags()):
            raise ConfigError(problems)
        return arguments

    def flags(self):
        """Those of the parser and of its commands."""
        shown = [flag for flag, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        actions = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        commands = [parser for action in actions for parser in action.choices.values()]
        return [*shown, *(flag for parser in commands for flag in parser.flags())]

    def error(self, message):
        message = message.removeprefix("argument ")
        if message.startswith("the following arguments are required: "):
            message = f"{message.partition(': ')[2].replace(', ', ' and ')} is missing"
        raise ConfigError([f"{message}; --help says what is allowed"])

    def _get_value(self, action, text):
        try:
            return self._registry_get("type", action.type, action.type)(text)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ConfigError([f"{argument_name(action)} {text}: {error}"]) from error

    def _check_value(self, action, value):
        if action.choices is not None and value not in action.choices:
            raise ConfigError([f"{argument_name(action)} {value}: choose one of {', '.join(map(str, action.choices))}"])


def argument_name(action):
    return action.option_strings[-1] if action.option_strings else action.metavar or action.dest


def unknown_arguments(unknown, flags):
    """Sentences for ``unknown``, arguments that none of the ``flags`` takes; a value is its unknown flag's."""
    problems = []
    for before, text in pairwise(["", *unknown]):
        if text.startswith("--"):
            name = text.split("=")[0]
            problems.append(f"flag {name} is unknown: {nearest(name, flags)}")
        elif not before.startswith("--"):
            problems.append(f"argument {text!r} belongs to no flag: remove it")
    return problems


def nearest(name, names):
    """A sentence with what ``name`` may stand for: what it is the beginning or the initials of, or looks like."""
    found = [known for known in names if known.startswith(name)]
    found = found or [known for known in names if initials(known) == name.strip("-")][:1]
    found = found or difflib.get_close_matches(name, names, n=1)
    return f"did you mean {' or '.join(found[:3])}?" if found else "--help lists what there is"


def initials(name):
    """lr of --learning-rate and of learning_rate."""
    return "".join(word[:1] for word in re.split("[-_]", name.strip("-")))
