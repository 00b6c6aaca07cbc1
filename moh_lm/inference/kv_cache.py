"""The key/value cache of a model: what a layer keeps of the tokens that it has read, and how a new token attends to it.

Keys and values of all heads are computed and kept, since a later token may select any of them, so the cache is as large
as that of a dense model. A step can still save reads. A token needs the keys and values of its shared heads and of the
routed heads that it selects, or of the groups in which it selects a head. See ``decode.py``.

A layer with a sliding window keeps only as many tokens as the window holds: the token at position p is in slot p modulo
T. The order of the slots does not matter, since keys are stored after rotation.

Routed heads that see only their own tokens (``--routed-keys selected``) keep only those, on a CPU and without a window;
see ``SelectedKVCache``. Otherwise all keys are kept, with a record of the heads that use each token. Multi-head latent
attention keeps the latent and the rotated key of a token. They form one key for all heads; the latent is also the
value.

Shapes: b rows (prompts), s new tokens, h query heads, k key/value heads, T room for tokens in a layer, e head
dimension, d hidden size. One rank; the model is a ``CausalLM`` without tensor parallelism.
"""

import torch

from moh_lm.inference.decode import decode_attention
from moh_lm.inference.selected_kv_cache import SelectedKVCache
from moh_lm.kernels.heads_in_groups import HeadsInGroups
from moh_lm.model.batch_context import RouterInputs
from moh_lm.model.head_positions import HeadPositions
from moh_lm.model.mla import MultiLatentAttention
from moh_lm.model.query_norm import QueryNormAttention


class Cache:
    """The caches of all layers, and how many tokens of each row were read.

    max_length: the most tokens of a prompt and its continuation. lengths: int32 [rows], on the device of the keys, so
    that a step copies nothing from the host. attention_backend: see ``decode_attention``. Raises ValueError for more
    tokens than the model has positions.
    """

    def __init__(self, model, rows, max_length, attention_backend="auto"):
        if model.model.embed_positions is not None:
            model.model.embed_positions.within(max_length)
        weight = model.model.embed_tokens.weight
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=weight.device)
        self.layers = []
        for layer in model.model.layers:
            config, kind = model.config.of_layer(layer.index), cache_kind(layer.self_attn)
            self.layers.append(kind(config, layer, rows, max_length, weight, attention_backend))

    def counters(self):
        """Return the tensors that a step changes by addition."""
        return [self.lengths, *(kept.counts for kept in self.layers if isinstance(kept, CountedLayerCache))]


class LayerCache:
    """Keys and values of a layer. config: ``ModelConfig`` of the layer. like: a tensor of the dtype and device.

    own: a ``SelectedKVCache`` if heads keep their own tokens only, else None. used: bool [rows, h, T], the heads that
    use each token, if heads see their own tokens only and all are kept; else None.
    """

    def __init__(self, config, layer, rows, max_length, like, attention_backend):
        self.attention, self.backend, self.max_length = layer.self_attn, attention_backend, max_length
        self.core = self.attention.core_attention
        window, own_keys = config.window[layer.index], config.own_keys(layer.index)
        room, heads = min(window or max_length, max_length), config.num_attention_heads
        compact = like.device.type == "cpu" and attention_backend in ("auto", "loops")
        self.own = self.used = None
        if own_keys and compact and not window:
            self.own = SelectedKVCache(rows, config.num_key_value_heads, config.queries_per_key, config.head_dim, like)
            return
        self.make_room(config, rows, room, like)
        if own_keys:
            self.used = like.new_zeros((rows, heads, room), dtype=torch.bool)

    def make_room(self, config, rows, room, like):
        self.keys, self.values = (
            like.new_zeros(rows, config.num_key_value_heads, room, config.head_dim) for _ in range(2)
        )

    def read_prompt(self, x, row, positions):
        """Fill a row with a prompt and return the attention's output for it. x: [s, 1, d], normalised."""
        query, key, value, routing, table = self.project(x, positions, slice(row, row + 1))
        active = in_use(query, routing)
        if self.own:
            self.own.add(row, key[:, 0], value[:, 0], active[:, 0])
        else:
            pairs = list(zip((self.keys, self.values), self.kept(x, key, value, table), strict=True))
            if self.used is not None:
                pairs.append((self.used, active))
            for kept, new in pairs:
                last = new[-kept.shape[2] :, 0].transpose(0, 1)  # [k, at most T, e], or [h, at most T]
                kept[row, :, positions[-last.shape[1] :] % kept.shape[2]] = last
        heads = self.core(query, key, value, routing.gates, routing.selected)
        return self.attention.output(heads, x)

    def read_token(self, x, lengths):
        """Keep one new token per row and return the attention's output for it. x: [1, b, d], normalised.
        lengths: int32 [b], tokens read before it."""
        positions, lengths = lengths.long(), lengths + 1
        query, key, value, routing, table = self.project(x, positions[None], slice(None))
        active, gates = in_use(query, routing)[0], None if routing.gates is None else routing.gates[0]
        rows = torch.arange(x.shape[1], device=x.device)
        if self.own:
            for row in range(len(rows)):
                self.own.add(row, key[:, row], value[:, row], active[row : row + 1])
            heads = self.own.attend(query[0], active)
            heads = heads * gates.unsqueeze(-1).to(heads.dtype)
        else:
            query, (key, value) = self.asked(query), self.kept(x, key, value, table)
            room = self.keys.shape[2]
            self.keys[rows, :, positions % room], self.values[rows, :, positions % room] = key[0], value[0]
            if self.used is not None:
                self.used[rows, :, positions % room] = active
            added = self.core.added_to_cache(query[0], self.keys, lengths)
            held = lengths.clamp_max(room)
            heads = self.answered(self.attend(query[0], held, active, gates, added))
        return self.attention.output(heads[None], x)

    def attend(self, query, held, active, gates, added):
        """Return g_i H_i of new tokens; see ``decode_attention``."""
        return decode_attention(query, self.keys, self.values, held, active, gates, self.backend, self.used, added)

    def project(self, x, positions, rows):
        """Return queries, rotated keys, values, ``RouterOutput`` and table for new tokens of ``rows``, a slice."""
        attention, by_queries = self.attention, isinstance(self.attention, QueryNormAttention)
        routing = None if by_queries else attention.router(x, RouterInputs())
        table = attention.positions.table(x, positions, self.max_length)
        query, key, value = attention.project(x, table)
        if by_queries:
            routing = attention.router(attention.norms(query), RouterInputs())
        return attention.positions.query(attention.q_norm(query), table), key, value, routing, table

    def kept(self, x, key, value, table):
        """Return the (keys, values) of x that the cache keeps, [s, b, k, e]."""
        return key, value

    def asked(self, query):
        """Map a query [1, b, h, e] to the one that attends to the cache."""
        return query

    def answered(self, heads):
        """Map the result of attention to the cache to g_i H_i [b, h, e]."""
        return heads


