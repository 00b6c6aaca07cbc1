"""The queries of every head, moved together: what the sparse backends compute instead of all of them.

A routed head is needed by some tokens only. Its queries go into *slots*: first the tokens that select the head, in the
order of the sequence, then those that do not, from the last one back. The slots of a head are a permutation of the
sequence, so shapes never depend on the routing, nothing is dropped, and nobody waits for a number to come from the
device.

Positions ascend over the selected slots, so causality stays a matter of ranges. With p(i) the position of slot i and
n(t) the number of selected tokens before position t:

    slots [i, j), all selected    see wholly the keys [0, p(i)], in part those up to p(j - 1)
    keys [t, u)                   are seen by the slots from n(t) on, wholly by those from n(u - 1) on

and inside documents, where that of position t is [start(t), end(t)), by these bounds besides:

    slots [i, j), all selected    see wholly the keys from start(p(j - 1)) on, in part those from start(p(i)) on
    keys [t, u)                   are seen by the slots before n(end(u - 1)), wholly by those before n(end(t))

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
    slot = torch.where(chosen, rank, len(token) - 1 - (token - rank))
    return Compaction(torch.empty_like(slot).scatter(-1, slot.long(), token.expand_as(slot)), before)


def key_blocks(compaction, block_m, block_n, starts=None):
    """(begin, inner, full, end), int32 [b, heads, blocks]: the key blocks of ``block_n`` that ``block_m`` slots attend
    to. starts: of ``Boundaries``, or None.

    Those in [inner, full) are visible to every selected row, the others of [begin, end) to some; no row: all are 0.
    """
    positions, before = compaction
    length = positions.shape[-1]
    count = before[..., -1:]
    first = torch.arange(0, length, block_m, dtype=torch.int32, device=count.device)
    last = (torch.minimum(first + block_m, count) - 1).clamp_min(0)
    used = first < count  # [b, heads, blocks]
    lowest = positions[..., ::block_m]
    highest = positions.gather(-1, last.long())
    full, end = (lowest + 1) // block_n, highest // block_n + 1
    begin = inner = torch.zeros_like(full)
    if starts is not None:
        of_lowest, of_highest = (at_positions(starts, at) for at in (lowest, highest))
        begin, inner = of_lowest // block_n, torch.minimum((of_highest + block_n - 1) // block_n, full)
    return tuple(torch.where(used, bound, 0) for bound in (begin, inner, full, end))


def slot_blocks(compaction, block_m, block_n, ends=None):
    """Blocks of ``block_m`` slots that every block of ``block_n`` keys is attended by, from its first slot on: int32
    [b, heads, key blocks]. ends: of ``Boundaries``, or None."""
    before = compaction.before
    stop = before[..., -1:]
    if ends is not None:
        length = ends.shape[-1]
        last_key = torch.arange(block_n - 1, length + block_n - 1, block_n, device=ends.device).clamp_max(length - 1)
        stop = at_positions(before, ends[:, None, last_key].expand(*before.shape[:2], -1))
    return -((before[..., :-1:block_n] - stop) // block_m)


def at_positions(values, positions):
    """values: [b, s] or [b, heads, n]. positions: int32 [b, heads, m] -> [b, heads, m]."""
    values = values if values.dim() == 3 else values.unsqueeze(1).expand(-1, positions.shape[1], -1)
    return values.gather(-1, positions.long())
