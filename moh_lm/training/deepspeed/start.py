"""DeepSpeed before there is an engine: what it looks for, says and opens as a process starts."""

from datetime import timedelta

import deepspeed
import deepspeed.ops
from deepspeed.accelerator import get_accelerator


def quiet():
    """Have DeepSpeed build none of its own ops.

    It would ask a compiler which of them could be built. The one that it would build by itself, on a CPU, takes a
    minute and shared memory that nobody removes; training calls none of them.
    """
    deepspeed.ops.__compatible_ops__ = {}


def visible_gpus():
    """Number of GPUs that DeepSpeed sees; None where it computes on CPUs."""
    accelerator = get_accelerator()
    return accelerator.device_count() if accelerator.device_name() == "cuda" else None


def init_distributed(backend, seconds):
    """Let DeepSpeed use the process group that is open, with the time-out of so many ``seconds`` for its own groups."""
    deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=seconds), verbose=False)
