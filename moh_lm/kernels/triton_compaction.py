"""``moh_lm.kernels.compaction.compact`` as one Triton kernel: a dozen small operations of torch become one launch."""

import torch
import triton
import triton.language as tl

from moh_lm.kernels.compaction import Compaction

TOKENS = 1024  # read at a time


@triton.jit
def compact_kernel(
    selected, positions, before, stride_s, stride_b, stride_h, num_heads, seq, TOKENS: tl.constexpr
):  # fmt: skip
    """positions and before of one head. Grid: (b * heads,)."""
    bh = tl.program_id(0).to(tl.int64)
    selected += bh // num_heads * stride_b + bh % num_heads * stride_h
    positions += bh * seq
    before += bh * (seq + 1)
    count = 0
    tl.store(before, count)
    for start in range(0, seq, TOKENS):
        token = start + tl.arange(0, TOKENS)
        inside = token < seq
        chosen = tl.load(selected + token.to(tl.int64) * stride_s, mask=inside, other=0) != 0
        through = count + tl.cumsum(chosen.to(tl.int32), 0)  # selected tokens up to this one
        rank = through - chosen.to(tl.int32)
        tl.store(before + 1 + token, through, mask=inside)
        tl.store(positions + tl.where(chosen, rank, seq - 1 - (token - rank)), token, mask=inside)
        count += tl.sum(chosen.to(tl.int32))


def compact(selected):
    """``Compaction`` of a selection [s, b, heads], bool or 0 and 1."""
    length, batch, heads = selected.shape
    positions = selected.new_empty((batch, heads, length), dtype=torch.int32)
    before = selected.new_empty((batch, heads, length + 1), dtype=torch.int32)
    compact_kernel[(batch * heads,)](
        selected, positions, before, *selected.stride(), heads, length, TOKENS, enable_fp_fusion=True
    )
    return Compaction(positions, before)
