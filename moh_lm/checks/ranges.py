"""Sentences about settings that are out of range, or given where they have no meaning."""

import math
from dataclasses import fields

from moh_lm.config import flag


def below(section, lowest, *keys):
    """Return a sentence for each of ``keys`` whose value is neither None nor a finite number of at least ``lowest``."""
    values = {key: getattr(section, key) for key in keys}
    return [
        f"{flag(key)} {value:g}: must be {lowest} or above"
        for key, value in values.items()
        if value is not None and not lowest <= value < math.inf
    ]


def not_default(section, keys, problem):
    """Return a sentence, which ends with ``problem``, for each of ``keys`` whose value is not its default."""
    defaults = {entry.name: entry.default for entry in fields(section)}
    values = {key: getattr(section, key) for key in keys}
    return [f"{flag(key)} {value}: {problem}" for key, value in values.items() if value != defaults[key]]


def between(least, most):
    """Describe the range in which a number must lie."""
    return f"must be {least}" if least == most else f"must be between {least} and {most}"


def divisors(number, most):
    return ", ".join(str(n) for n in range(1, most + 1) if number % n == 0)
