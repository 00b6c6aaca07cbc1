"""The program of every rank: its flags first, then the imports that take seconds, then the run.

    python -m moh_lm.pretrain --help        the launch/ scripts call it with the paper's values

docs/checkpoints.md has the exit codes.
"""

import importlib
import os
import socket
import sys

from moh_lm.config import ConfigError
from moh_lm.flags import make_parser, parse_flags


def main():
    try:
        given = parse_flags(make_parser(), sys.argv[1:])
    except ConfigError as error:
        tell(error.problems)
        sys.exit(2)
    importlib.import_module("moh_lm.run.program").main(given, tell)


def tell(problems, speaker=0):
    """Print what is wrong once per node, by its rank ``speaker``: it may be wrong on one node only."""
    rank = int(os.environ.get("RANK", 0))
    if int(os.environ.get("LOCAL_RANK", rank)) != speaker:
        return
    where = f" on {socket.gethostname()}" if rank else ""
    for text in problems:
        print(f"moh_lm.pretrain{where}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
