"""The program of every rank: its flags first, then the imports that take seconds, then the run.

    python -m moh_lm.pretrain --help        the launch/ scripts call it with the paper's values

docs/checkpoints.md has the exit codes.
"""

import functools
import importlib
import sys

from moh_lm.cli.output import open_closed_streams
from moh_lm.config import Config, ConfigError
from moh_lm.flags import changes, make_parser, parse_flags
from moh_lm.supervise.errors import report_errors


def main(arguments=None, kind=Config, work="moh_lm.run.program"):
    """arguments: by default those of the command line. kind: of configuration. work: the module that trains it."""
    open_closed_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        given = parse_flags(make_parser(kind), arguments, kind)
        given.changes = functools.partial(changes, arguments, kind)
    except ConfigError as error:
        report_errors(error.problems, program=kind.program)
        sys.exit(2)
    importlib.import_module(work).main(given)


if __name__ == "__main__":
    main()
