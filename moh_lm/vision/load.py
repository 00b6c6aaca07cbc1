"""An image model as a checkpoint has it."""

from pathlib import Path

import torch

from moh_lm.checkpoint.fragments import AVERAGE, FragmentReader
from moh_lm.config import ConfigError
from moh_lm.data.files import read_json
from moh_lm.vision.config import DiTTraining, ViTTraining
from moh_lm.vision.dit import DiT
from moh_lm.vision.transnext import TransNeXt

MODELS = {"image_size": (ViTTraining, TransNeXt), "input_size": (DiTTraining, DiT)}  # by what their config.json has


@torch.no_grad()
def load_model(step, weights=None):
    """The configuration of a step directory, and its model: on the CPU, in fp32, for evaluation.

    weights: "master", or "ema" for their moving average; None: the average if there is one. Raises ConfigError.
    """
    path = Path(step) / "config.json"
    found = [MODELS[key] for key in read_json(path) if key in MODELS]
    if not found:
        raise ConfigError([f"{step}: is no image model; give a run of moh_lm.pretrain vit or dit"])
    ((kind, make),) = found
    config, reader = kind.load(path), FragmentReader(step)
    if weights == AVERAGE and not reader.averaged:
        raise ConfigError([f"--weights {weights}: no moving average in {step}; choose master"])
    averaged = reader.averaged if weights != "master" else ()
    model = make(config.model.after(read_json(Path(step) / "state.json")["step"])).eval()
    for name, tensor in model.state_dict().items():
        tensor.copy_(reader.read(AVERAGE if name in averaged else "master", name))
    return config, model
