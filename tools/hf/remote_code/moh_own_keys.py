"""Heads that keep only their own tokens (``routed_keys`` selected), in any attention and in caches of transformers.

Head i at token t sees only the tokens u <= t that use head i. Keys and queries have a few additional features
(``marked_query``, ``marked_key``), by which any attention and any cache ignores the other tokens. A dynamic cache keeps
the keys and values of only the heads that a token uses (``OwnKeysLayer``), a static one those of as many heads as a
token can use (``OwnKeysStaticLayer``).

Shapes: b batch, s new tokens, k cached and new tokens, h query heads, r of them to a key/value head, e head dimension.
"""

import torch
import torch.nn.functional as F
from transformers import cache_utils

DynamicLayer = getattr(cache_utils, "DynamicLayer", None)  # since transformers 4.54
StaticLayer = getattr(cache_utils, "StaticLayer", None)
OldQuantizedLayer = getattr(cache_utils, "QuantizedLayer", ())  # transformers 4 has it, else ()
QuantizedLayer = getattr(cache_utils, "BaseQuantizedLayer", OldQuantizedLayer)


def room_for_marks(r, e, head_dim):
    """Return the number of additional features of queries, keys and values of width e: up to head_dim, if that is above
    e. Otherwise there is one for each of the r query heads of a key, rounded up to a multiple of 8 for kernels."""
    return head_dim - e or r + -(e + r) % 8


