"""Checks the configuration of an image model and lists every problem, before any process group is opened."""

import math

from moh_lm.checks import run as checks
from moh_lm.checks.model import dense_warmup_problems, form_problems
from moh_lm.checks.ranges import below
from moh_lm.checks.schedule import schedule_problems
from moh_lm.config import flag, walk
from moh_lm.units import words
from moh_lm.vision.augment import STRONGEST


def classifier_problems(config, world_size, on_gpu):
    """Return sentences for what is wrong with a ``ViTTraining`` on ``world_size`` processes."""
    found = image_problems(config, vit_problems(config.model), world_size, on_gpu)
    data = config.data
    if config.run.micro_batch_size == 1 and (data.mixup > 0 or data.cutmix > 0):
        advice = "choose 2 or more, or --mixup 0 --cutmix 0"
        found.append(f"--micro-batch-size 1: Mixup and CutMix join images of one micro-batch; {advice}")
    return found


def diffusion_problems(config, world_size, on_gpu):
    """Return sentences for what is wrong with a ``DiTTraining`` on ``world_size`` processes."""
    model, run = config.model, config.run
    found = image_problems(config, dit_problems(model), world_size, on_gpu)
    if run.samples and run.sampling_steps > model.diffusion_steps:
        given = f"--sampling-steps {run.sampling_steps}"
        found.append(f"{given}: the model has {model.diffusion_steps} --diffusion-steps; give at most as many")
    return found + list(guidance_problems(model, run.cfg_scale) if run.samples else ())


def image_problems(config, of_sizes, world_size, on_gpu):
    """Return the problems that both kinds can have. of_sizes: problems of the model's sizes; heads are only checked
    without any."""
    model, run = config.model, config.run
    found = [
        f"{flag(entry.name)} {words(getattr(section, entry.name))}: is for language models; leave it out"
        for section, entry in walk(config)
        if config.hides(entry) and getattr(section, entry.name) != entry.default
    ]
    found += of_sizes
    found = found or head_problems(model)
    found += checks.optimizer_problems(config.optimizer) + checks.frozen_problems(config)
    found += schedule_problems(config) + checks.compile_problems(run, on_gpu)
    found += checks.reliability_problems(config.reliability) + checks.alarm_problems(config.alarms)
    found += data_problems(config.data) + run_problems(run) + batch_problems(run, world_size)
    if config.optimizer.train_only != "all" and run.ema_decay:
        given = f"--train-only {config.optimizer.train_only}"
        found.append(f"{given}: the average of frozen weights would be lost; give --ema-decay 0, or train all")
    return found


def guidance_problems(model, cfg_scale):
    """Yield a sentence if guidance is requested from a ``DiTConfig`` that never trains its embedding of no class."""
    if model.class_dropout == 0 and cfg_scale != 1:
        why = "guidance compares with images of no class, which --class-dropout 0 never trains"
        yield f"--cfg-scale {cfg_scale:g}: {why}; give 1"


