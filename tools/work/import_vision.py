"""The work of tools/import_vision.py: a file is read, compared with the model of its preset, and written as step 0."""

import math
import zipfile
from argparse import Namespace
from functools import partial

import torch
from safetensors.torch import load_file
from tqdm import tqdm

from moh_lm.config import ConfigError, raise_any
from moh_lm.vision.checks import vit_problems
from moh_lm.vision.config import KINDS
from moh_lm.vision.load import MODELS
from moh_lm.vision.released import POSITIONS, sizes, state_dict
from tools.hf.convert.import_step import output_problems, write_step
from tools.hf.convert.import_weights import Part

MOST_PROBLEMS = 10
FAILURES = OSError


def run(arguments):
    """The whole program. Raises ConfigError before anything is written, ConfigError or OSError after."""
    kind = KINDS[arguments.kind]
    problems, given = output_problems(arguments.output), {}
    if arguments.preset not in kind.presets:
        problems.append(f"--preset {arguments.preset}: choose one of {', '.join(kind.presets)}")
    if arguments.image_size and arguments.kind == "dit":
        problems.append(f"--image-size {arguments.image_size}: is of --kind vit; the file of a DiT has its own")
    elif arguments.image_size:
        given = {"image_size": arguments.image_size}
        problems += vit_problems(kind.from_dict(kind.presets.get(arguments.preset, {}) | given).model)
    raise_any(problems)
    try:
        tensors, key = state_dict(read(arguments.file), arguments.weights)
    except ConfigError as error:
        raise ConfigError([f"{arguments.file}: {problem}" for problem in error.problems]) from error
    config = kind.from_dict({**kind.presets[arguments.preset], **sizes(arguments.kind, tensors), **given})
    tensors.pop(POSITIONS, None)
    with torch.device("meta"):
        wanted = dict(MODELS[arguments.kind][0](config.model).named_parameters())
    raise_any([f"{arguments.file}: {problem}" for problem in differences(wanted, tensors)])
    parts = [Part(name, tuple(wanted[name].shape), partial(blocks, tensors[name]), key) for name in wanted]
    facts = {"source": str(arguments.file), "preset": arguments.preset, "weights": key}
    total = sum(math.prod(part.shape) for part in parts)
    with tqdm(desc="importing", total=4 * total, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        step = write_step(arguments.output, config, parts, facts, {}, bar.update)
    where = f"{arguments.file} ({key})" if key else arguments.file
    print(f"imported {where} as {step}: {arguments.kind} {arguments.preset}, {total:,} parameters")


def read(path):
    """What a file holds: tensors, numbers, texts and containers of them. Raises ConfigError for other things."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([Namespace]):  # args of training
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise ConfigError([f"cannot be read ({error.strerror or error}); give another file"]) from error
    except Exception as error:  # a damaged file may raise anything
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        raise ConfigError([f"holds no weights alone ({reason}); give a file with nothing but weights"]) from error


def differences(wanted, found):
    """Sentences for parameters that are missing, of another shape, or unknown; at most ``MOST_PROBLEMS``."""
    problems = [f"{name}: is missing" for name in wanted if name not in found]
    for name, parameter in wanted.items():
        if name in found and found[name].shape != parameter.shape:
            shapes = list(found[name].shape), list(parameter.shape)
            problems.append(f"{name}: has shape {shapes[0]} and the preset {shapes[1]}")
    problems += [f"{name}: is no parameter of the preset" for name in found if name not in wanted]
    if len(problems) > MOST_PROBLEMS:
        more = len(problems) - MOST_PROBLEMS + 1
        problems[MOST_PROBLEMS - 1 :] = [f"{more} more parameters differ; give the --preset of the file"]
    return problems


def blocks(tensor):
    yield tensor.float()