def computed_dtype(x):
    """Return the dtype in which attention reads x, which autocast may narrow."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def marked_query(query, used, r, head_dim):
    """Add features to a query [b, h, s, e] by which it sees only keys that use its head: 1 at its own head's place
    among the r query heads of a key, if the token uses it. used: bool [b, h, s]. A head that the token does not use
    sees all keys: its gate is 0."""
    room = room_for_marks(r, query.shape[-1], head_dim)
    places = torch.eye(r, room, dtype=query.dtype, device=query.device).repeat(query.shape[1] // r, 1)  # [h, room]
    return torch.cat((query, used.unsqueeze(-1) * places.unsqueeze(1)), -1)


def marked_key(key, value, used, head_dim):
    """Add these features to key and value [b, h / r, k, e]: in a key 0 for the query heads that the token uses, else a
    number so low that no probability is left. used: bool [b, h, k]."""
    used = used.unflatten(1, (key.shape[1], -1)).transpose(2, 3)  # [b, h / r, k, r]
    room = room_for_marks(used.shape[-1], key.shape[-1], head_dim)
    hidden = -min(torch.finfo(computed_dtype(key)).max / 4, 2.0**100)
    hides = F.pad((~used).to(key.dtype) * hidden, (0, room - used.shape[-1]))
    return torch.cat((key, hides), -1), F.pad(value, (0, room))


def positions_in_heads(used, before=0):
    """Return the position of each token among those that use a head, bool [b, n, k] -> int64 [b, n, k]. before: the
    number of earlier ones, [b, n, 1]."""
    return (before + used.cumsum(-1) - 1).clamp_min(0)


class OwnKeysLayer(DynamicLayer or object):
    """A layer of a dynamic cache that keeps the keys and values of only the heads that a token uses.

    keys, values: [n, e], of the (token, key/value head) pairs that are kept, ordered by row, head and position. others:
    their positions, int32 [n], and which of the r query heads use them, bool [n, r]. counts: [b, h / r].
    """

    cumulative_length, counts = 0, None

    def positions(self, used):
        """Return ``positions_in_heads`` of new tokens. used: bool [b, h / r, s], heads that share a key together."""
        return positions_in_heads(used, 0 if self.counts is None else self.counts.unsqueeze(-1))

    def keep(self, key, value, used):
        """Add new tokens. key, value: [b, h / r, s, e]. used: bool [b, h, s]."""
        members = used.unflatten(1, (key.shape[1], -1)).transpose(2, 3)  # [b, h / r, s, r]
        positions = self.cumulative_length + torch.arange(key.shape[2], dtype=torch.int32, device=key.device)
        positions = positions.expand(key.shape[:3])
        self.dtype, self.device, self.is_initialized = key.dtype, key.device, True
        new, slots = (key, value, positions, members), members.any(-1)
        if self.cumulative_length:
            new = [torch.cat((self.padded(old), more), 2) for old, more in zip(self.parts(), new, strict=True)]
            slots = torch.cat((self.slots(), slots), 2)
        self.cumulative_length += key.shape[2]
        self.store(new, slots)

    def read(self, length, mask):
        """Return keys, values [b, h / r, n, e] and an additive mask [b, h, length, n] for the last ``length`` tokens.

        mask: additive or bool mask of all tokens, [b or 1, 1, length, tokens]; None: causal.
        """
        key, value, positions, members = map(self.padded, self.parts())
        last = torch.arange(self.cumulative_length - length, self.cumulative_length, device=key.device)
        earlier = (positions.unsqueeze(-2) <= last.unsqueeze(-1)).unsqueeze(2)  # [b, h / r, 1, length, n]
        visible = (earlier & members.transpose(2, 3).unsqueeze(3)).flatten(1, 2)
        lowest = torch.finfo(computed_dtype(key)).min
        added = torch.zeros_like(visible, dtype=key.dtype).masked_fill(~visible, lowest)
        if mask is not None:
            places = positions.long().unsqueeze(2).expand(-1, -1, length, -1)
            given = mask.expand(*places.shape[:3], -1).gather(-1, places).repeat_interleave(members.shape[-1], 1)
            given = given.to(key.dtype) if given.dtype != torch.bool else (~given).to(key.dtype) * lowest
            added = torch.minimum(added, given)
        return key, value, added

    def parts(self):
        return self.keys, self.values, *self.others

    def store(self, parts, slots):
        """Store parts, [b, h / r, n, ...]. slots: bool [b, h / r, n], the entries to keep."""
        self.counts = slots.sum(-1)
        self.keys, self.values, *self.others = (part[slots] for part in parts)

    def slots(self):
        most = self.counts.max().clamp_min(1)  # with ReLU a token may select no head
        return torch.arange(most, device=self.counts.device) < self.counts.unsqueeze(-1)

    def padded(self, part):
        """Map [n, ...] to [b, h / r, most of a head, ...]."""
        slots = self.slots()
        padded = part.new_zeros(*slots.shape, *part.shape[1:])
        padded[slots] = part
        return padded

    def choose(self, rows):
        """Keep these rows of the batch."""
        if self.cumulative_length:
            rows = rows.to(self.counts.device)
            self.store([self.padded(part)[rows] for part in self.parts()], self.slots()[rows])

    reorder_cache = batch_select_indices = choose

    def batch_repeat_interleave(self, repeats):
        if self.cumulative_length:
            self.choose(torch.arange(len(self.counts), device=self.counts.device).repeat_interleave(repeats))

    def crop(self, length):
        """Keep ``length`` tokens, or remove that many if ``length`` is negative."""
        if length and self.cumulative_length:
            past = self.cumulative_length
            self.cumulative_length = min(past, length) if length > 0 else max(0, past + length)
            parts = list(map(self.padded, self.parts()))
            self.store(parts, self.slots() & (parts[2] < self.cumulative_length))

    def reset(self):
        super().reset()
        self.cumulative_length, self.counts = 0, None

    def get_seq_length(self, *arguments):
        return self.cumulative_length


class OwnKeysStaticLayer(StaticLayer or object):
    """A layer of a static cache that keeps as many key/value heads of a token as a token can use.

    keys, values: [b, kept heads, all tokens, e], for each token the heads that it uses, in their order, then others
    that are never read. members: which query heads use each token, bool [b, h, all tokens].
    """

    members = None

    def __init__(self, max_cache_len, num_kept_heads):
        super().__init__(max_cache_len)
        self.num_kept_heads = num_kept_heads

    def positions(self, used):
        """See ``OwnKeysLayer``."""
        if self.members is None:
            return positions_in_heads(used)
        members = self.members[:, :: self.members.shape[1] // used.shape[1]]
        if (past := getattr(self, "cumulative_length", None)) is not None:  # ``crop`` of transformers 5 lowers it only
            members = members & (torch.arange(self.max_cache_len, device=members.device) < past)
        return positions_in_heads(used, members.sum(-1, True))

    def update(self, key, value, more, **kwargs):
        """Add key, value: [b, h / r, s, e]. more: cache_position, the slots of transformers 4, and used, bool [b, h,
        s]. Returns the layer's keys and values."""
        used, slots = more["used"], more["cache_position"]
        if self.members is None:
            self.members = used.new_zeros(*used.shape[:2], self.max_cache_len)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.members)
        if (start := getattr(self, "cumulative_length", None)) is not None:  # transformers 5 counts them
            slots = start + torch.arange(key.shape[2], device=key.device)
        self.members.index_copy_(2, slots, used)
        kept = used.unflatten(1, (key.shape[1], -1)).any(2).byte().argsort(dim=1, descending=True, stable=True)
        kept = kept[:, : self.num_kept_heads, :, None]
        key, value = (part.gather(1, kept.expand(-1, -1, -1, part.shape[-1])) for part in (key, value))
        return super().update(key, value, more, **kwargs)

    def reorder_cache(self, beam_idx):
        if self.members is not None:
            chosen = beam_idx.to(self.members.device)
            parts = (self.keys, self.values, self.members)
            self.keys, self.values, self.members = (part.index_select(0, chosen) for part in parts)

    def reset(self):
        super().reset()
        if self.members is not None:
            self.members.zero_()


