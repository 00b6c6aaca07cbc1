"""The choice of each layer's attention backend, once per run: by name, or by measured times (measured.py)."""

import math

from moh_lm.kernels.gated_attention import TRITON
from moh_lm.kernels.measured import TRITON_HEAD_DIMS, measurement

WORTH_IT = 0.96  # a larger ratio is within the noise of the measurement


def choose_backend(name, device, dtype, shape, active_share, dense_only=False, own_keys=False, compiled=False):
    """Return the name of the backend that computes queries of ``shape`` [s, b, heads, head_dim]; it is never ``auto``.

    active_share: share of the heads that a token uses, by which ``auto`` chooses. dense_only: whether the layer needs
    all scores. own_keys: see ``gated_attention``. compiled: whether torch.compile compiles the layer. Raises
    RuntimeError if the named backend cannot run here.
    """
    if dense_only:
        return "dense"
    if name == "auto":
        if device.type == "cpu" and compiled:
            return "dense"  # cpu_sparse would break the graph
        chosen = fastest(device, dtype, tuple(shape), active_share, compiled)
        return "dense" if chosen == "triton" and (TRITON is None or own_keys) else chosen
    if name == "triton" and TRITON is None:
        raise RuntimeError("attention backend triton: the package triton is not installed; install it, or choose auto")
    if name == "cpu_sparse" and device.type != "cpu":
        raise RuntimeError(f"attention backend cpu_sparse: the tensors are on {device}; choose auto")
    return name


def fastest(device, dtype, shape, active_share, compiled=False):
    """Return "triton", "cpu_sparse" or "dense" for queries of ``shape`` [s, b, heads, head_dim], as measured at the
    next shorter length and the next larger active share. compiled: as above; a GPU then hardly waits for the host."""
    found = measurement(device, dtype)
    ratio = measured_ratio(found, shape, active_share, compiled)
    if ratio is None or ratio > WORTH_IT:
        return "dense"
    if found.device == "cpu":
        return "cpu_sparse"
    return "triton" if shape[3] in TRITON_HEAD_DIMS else "dense"


def measured_ratio(found, shape, active_share, compiled=False):
    """Return the time of a sparse attention layer over a dense one by a ``Measurement``; None if none of its figures
    applies. For the others see ``fastest``."""
    if found is None or math.prod(shape) < found.elements:
        return None
    like = [(row[0], -row[1], row[-1] if compiled else row[2]) for row in found.ratios if row[0] <= shape[0]]
    return max((row for row in like if -row[1] >= active_share), default=(None,))[-1]
