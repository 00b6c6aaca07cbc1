"""Where a sparse backend is faster than the dense one: measured figures, and the choice that ``auto`` makes by them.

    python benchmarks/attention.py

gives them: time of the attention layer, forward and backward, by the sparse backend over that by the dense one. The
activation is the share of heads that a token uses, half of them shared and the others routed (the paper's budgets).
"""

from typing import NamedTuple

import torch


class Measured(NamedTuple):
    """seq_length, active_share: of the layer. ratio: sparse / dense, the largest of the shapes measured."""

    seq_length: int
    active_share: float
    ratio: float


# 2 cores of an AMD EPYC (Zen 4), torch 2.13.0, fp32, micro-batch 1, LLM-S and LLM-B, one and two threads.
CPU = ()
# No GPU has been measured: auto is dense there.

TRITON_HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128)  # what moh_lm.kernels.triton_attention has kernels for

WORTH_IT = 0.97  # a ratio above is within the noise of the measurement


def fastest(device_type, dtype, seq_length, active_share):
    """"cpu_sparse" or "dense" for a layer: by the longest measured length not above its own, and the least activation
    not below its own."""
    if device_type != "cpu" or dtype != torch.float32:
        return "dense"
    like = [row for row in CPU if row.seq_length <= seq_length and row.active_share >= active_share]
    if not like:
        return "dense"
    nearest = max(like, key=lambda row: (row.seq_length, -row.active_share))
    return "cpu_sparse" if nearest.ratio <= WORTH_IT else "dense"