def vit_problems(model):
    stages = len(model.depths)
    found = [
        f"{flag(key)}: has {len(getattr(model, key))} numbers for the {stages} stages of --depths; give as many"
        for key in ("hidden_sizes", "num_attention_heads", "mlp_ratios", "sr_ratios")
        if len(getattr(model, key)) != stages
    ]
    counted = ("depths", "num_attention_heads", "mlp_ratios", "sr_ratios")
    least = {key: min(getattr(model, key), default=0) for key in counted}
    found += [f"{flag(key)} {value}: must be 1 or above" for key, value in least.items() if value < 1]
    if found:
        return found
    step = 4 << stages - 1
    if model.image_size < 1 or model.image_size % step:
        found.append(f"--image-size {model.image_size}: must be a multiple of {step}")
    if model.in_channels not in (1, 3):
        found.append(f"--in-channels {model.in_channels}: must be 1 (grey) or 3 (RGB)")
    sides = [model.image_size // (4 << stage) for stage in range(stages)]
    found += [
        f"--sr-ratios {ratio}: leaves none of the {side} x {side} tokens of stage {stage + 1}; choose at most {side}"
        for stage, (ratio, side) in enumerate(zip(model.sr_ratios, sides, strict=True))
        if ratio > side > 0
    ]
    if not 0 <= model.drop_path < 1:
        found.append(f"--drop-path {model.drop_path:g}: must be at least 0 and below 1")
    found += [
        f"--hidden-sizes {width}: must be a multiple of the {heads} heads of its stage"
        for width, heads in zip(model.hidden_sizes, model.num_attention_heads, strict=True)
        if width < 1 or width % heads
    ]
    return found + below(model, 1, "num_classes")


def dit_problems(model):
    found = below(model, 1, "input_size", "in_channels", "patch_size", "num_classes", "num_layers")
    found += below(model, 21, "diffusion_steps")
    if found:
        return found
    if len(model.num_attention_heads) != model.num_layers or min(model.num_attention_heads) < 1:
        found.append(f"--num-attention-heads: give one number, or one for each of the {model.num_layers} layers")
    else:
        found += below(model, 1, "head_dim")
    if not 0 < model.hidden_size * model.mlp_ratio < math.inf:
        found.append(f"--mlp-ratio {model.mlp_ratio:g}: must be above 0, such as 4")
    elif model.hidden_size * model.mlp_ratio < 1:
        found.append(f"--mlp-ratio {model.mlp_ratio:g}: leaves no feature of --hidden-size {model.hidden_size}; give 4")
    if model.input_size % model.patch_size:
        found.append(f"--input-size {model.input_size}: must be a multiple of --patch-size {model.patch_size}")
    if model.hidden_size < 4 or model.hidden_size % 4:
        found.append(f"--hidden-size {model.hidden_size}: must be a multiple of 4, for the positions")
    if not 0 <= model.class_dropout < 1:
        found.append(f"--class-dropout {model.class_dropout:g}: must be at least 0 and below 1")
    return found


def head_problems(model):
    heads, layers = model.heads, model.num_layers
    found = below(heads, 0, "load_balance_coefficient", "router_z_loss", "router_gumbel_noise")
    if heads.head_selection == "all":
        return found
    for key in ("num_shared_heads", "num_active_routed_heads"):
        if len(getattr(heads, key)) != layers:
            advice = f"give one number, one per stage, or one for each of the {layers} layers"
            return [*found, f"{flag(key)}: {advice}; --preset has the paper's"]
    found += form_problems(heads)
    for layer, number in enumerate(model.head_counts):
        shared, active = heads.num_shared_heads[layer], heads.num_active_routed_heads[layer]
        routed = number - shared
        if not (0 <= shared <= number and (1 <= active <= routed or active == routed == 0)):
            text = f"layer {layer} has {number} heads: {shared} shared and {active} of {routed} others"
            found.append(f"{text}; choose at most {number} shared, and at least 1 and at most all of the others")
    return list(dict.fromkeys(found)) or dense_warmup_problems(model)


def data_problems(data):
    found = [] if data.data_dir else ["--data-dir is missing: give the directory of the training images"]
    if not 0 <= data.rand_augment <= STRONGEST:
        found.append(f"--rand-augment {data.rand_augment:g}: must be between 0 and {STRONGEST}")
    found += below(data, 0, "workers", "mixup", "cutmix") + below(data, 1, "repeated_augmentation")
    shares = ("random_erasing", "horizontal_flip", "min_crop_area", "label_smoothing")
    return found + [
        f"{flag(key)} {getattr(data, key):g}: must be between 0 and 1"
        for key in shares
        if not 0 <= getattr(data, key) <= 1
    ]


def run_problems(run):
    found = checks.base_problems(run) + below(run, 1, "batch_size", "sampling_steps")
    found += below(run, 0, "eval_images", "samples", "cfg_scale")
    budget = run.epochs if run.train_iters is None else run.train_iters
    if budget is None:
        found.append("--epochs is missing: give a budget such as 300, or --train-iters")
    elif not 0 < budget < math.inf:
        found.append(f"{'--epochs' if run.train_iters is None else '--train-iters'} {budget:g}: must be above 0")
    if not 0 <= run.ema_decay < 1:
        found.append(f"--ema-decay {run.ema_decay:g}: must be at least 0 and below 1, such as 0.9999")
    if run.sampling_steps == 1:
        found.append("--sampling-steps 1: must be 2 or above")
    return found


def batch_problems(run, world_size):
    chunk = max(1, run.micro_batch_size) * world_size
    if run.batch_size % chunk == 0:
        return []
    nearest = math.ceil(run.batch_size / chunk) * chunk
    return [
        f"--batch-size {run.batch_size}: not a multiple of --micro-batch-size {run.micro_batch_size} on {world_size} "
        f"processes = {chunk}; choose {nearest}"
    ]
