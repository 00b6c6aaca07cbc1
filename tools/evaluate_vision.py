"""How good an image model is: the accuracy of a classifier, or how near drawn images are to real ones.

    python tools/evaluate_vision.py RUN_OR_STEP --images DIR_OR_TAR
    python tools/evaluate_vision.py --samples A.npz --reference B.npz --inception FILE

The first form prints top-1 and top-5 accuracy and loss over class folders, as many as the model has classes, in the
order of their names.

The second compares two sets of images, each an .npz (arr_0, uint8 [n, H, W, 3]) or a directory of PNGs: FID, KID,
Inception Score of the samples, precision and recall of Inception's features as in ADM's evaluator, by torch-fidelity.
It has no sFID. Numbers depend on n; published ones are of 50,000 samples.

Exit codes: 0; 1 torch-fidelity failed; 2 an argument, the checkpoint or an image has to be mended.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import device, run
from moh_lm.cli.parser import Parser
from moh_lm.config import ConfigError
from moh_lm.units import at_least

INCEPTION = "github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"


def main(texts):
    compares = any(text.split("=")[0] == "--samples" for text in texts)
    return run("evaluate_vision", parse_arguments, texts, extra="fid" if compares else "vision")


def parse_arguments(texts):
    parser = Parser(prog="python tools/evaluate_vision.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", nargs="?", type=Path, metavar="RUN_OR_STEP", help="a classifier: run, or its checkpoints/step-N")
    add("--images", type=Path, metavar="DIR", help="class folders for it, in a directory or a tar")
    add("--weights", choices=("master", "ema"), help="the weights, or their moving average (default: it, if kept)")
    add("--workers", type=at_least(0), default=min(4, os.cpu_count()), metavar="N", help="processes that read images "
        "(default: %(default)s)")  # fmt: skip
    add("--samples", type=Path, metavar="FILE", help="drawn images: an .npz, or a directory of PNGs")
    add("--reference", type=Path, metavar="FILE", help="real images, in the same form")
    add("--inception", type=Path, metavar="FILE", help=f"weights of Inception v3, from https://{INCEPTION}")
    add("--batch-size", type=at_least(1), default=64, metavar="N", help="images at a time (default: %(default)s)")
    add("--device", type=device, metavar="NAME", help="cpu, cuda, or cuda:N (default: cuda if there is one, else cpu)")
    arguments = parser.parse_args(texts)
    forms = [(arguments.model, arguments.images), (arguments.samples, arguments.reference, arguments.inception)]
    if [all(form) for form in forms] != [any(form) for form in forms] or all(forms[0]) == all(forms[1]):
        raise ConfigError(["give either RUN_OR_STEP and --images, or --samples, --reference and --inception"])
    return arguments


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
