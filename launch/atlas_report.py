"""The report of an atlas: REPORT.md with its tables, and the pictures of launch/atlas_pictures.py.

    python launch/atlas_report.py OUT

Reads OUT/runs/SIZE/VARIANT/rate-FACTOR-seed-N; runs that are not complete are left out. L is the validation loss at the
end of a run, nats per token, mean over sources. Differences of L are those of launch/ablation_report.py, with 90%
intervals. The multiplier of a form is T_dense(L) / T: the tokens with which the dense model ends at the form's loss,
over the form's own. docs/atlas.md says how T_dense is interpolated. The interval of a multiplier is that of its
logarithm. In FLOPs it is multiplied by FLOPs(dense) / FLOPs(form), with the heads that tokens use.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.parser import Parser
from tools.command import run


def main(texts):
    return run("atlas_report", parse_arguments, texts, work="launch.work.atlas_report")


def parse_arguments(texts):
    parser = Parser(prog="python launch/atlas_report.py", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of launch/atlas.py")
    return parser.parse_args(texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
