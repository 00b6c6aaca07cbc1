"""The recovery curve: how much of a dense model's quality a Mixture-of-Head model made of it regains, and how soon.

    python launch/quickstart_recovery.py --mixture RUN --control RUN [--output PREFIX]

Both runs began with the same dense model and were trained on the same samples. docs/continue.md defines the shares that
are recovered, of the mean over sources and of each source. PREFIX.csv receives every figure, PREFIX.png the curve if
matplotlib is installed. Exit code 2 if the runs cannot be compared.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import run
from moh_lm.cli.parser import Parser


def main(texts):
    return run("quickstart_recovery", parse_arguments, texts, work="launch.work.quickstart_recovery")


def parse_arguments(texts):
    parser = Parser(prog="python launch/quickstart_recovery.py", description=__doc__.splitlines()[0])
    parser.add_argument("--mixture", type=Path, metavar="RUN", required=True, help="run directory of the mixture")
    parser.add_argument("--control", type=Path, metavar="RUN", required=True, help="run directory of the dense model")
    parser.add_argument("--output", type=Path, metavar="PREFIX", help="of the files to write")
    return parser.parse_args(texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
