"""The device that a tool computes on."""

import torch

from moh_lm.config import ConfigError


def usable_device(name):
    """Return ``name`` or, if it is None, a GPU if there is one, else the CPU. Raises ConfigError if it is unusable."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # torch has no CUDA, or the number is too large
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = f"this machine shows {found} GPUs" if found else "this machine shows no GPU, or its torch has no CUDA"
        raise ConfigError([f"--device {name}: {gpus}; choose cpu"]) from error
    return name
