"""How every command begins and ends: it reads its arguments, does its work, and reports the result by its exit code.

A command is one file. The functions that do its work import slow packages in their first lines, so that --help and
wrong arguments are answered at once.
"""

import contextlib
import errno
import os
import re
import sys
import tempfile
from pathlib import Path

from moh_lm.checkpoint.directory import step_around
from moh_lm.cli.output import Output, open_closed_streams
from moh_lm.cli.parser import Parser
from moh_lm.config import ConfigError, raise_any

OURS = ("moh_lm", "tools", "data_prep", "studies", "launch")
READ_AT_IMPORT = {  # variables for which torch or DeepSpeed would end with a traceback: what they accept
    "DS_ACCELERATOR": ("cuda|cpu", "cuda or cpu"),
    "DEEPSPEED_TIMEOUT": (r"\d{1,9}", "a number of minutes"),
    "TORCH_DISTRIBUTED_DEBUG": ("(?i:off|info|detail)", "OFF, INFO or DETAIL"),
}
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)  # only the user can allow it
RESUMES = "stopped; run the same command again to resume"


class Failure(Exception):
    """The work could not be done. The message gives the whole reason, and no command adds a traceback."""


def run_file(file, about, add_flags, work, texts, *, check=None, **settings):
    """``run_command`` for the command ``python FOLDER/NAME.py`` in a ``file``, which is called NAME.

    about: its docstring, whose first paragraph describes it. add_flags: a function that adds its flags to a ``Parser``.
    check: a function of the arguments that raises ConfigError if they contradict each other.
    """
    path = Path(file)

    def parse(texts):
        parser = Parser(prog=f"python {path.parent.name}/{path.name}", description=about.partition("\n\n")[0])
        add_flags(parser)
        arguments = parser.parse_args(texts)
        if check:
            check(arguments)
        return arguments

    return run_command(path.stem, parse, work, texts, **settings)


def run_command(
    name, parse, work, texts, *, failures=(), code=1, remark="", extra=None, interrupted="interrupted",
    unheard="continues", trains=False,
):  # fmt: skip
    """Run the command ``name`` with the arguments ``texts``, and return its exit code.

    The code is what ``work`` returns, or 0; 2 if the user has to fix something, such as permissions; ``code`` after a
    ``Failure``, an OSError or one of ``failures``; 130 after Ctrl-C. All but the first also print a line on standard
    error, which begins with ``name``.

    parse: a function of ``texts``, whose result ``work`` receives. remark: ends the line of a failure. extra: the extra
    of setup.py with the packages that the work needs. interrupted: the word for Ctrl-C. unheard: "continues" or "ends"
    once nobody reads standard output. trains: whether the work starts runs of training.
    """
    open_closed_streams()
    if not trains:  # a run chooses its own accelerator
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise importing DeepSpeed prints which one it has found
    try:
        raise_any([] if {"-h", "--help"} & {*texts} else import_problems())
        arguments = parse(texts)
        if getattr(arguments, "check", False):  # --check
            return 0
        with contextlib.redirect_stdout(Output(sys.stdout, unheard)):
            result = work(arguments) or 0
            sys.stdout.flush()
        return result
    except ConfigError as error:
        print("\n".join(f"{name}: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"{name}: {absent_package(error, extra)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: {interrupted}", file=sys.stderr)
        return 130
    except (Failure, OSError, *failures) as error:
        is_forbidden = getattr(error, "errno", None) in FORBIDDEN
        remedy = "; allow it, or give another path" if is_forbidden else ""
        print(f"{name}: {reason(error)}{remedy}{remark}", file=sys.stderr)
        return 2 if is_forbidden else code


def absent_package(error, extra=None):
    """Return a sentence about the package that a ModuleNotFoundError names; raises it again for a module of ours.

    extra: the extra of setup.py that has it; by default every installation has it.
    """
    if error.name is None or error.name.startswith(OURS):
        raise error
    remedy = f"pip install -e '.[{extra}]'" if extra else "source .venv/bin/activate, or pip install -e ."
    return f"the package {error.name} is not installed: {remedy}"


def import_problems():
    """Return sentences about the environment with which torch or DeepSpeed cannot be imported."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        places = error.strerror.partition("[")[2].rstrip("]")
        problem = f"temporary files fit nowhere: {places} are read-only, full or missing"
        return [f"{problem}; set TMPDIR to another directory"]
    return [
        f"{name} is {os.environ[name]!r} in the environment: must be {allowed}; change it, or unset it"
        for name, (pattern, allowed) in READ_AT_IMPORT.items()
        if not re.fullmatch(pattern, os.environ.get(name, "")) and name in os.environ
    ]


def device(text):
    """Read --device; moh_lm/cli/devices.py checks that the device exists."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise ValueError("write cpu, cuda, or cuda:N")
    return text


def output_path(text):
    """Read --output or another path to write. Paths inside a checkpoint are refused, since writing would damage it."""
    if step := step_around(text):
        raise ValueError(f"lies in a checkpoint, {step}; give a path outside it")
    return Path(text)


def reason(error):
    """Return the message of an error; for errors of the operating system, the file and what is wrong with it."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror.lower()}" if error.filename else error.strerror.lower()
