"""Imports a released MoH-ViT, MoH-DiT, TransNeXt or DiT as step 0 of a run, to be trained, sampled, evaluated or
exported.

    python tools/import_vision.py moh_vit_s_80.pth --kind vit --preset S-80 --output RUN
    python tools/import_vision.py moh_dit_xl_90.pt --kind dit --preset XL-90 --weights ema --output RUN

FILE is the authors' file (.pth, .pt) or a .safetensors with the same names. Code in a file is never run. The file
determines the numbers of classes and channels, and for a DiT the sizes of patches and of generated images.

Exit codes: 0 step 0 is in RUN; 2 an argument or the file must be fixed, or a file could not be written; then nothing
is there under the final name.
"""

import math
import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import output_path, run_file
from moh_lm.config import ConfigError, raise_any
from moh_lm.units import at_least
from moh_lm.vision.config import KINDS

MOST_PROBLEMS = 10


def main(texts):
    left = "nothing is left"
    words = {"remark": f"; {left}", "interrupted": f"stopped; {left}"}
    return run_file(__file__, __doc__, add_flags, run, texts, code=2, **words)


def add_flags(parser):
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="released weights")
    add("--kind", required=True, choices=("vit", "dit"), help="kind of model: MoH-ViT or TransNeXt, MoH-DiT or DiT")
    add("--preset", required=True, metavar="NAME", help="sizes and heads, such as S-80; names without a number are "
        "dense")  # fmt: skip
    add("--output", required=True, type=output_path, metavar="RUN", help="run directory to create")
    add("--weights", choices=("ema", "model"), help="which weights of a file that has several (default: ema if "
        "present)")  # fmt: skip
    add("--image-size", type=at_least(32), metavar="N", help="for a vit: side in pixels of the images it will be "
        "trained on (default: 224)")  # fmt: skip


def run(arguments):
    """Run the whole program. Raises ConfigError before anything is written, ConfigError or OSError after."""
    import torch

    from moh_lm.vision.checks import vit_problems
    from moh_lm.vision.load import MODELS
    from moh_lm.vision.released import POSITIONS, sizes, state_dict
    from tools.checkpoints.read import progress
    from tools.hf.convert.import_step import output_problems, write_step
    from tools.hf.convert.import_weights import Part, read_released

    kind = KINDS[arguments.kind]
    problems, given = output_problems(arguments.output), {}
    if arguments.preset not in kind.presets:
        problems.append(f"--preset {arguments.preset}: choose one of {', '.join(kind.presets)}")
    if arguments.image_size and arguments.kind == "dit":
        remedy = "the file of a DiT has its own; leave it out"
        problems.append(f"--image-size {arguments.image_size}: is for --kind vit only, since {remedy}")
    elif arguments.image_size:
        given = {"image_size": arguments.image_size}
        problems += vit_problems(kind.from_dict(kind.presets.get(arguments.preset, {}) | given).model)
    raise_any(problems)
    try:
        tensors, key = state_dict(read_released(arguments.file), arguments.weights)
    except ConfigError as error:
        raise ConfigError([f"{arguments.file}: {problem}" for problem in error.problems]) from error
    config = kind.from_dict({**kind.presets[arguments.preset], **sizes(arguments.kind, tensors), **given})
    tensors.pop(POSITIONS, None)
    with torch.device("meta"):
        wanted = dict(MODELS[arguments.kind][0](config.model).named_parameters())
    raise_any([f"{arguments.file}: {problem}" for problem in differences(wanted, tensors)])
    parts = [Part(name, tuple(wanted[name].shape), lambda n=name: [tensors[n].float()], key) for name in wanted]
    facts = {"source": str(arguments.file), "preset": arguments.preset, "weights": key}
    total = sum(math.prod(part.shape) for part in parts)
    with progress("importing", 4 * total) as bar:
        step = write_step(arguments.output, config, parts, facts, {}, bar.update)
    where = f"{arguments.file} ({key})" if key else arguments.file
    print(f"imported {where} as {step}: {arguments.kind} {arguments.preset}, {total:,} parameters")


def differences(wanted, found):
    """Sentences for parameters that are missing, misshapen, not finite or unknown; at most ``MOST_PROBLEMS``."""
    problems = [f"{name}: is missing" for name in wanted if name not in found]
    for name, parameter in wanted.items():
        if name in found and found[name].shape != parameter.shape:
            shapes = list(found[name].shape), list(parameter.shape)
            problems.append(f"{name}: has shape {shapes[0]}, but {shapes[1]} in the preset")
        elif name in found and not found[name].isfinite().all():
            problems.append(f"{name}: is not finite")
    problems += [f"{name}: is not a parameter of the preset" for name in found if name not in wanted]
    if len(problems) > MOST_PROBLEMS:
        more = len(problems) - MOST_PROBLEMS + 1
        problems[MOST_PROBLEMS - 1 :] = [f"{more} more parameters differ; give the --preset of the file"]
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
