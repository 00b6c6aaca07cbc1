"""The program of every rank: its flags first, then the imports that take seconds, then the run.

    python -m moh_lm.pretrain --help        the scripts in launch/ call it with the paper's values

docs/checkpoints.md has the exit codes.
"""

import contextlib
import functools
import importlib
import pkgutil
import sys

from moh_lm.cli.command import absent_package
from moh_lm.cli.output import open_closed_streams
from moh_lm.config import Config, ConfigError, raise_any
from moh_lm.flags import changes, make_parser, parse_flags
from moh_lm.supervise.errors import (
    INTERRUPTED,
    launch_problems,
    number_problems,
    on_several_machines,
    report_errors,
)


def main(arguments=None, config_type=Config, task="moh_lm.run.text:TEXT", extra=None):
    """Run the training command of a task, and exit.

    arguments: by default those of the command line. config_type: the configuration class of the task. task:
    where the ``Task`` is, since it takes seconds to import. extra: that of setup.py with the packages it needs.
    """
    open_closed_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    if problems := number_problems():  # so it is unknown which rank this is
        print("\n".join(f"{config_type.program}: {problem}" for problem in problems), file=sys.stderr)
        refuse_start()
        sys.exit(2)
    try:
        raise_any(launch_problems())
        given = parse_flags(make_parser(config_type), arguments, config_type)
        given.changes = functools.partial(changes, arguments, config_type)
        program, of_task = importlib.import_module("moh_lm.run.program"), pkgutil.resolve_name(task)
    except (ConfigError, ModuleNotFoundError) as error:
        problems = error.problems if isinstance(error, ConfigError) else [absent_package(error, extra)]
        report_errors(problems, program=config_type.program)
        refuse_start()
        sys.exit(2)
    except KeyboardInterrupt:  # during the imports
        sys.exit(INTERRUPTED)
    program.main(given, of_task)


def refuse_start():
    """Tell the ranks on other machines that this one cannot start; they would wait for it."""
    with contextlib.suppress(Exception):  # what is wrong here may stop this too
        if on_several_machines():
            from moh_lm.supervise.rendezvous import refuse  # imports torch

            refuse()


if __name__ == "__main__":
    main()
