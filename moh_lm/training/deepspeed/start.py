"""Sets up DeepSpeed in a process: the devices it sees, what it prints and the groups it opens."""

from datetime import timedelta

import deepspeed
import deepspeed.ops
from deepspeed.accelerator import get_accelerator


def quiet():
    """Keep DeepSpeed from building its own ops, none of which training uses.

    It would ask a compiler which of them can be built. The op that it builds by itself on a CPU takes a minute, and
    shared memory that is never removed.
    """
    deepspeed.ops.__compatible_ops__ = {}


def visible_gpus():
    """Return the number of GPUs that DeepSpeed sees, or None where it computes on CPUs."""
    accelerator = get_accelerator()
    return accelerator.device_count() if accelerator.device_name() == "cuda" else None


def init_distributed(backend, seconds):
    """Let DeepSpeed use the open process group, and ``seconds`` as the time-out of groups that it opens itself."""
    deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=seconds), verbose=False)
