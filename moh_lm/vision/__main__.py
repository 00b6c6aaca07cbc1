"""Trains an image model: the program of every rank.

    python -m moh_lm.vision vit --help        MoH-ViT, a classifier; launch/train_moh_vit_b.sh has the paper's values
    python -m moh_lm.vision dit --help        MoH-DiT, which generates images of a class; launch/train_moh_dit_xl.sh

Exit codes are those of moh_lm.pretrain.
"""

import sys

from moh_lm import pretrain
from moh_lm.cli.output import open_closed_streams
from moh_lm.vision.config import KINDS


def main():
    open_closed_streams()
    arguments = [text for text in sys.argv[1:] if not text.startswith("--local")]  # a flag of the deepspeed launcher
    name, *arguments = arguments or [""]
    if name not in KINDS:
        print(__doc__ if name in ("-h", "--help") else f"moh_lm.vision {name}: give vit or dit first".strip())
        sys.exit(0 if name in ("-h", "--help") else 2)
    pretrain.main(arguments, KINDS[name], f"moh_lm.vision.task:{name.upper()}", "vision")


if __name__ == "__main__":
    main()
