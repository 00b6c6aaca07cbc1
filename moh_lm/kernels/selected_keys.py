"""Heads that keep only their own tokens: query head i at token t sees the tokens u <= t that use head i.

Shared heads are used by every token, so they see all tokens. Query heads that share a key/value head each see their own
tokens. ``with_marks`` works with any kernel of causal attention, documents and windows, but all scores are computed.
``in_slots`` computes causal attention over the shorter sequence of a head's tokens.

Shapes: s sequence, b batch, h query heads, kv key/value heads, r = h / kv, e head dimension.
"""

import torch
import torch.nn.functional as F

ALIGNED = 8  # GPU kernels need a number of features that this divides


def marked_features(e, r):
    """Return the number of features that the marks take."""
    return r + -(e + r) % ALIGNED


def in_slots(backend, query, key, value, gates, used, documents=None):
    """Compute g_i H_i by a sparse ``backend`` after moving the tokens that use a head before all others, in order."""
    if documents is not None:
        raise RuntimeError("keys can be left out of whole sequences only, not of documents or windows; choose auto")
    order = (used == 0).to(torch.uint8).argsort(dim=0, stable=True)  # [s, b, h]
    index, r = order.unsqueeze(-1).expand(query.shape), query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(r, 2), value.repeat_interleave(r, 2)
    query, key, value = (part.gather(0, index) for part in (query, key, value))
    rows = backend(query, key, value, gates.gather(0, order), used.gather(0, order))
    return torch.zeros_like(rows).scatter(0, index, rows)


def with_marks(query, key, value, used):
    """Add to query [s, b, h, e], key and value [s, b, kv, e] a feature for each of the r query heads that share a key.

    used: [s, b, h], bool or 0 and 1. In a query the feature of its own head is 1 if the token uses that head. In a key
    it is 0 if the token uses the head, else so low that no probability is left. In a value it is 0. Queries of unused
    heads have no mark: they see all keys, their scores stay in range, and their gate is 0.
    """
    of_key = used.to(query.dtype).unflatten(2, (key.shape[2], -1))  # [s, b, kv, r]
    r, e = of_key.shape[3], query.shape[3]
    room = marked_features(e, r)
    hidden = -min(torch.finfo(query.dtype).max / 4, 2.0**100)
    asks = of_key.unsqueeze(-1) * torch.eye(r, room, dtype=query.dtype, device=query.device)  # [s, b, kv, r, room]
    hides = F.pad((1 - of_key) * hidden, (0, room - r))
    return torch.cat((query, asks.flatten(2, 3)), -1), torch.cat((key, hides), -1), F.pad(value, (0, room))
