"""Loads an image model from a checkpoint."""

from dataclasses import replace
from pathlib import Path

import torch

from moh_lm.checkpoint.fragments import AVERAGE, FragmentReader
from moh_lm.config import ConfigError
from moh_lm.data.files import read_json
from moh_lm.vision.config import ImageTraining, kind_of_run
from moh_lm.vision.dit import DiT, DiTBlock
from moh_lm.vision.transnext import Block, TransNeXt

MODELS = {"vit": (TransNeXt, Block), "dit": (DiT, DiTBlock)}  # models and their layers


@torch.no_grad()
def load_model(step, weights=None):
    """Return the configuration of a step directory and its model, on the CPU, in fp32, for evaluation; both without
    routers within the dense warm-up.

    weights: "master", "ema" for the moving average, or None for the average if there is one. Raises ConfigError.
    """
    kind = kind_of_run(step)
    if not issubclass(kind, ImageTraining):
        raise ConfigError([f"{step}: is not an image model; give a run of moh_lm.vision vit or dit"])
    config, reader = kind.load(Path(step) / "config.json"), FragmentReader(step)
    if weights == AVERAGE and not reader.averaged:
        raise ConfigError([f"--weights {weights}: {step} has no moving average; choose master"])
    averaged = reader.averaged if weights != "master" else ()
    config = replace(config, model=config.model.after(read_json(Path(step) / "state.json")["step"]))
    model = MODELS[kind.kind][0](config.model).eval()
    for name, tensor in model.state_dict().items():
        reader.require(name, tensor.shape)
        tensor.copy_(reader.read(AVERAGE if name in averaged else "master", name))
    return config, model
