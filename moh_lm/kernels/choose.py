"""The choice of each layer's attention backend, once per run: by name, by measured times (measured.py), or on a GPU
without any by an estimate.

The estimate rests on rates that one NVIDIA H200 reached with LLM-S and LLM-B (docs/results.md): cuDNN's attention 46%
of the peak, routed heads 0.55 of that, and everything else in a layer 34%. From 1,024 to 8,192 tokens its ratios are
within 0.05 of the measured ones.
"""

import math

import torch

from moh_lm.kernels.devices import missing_for_triton
from moh_lm.kernels.gated_attention import TRITON
from moh_lm.kernels.measured import TRITON_HEAD_DIMS, measurement

WORTH_IT = 0.96  # a larger ratio is within the noise of the measurement
ESTIMATE_WORTH_IT = 0.92  # a larger one is within the error of the estimate
MOST_IN_GROUPS = 0.5  # with three quarters of the heads, ordinary attention of chosen heads was as fast as cpu_sparse
ATTENTION, ROUTED_HEADS, OTHERS = 0.46, 0.55, 0.34
ESTIMATED = ((8, 0), (9, 0))  # compute capabilities: those of the A100 and the H100
ESTIMATED_ELEMENTS = 8 * 2048 * 768  # of the queries in the smallest measured call; a shorter one waits for the host


def choose_backend(
    name, device, dtype, shape, active_share, dense_only=False, own_keys=False, compiled=False, estimate=1.0,
    in_groups=False,
):  # fmt: skip
    """Return the name of the backend that computes queries of ``shape`` [s, b, heads, head_dim]; it is never ``auto``.

    active_share: share of the heads that a token uses, by which ``auto`` chooses. dense_only: whether the layer needs
    all scores. own_keys: see ``gated_attention``. compiled: whether torch.compile compiles the layer, or a CUDA graph
    launches it. estimate: ``estimated_ratio`` of the layer. in_groups: whether a token chooses equally many heads in
    every key/value group. Raises RuntimeError if the named backend cannot run here.
    """
    if dense_only:
        return "dense"
    if name == "auto":
        ordinary = "groups" if in_groups else "dense"
        better = {
            "cpu_sparse": not compiled and not (in_groups and active_share > MOST_IN_GROUPS),  # it breaks graphs
            "triton": TRITON is not None and not own_keys and not in_groups and not missing_for_triton(),
        }
        chosen = fastest(device, dtype, shape, active_share, compiled, estimate)
        return chosen if better.get(chosen) else ordinary
    if name == "triton" and TRITON is None:
        raise RuntimeError("attention backend triton: the package triton is not installed; install it, or choose auto")
    if name == "cpu_sparse" and device.type != "cpu":
        raise RuntimeError(f"attention backend cpu_sparse: the tensors are on {device}; choose auto")
    return name


def fastest(device, dtype, shape, active_share, compiled=False, estimate=1.0):
    """Return "triton", "cpu_sparse" or "dense" for queries of ``shape`` [s, b, heads, head_dim], as measured at the
    next shorter length and the next larger active share, or on a GPU without measurements by the ``estimate``.
    compiled: as above; a GPU then hardly waits for the host."""
    found = measurement(device, dtype)
    ratio = measured_ratio(found, shape, active_share, compiled)
    if found is None and compiled and math.prod(shape) >= ESTIMATED_ELEMENTS and is_estimated(device, dtype):
        ratio = estimate if estimate <= ESTIMATE_WORTH_IT else None
    if ratio is None or ratio > WORTH_IT:
        return "dense"
    if device.type == "cpu":
        return "cpu_sparse"
    return "triton" if shape[3] in TRITON_HEAD_DIMS else "dense"


def is_estimated(device, dtype):
    """Return whether the estimate speaks for this device."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) in ESTIMATED


def estimated_ratio(core, projections, shared, active):
    """Return the time of an attention layer on a GPU that computes only the heads in use over that of all heads.

    core, projections: a token's multiplications for scores and values, and in projections. shared, active: shares of
    the heads that every token uses, and that a token selects.
    """
    core, others = core / ATTENTION, projections / OTHERS
    return 1 - core / (core + others) * (1 - head_time(shared, active))


def head_time(shared, active, in_groups=False):
    """Return the time of attention over that of all heads, for shares of heads that are shared and selected."""
    return shared + active / (1 if in_groups else ROUTED_HEADS)


def measured_ratio(found, shape, active_share, compiled=False):
    """Return the time of a sparse attention layer over a dense one by a ``Measurement``; None if none of its figures
    applies. For the others see ``fastest``."""
    if found is None or math.prod(shape) < found.elements:
        return None
    like = [(row[0], -row[1], row[-1] if compiled else row[2]) for row in found.ratios if row[0] <= shape[0]]
    return max((row for row in like if -row[1] >= active_share), default=(None,))[-1]
