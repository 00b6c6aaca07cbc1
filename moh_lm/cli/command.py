"""How every command begins and ends: its arguments, then the imports that take seconds, then the work; its exit code.

A command's own file reads the arguments, and imports nothing slow. ``run`` imports the module that does the work when
the arguments are right. So --help, and what is wrong, is there at once.
"""

import contextlib
import importlib
import os
import re
import sys
from pathlib import Path

from moh_lm.checkpoint.directory import STEP_NAME
from moh_lm.cli.output import Output, open_closed_streams
from moh_lm.config import ConfigError

OURS = ("moh_lm", "tools", "data_prep", "launch")
GOES_ON = "stopped; the same command goes on"


def run(name, parse, texts, work=None, code=1, remark="", extra=None, interrupted="interrupted", unheard="goes on"):
    """The exit code of a command: what its work returns, or 0; 2 for what has to be mended; ``code`` if it failed;
    130 after Ctrl-C, with the word ``interrupted``. unheard: "goes on" or "ends", once nobody reads standard output.

    name: of the command, which begins every line on standard error. parse: a function of ``texts``, the arguments.
    work: the module (default: tools.work.NAME) whose ``run`` is called with what ``parse`` returns. Its FAILURES are
    exceptions that need no traceback; ``remark`` ends their line. extra: of setup.py, with the packages it needs.
    """
    open_closed_streams()
    failures = ()
    if work is None:  # not for runs that a command starts
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else the import of DeepSpeed prints which one it has found
    try:
        arguments = parse(texts)
        if getattr(arguments, "check", False):  # --check
            return 0
        module = importlib.import_module(work or f"tools.work.{name}")
        failures = module.FAILURES
        with contextlib.redirect_stdout(Output(sys.stdout, unheard)):
            result = module.run(arguments) or 0
            sys.stdout.flush()
        return result
    except ConfigError as error:
        print("\n".join(f"{name}: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if extra is None or error.name.startswith(OURS):
            raise
        print(f"{name}: the package {error.name} is not installed: pip install -e '.[{extra}]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{name}: {interrupted}", file=sys.stderr)
        return 130
    except failures as error:
        print(f"{name}: {reason(error)}{remark}", file=sys.stderr)
        return code


def device(text):
    """A reader of --device; moh_lm/cli/devices.py looks whether there is one."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise ValueError("write cpu, cuda, or cuda:N")
    return text


def output_path(text):
    """A reader of --output, and of other paths to write. A checkpoint that other files are written into is damaged."""
    for place in (path := Path(os.path.realpath(text)), *path.parents):
        is_step = all(os.path.exists(place / name) for name in ("manifest.json", "state.json"))
        if is_step or (place.parent.name == "checkpoints" and STEP_NAME.fullmatch(place.name)):
            raise ValueError(f"lies in a checkpoint, {place}; give a path outside of it")
    return Path(text)


def reason(error):
    """The message of an error; of the operating system's the file and what is wrong with it."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror.lower()}" if error.filename else error.strerror.lower()
