"""Contextual positions, ``--position cope`` (CoPE: Golovneva et al. 2024, arXiv 2405.18719): each query counts the keys
that matter to it.

    g_ij = sigmoid(q_i k_j)                     how much key j counts for query i; 0 where i does not see j
    p_ij = min(P, g_ij + ... + g_ii)            the position of key j: the sum from there up to i
    z_i[p] = q_i e[p], p = 0 to P               e: a table of each query head
    score_ij = q_i k_j / sqrt(e) + (1 - r) z_i[n] + r z_i[n + 1],    n = floor(p_ij), r = p_ij - n

Gates and z are not divided by sqrt(e), as in the paper's Eq. 3; the code that its authors published divides both, and
has one table for all heads of a layer. Counts are fp32 or wider. All scores are made: attention is dense.

Shapes: s sequence, b batch, tp tensor-parallel ranks, d hidden size, h query heads, k key/value heads, e head
dimension, t keys, T room of a cache.
"""

import torch
from torch import nn

from moh_lm.kernels.core_attention import CoreAttention
from moh_lm.kernels.masks import AttentionMask, apply_window, visible_keys
from moh_lm.parallel.layers import make_parameter


class CoPECore(CoreAttention):
    """See ``CoreAttention``. The positions of keys add to the scores. positions: ``ContextualPositions``, which the
    attention layer owns, so that its weight is named ``self_attn.cope.weight``."""

    def __init__(self, positions, **settings):
        super().__init__(**settings)
        self.positions = (positions,)  # in a tuple, so that it is no submodule of this one

    def visible(self, query, key, mask):
        """See ``CoreAttention``. The mask is what is added to the scores."""
        (positions,) = self.positions
        return positions.added_to(query, key, apply_window(mask, self.window, query, masked=False))

    def added_to_cache(self, query, keys, lengths):
        (positions,) = self.positions
        return positions.added_to_cache(query, keys, lengths)


class ContextualPositions(nn.Module):
    """The values that the positions of keys add to the scores of a layer. heads: its ``HeadPartition``. exchange: its
    ``UlyssesExchange``, or None."""

    def __init__(self, config, init_std, heads, exchange=None):
        super().__init__()
        self.exchange = exchange
        self.most = config.cope_max_position
        shape = (config.num_attention_heads, self.most + 1, config.head_dim)
        self.weight = make_parameter(shape, init_std, heads.partition(0, 1))

    def forward(self, query, key, visible):
        """Return the values [b, h, s, t], -inf where not ``visible``, bool [b or 1, 1, s, t]. query: [b, h, s, e], key:
        [b, k, t, e], in the order of their positions."""
        wide = torch.promote_types(query.dtype, torch.float32)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        gates = (query @ key.transpose(2, 3)).to(wide).sigmoid() * visible
        position = gates.flip(-1).cumsum(-1).flip(-1).clamp_max(self.most)
        below = position.detach().nan_to_num().floor().clamp(0, self.most - 1).long()
        table = self.exchange.own(self.weight) if self.exchange else self.weight
        z = torch.einsum("bhse,hpe->bhsp", query, table).to(wide)
        added = z.gather(-1, below) + z.diff(dim=-1).gather(-1, below) * (position - below)
        return added.masked_fill(~visible, -torch.inf).to(query.dtype)

    def added_to(self, query, key, seen):
        """Return ``seen``, ``AttentionMask`` or None, with the values for the scores as its mask. query: [s, b, h, e],
        key: [s, b, k, e]."""
        seen = seen or AttentionMask(query.new_zeros(1, len(query)), None, None)
        visible = visible_keys(seen.starts)
        return seen._replace(mask=self(query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), visible))

    def added_to_cache(self, query, keys, lengths):
        """Return the values for the scores of one token per row, [b, h, T]. query: [b, h, e]. keys: the cache [b, k, T,
        e], the key at position p in slot p modulo T. lengths: int32 [b], tokens of each row, including its own."""
        room = keys.shape[2]
        place, oldest = torch.arange(room, device=keys.device), (lengths - room).clamp_min(0)[:, None]
        slots = ((oldest + place) % room)[:, None, :, None]  # in the order of positions
        visible = (place < lengths[:, None])[:, None, None]
        added = self(query.unsqueeze(2), keys.gather(2, slots.expand_as(keys)), visible).squeeze(2)
        return added.gather(2, ((place - oldest) % room)[:, None].expand_as(added))
