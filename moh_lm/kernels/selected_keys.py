"""Heads that keep their own tokens only: query head i at token t sees the tokens u <= t that use head i.

Shared heads are used by every token, so that they see all. Where query heads share a key/value head, each sees its own
tokens of it. ``with_marks`` needs no mask of [s, s]: any kernel of causal attention computes it, with documents and
windows, but computes all scores. With ``in_slots`` a head is causal attention over the shorter sequence of its tokens.

Shapes: s sequence, b batch, h query heads, kv key/value heads, r = h / kv, e head dimension.
"""

import torch
import torch.nn.functional as F

ALIGNED = 8  # features: kernels of GPUs want multiples of it


def marked_features(e, r):
    """How many features the marks take."""
    return r + -(e + r) % ALIGNED


def in_slots(backend, query, key, value, gates, used, documents=None):
    """g_i H_i by a sparse ``backend``: the tokens that use a head are put before all others, in their order."""
    if documents is not None:
        raise RuntimeError("keys are left out of whole sequences only, not of documents nor windows; choose auto")
    order = (used == 0).to(torch.uint8).argsort(dim=0, stable=True)  # [s, b, h]
    index, r = order.unsqueeze(-1).expand(query.shape), query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(r, 2), value.repeat_interleave(r, 2)
    query, key, value = (part.gather(0, index) for part in (query, key, value))
    rows = backend(query, key, value, gates.gather(0, order), used.gather(0, order))
    return torch.zeros_like(rows).scatter(0, index, rows)


def with_marks(query, key, value, used):
    """Query [s, b, h, e'], key and value [s, b, kv, e'] with a feature for each of the r query heads that share a key.

    used: [s, b, h], bool or 0 and 1. In a query it is 1 at its own head, if the token uses that head; in a key 0 for a
    head that the token uses, else a number so low that no probability is left; in a value 0. A query of a head that the
    token does not use has none: it sees all keys, its scores stay in range, and its gate is 0.
    """
    of_key = used.to(query.dtype).unflatten(2, (key.shape[2], -1))  # [s, b, kv, r]
    r, e = of_key.shape[3], query.shape[3]
    room = marked_features(e, r)
    hidden = -min(torch.finfo(query.dtype).max / 4, 2.0**100)
    asks = of_key.unsqueeze(-1) * torch.eye(r, room, dtype=query.dtype, device=query.device)  # [s, b, kv, r, room]
    hides = F.pad((1 - of_key) * hidden, (0, room - r))
    return torch.cat((query, asks.flatten(2, 3)), -1), torch.cat((key, hides), -1), F.pad(value, (0, room))
