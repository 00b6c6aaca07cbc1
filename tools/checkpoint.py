"""Checkpoints of a run: list, verify, show, diff, copy, consolidate.

    python tools/checkpoint.py COMMAND --help

docs/checkpoints.md has a line for each. Where a step is wanted, a run directory is its newest step. Every command but
`list` and `show --quick` reads and hashes every byte of a checkpoint before it believes it.

Exit codes: 0 done, or sound, or equal; 1 `verify` found damage, or `diff` a difference; 2 an argument or a checkpoint
has to be mended, or a file could not be written, and nothing was.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import output_path, run
from moh_lm.cli.parser import Parser
from moh_lm.units import at_least


def main(texts):
    return run("checkpoint", parse_arguments, texts, code=2)


def parse_arguments(texts):
    parser = Parser(prog="python tools/checkpoint.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")

    def add(command, help, *paths):
        added = commands.add_parser(command, help=help, description=help)
        for path in paths:
            written = path in ("DEST", "FILE")
            added.add_argument(path.lower(), metavar=path, type=output_path if written else Path)
        return added

    lists = add("list", "all checkpoints of a run, damaged and half-written ones too; looks at sizes only", "RUN")
    verifies = add("verify", "read every byte, and check that the model is there whole and finite", "RUN_OR_STEP")
    verifies.add_argument("--all", action="store_true", help="every step of the run (default: the newest)")
    shows = add("show", "configuration, position, data, files, and the hash of the state", "RUN_OR_STEP")
    shows.add_argument("--parameters", action="store_true", help="shape and norms of every parameter too")
    shows.add_argument("--quick", action="store_true", help="only what needs no reading of the large files")
    compares = add("diff", "compare configuration, position, weights and moments of two checkpoints", "A", "B")
    listed = "parameters listed; 0: all (default: %(default)s)"
    compares.add_argument("--top", type=at_least(0), default=20, metavar="N", help=listed)
    for command in (lists, shows, compares):
        command.add_argument("--json", action="store_true", help="everything, as one JSON object")
    add("copy", "copy a step, verified on both sides, into a run or another directory", "STEP", "DEST")
    joins = add("consolidate", "the whole parameters, under their Hugging Face names, in one file", "STEP", "FILE")
    joins.add_argument("--moments", action="store_true", help="add exp_avg/NAME and exp_avg_sq/NAME, in float32")
    dtypes = ("float32", "bfloat16")
    joins.add_argument("--dtype", default="float32", choices=dtypes, help="of the weights (default: %(default)s)")
    return parser.parse_args(texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
