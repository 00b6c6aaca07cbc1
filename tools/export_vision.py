"""A checkpoint of an image model -> a directory that transformers loads, of a classifier, or diffusers, of a DiT.

    python tools/export_vision.py RUN_OR_STEP --output DIR [--weights ema]
    python tools/export_vision.py RUN_OR_STEP --output DIR --vae VAE_DIR        a DiT of latents, with its decoder

    AutoModelForImageClassification.from_pretrained(DIR, trust_remote_code=True)
    DiffusionPipeline.from_pretrained(DIR, trust_remote_code=True)

The code of the model is in DIR and needs torch, and transformers or diffusers, alone. Everything is written beside DIR,
read again and compared with the checkpoint's model, and then renamed to DIR.

Exit codes: 0 the export is in DIR; 1 it failed its check or could not be written, and nothing is there; 2 an argument
or the checkpoint has to be mended.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import output_path, run
from moh_lm.cli.parser import Parser


def main(texts):
    return run("export_vision", parse_arguments, texts, remark="; nothing was exported", extra="vision")


def parse_arguments(texts):
    parser = Parser(prog="python tools/export_vision.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", type=Path, metavar="RUN_OR_STEP", help="run directory, or its checkpoints/step-N")
    add("--output", required=True, type=output_path, metavar="DIR", help="directory to make")
    add("--weights", choices=("master", "ema"), help="the weights, or their moving average (default: it, if kept)")
    add("--vae", type=Path, metavar="DIR", help="of a DiT of latents: an AutoencoderKL of diffusers, to be copied")
    return parser.parse_args(texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
