"""The cache of a layer whose routed heads keep only their own tokens: a list for every row and key/value head.

Each list is as long as the number of tokens that use one of its query heads. Keys are stored after rotation, so that
attention over a list needs no other positions. A list grows by a fraction of its length, so little memory stays unused.
It runs on CPUs only, because lengths are Python numbers.

Shapes: b rows, s new tokens, h query heads, k key/value heads, r = h / k, e head dimension.
"""

import torch
import torch.nn.functional as F

GROWTH = 32  # a list grows by its length over this, and a few tokens


class SelectedKVCache:
    """rows, kv_heads, head_dim: the shape of a cache. shared_by: r. like: a tensor of the dtype and device."""

    def __init__(self, rows, kv_heads, shared_by, head_dim, like):
        self.lists = [[KVList(shared_by, head_dim, like) for _ in range(kv_heads)] for _ in range(rows)]

    def add(self, row, keys, values, used):
        """Add the next tokens of a row. keys, values: [s, k, e]. used: bool [s, h]."""
        used = used.unflatten(1, (keys.shape[1], -1))
        for head, kept in enumerate(self.lists[row]):
            kept.add(keys[:, head], values[:, head], used[:, head])

    def attend(self, query, used):
        """Return H of the last token of each row, [b, h, e], with zeros for heads that it does not use.

        query: [b, h, e]. used: bool [b, h].
        """
        out = torch.zeros_like(query).unflatten(1, (len(self.lists[0]), -1))  # [b, k, r, e]
        asked, on = query.unflatten(1, out.shape[1:3]) * query.shape[-1] ** -0.5, used.unflatten(1, out.shape[1:3])
        for row, head in on.any(-1).nonzero().tolist():
            heads = on[row, head]
            out[row, head, heads] = self.lists[row][head].attend(asked[row, head, heads], heads)
        return out.flatten(1, 2)


class KVList:
    """Keys and values, [2, room, e], of ``count`` tokens, and which of the r query heads use them, bool [room, r]."""

    def __init__(self, shared_by, head_dim, like):
        self.data, self.count = like.new_empty(2, 0, head_dim), 0
        self.members = like.new_empty(0, shared_by, dtype=torch.bool)

    def add(self, keys, values, used):
        tokens = used.any(-1).nonzero().flatten()
        start, self.count = self.count, self.count + len(tokens)
        missing = self.count - len(self.members)
        if missing > 0:
            more = (0, 0, 0, missing + start // GROWTH + 8)
            self.data, self.members = F.pad(self.data, more), F.pad(self.members, more)
        self.data[:, start : self.count] = torch.stack((keys, values))[:, tokens]
        self.members[start : self.count] = used[tokens]

    def attend(self, query, heads):
        """Return H, [heads in use, e]. query: [heads in use, e], scaled. heads: bool [r]."""
        keys, values = self.data[:, : self.count]
        scores = (query @ keys.t()).masked_fill_(~self.members[: self.count, heads].t(), -torch.inf)
        wide = torch.promote_types(query.dtype, torch.float32)
        return scores.softmax(-1, dtype=wide).to(query.dtype) @ values
