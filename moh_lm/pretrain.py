"""The program of every rank: its flags first, then the imports that take seconds, then the run.

    python -m moh_lm.pretrain --help        the launch/ scripts call it with the paper's values

docs/checkpoints.md has the exit codes.
"""

import functools
import importlib
import sys

from moh_lm.cli.output import open_closed_streams
from moh_lm.config import ConfigError
from moh_lm.flags import changes, make_parser, parse_flags
from moh_lm.run.problems import tell


def main():
    open_closed_streams()
    try:
        given = parse_flags(make_parser(), sys.argv[1:])
        given.changes = functools.partial(changes, sys.argv[1:])
    except ConfigError as error:
        tell(error.problems)
        sys.exit(2)
    importlib.import_module("moh_lm.run.program").main(given)


if __name__ == "__main__":
    main()
