"""DeepSpeed at the start of a process: which devices it sees, what it prints and which groups it opens."""

from datetime import timedelta

import deepspeed
import deepspeed.ops
from deepspeed.accelerator import get_accelerator


def quiet():
    """Have DeepSpeed build none of its own ops.

    It would ask a compiler which of them can be built. The op that it builds by itself on a CPU takes a minute, and
    shared memory that is never removed. Training uses none of them.
    """
    deepspeed.ops.__compatible_ops__ = {}


def visible_gpus():
    """Number of GPUs that DeepSpeed sees; None where it computes on CPUs."""
    accelerator = get_accelerator()
    return accelerator.device_count() if accelerator.device_name() == "cuda" else None


def init_distributed(backend, seconds):
    """Let DeepSpeed use the open process group, and ``seconds`` as the time-out of groups that it opens itself."""
    deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=seconds), verbose=False)
