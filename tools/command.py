"""How every command ends: what has to be mended in one line each on standard error, and its exit code."""

import sys

from moh_lm.config import ConfigError


def exit_code(name, command, *arguments, failures=(), code=1, remark=""):
    """What ``command`` returns, or 0; 2 if it raises ConfigError, ``code`` for one of the ``failures``.

    name: of the command, which begins every line. remark: the end of the line of a failure.
    """
    try:
        return command(*arguments) or 0
    except ConfigError as error:
        print("\n".join(f"{name}: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    except failures as error:
        print(f"{name}: {reason(error)}{remark}", file=sys.stderr)
        return code


def reason(error):
    """The message of an error; of the operating system's the file and what is wrong with it."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror.lower()}" if error.filename else error.strerror.lower()
