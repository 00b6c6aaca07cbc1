"""The work of tools/sample_images.py: the model, images of it in batches, and their files."""

import math
import sys

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image

from moh_lm.checkpoint.saver import find_step
from moh_lm.cli.devices import usable_device
from moh_lm.config import ConfigError, raise_any
from moh_lm.vision.checks import guidance_problems
from moh_lm.vision.dit import DiT
from moh_lm.vision.load import load_model
from moh_lm.vision.pictures import grid, to_bytes

FAILURES = OSError


@torch.no_grad()
def run(arguments):
    step, device = find_step(arguments.model), usable_device(arguments.device)
    config, model = load_model(step, arguments.weights)
    check(arguments, model)
    vae = load_vae(arguments.vae, config.model.in_channels).to(device) if arguments.vae else None
    model.to(device, getattr(torch, arguments.dtype))
    classes = arguments.classes or range(config.model.num_classes)
    last, images, pixels = arguments.first + arguments.number, [], []
    for first in range(arguments.first, last, arguments.batch_size):
        numbers = range(first, min(first + arguments.batch_size, last))
        y = torch.tensor([classes[number % len(classes)] for number in numbers], device=device)
        x = model.draw(y, numbers, arguments.seed, arguments.steps, arguments.cfg_scale)
        x = x if vae is None else vae.decode(x / vae.config.scaling_factor).sample
        images += [x.cpu()] if arguments.output else []
        pixels += [to_bytes(x)] if arguments.npz else []
        print(f"{numbers.stop - arguments.first} of {arguments.number} images", file=sys.stderr)
    if arguments.npz:
        np.savez(arguments.npz, arr_0=np.concatenate(pixels))
    if arguments.output:
        Image.fromarray(grid(torch.cat(images))).save(arguments.output)


def check(arguments, model):
    if not isinstance(model, DiT):
        raise ConfigError([f"{arguments.model}: is a classifier; give a run of a diffusion model"])
    config, problems = model.config, []
    if config.in_channels not in (1, 3) and not arguments.vae:
        problems.append(f"--vae: must be given, since the model draws latents of {config.in_channels} channels")
    for number in set(arguments.classes or ()):
        if number >= config.num_classes:
            problems.append(f"--classes {number}: must be below {config.num_classes}, the classes of the model")
    if arguments.steps > config.diffusion_steps:
        problems.append(f"--steps {arguments.steps}: the model has {config.diffusion_steps}; give at most these")
    if not math.isfinite(arguments.cfg_scale):
        problems.append(f"--cfg-scale {arguments.cfg_scale}: must be finite, such as 4")
    problems += guidance_problems(config, arguments.cfg_scale)
    raise_any(problems)


def load_vae(path, channels):
    if not (path / "config.json").is_file():
        raise ConfigError([f"--vae {path}: has no config.json; give the directory of an AutoencoderKL of diffusers"])
    vae = AutoencoderKL.from_pretrained(path, local_files_only=True)
    if vae.config.latent_channels != channels:
        found = f"has latents of {vae.config.latent_channels} channels"
        raise ConfigError([f"--vae {path}: {found}, and the model draws {channels}; give that of its data"])
    return vae
