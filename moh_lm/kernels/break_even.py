"""Where a sparse backend is faster than the dense one: measured figures, and the choice that ``auto`` makes by them.

    python benchmarks/attention.py --levels layer --threads N

gives them: time of the attention layer, forward and backward, by the sparse backend over that by the dense one, with
the paper's budgets of shared and routed heads. Inside documents (``--documents``) the ratios are lower from T = 1024
on, and where the sparse backend is taken it is not slower at T = 512 either.
"""

from typing import NamedTuple

import torch


class Measured(NamedTuple):
    """num_threads: of torch. active_share: share of its heads that a token uses. ratio: sparse / dense, the largest of
    the shapes measured."""

    num_threads: int
    seq_length: int
    active_share: float
    ratio: float


# AMD EPYC (Zen 4), torch 2.13.0, fp32, micro-batch 1. One thread: LLM-S, LLM-B, and layers of width 256 with 8 heads x
# 32 and 4 x 64 up to T = 2048, by CPU time on a busy machine; at 50% and T = 2048 the clock of an idle one said more.
# Two threads, on two cores: LLM-S and LLM-B, by the clock, idle machine.
CPU = (
    Measured(1, 512, 0.50, 0.87),
    Measured(1, 1024, 0.50, 0.82),
    Measured(1, 2048, 0.50, 0.75),
    Measured(1, 4096, 0.50, 0.70),
    Measured(1, 512, 0.75, 1.10),
    Measured(1, 1024, 0.75, 0.99),
    Measured(1, 2048, 0.75, 0.94),
    Measured(2, 512, 0.50, 0.89),
    Measured(2, 1024, 0.50, 0.84),
    Measured(2, 2048, 0.50, 0.77),
    Measured(2, 4096, 0.50, 0.69),
    Measured(2, 512, 0.75, 1.00),
    Measured(2, 1024, 0.75, 0.97),
    Measured(2, 2048, 0.75, 0.91),
    Measured(2, 4096, 0.75, 0.85),
)
# No GPU has been measured: auto is dense there.

TRITON_HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128)  # what moh_lm.kernels.triton_attention has kernels for

WORTH_IT = 0.96  # a ratio above is within the noise of the measurement


def fastest(device_type, dtype, seq_length, active_share):
    """"cpu_sparse" or "dense" for a layer: by the longest length not above its own that was measured with as many
    threads, and the least activation not below its own. Inside torch.compile "dense": the graph would break at the
    other."""
    if device_type != "cpu" or dtype != torch.float32 or torch.compiler.is_compiling():
        return "dense"
    measured = [row for row in CPU if row.num_threads == torch.get_num_threads()]
    like = [row for row in measured if row.seq_length <= seq_length and row.active_share >= active_share]
    if not like:
        return "dense"
    nearest = max(like, key=lambda row: (row.seq_length, -row.active_share))
    return "cpu_sparse" if nearest.ratio <= WORTH_IT else "dense"
