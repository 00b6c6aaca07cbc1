"""Generates images of some classes with a checkpoint of MoH-DiT or DiT, and a picture of all of them.

    python tools/sample_images.py RUN_OR_STEP --output grid.png [--classes 1 7 3] [--number 16] [--steps 250]
    python tools/sample_images.py RUN_OR_STEP --vae DIR --output grid.png    latents, by an AutoencoderKL of diffusers
    python tools/sample_images.py RUN_OR_STEP --number 50000 --npz samples.npz     arr_0, uint8 [n, H, W, c], as ADM's

Image n has the n-th of the given classes, which repeat. It depends only on --seed and n, not on the batch, so several
processes can each draw a part, starting at --first. With --images-per-npz 1000, samples-0.npz, samples-1000.npz and so
on are written as they are drawn, and --first draws the rest after a stop. tools/evaluate_vision.py reads all of them.

Exit codes: 0; 2 an argument or the checkpoint must be fixed.
"""

import math
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import device, output_path, run_file
from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import temporary_name
from moh_lm.units import at_least


def main(texts):
    return run_file(__file__, __doc__, add_flags, run, texts, check=check, code=2, extra="vision")


def add_flags(parser):
    add = parser.add_argument
    add("model", type=Path, metavar="RUN_OR_STEP", help="run directory, or its checkpoints/step-N")
    add("--classes", type=at_least(0), nargs="+", metavar="N", help="classes to draw, in turn (default: all)")
    add("--number", type=at_least(1), default=16, metavar="N", help="images to draw (default: %(default)s)")
    add("--first", type=at_least(0), default=0, metavar="N", help="number of the first image (default: %(default)s)")
    add("--steps", type=at_least(2), default=250, metavar="N", help="steps per image (default: %(default)s)")
    add("--cfg-scale", type=float, default=4.0, metavar="X", help="strength of the guidance by the class; 1: none "
        "(default: %(default)s)")  # fmt: skip
    add("--seed", type=at_least(0), default=0, metavar="N", help="seed of the noise (default: %(default)s)")
    add("--weights", choices=("master", "ema"), help="weights, or their moving average (default: ema if kept)")
    add("--vae", type=Path, metavar="DIR", help="directory of the AutoencoderKL that decodes latents")
    add("--output", type=output_path, metavar="FILE", help="picture with all images, such as grid.png")
    add("--npz", type=output_path, metavar="FILE", help="file with the pixels as an array, such as samples.npz")
    add("--images-per-npz", type=at_least(1), metavar="N", help="images in a file, for --npz; the number of its first "
        "image is added to its name (default: all in one file)")  # fmt: skip
    add("--batch-size", type=at_least(1), default=32, metavar="N", help="images at a time (default: %(default)s)")
    dtypes = ("float32", "bfloat16")
    add("--dtype", default="float32", choices=dtypes, help="precision of the model (default: %(default)s)")
    add("--device", type=device, metavar="NAME", help="cpu, cuda, or cuda:N (default: cuda if available, else cpu)")


def check(arguments):
    files = {"--output": arguments.output, "--npz": arguments.npz}
    problems = [f"{flag} {path}: there is no directory {path.parent}; create it"
                for flag, path in files.items() if path and not path.parent.is_dir()]  # fmt: skip
    for flag, ending in (("--output", ".png"), ("--npz", ".npz")):
        if files[flag] and files[flag].suffix != ending:
            problems.append(f"{flag} {files[flag]}: give a name that ends in {ending}")
    if not any(files.values()):
        problems.append("give --output or --npz")
    if arguments.images_per_npz and not arguments.npz:
        problems.append(f"--images-per-npz {arguments.images_per_npz}: needs --npz; add it")
    raise_any(problems)


def run(arguments):
    import torch
    from PIL import Image

    from moh_lm.checkpoint.saver import find_step
    from moh_lm.cli.devices import usable_device
    from moh_lm.vision.load import load_model
    from moh_lm.vision.pictures import grid, to_bytes

    step, device = find_step(arguments.model), usable_device(arguments.device)
    config, model = load_model(step, arguments.weights)
    check_model(arguments, model)
    vae = load_vae(arguments.vae, config.model.in_channels).to(device) if arguments.vae else None
    model.to(device, getattr(torch, arguments.dtype))
    classes = arguments.classes or range(config.model.num_classes)
    last, images = arguments.first + arguments.number, []
    each = arguments.images_per_npz or arguments.number
    for start in range(arguments.first, last, each):
        pixels, end = [], min(start + each, last)
        for first in range(start, end, arguments.batch_size):
            numbers = range(first, min(first + arguments.batch_size, end))
            y = torch.tensor([classes[number % len(classes)] for number in numbers], device=device)
            with torch.no_grad():
                x = model.draw(y, numbers, arguments.seed, arguments.steps, arguments.cfg_scale)
                x = x if vae is None else vae.decode(x / vae.config.scaling_factor).sample
            images += [x.cpu()] if arguments.output else []
            pixels += [to_bytes(x)] if arguments.npz else []
            print(f"{numbers.stop - arguments.first} of {arguments.number} images", file=sys.stderr)
        if arguments.npz:
            path = arguments.npz
            write(path.with_stem(f"{path.stem}-{start}") if arguments.images_per_npz else path, pixels)
    if arguments.output:
        Image.fromarray(grid(torch.cat(images))).save(arguments.output)


def write(path, pixels):
    """Write parts of an array to an .npz, which is there in full or not at all."""
    import numpy as np

    unfinished = temporary_name(path)
    with open(unfinished, "wb") as file:
        np.savez(file, arr_0=np.concatenate(pixels))
    os.replace(unfinished, path)


def check_model(arguments, model):
    from moh_lm.vision.checks import guidance_problems
    from moh_lm.vision.dit import DiT

    if not isinstance(model, DiT):
        raise ConfigError([f"{arguments.model}: is a classifier; give a run of a diffusion model"])
    config, problems = model.config, []
    if config.in_channels not in (1, 3) and not arguments.vae:
        problems.append(f"--vae is missing: give it, since the model draws latents of {config.in_channels} channels")
    for number in set(arguments.classes or ()):
        if number >= config.num_classes:
            problems.append(f"--classes {number}: must be below {config.num_classes}, the classes of the model")
    if arguments.steps > config.diffusion_steps:
        problems.append(f"--steps {arguments.steps}: the model has {config.diffusion_steps}; give at most as many")
    if not math.isfinite(arguments.cfg_scale):
        problems.append(f"--cfg-scale {arguments.cfg_scale}: must be finite, such as 4")
    problems += guidance_problems(config, arguments.cfg_scale)
    raise_any(problems)


def load_vae(path, channels):
    from tools.hf.convert.autoencoder import load_autoencoder

    vae = load_autoencoder(path)
    if vae.config.latent_channels != channels:
        found = f"has latents of {vae.config.latent_channels} channels"
        raise ConfigError([f"--vae {path}: {found}, but the model draws {channels}; give the autoencoder of its data"])
    return vae


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
