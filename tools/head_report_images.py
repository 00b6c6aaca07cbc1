"""Which heads of an image model are chosen for what: loads by class and layer, and of a MoH-DiT by time step.

    python tools/head_report_images.py RUN_OR_STEP --images DIR --output heads
    python tools/head_report_images.py RUN_OR_STEP --images DIR --classes 1 7 3 --number 500 --weights master

DIR has held-out images, or of a MoH-DiT latents, as --validation-dir of the training. --output gets heads.json, with
all numbers, and heads.png. A table tells of each layer with routed heads how many there are, the entropy of their
load, the least and the most used one, and by how much classes differ; tools/work/head_report_images.py has the
formulas.

Exit codes: 0; 1 an image is damaged, or a file cannot be written; 2 an argument has to be mended.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import device, output_path, run
from moh_lm.cli.parser import Parser
from moh_lm.units import at_least


def main(texts):
    return run("head_report_images", parse_arguments, texts, extra="plot")


def parse_arguments(texts):
    parser = Parser(prog="python tools/head_report_images.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", type=Path, metavar="RUN_OR_STEP", help="run directory, or its checkpoints/step-N")
    add("--images", required=True, type=Path, metavar="DIR", help="held-out images in class folders, or latents")
    add("--classes", type=at_least(0), nargs="+", metavar="N", help="images of these only (default: of all)")
    add("--number", type=at_least(1), default=2000, metavar="N", help="images, of each class in turn (default: "
        "%(default)s)")  # fmt: skip
    add("--weights", choices=("master", "ema"), help="the weights, or their moving average (default: it, if kept)")
    add("--batch-size", type=at_least(1), default=64, metavar="N", help="images at a time (default: %(default)s)")
    add("--output", type=output_path, default="heads", metavar="DIR", help="gets both files (default: %(default)s)")
    add("--device", type=device, metavar="NAME", help="cpu, cuda, or cuda:N (default: cuda if there is one, else cpu)")
    return parser.parse_args(texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
