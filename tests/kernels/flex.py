"""The FlexAttention backend: torch's own block-sparse kernel on the compacted queries, to check the Triton kernels by.

Its ``BlockMask`` follows from ``key_blocks`` in closed form: the key blocks of a block of slots are a contiguous range,
and so are the full blocks among them. No s x s mask is needed.

Shapes: s sequence, b batch, e head dimension, n blocks of the sequence.
"""

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from moh_lm.kernels.gated_attention import Backend
from moh_lm.kernels.selected_keys import in_slots
from tests.kernels.blocks import at_positions, compact, key_blocks

BLOCK = 128


def flex_heads(query, key, value, gates, selected, documents=None):
    """g_i H_i of the selected heads, 0 elsewhere. Shapes as in ``gated_attention``. On a CPU there are no gradients:
    torch has the forward pass only."""
    if query.device.type == "cpu":
        query, key, value = query.detach(), key.detach(), value.detach()  # torch refuses others even under no_grad
    length = query.shape[0]
    padding = -length % BLOCK  # rows that no head selects: all blocks are whole
    query, key, value = (F.pad(tensor, (0, 0, 0, 0, 0, 0, 0, padding)) for tensor in (query, key, value))
    compaction = compact(F.pad(selected, (0, 0, 0, 0, 0, padding)))
    starts = documents and F.pad(documents.starts, (0, padding), value=length)
    slot = torch.arange(query.shape[0], device=query.device)
    used = slot < compaction.after[..., :1]  # [b, heads, s]
    token = compaction.positions.long().unsqueeze(-1).expand(-1, -1, -1, query.shape[-1])  # [b, heads, s, e]
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [b, heads, s, e]
    grouped = q.shape[1] != k.shape[1]
    rows = compiled()(q.gather(2, token), k, v, block_mask=block_mask(compaction, starts), enable_gqa=grouped)
    out = torch.zeros_like(q).scatter(2, token, torch.where(used.unsqueeze(-1), rows, 0))
    return (out.permute(2, 0, 1, 3)[:length] * gates.unsqueeze(-1)).to(query.dtype)


FLEX = Backend("flex", flex_heads, partial(in_slots, flex_heads))


@cache
def compiled():
    """``flex_attention``, compiled for every shape, with gradients and without."""
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def block_mask(compaction, starts=None):
    """``BlockMask`` in which slots attend to the keys up to their position, from the start of their document on; the
    sequence is a multiple of BLOCK. starts: of ``AttentionMask``, or None."""
    # [b, heads, n], descending over the blocks with selected slots
    begin, inner, full, end = key_blocks(compaction, BLOCK, BLOCK, starts)
    positions, after = compaction
    length = positions.shape[-1]
    block = torch.arange(full.shape[-1], dtype=torch.int32, device=full.device)
    slot = torch.arange(length, device=full.device)
    count = after[..., :1]
    # Slots beyond the selected ones of a block see what its last selected slot sees: they add no block to its list.
    last = torch.minimum((slot // BLOCK + 1) * BLOCK, count).clamp_min(1) - 1
    seen = torch.where(slot < count, positions, positions.gather(-1, last.long()))
    seen_from = torch.zeros_like(seen) if starts is None else at_positions(starts, seen)

    def indices(first, gap_at, gap_stop):
        """first, first + 1, ... without [gap_at, gap_stop): [b, heads, n, n]"""
        index = first.unsqueeze(-1) + block
        index = index + torch.where(index < gap_at.unsqueeze(-1), 0, (gap_stop - gap_at).unsqueeze(-1))
        return index.clamp_max(len(block) - 1)

    return BlockMask.from_kv_blocks(
        end - full + inner - begin, indices(begin, inner, full), full - inner, indices(inner, inner, inner), BLOCK,
        mask_mod=lambda b, h, q, k: (seen[b, h, q] >= k) & (seen_from[b, h, q] <= k),
    )  # fmt: skip
