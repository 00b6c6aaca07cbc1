"""The parts of every section of the configuration: fields that document themselves, and their names."""

from dataclasses import field, fields, is_dataclass
from typing import get_args, get_origin

LARGEST = 2**63 - 1
IN_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class ConfigError(Exception):
    """Errors that the user has to fix, one sentence each in ``problems``. Programs print them and exit with code 2.

    A character of a foreign name that would break the line, or act on the terminal, is replaced by its escape.
    local_rank: the first rank on a node that sees the errors, and prints them.
    """

    def __init__(self, problems: list[str], local_rank: int = 0):
        self.problems = ["".join(c if c.isprintable() else repr(c)[1:-1] for c in text) for text in problems]
        super().__init__("\n".join(self.problems))
        self.local_rank = local_rank


def raise_any(problems: list[str]):
    """Raise ConfigError with these ``problems`` if there are any."""
    if problems:
        raise ConfigError(problems)


def option(default, help, **metadata):
    """Return a dataclass field with its help. moh_lm.flags reads choices, binary, duration, metavar and replaces."""
    return field(default=default, metadata={"help": help, **metadata})


def text_option(default, help, **metadata):
    """Return a field that only language models have, in a section that all tasks share."""
    return option(default, help, text_only=True, **metadata)


def walk(section):
    """Yield (section, field) for every leaf field below ``section``, in order."""
    for entry in fields(section):
        value = getattr(section, entry.name)
        if is_dataclass(value):
            yield from walk(value)
        else:
            yield section, entry


def build(section_type, values):
    """Build a section, including nested ones, from a flat mapping of field names."""
    arguments = {}
    for entry in fields(section_type):
        if is_dataclass(entry.type):
            arguments[entry.name] = build(entry.type, values)
        elif entry.name in values:
            arguments[entry.name] = as_tuples(values[entry.name])
    return section_type(**arguments)


def as_tuples(value):
    """Convert lists to tuples: JSON only has lists, fields hold tuples."""
    return tuple(map(as_tuples, value)) if isinstance(value, list | tuple) else value


def tuple_of(value):
    """Return a tuple as it is, and one number for all layers as a tuple of one."""
    return value if isinstance(value, tuple) else (value,)


def fits(value, wanted):
    """Return whether a value of JSON is of the type of a field, which may be one of several (int | None) or a tuple.
    Whole numbers have at most 63 bits."""
    if get_origin(wanted) is tuple:
        return isinstance(value, list) and all(fits(part, get_args(wanted)[0]) for part in value)
    if get_args(wanted):
        return any(fits(value, one) for one in get_args(wanted))
    allowed = int | float if wanted is float else wanted
    is_large = isinstance(value, int) and value > LARGEST
    return isinstance(value, allowed) and isinstance(value, bool) == (wanted is bool) and not is_large


def in_words(wanted, value=None):
    """Return what a ``value`` that does not fit must be instead, in words."""
    if isinstance(value, int) and value > LARGEST:
        return "below 2^63"
    if get_origin(wanted) is tuple:
        return f"a list of {in_words(get_args(wanted)[0]).removeprefix('a ').removesuffix('s')}s"
    return " or ".join(map(in_words, get_args(wanted))) or IN_WORDS.get(wanted, "null")


def flag(name):
    return "--" + name.replace("_", "-")
