"""Contextual position encoding, CoPE (Golovneva et al. 2024, arXiv 2405.18719): queries count the keys that matter.

    g_ij = sigmoid(q_i k_j)                     how much key j counts for query i; 0 where i does not see j
    p_ij = min(P, g_ij + ... + g_ii)            the position of key j: what counts from there up to i
    z_i[p] = q_i e[p]                           for p = 0 to P; e: a table of each query head
    score_ij = q_i k_j / sqrt(e) + (1 - r) z_i[n] + r z_i[n + 1],    n = floor(p_ij), r = p_ij - n

Gates and z are not divided by sqrt(e), as in the paper's Eq. 3; the code that its authors published divides both, and
has one table for all heads of a layer. Positions are counted in fp32 or wider. All scores are made, so that attention
is dense.

Shapes: s sequence, b batch, h query heads, k key/value heads, e head dimension, t keys, T room of a cache.
"""

import torch
from torch import nn

from moh_lm.kernels.documents import Boundaries, document_mask
from moh_lm.parallel.layers import make_parameter


class ContextualPositions(nn.Module):
    """What the positions of keys add to the scores of a layer. heads: its ``LocalHeads``."""

    def __init__(self, config, init_std, heads):
        super().__init__()
        self.most = config.cope_max_position
        shape = (config.num_attention_heads, self.most + 1, config.head_dim)
        self.weight = make_parameter(shape, init_std, heads.partition(0, 1))

    def forward(self, query, key, visible):
        """[b, h, s, t], -inf where not ``visible``, bool [b or 1, 1, s, t]. query: [b, h, s, e], key: [b, k, t, e], in
        the order of their positions."""
        wide = torch.promote_types(query.dtype, torch.float32)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        gates = (query @ key.transpose(2, 3)).to(wide).sigmoid() * visible
        position = gates.flip(-1).cumsum(-1).flip(-1).clamp_max(self.most)
        below = position.detach().floor().clamp_max(self.most - 1).long()
        of_positions = torch.einsum("bhse,hpe->bhsp", query, self.weight).to(wide)
        added = of_positions.gather(-1, below) + of_positions.diff(dim=-1).gather(-1, below) * (position - below)
        return added.masked_fill(~visible, -torch.inf).to(query.dtype)

    def narrow(self, query, key, seen):
        """``Boundaries`` with what is added to the scores as their mask. query: [s, b, h, e], key: [s, b, k, e]; seen:
        ``Boundaries`` of what tokens see, or None."""
        visible = None if seen is None else seen.mask
        if visible is None:
            visible = document_mask(query.new_zeros(1, len(query)) if seen is None else seen.starts)
        added = self(query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), visible)
        return Boundaries(None, None, added) if seen is None else seen._replace(mask=added)

    def of_cache(self, query, keys, lengths):
        """What is added to the scores of one token per row: [b, h, T]. query: [b, h, e]. keys: the cache, [b, k, T, e],
        the key at position p in slot p modulo T. lengths: int32 [b], tokens of each row, its own the last of them."""
        room = keys.shape[2]
        place, oldest = torch.arange(room, device=keys.device), (lengths - room).clamp_min(0)[:, None]
        slots = ((oldest + place) % room)[:, None, :, None]  # in the order of positions
        visible = (place < lengths[:, None])[:, None, None]
        added = self(query.unsqueeze(2), keys.gather(2, slots.long().expand_as(keys)), visible).squeeze(2)
        return added.gather(2, ((place - oldest) % room)[:, None].expand_as(added))
