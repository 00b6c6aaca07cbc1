"""Latents of images for MoH-DiT: each image and its mirror image through the encoder of an autoencoder, once.

    python tools/encode_latents.py --images DIR_OR_TAR --vae DIR --image-size 256 --output LATENTS

LATENTS is then a --data-dir of `python -m moh_lm.vision dit` (moh_lm/vision/latents.py has its form). The autoencoder
is an AutoencoderKL in diffusers' form, such as stabilityai/sd-vae-ft-ema. A GPU is used if there is one. After a stop
the same command goes on.

Exit codes: 0; 1 an image or file cannot be read or written; 2 an argument has to be mended; 130 after Ctrl-C.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import GOES_ON, output_path, run
from moh_lm.cli.parser import Parser
from moh_lm.units import at_least


def main(texts):
    return run("encode_latents", parse_arguments, texts, extra="vision", interrupted=GOES_ON)


def parse_arguments(texts):
    parser = Parser(prog="python tools/encode_latents.py", description=__doc__.splitlines()[0])
    parser.add_argument("--images", required=True, metavar="DIR_OR_TAR", help="directory or tar of class folders")
    parser.add_argument("--vae", type=Path, required=True, metavar="DIR", help="directory of an AutoencoderKL")
    parser.add_argument("--image-size", type=at_least(1), required=True, metavar="S", help="pixels of a side")
    parser.add_argument("--output", type=output_path, required=True, metavar="LATENTS", help="directory to be made")
    parser.add_argument("--batch-size", type=at_least(1), default=32, metavar="N", help="images at once (%(default)s)")
    parser.add_argument("--dtype", choices=("fp16", "fp32"), default="fp16", help="of the latents (%(default)s)")
    return parser.parse_args(texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
