"""A released MoH-ViT, MoH-DiT, TransNeXt or DiT -> step 0 of a run, which is trained, sampled, evaluated and exported.

    python tools/import_vision.py moh_vit_s_80.pth --kind vit --preset S-80 --output RUN
    python tools/import_vision.py moh_dit_xl_90.pt --kind dit --preset XL-90 --weights ema --output RUN

FILE is the authors' (.pth, .pt) or a .safetensors with the same names. Code in a file is never run. The numbers of
classes and channels are the file's, and of a DiT the sizes of patches and of what is generated.

Exit codes: 0 step 0 is in RUN; 2 an argument or the file has to be mended, or a file could not be written, and nothing
is there under the final name.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import output_path, run
from moh_lm.cli.parser import Parser
from moh_lm.units import at_least


def main(texts):
    left = "nothing is left"
    return run("import_vision", parse_arguments, texts, code=2, remark=f"; {left}", interrupted=f"stopped; {left}")


def parse_arguments(texts):
    parser = Parser(prog="python tools/import_vision.py", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="released weights")
    add("--kind", required=True, choices=("vit", "dit"), help="of model: MoH-ViT or TransNeXt, MoH-DiT or DiT")
    add("--preset", required=True, metavar="NAME", help="sizes and heads, such as S-80; without a number dense")
    add("--output", required=True, type=output_path, metavar="RUN", help="run directory to make")
    add("--weights", choices=("ema", "model"), help="of a file with several: which (default: ema if it is there)")
    add("--image-size", type=at_least(32), metavar="N", help="of a vit: pixels of a side in training, "
        "from its first step on (default: 224)")  # fmt: skip
    return parser.parse_args(texts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
