"""Gathers the selected queries of every head, so that the Triton backend computes only those.

Only some tokens need a routed head. Its queries are put into *slots*: first the tokens that select the head, from the
last to the first, then the others. The slots of a head are a permutation of the sequence, so shapes never depend on the
routing, nothing is dropped, and the host never waits for the device. The block of slots that is not full holds the
earliest tokens, which attend to the fewest keys.

Positions descend over the selected slots, so causality is still expressed by ranges. With p(i) the position of slot i
and n(t) the number of selected tokens from position t on:

    slots [i, j), all selected    all see the keys [0, p(j - 1)], some see those up to p(i)
    keys [t, u)                   are seen by the slots before n(t), all of them by those before n(u - 1)

Inside documents or a window, position t sees keys from start(t) on and is seen before end(t). This adds bounds:

    slots [i, j), all selected    all see the keys from start(p(i)) on, some see those from start(p(j - 1)) on
    keys [t, u)                   are seen by the slots from n(end(u - 1)) on, all of them by those from n(end(t)) on

One kernel takes the place of a dozen small operations of torch. Shapes: s sequence, b batch.
"""

import torch
import triton
import triton.language as tl

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
    """Return positions and after of a selection [s, b, heads], bool or 0 and 1.

    positions: int32 [b, heads, s], the token in every slot. after: int32 [b, heads, s + 1], the number of selected
    tokens from each position on; after[..., 0] is the number of selected slots.
    """
    length, batch, heads = selected.shape
    positions = selected.new_empty((batch, heads, length), dtype=torch.int32)
    after = selected.new_empty((batch, heads, length + 1), dtype=torch.int32)
    compact_kernel[(batch * heads,)](
        selected, positions, after, *selected.stride(), heads, length, TOKENS, enable_fp_fusion=True
    )
    return positions, after
