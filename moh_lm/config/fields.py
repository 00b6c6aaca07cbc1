"""The parts of every section of the configuration: fields that document themselves, and their names."""

from dataclasses import field, fields, is_dataclass


class ConfigError(Exception):
    """Errors that the user has to fix, one sentence each in ``problems``. Programs print them and exit with code 2.

    local_rank: the first rank on a node that sees the errors, and prints them.
    """

    def __init__(self, problems: list[str], local_rank: int = 0):
        super().__init__("\n".join(problems))
        self.problems = problems
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


def flag(name):
    return "--" + name.replace("_", "-")
