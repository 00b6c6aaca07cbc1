"""Numbers and lines as people write and read them: 4M tokens, 3h50m, 1.25B parameters, 2.00 GiB, 80 columns."""

import math
import re
import textwrap
from decimal import Decimal, InvalidOperation, Overflow
from itertools import groupby
from shlex import quote

SUFFIXES = {"K": 1, "M": 2, "G": 3, "B": 3, "T": 4}
DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?|(\d+)")


def quantity(base):
    """Return a function that reads counts such as 4M or 100B, whose suffixes are powers of ``base``."""

    def read(text):
        suffix = text[-1:].upper()
        digits, power = (text[:-1], SUFFIXES[suffix]) if suffix in SUFFIXES else (text, 0)
        try:
            value = Decimal(digits) * base**power
        except (InvalidOperation, Overflow):
            value = Decimal("NaN")
        if not value.is_finite() or value != int(value) or value < 0:
            raise ValueError("write a whole number, or one with a suffix such as 4M or 100B")
        return in_64_bits(int(value))

    return read


def duration(text):
    """Read seconds from a number, or from parts such as 3h50m."""
    parts = DURATION.fullmatch(text)
    if not text or not parts:
        raise ValueError("write seconds, or days, hours, minutes and seconds such as 3h50m")
    return sum(int(part or 0) * seconds for part, seconds in zip(parts.groups(), (86400, 3600, 60, 1, 1), strict=True))


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


def at_least(least):
    """Return a function that reads whole numbers from ``least`` on."""

    def read(text):
        value = integer(text)
        if value < least:
            raise ValueError(f"must be {least} or above")
        return in_64_bits(value)

    return read


def in_64_bits(value):
    """Return ``value``. Raises ValueError if it is too large or too small for a signed 64-bit number."""
    if abs(value) >= 2**63:
        raise ValueError("must be below 2^63" if value > 0 else "must be above -2^63")
    return value


def above_0(text):
    value = real(text)
    if not 0 < value < math.inf:
        raise ValueError("must be above 0, and finite")
    return value


def share(text):
    value = real(text)
    if not 0 < value <= 1:
        raise ValueError("must be above 0 and at most 1")
    return value


def short(number):
    """Return a number such as 4M or 1.25B; suffixes are powers of 1000."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.2f}{unit}" if unit == "B" else f"{number / size:.0f}{unit}"
    return str(number)


def duration_text(seconds):
    """Return a text such as 3h50m, which ``duration`` reads."""
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        number, seconds = divmod(seconds, size)
        parts += [f"{number}{unit}"] if number else []
    return "".join(parts) or "0"


def binary_size(size):
    """Return a number of bytes in GiB, or in MiB below 0.1 GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 0.1 * 2**30 else f"{size / 2**20:.2f} MiB"


def counted(number, thing):
    """Return a text such as 1 shard or 2,000 shards."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def words(value):
    """Return the value of a setting, or the texts of its flag, as text."""
    if isinstance(value, tuple) and value and not isinstance(value[0], tuple):
        return layers_in_words(value)
    if isinstance(value, list | tuple):
        value = " ".join("=".join(part) if isinstance(part, tuple) else quote(str(part)) for part in value)
    return "none" if value in (None, "") else str(value).lower() if isinstance(value, bool) else str(value)


def listing(items, most=8):
    """Return a list such as: a, b and 3 more."""
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most} more" if items[most:] else "")


def layers_in_words(values, separator=", "):
    """Return a text such as: layers 0-3: 8, 4-11: 6."""
    parts, first = [], 0
    for value, equal in groupby(values):
        last = first + len(list(equal)) - 1
        parts.append(f"{first}-{last}: {value}" if last > first else f"{first}: {value}")
        first = last + 1
    return "layers " + separator.join(parts)


def wrapped(line, indent=11, break_words=False):
    """Return ``line`` wrapped to 80 columns, with the later lines indented."""
    ways = {"break_long_words": break_words, "break_on_hyphens": False}
    return textwrap.fill(line, 80, subsequent_indent=" " * indent, **ways)


def time_left(seconds):
    """Return a duration as people write it, such as 3h 50m."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}h" if days else f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s"


def rounded(value):
    """Round numbers to five significant digits, so that rows stay small."""
    return each_float(value, lambda number: float(f"{number:.5g}"))


def each_float(value, function):
    if isinstance(value, dict):
        return {key: each_float(item, function) for key, item in value.items()}
    if isinstance(value, list):
        return [each_float(item, function) for item in value]
    return function(value) if isinstance(value, float) else value