def can_keep_less(layer, head_dim):
    """Return whether a ``StaticLayer`` is empty and was not made for keys with marks."""
    begun = getattr(layer, "is_initialized", None)  # transformers before 4.57 have none
    return begun is False or bool(begun) and layer.keys.shape[-1] == head_dim and not layer.get_seq_length()


def places_kept(used, num_key_value_heads):
    """Return where an ``OwnKeysStaticLayer`` keeps key/value heads: used, bool [b, h, k] -> [b, h / r, k], arbitrary
    for those that no query head uses."""
    return (used.unflatten(1, (num_key_value_heads, -1)).any(2).cumsum(1) - 1).clamp_min(0)


def unpacked(kept, used, num_key_value_heads):
    """Unpack [b, kept heads, k, e] of an ``OwnKeysStaticLayer`` to [b, h / r, k, e]."""
    places = places_kept(used, num_key_value_heads).unsqueeze(-1).clamp_max(kept.shape[1] - 1)  # NaN selects all heads
    return kept.gather(1, places.expand(-1, -1, -1, kept.shape[-1]))


def kept_mask(used, num_key_value_heads, num_kept, mask, dtype):
    """Return the additive mask of one token's heads for the kept keys: used [b, h, k] -> [b, h, kept, k].

    mask: additive or bool mask of all tokens, [b or 1, 1, 1, k]; None: all are visible.
    """
    places = places_kept(used, num_key_value_heads).repeat_interleave(used.shape[1] // num_key_value_heads, 1)
    visible = used.unsqueeze(2) & (places.unsqueeze(2) == torch.arange(num_kept, device=used.device).unsqueeze(-1))
    added = torch.zeros((), dtype=dtype, device=used.device)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        added = mask.clamp_min(torch.finfo(dtype).min).to(dtype)
    return torch.where(visible, added, torch.finfo(dtype).min)


def kept_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    """Attention of one new token to the content of an ``OwnKeysStaticLayer``, which is read once: the heads are rows of
    two matrix products, which a GPU divides over the keys.

    query [b, h, 1, e], key and value [b, kept heads, k, e], attention_mask [b, h, kept heads, k] -> [b, 1, h, e], None
    """
    key, value = (part.flatten(1, 2) for part in (key, value))
    scores = torch.baddbmm(attention_mask.flatten(2), query.squeeze(2) * scaling, key.transpose(1, 2))
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    return (weights @ value).unsqueeze(1), None


def own_layer(cache, index):
    """Return the layer of a cache if it keeps only what heads use, or None."""
    layers = getattr(cache, "layers", None) or []
    own = index < len(layers) and isinstance(layers[index], (OwnKeysLayer, OwnKeysStaticLayer))
    return layers[index] if own else None


def keep_own_keys(cache, layers, implementation, padded_only, output_attentions):
    """Make the layers of an empty cache keep only the tokens that heads use, unless attention weights are requested.

    layers: those of the model. implementation: of attention. padded_only: no mask was given but one of padding.
    """
    kept = getattr(cache, "layers", None) or []
    if output_attentions and any(isinstance(cached, OwnKeysLayer) for cached in kept):
        raise ValueError("output_attentions: the cache has left out keys; request them from the first token on")
    own = {index: layer.self_attn for index, layer in enumerate(layers) if layer.self_attn.own_keys}
    if any(isinstance(cached, QuantizedLayer) for index, cached in enumerate(kept) if index in own):
        raise ValueError("routed_keys selected: a quantized cache cannot keep its marks; choose another cache")
    if torch.compiler.is_compiling():
        return
    for index, cached in enumerate(kept):
        if index in own and StaticLayer and type(cached) is StaticLayer and can_keep_less(cached, own[index].head_dim):
            kept[index] = OwnKeysStaticLayer(cached.max_cache_len, own[index].num_kept_heads)
    plain = type(cache) is cache_utils.DynamicCache and DynamicLayer and not getattr(cache, "offloading", False)
    simple = padded_only and not output_attentions and implementation in ("eager", "sdpa")
    if plain and simple and not cache.get_seq_length():
        cache.layers += [DynamicLayer() for _ in range(len(cache.layers), len(layers))]
        for index in own:
            if type(cache.layers[index]) is DynamicLayer:
                cache.layers[index] = OwnKeysLayer()
