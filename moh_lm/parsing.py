"""Reads JSON that others wrote, or raises a ValueError that says what is wrong with it."""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path


class BeyondLimits(ValueError):
    """JSON that Python cannot read, whether or not it is valid. The message says which limit it exceeds."""


def open_at_once(path, flags):
    """Open a file to read, as an ``opener``: a pipe without a writer is empty, instead of waiting for one."""
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def naming(path: str | Path):
    """Add the path to errors of the operating system that lack it, as those of reading and writing do."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_json(path):
    """Return the value of a JSON file. Raises OSError, and ValueError as ``parse_json``."""
    with naming(path), open(path, "rb", opener=open_at_once) as file:
        return parse_json(file.read())


def parse_json(text: str | bytes):
    """Return the value of a JSON text. Raises ValueError, or BeyondLimits if only Python's limits are the reason."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise BeyondLimits("nested too deeply") from error
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:  # its advice would be a call in Python
        raise BeyondLimits(f"number of more than {sys.get_int_max_str_digits()} digits") from error
