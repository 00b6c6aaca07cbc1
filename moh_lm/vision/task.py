"""The tasks of image models: MoH-ViT, which classifies images, and MoH-DiT, which generates images of a class."""

import functools
import math
import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from moh_lm.checks.run import profile_problems
from moh_lm.checks.schedule import schedule_problems
from moh_lm.config import raise_any
from moh_lm.cost.flops import BACKWARD
from moh_lm.cost.summary import describe_layout
from moh_lm.run.task import Task
from moh_lm.units import layers_in_words, short, wrapped
from moh_lm.vision.checks import classifier_problems, diffusion_problems
from moh_lm.vision.config import DiTTraining, ViTTraining
from moh_lm.vision.dit import DiT
from moh_lm.vision.engine import ImageEngine
from moh_lm.vision.evaluation import ClassifierEvaluation, DiffusionEvaluation
from moh_lm.vision.load import MODELS
from moh_lm.vision.loader import ImageLoader, open_images
from moh_lm.vision.model_config import DiTConfig
from moh_lm.vision.transnext import TransNeXt


def open_data(config, problems, dry_run):
    """Return the configuration, with its budget in iterations, and the images. Raises ConfigError."""
    raise_any(problems)
    if dry_run and not os.path.exists(config.data.data_dir):
        return config, None
    images = open_images(config)
    if config.run.train_iters is None:
        iterations = max(1, math.ceil(config.run.epochs * images.num_images / config.run.batch_size))
        config = replace(config, run=replace(config.run, train_iters=iterations))
        raise_any([*schedule_problems(config), *profile_problems(config.run)])
    return config, images


def describe(config, images, world_size, device=None):
    """Return the lines that describe the run."""
    model, run, size = config.model, config.run, parameters(config)
    budget = f"{run.epochs:g} epochs" if run.train_iters is None else f"{run.train_iters:,} iterations"
    lines = [
        f"model      {MODELS[config.kind][0].__name__}, {model.num_layers} layers, width {model.hidden_size}",
        f"parameters {short(size)} ({size:,})",
        f"heads      {describe_heads(model)}",
        f"batch      {run.batch_size} images, {config.seq_length} tokens each",
        f"budget     {budget}",
        *describe_images(config, images),
        describe_layout(config, world_size),
    ]
    return list(map(wrapped, lines))


def parameters(config):
    with torch.device("meta"):
        network = MODELS[config.kind][0](config.model)
    return sum(parameter.numel() for parameter in network.parameters())


def describe_images(config, images):
    if images is None:
        yield f"data       {config.data.data_dir}, which does not exist yet"
        return
    number, held_out = images.num_images, images.num_validation
    seen = f"seen {config.run.train_iters * config.run.batch_size / number:.3g} times"
    yield f"data       {config.data.data_dir}: {number:,} images, {seen}; held out: {held_out:,}"
    yield from (f"  {note}" for note in images.notes)


def describe_heads(model):
    if model.heads.head_selection == "all":
        return f"all heads for every token: {layers_in_words(list(map(str, model.head_counts)), '; ')}"
    on = [
        f"{layer.num_shared} shared" + f", {layer.num_active} of {layer.num_routed} routed" * (layer.num_routed > 0)
        for layer in map(model.routed_layer, range(model.num_layers))
    ]
    return f"{layers_in_words(on, '; ')}; {model.active_share():.1%} per token; routing {model.heads.routing}"


def make_loader(config, images, groups, device):
    return ImageLoader(images, dist.get_rank(groups.data), dist.get_world_size(groups.data), device.type == "cuda")


def image_flops(model, seq_length, measured):
    """Return the FLOPs of training per token, those of a ViT in its first stage: every head is computed."""
    found = forward_flops(model) * (1 + BACKWARD) / seq_length
    return {"dense": found, "active": found}


@functools.lru_cache(maxsize=2)
def forward_flops(model):
    """Return the FLOPs of one image's forward pass, as torch counts them."""
    is_dit = isinstance(model, DiTConfig)
    side = model.input_size if is_dit else model.image_size
    with torch.device("meta"):
        made, image = (DiT if is_dit else TransNeXt)(model).eval(), torch.zeros(1, model.in_channels, side, side)
        zero = torch.zeros(1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        made.predict(image, zero, zero) if is_dit else made(image)
    return counter.get_total_flops()


COMMON = dict(
    open_data=open_data, describe=describe, parameters=parameters, make_engine=ImageEngine, make_loader=make_loader,
    flops=image_flops,
)  # fmt: skip
VIT = Task(config_type=ViTTraining, problems=classifier_problems, make_evaluation=ClassifierEvaluation, **COMMON)
DIT = Task(config_type=DiTTraining, problems=diffusion_problems, make_evaluation=DiffusionEvaluation, **COMMON)
