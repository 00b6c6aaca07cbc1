"""Training of an image model on one rank: what moh_lm/run/program.py needs to know of it."""

import math
import os
from dataclasses import replace

import torch

from moh_lm.checks.run import schedule_problems
from moh_lm.config import flag, raise_any, walk
from moh_lm.cost.summary import describe_layout
from moh_lm.run import program
from moh_lm.units import by_layer, short, wrapped
from moh_lm.vision.checks import image_problems
from moh_lm.vision.load import MODELS
from moh_lm.vision.loader import open_images
from moh_lm.vision.run import ImageRun

OF_VIT = (
    "rand_augment", "mixup", "cutmix", "random_erasing", "min_crop_area", "label_smoothing", "repeated_augmentation",
)  # fmt: skip
OF_DIT = ("samples", "sampling_steps", "cfg_scale")


def main(given):
    """Run what ``parse_flags`` gave, and exit."""
    program.main(given, program.Work(image_problems, open_data, describe, lambda *_: [], ImageRun))


def open_data(config, problems, dry_run):
    """The configuration, whose budget is in iterations, and the images. Raises ConfigError with every problem."""
    raise_any(problems)
    if dry_run and not os.path.exists(config.data.data_dir):
        return config, None
    images = open_images(config)
    if config.run.train_iters is None:
        iterations = max(1, math.ceil(config.run.epochs * images.num_images / config.run.batch_size))
        config = replace(config, run=replace(config.run, train_iters=iterations))
        raise_any(schedule_problems(config))
    return config, images


def describe(config, images, world_size):
    """Lines that say what the run is."""
    model, run = config.model, config.run
    with torch.device("meta"):
        network = MODELS[config.kind][0](model)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    budget = f"{run.epochs:g} epochs" if run.train_iters is None else f"{run.train_iters:,} iterations"
    lines = [
        f"model      {type(network).__name__}, {model.num_layers} layers, width {model.hidden_size}",
        f"parameters {short(parameters)} ({parameters:,})",
        f"heads      {describe_heads(model)}",
        f"batch      {run.batch_size} images, {run.seq_length} tokens each",
        f"budget     {budget}",
        *describe_images(config, images),
        describe_layout(config, world_size).replace("sequences", "images"),
        *describe_idle(config),
    ]
    return list(map(wrapped, lines))


def describe_idle(config):
    """Flags that were given and are for the other kind of model."""
    others = OF_DIT if config.kind == "vit" else OF_VIT
    idle = [
        flag(entry.name)
        for section, entry in walk(config)
        if entry.name in others and getattr(section, entry.name) != entry.default
    ]
    if idle:
        yield f"note: a model of {config.kind} makes no use of {', '.join(idle)}"


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
        return f"all heads for every token: {by_layer(list(map(str, model.head_counts)), '; ')}"
    on = [
        f"{layer.num_shared} shared" + f", {layer.num_active} of {layer.num_routed} routed" * (layer.num_routed > 0)
        for layer in map(model.routed_layer, range(model.num_layers))
    ]
    return f"{by_layer(on, '; ')}; {model.active_share():.1%} for a token; routing {model.heads.routing}"
