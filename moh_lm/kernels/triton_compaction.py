"""``moh_lm.kernels.compaction.compact`` as one Triton kernel instead of a dozen small torch operations."""

import torch
import triton
import triton.language as tl

from moh_lm.kernels.compaction import Compaction

TOKENS = 1024  # tokens read at a time


@triton.jit
def compact_kernel(selected, positions, after, stride_s, stride_b, stride_h, num_heads, seq, TOKENS: tl.constexpr):
    """Write positions and after of one head, from the last tokens back. Grid: (b * heads,)."""
    bh = tl.program_id(0).to(tl.int64)
    selected += bh // num_heads * stride_b + bh % num_heads * stride_h
    positions += bh * seq
    after += bh * (seq + 1)
    count = 0
    tl.store(after + seq, count)
    for step in range(0, seq, TOKENS):
        token = seq - 1 - step - tl.arange(0, TOKENS)
        inside = token >= 0
        chosen = (tl.load(selected + token.to(tl.int64) * stride_s, mask=inside, other=0) != 0).to(tl.int32)
        through = count + tl.cumsum(chosen, 0)  # selected tokens from this one on
        tl.store(after + token, through, mask=inside)
        tl.store(positions + tl.where(chosen != 0, through - 1, token + through), token, mask=inside)
        count += tl.sum(chosen)


def compact(selected):
    """Return the ``Compaction`` of a selection [s, b, heads], bool or 0 and 1."""
    length, batch, heads = selected.shape
    positions = selected.new_empty((batch, heads, length), dtype=torch.int32)
    after = selected.new_empty((batch, heads, length + 1), dtype=torch.int32)
    compact_kernel[(batch * heads,)](
        selected, positions, after, *selected.stride(), heads, length, TOKENS, enable_fp_fusion=True
    )
    return Compaction(positions, after)