class GroupedLayerCache(LayerCache):
    """See ``LayerCache``. A token computes only the heads that it chooses in every key/value group."""

    def attend(self, query, held, active, gates, added):
        if gates is None:
            return super().attend(query, held, active, gates, added)
        asked, rank = self.core.chosen(query[None], active[None], self.keys.shape[1])
        heads = super().attend(asked[0], held, active.new_ones(asked.shape[1:3]), None, added)
        return self.core.in_place(heads[None], rank, gates[None])[0]


class CountedLayerCache(LayerCache):
    """See ``LayerCache``. Positions count the tokens of each head. counts: int64 [rows, h], tokens read so far."""

    def __init__(self, config, layer, rows, max_length, like, attention_backend):
        super().__init__(config, layer, rows, max_length, like, attention_backend)
        self.positions, self.core = self.core, self.core.core
        self.counts = like.new_zeros(rows, config.num_attention_heads, dtype=torch.int64)

    def project(self, x, positions, rows):
        query, key, value, routing, table = super().project(x, positions, rows)
        used, counts = in_use(query, routing), self.counts[rows]
        query, key = self.positions.turned(query, key, used, counts, self.max_length)
        counts += used.sum(0)
        return query, key, value, routing, table


class LatentLayerCache(LayerCache):
    """See ``LayerCache``. W_UK_i is applied to the query, and W_UV_i to the weighted sum of latents:

        q_i k_i^T = [rotated W_QR_i x; W_UK_i^T W_UQ_i x] [rotated W_KR x; c]^T

    The cache therefore has one key for all heads, and its values are a part of that key.
    """

    def make_room(self, config, rows, room, like):
        width = config.qk_rope_head_dim + config.kv_lora_rank
        self.keys = self.values = like.new_zeros(rows, 1, room, width)

    def kept(self, x, key, value, table):
        latent, rotated = self.attention.latents(x, table)
        return (torch.cat((rotated, latent.unsqueeze(2)), -1),) * 2

    def asked(self, query):
        rotated, still = query.split((self.attention.rotary_dim, self.attention.head_dim), -1)
        asked = torch.cat((rotated, torch.einsum("sbhe,her->sbhr", still, self.expansions()[0])), -1)
        return asked * (asked.shape[-1] / query.shape[-1]) ** 0.5  # a cache divides by the root of its width

    def answered(self, heads):
        return torch.einsum("bhr,her->bhe", heads[..., self.attention.rotary_dim :], self.expansions()[1])

    def expansions(self):
        """Return W_UK and W_UV of each head, [h, e, r]."""
        return self.attention.kv_b_proj.weight.unflatten(0, (-1, 2 * self.attention.head_dim)).chunk(2, 1)


def cache_kind(attention):
    """Return the class of a layer's cache."""
    if isinstance(attention, MultiLatentAttention):
        return LatentLayerCache
    kinds = {HeadsInGroups: GroupedLayerCache, HeadPositions: CountedLayerCache}
    return kinds.get(type(attention.core_attention), LayerCache)


def in_use(query, routing):
    """Return the heads that tokens use according to their ``RouterOutput``, bool [s, b, h]."""
    if routing.selected is None:
        return query.new_ones(query.shape[:3], dtype=torch.bool)
    return routing.selected != 0
