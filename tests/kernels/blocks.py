"""The slots of triton_compaction.py by torch, and the blocks of keys and of slots that kernels process for them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Compaction(NamedTuple):
    """positions: int32 [b, heads, s], the token in every slot. after: int32 [b, heads, s + 1], the number of selected
    tokens from each position on; after[..., 0] is the number of selected slots."""

    positions: torch.Tensor
    after: torch.Tensor


def compact(selected):
    """Return the ``Compaction`` of a selection [s, b, heads], bool or 0 and 1."""
    chosen = selected.permute(1, 2, 0) != 0  # [b, heads, s]
    after = F.pad(chosen.flip(-1).cumsum(-1, dtype=torch.int32).flip(-1), (0, 1))
    token = torch.arange(chosen.shape[-1], dtype=torch.int32, device=chosen.device)
    later = after[..., 1:]
    slot = torch.where(chosen, later, token + later)
    return Compaction(torch.empty_like(slot).scatter(-1, slot.long(), token.expand_as(slot)), after)


def key_blocks(compaction, block_m, block_n, starts=None):
    """Return (begin, inner, full, end), int32 [b, heads, blocks]: the blocks of ``block_n`` keys that each block of
    ``block_m`` slots attends to. starts: see ``AttentionMask``, or None.

    Blocks in [inner, full) are visible to every selected row, the others of [begin, end) to some. Without rows all are
    0.
    """
    positions, after = compaction
    length = positions.shape[-1]
    count = after[..., :1]
    first = torch.arange(0, length, block_m, dtype=torch.int32, device=count.device)
    last = (torch.minimum(first + block_m, count) - 1).clamp_min(0)
    used = first < count  # [b, heads, blocks]
    lowest = positions.gather(-1, last.long())
    highest = positions[..., ::block_m]
    full, end = (lowest + 1) // block_n, highest // block_n + 1
    begin = inner = torch.zeros_like(full)
    if starts is not None:
        of_lowest, of_highest = (at_positions(starts, at) for at in (lowest, highest))
        begin, inner = of_lowest // block_n, torch.minimum((of_highest + block_n - 1) // block_n, full)
    return tuple(torch.where(used, bound, 0) for bound in (begin, inner, full, end))


def slot_blocks(compaction, block_m, block_n, ends=None):
    """Return how many blocks of ``block_m`` slots attend to every block of ``block_n`` keys, counted from the first
    such slot: int32 [b, heads, key blocks]. ends: see ``AttentionMask``, or None."""
    after = compaction.after
    first = 0
    if ends is not None:
        length = ends.shape[-1]
        last_key = torch.arange(block_n - 1, length + block_n - 1, block_n, device=ends.device).clamp_max(length - 1)
        first = at_positions(after, ends[:, None, last_key].expand(*after.shape[:2], -1))
    return -((first - after[..., :-1:block_n]) // block_m)


def at_positions(values, positions):
    """Gather values [b, s] or [b, heads, n] at positions, int32 [b, heads, m]: [b, heads, m]."""
    values = values if values.dim() == 3 else values.unsqueeze(1).expand(-1, positions.shape[1], -1)
    return values.gather(-1, positions.long())
