"""The queries of every head, moved together: what the sparse backends compute instead of all of them.

A routed head is needed by some tokens only. Its queries go into *slots*: first the tokens that select the head, in the
order of the sequence, then those that do not. The slots of a head are a permutation of the sequence, so shapes never
depend on the routing, nothing is dropped, and nobody waits for a number to come from the device.

Positions ascend over the selected slots, so causality stays a matter of ranges. With p(i) the position of slot i and
n(t) the number of selected tokens before position t:

    slots [i, j), all selected    see wholly the keys [0, p(i)], in part those up to p(j - 1)
    keys [t, u)                   are seen by the slots from n(t) on, wholly by those from n(u - 1) on

Shapes: s sequence, b batch.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Compaction(NamedTuple):
    """positions: int32 [b, heads, s], of the token in every slot. before: int32 [b, heads, s + 1], the number of
    selected tokens before each position; the last is the number of selected slots."""

    positions: torch.Tensor
    before: torch.Tensor


def compact(selected):
    """``Compaction`` of a selection [s, b, heads], bool or 0 and 1."""
    chosen = selected.permute(1, 2, 0) != 0  # [b, heads, s]
    before = F.pad(chosen.cumsum(-1, dtype=torch.int32), (1, 0))
    token = torch.arange(chosen.shape[-1], dtype=torch.int32, device=chosen.device)
    rank = before[..., :-1]
    slot = torch.where(chosen, rank, before[..., -1:] + token - rank)
    return Compaction(torch.empty_like(slot).scatter(-1, slot.long(), token.expand_as(slot)), before)


def key_blocks(compaction, block_m, block_n):
    """(full, end), int32 [b, heads, blocks]: the key blocks of ``block_n`` that ``block_m`` slots attend to.

    Those in [0, full) are visible to every selected row, [full, end) to some; (0, 0) where no row is selected.
    """
    positions, before = compaction
    length = positions.shape[-1]
    count = before[..., -1:]
    first = torch.arange(0, length, block_m, dtype=torch.int32, device=count.device)
    last = (torch.minimum(first + block_m, count) - 1).clamp_min(0)
    used = first < count  # [b, heads, blocks]
    lowest = positions[..., ::block_m]
    highest = positions.gather(-1, last.long())
    return torch.where(used, (lowest + 1) // block_n, 0), torch.where(used, highest // block_n + 1, 0)


def slot_blocks(compaction, block_m, block_n):
    """Blocks of ``block_m`` slots that every block of ``block_n`` keys is attended by, from its first slot on: int32
    [b, heads, key blocks]."""
    before = compaction.before
    return -((before[..., :-1:block_n] - before[..., -1:]) // block_m)
