"""Command-line flags, made from the fields of the configuration.

Every field becomes one flag of its name (``num_layers`` -> ``--num-layers``), grouped by section in ``--help``. A
later flag wins over an earlier one, so that arguments appended to a launch script override it. All unknown flags and
unreadable values are collected and shown together.
"""

import argparse
import difflib
from itertools import pairwise

from moh_lm.checkpoint.directory import newest_model
from moh_lm.config import Config, ConfigError, flag, walk
from moh_lm.config.presets import SIZES, preset
from moh_lm.quantities import duration, quantity


def parse_config(arguments):
    """(Config, dry_run) from command-line arguments. Raises ConfigError; exits by itself only for ``--help``.

    What is not given of the model is that of the newest checkpoint in --checkpoint-dir, if there is one.
    """
    namespace, unknown = make_parser().parse_known_args(arguments)
    options = {flag(entry.name): entry for _, entry in walk(Config())}
    problems = [unknown_argument(text, before, options) for before, text in pairwise(["", *unknown])]
    problems = [problem for problem in problems if problem]
    values = {}
    for name, entry in options.items():
        texts = getattr(namespace, entry.name)
        if texts is not None:
            try:
                values[entry.name] = read_value(entry, texts)
            except ValueError as error:
                problems.append(f"{name} {texts if isinstance(texts, str) else ' '.join(texts)}: {error}")
    if problems:
        raise ConfigError(problems)
    sizes = preset(namespace.preset, values) if namespace.preset else {}
    return Config.from_dict({**model_of_run(values.get("checkpoint_dir")), **sizes, **values}), namespace.dry_run


def model_of_run(directory):
    """{field: value} of the model in the newest checkpoint of a run directory; {} without any."""
    model = newest_model(directory)[1] if directory else None
    return {} if model is None else {entry.name: getattr(section, entry.name) for section, entry in walk(model)}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ConfigError([message])


def make_parser():
    parser = Parser(
        prog="python -m moh_lm.pretrain",
        usage="%(prog)s [flags]",
        description="Pretrain a Mixture-of-Head language model. The scripts in launch/ hold the paper's values.",
        allow_abbrev=False,
    )
    groups = {}
    for section, entry in walk(Config()):
        title = type(section).__doc__
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(
            flag(entry.name),
            action=LaterWins,
            replaces=entry.metadata.get("replaces"),
            nargs="+" if is_list(entry) else "?" if entry.type is bool else None,
            const="true" if entry.type is bool else None,
            metavar=placeholder(entry),
            help=help_text(entry),
        )
    parser.add_argument("--preset", choices=SIZES, help="sizes, batch, budget and rate that no other flag gives")
    parser.add_argument("--dry-run", action="store_true", help="print what the run would do, and exit")
    # The deepspeed launcher appends it to every rank's arguments; LOCAL_RANK is what counts.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    return parser


class LaterWins(argparse.Action):
    """Store the texts of a flag, and forget those of the flag that it ``replaces``."""

    def __init__(self, *args, replaces, **kwargs):
        super().__init__(*args, **kwargs)
        self.replaces = replaces

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, values)
        if self.replaces:
            setattr(namespace, self.replaces, None)


def read_value(entry, texts):
    """The value of a field from the text, or texts, after its flag. Raises ValueError that says what is allowed."""
    parse = value_parser(entry)
    if is_list(entry):
        return tuple(parse(text) for text in texts)
    value = parse(texts)
    allowed = entry.metadata.get("choices")
    if allowed and value not in allowed:
        raise ValueError(f"choose one of {', '.join(map(str, allowed))}")
    return value


def is_list(entry):
    return isinstance(entry.default, tuple)


def value_parser(entry):
    if "binary" in entry.metadata:
        return quantity(1024 if entry.metadata["binary"] else 1000)
    if "duration" in entry.metadata:
        return duration
    if entry.name in ("data_mix", "decay_mix"):
        return name_and_weight
    parse = entry.metadata.get("parse", entry.type)
    return {bool: boolean, int: integer, float: real}.get(parse, parse)


def integer(text):
    try:
        return int(text)
    except ValueError:
        raise ValueError("write a whole number") from None


def real(text):
    try:
        return float(text)
    except ValueError:
        raise ValueError("write a number such as 3e-4") from None


def boolean(text):
    if text.lower() not in ("true", "false"):
        raise ValueError("write true or false, or the flag alone for true")
    return text.lower() == "true"


def name_and_weight(text):
    name, separator, weight = text.rpartition("=")
    if not separator:
        raise ValueError("write NAME=WEIGHT for each source, such as books=4.24 arxiv=4.37")
    return name, weight


def unknown_argument(text, before, options):
    """A sentence for an argument that no flag takes; None for what belongs to the unknown flag ``before`` it."""
    if not text.startswith("--"):
        return None if before.startswith("--") else f"argument {text!r} belongs to no flag: remove it"
    name = text.split("=")[0]
    near = difflib.get_close_matches(name, [*options, "--dry-run", "--preset"], n=1)
    return f"flag {name} is unknown: " + (f"did you mean {near[0]}?" if near else "--help lists the flags")


def placeholder(entry):
    if "choices" in entry.metadata:
        return "{" + ",".join(map(str, entry.metadata["choices"])) + "}"
    if entry.type is bool:
        return "{true,false}"
    if "duration" in entry.metadata:
        return "TIME"
    return "NAME=WEIGHT" if value_parser(entry) is name_and_weight else "PATH" if entry.type is str else "N"


def help_text(entry):
    shown = str(entry.default).lower() if isinstance(entry.default, bool) else str(entry.default)
    default = "" if entry.default in (None, (), "") else f" (default: {shown})"
    return (entry.metadata["help"] + default).replace("%", "%%")
