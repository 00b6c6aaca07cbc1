"""A decay branch of a stable run: the model at a smaller budget, without training again what comes before its decay.

    python tools/branch.py RUN --at STEP --decay-iters N --output BRANCH

copies a verified checkpoint of a run with --schedule wsd into a new run directory, and prints the flags that let the
run's own command go on there: N iterations of decay, then the end (docs/training.md). Add --decay-mix for other data in
the decay.

Exit codes: 0; 2 an argument or the checkpoint has to be mended.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import output_path, run
from moh_lm.cli.parser import Parser
from moh_lm.units import at_least


def main(texts):
    return run("branch", parse_arguments, texts, code=2)


def parse_arguments(texts):
    parser = Parser(prog="python tools/branch.py", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory with --schedule wsd")
    parser.add_argument("--at", type=at_least(0), required=True, metavar="STEP", help="a checkpoint before its decay")
    parser.add_argument("--decay-iters", type=at_least(1), required=True, metavar="N", help="iterations of the decay")
    parser.add_argument("--output", type=output_path, required=True, metavar="BRANCH", help="run directory to be made")
    return parser.parse_args(texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
