"""The report of an ablation: REPORT.md with its tables, and curves.png if matplotlib is installed.

    python launch/ablation_report.py OUT

Reads OUT/runs/NAME-SEED; runs that are not complete, or whose last losses are not finite, are left out. With d the
difference of the final validation losses of two variants for one seed, mean over sources, and n seeds,

    difference = mean(d) +- t(n - 1) * s(d) / sqrt(n)

where s is the standard deviation and t the 97.5% point of Student's distribution: the interval that holds the true
mean with a confidence of 95%, seeds being all that varies. The report of the atlas reads and writes with the same
functions.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.parser import Parser
from tools.command import run


def main(texts):
    return run("ablation_report", parse_arguments, texts, work="launch.work.ablation_report")


def parse_arguments(texts):
    parser = Parser(prog="python launch/ablation_report.py", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of launch/ablation.py")
    return parser.parse_args(texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
