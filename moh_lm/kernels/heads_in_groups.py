"""Heads that are chosen inside their key/value groups, computed by stock attention.

With ``routing_unit`` head_in_group a token always uses a of the r query heads in every key/value group. The queries in
use are therefore [s, b, kv a, e]: grouped-query attention with a queries per key, which any kernel for scaled
dot-product attention computes, with documents and windows. The outputs, times their gates, are then put in the places
of their heads.

Shapes: s sequence, b batch, kv key/value heads, r query heads of each, h = kv r, e head dimension.
"""

import torch

from moh_lm.kernels.core_attention import CoreAttention
from moh_lm.kernels.gated_attention import dense_heads


class HeadsInGroups(CoreAttention):
    """See ``CoreAttention``. per_group: a, the query heads that a token uses in each key/value group."""

    def __init__(self, per_group, **options):
        super().__init__(**options)
        self.per_group = per_group

    @property
    def reads_selection(self):
        return True

    def forward(self, query, key, value, gates=None, selected=None, mask=None):
        if selected is None:  # all heads, as in a dense warm-up
            return super().forward(query, key, value, gates, selected, mask)
        asked, rank = self.chosen(query, selected, key.shape[2])
        heads = dense_heads(asked, key, value, None, self.visible(query, key, mask), self.causal)
        return self.in_place(heads, rank, selected if gates is None else gates)

    def chosen(self, query, selected, kv_heads):
        """Return the queries of the chosen heads in order, [s, b, kv a, e], and how many heads of its group are chosen
        up to each head, int64 [s, b, kv, r]. selected: [s, b, h], bool or 0 and 1."""
        rank = (selected != 0).unflatten(2, (kv_heads, -1)).cumsum(-1)
        number = torch.arange(self.per_group, device=rank.device).unsqueeze(-1)
        place = (rank.unsqueeze(-2) <= number).sum(-1)  # [s, b, kv, a]: heads before the first with a larger rank
        return take(query.unflatten(2, rank.shape[2:]), place).flatten(2, 3), rank

    def in_place(self, heads, rank, gates):
        """Put the chosen heads [s, b, kv a, e], times their gates [s, b, h], in their places: [s, b, h, e]."""
        heads, gates = heads.unflatten(2, (rank.shape[2], -1)), gates.unflatten(2, rank.shape[2:])
        if self.per_group > 1:  # else the one head is multiplied by all gates of its group, only one of which is not 0
            heads = take(heads, (rank - 1).clamp_min(0))
        return (heads * gates.unsqueeze(-1).to(heads.dtype)).flatten(2, 3)


def take(heads, place):
    """Gather heads [s, b, kv, n, e] by their places in the group, [s, b, kv, m]: [s, b, kv, m, e]."""
    first = torch.arange(place[..., 0].numel(), device=place.device).view(*place.shape[:3], 1) * heads.shape[3]
    return heads.flatten(0, 3).index_select(0, (first + place).flatten()).view(*place.shape, -1)
