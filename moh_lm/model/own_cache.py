"""A cache of a layer whose routed heads keep their own tokens only: a list for every row and key/value head.

Each list is as long as the number of tokens that use one of its query heads. Keys are kept turned to their positions,
so that attention over a list needs no other positions. A list grows by a part of its length, so that hardly any room
stays empty; with a window it first forgets what nobody sees any more. CPU: its lengths are numbers of Python.

Shapes: b rows, s new tokens, h query heads, k key/value heads, r = h / k, e head dimension.
"""

import torch
import torch.nn.functional as F

GROWTH = 32  # a list grows by its length over this, and a few tokens


class OwnKeys:
    """rows, kv_heads, head_dim: of a cache. window: of the layer, or 0. like: a tensor of the dtype and device."""

    def __init__(self, rows, kv_heads, head_dim, window, like):
        self.window = window
        self.lists = [[Kept(head_dim, like) for _ in range(kv_heads)] for _ in range(rows)]

    def add(self, row, keys, values, used, first):
        """Tokens of a row from position ``first`` on. keys, values: [s, k, e]. used: bool [s, h]."""
        used = used.unflatten(1, (keys.shape[1], -1))
        for head, kept in enumerate(self.lists[row]):
            kept.add(keys[:, head], values[:, head], used[:, head], first, self.window)

    def attend(self, query, used, positions):
        """H of the heads in use of one token per row, zeros for the others: [b, h, e]. query: [b, h, e]. used: bool
        [b, h]. positions: int64 [b], of the tokens, which have been added."""
        out = torch.zeros_like(query).unflatten(1, (len(self.lists[0]), -1))  # [b, k, r, e]
        asked, on = query.unflatten(1, out.shape[1:3]) * query.shape[-1] ** -0.5, used.unflatten(1, out.shape[1:3])
        for row, head in on.any(-1).nonzero().tolist():
            kept, heads = self.lists[row][head], on[row, head]
            out[row, head, heads] = kept.attend(asked[row, head, heads], heads, positions[row], self.window)
        return out.flatten(1, 2)


class Kept:
    """Keys and values, [2, room, e], of ``count`` tokens; their positions, int64 [room]; which of the r query heads use
    them, bool [room, r]."""

    def __init__(self, head_dim, like):
        self.data, self.count = like.new_empty(2, 0, head_dim), 0
        self.positions = self.members = None

    def add(self, keys, values, used, first, window):
        tokens = used.any(-1).nonzero().flatten()
        new = torch.stack((keys, values))[:, tokens], first + tokens, used[tokens]
        if self.positions is None:
            self.positions, self.members = tokens[:0], used[:0]
        stop = self.count + len(tokens)
        if stop > self.data.shape[1]:  # grow, without what nobody sees any more
            seen = slice(self.oldest(first, window), self.count)
            self.count -= seen.start
            stop, room = stop - seen.start, self.count // GROWTH + 8
            self.data = F.pad(torch.cat((self.data[:, seen], new[0]), 1), (0, 0, 0, room))
            self.positions = F.pad(torch.cat((self.positions[seen], new[1])), (0, room))
            self.members = F.pad(torch.cat((self.members[seen], new[2])), (0, 0, 0, room))
        else:
            self.data[:, self.count : stop], self.positions[self.count : stop], self.members[self.count : stop] = new
        self.count = stop

    def oldest(self, position, window):
        """Number of the first token that one at ``position`` sees."""
        return int(torch.searchsorted(self.positions[: self.count], position - window + 1)) if window else 0

    def attend(self, query, heads, position, window):
        """query: [heads in use, e], scaled; heads: bool [r] -> [heads in use, e]."""
        seen = slice(self.oldest(position, window), self.count)
        keys, values = self.data[:, seen]
        scores = (query @ keys.t()).masked_fill_(~self.members[seen, heads].t(), -torch.inf)
        wide = torch.promote_types(query.dtype, torch.float32)
        return scores.softmax(-1, dtype=wide).to(query.dtype) @ values
