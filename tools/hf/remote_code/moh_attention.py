"""The attention of an exported model, whose heads are weighted by gates (Eq. 4).

moh_attention_kinds.py has the less common kinds. Names of attributes and the form of ``forward`` follow the
transformers interface, which vLLM's Transformers backend reads.

Shapes: b batch, s new tokens, k cached and new tokens, h heads, d hidden size.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.models.llama.modeling_llama import LlamaRMSNorm, repeat_kv

from .moh_own_keys import (
    OwnKeysLayer,
    OwnKeysStaticLayer,
    kept_attention_forward,
    kept_mask,
    marked_key,
    marked_query,
    own_layer,
    positions_in_heads,
    unpacked,
)
from .moh_positions import rotary_of, rotary_table
from .moh_router import layer_router

try:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError:  # transformers before 4.48
    ALL_ATTENTION_FUNCTIONS = {}


def eager_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    """Attention in plain operations: query [b, h, s, head_dim] -> output [b, s, h, head_dim], weights [b, h, s, k]."""
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    scores = query @ key.transpose(2, 3) * scaling  # [b, h, s, k]
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def sdpa_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    """Do the same with torch's scaled_dot_product_attention, for transformers without an attention interface."""
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def local_heads(gates, num_local):
    """Return the gates of this rank's heads: [b, s, h] -> [b, s, num_local], fewer under tensor parallelism."""
    ranks = gates.shape[-1] // num_local
    if ranks == 1:
        return gates
    if gates.requires_grad:
        gates.register_hook(refuse_gradient)
    return gates.narrow(-1, torch.distributed.get_rank() % ranks * num_local, num_local)


def refuse_gradient(gradient):
    """Raise an error, since a rank would only have the gradient of its own heads, and routers would drift apart."""
    raise NotImplementedError("gates have no gradient with tensor parallelism: train without it")


if not ALL_ATTENTION_FUNCTIONS:
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward


class MoHLlamaContextualPositions(nn.Module):
    """Contextual position encoding, CoPE (arXiv 2405.18719).

    Key j counts sigmoid(q_i k_j) for query i. Its position p is the sum of the counts of keys j to i, at most P.
    q_i e[p] is added to its score, where e is a table of each head, interpolated between whole positions.
    """

    def __init__(self, config, num_heads):
        super().__init__()
        self.most = config.cope_max_position
        self.weight = nn.Parameter(torch.empty(num_heads, self.most + 1, config.head_dim))

    def forward(self, query, key, attention_mask):
        """Return values to add to scores, [b, h, s, k]. attention_mask: [b, 1, s, k], true or 0 for visible keys."""
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        wide = torch.promote_types(query.dtype, torch.float32)
        key = repeat_kv(key, query.shape[1] // key.shape[1])
        gates = (query @ key.transpose(2, 3)).to(wide).sigmoid() * visible
        position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.most)
        below = position.detach().nan_to_num().floor().clamp(0, self.most - 1).long()
        table = local_heads(self.weight.movedim(0, -1), query.shape[1]).movedim(-1, 0)
        whole = torch.einsum("bhse,hpe->bhsp", query, table).to(wide)  # at whole positions
        added = whole.gather(-1, below) + whole.diff(dim=-1).gather(-1, below) * (position - below)
        return added.to(query.dtype).masked_fill(~visible, torch.finfo(query.dtype).min)


class MoHLlamaAttention(nn.Module):
    """Self-attention whose heads are weighted by gates, Eq. 4. projects: whether a class makes queries, keys and values
    with its own ``project`` and ``expand``, which vLLM cannot run."""

    projects = False

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.query_dim
        self.num_heads, self.num_key_value_groups = config.layer_heads[layer_idx], config.queries_per_key
        self.scaling = (self.head_dim + config.turning_dim) ** -0.5
        self.attention_dropout = 0.0
        self.is_causal = True
        self.sliding_window = config.layer_windows[layer_idx] or None  # flash attention reads it, since it has no mask
        self.num_shared = config.num_shared_heads[layer_idx]
        self.num_active = config.num_active_routed_heads[layer_idx]
        self.make_projections(config)
        size = sum(config.head_dims) or self.num_heads * self.head_dim
        self.o_proj = nn.Linear(size, config.hidden_size, bias=False)
        self.rotary = rotary_of(config) if config.layer_positions[layer_idx] == "rotary" else None
        cope = config.layer_positions[layer_idx] == "cope"
        self.cope = MoHLlamaContextualPositions(config, self.num_heads) if cope else None
        self.router = layer_router(config, layer_idx) if config.head_selection == "mixture" else None
        self.gated = self.router is not None or self.num_shared < self.num_heads  # else every gate is 1
        size = self.num_heads * self.head_dim
        self.g_proj = nn.Linear(config.hidden_size, size, bias=False) if config.element_gates else None
        routed = self.router is not None and self.num_shared < self.num_heads
        self.own_keys = routed and config.routed_keys == "selected"
        self.own_positions = self.own_keys and self.rotary is not None and config.routed_positions == "head"
        r = self.num_key_value_groups
        self.num_kept_heads = self.num_heads // r  # the key/value heads that a token can use
        if self.own_keys and not self.router.form.by_sign:
            used = -(-self.num_shared // r) + self.num_active // config.heads_per_expert
            self.num_kept_heads = min(self.num_kept_heads, used)

    def make_projections(self, config):
        key_value_size = self.num_heads // self.num_key_value_groups * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_value_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_value_size, bias=False)
        self.q_norm, self.k_norm = (
            LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def joined(self, output):
        """Map [b, s, h, head_dim] to the input of the output projection."""
        return output.flatten(2)

    def route(self, hidden_states, query):
        """Return the results of ``MoHLlamaRouter``. query: [b, s, h, head_dim], before norm and rotary."""
        if self.router is None:
            always_on = torch.arange(self.num_heads, device=query.device) < self.num_shared + self.num_active
            selected = always_on.expand(*query.shape[:-2], self.num_heads)
            return selected.float(), selected, query.new_zeros(*query.shape[:-2], 0)
        if not self.router.form.reads_queries:
            return self.router(hidden_states)
        if query.shape[-2] < self.num_heads:
            raise NotImplementedError("query_norm routing compares all heads: run it without tensor parallelism")
        return self.router(query)

    def turned(self, query, key, positions):
        """Rotate query [b, h, s, e] and key [b, h / r, k, e]. positions: [b, h / r, k], the last s for queries."""
        asked = positions[..., -query.shape[2] :].repeat_interleave(self.num_key_value_groups, 1)
        pairs = (query, asked), (key, positions)
        return (self.rotary.apply_rotary(x, rotary_table(self.rotary, x, places)) for x, places in pairs)

    def forward(
        self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, cache_position=None,
        present=None, position_ids=None, **kwargs,
    ):  # fmt: skip
        shape = hidden_states.shape[:-1]
        if self.projects:
            queries, query, key, value = self.project(hidden_states, position_embeddings, position_ids)
        else:
            # vLLM fuses the three if their names are not assigned again. Then ranks can share a key/value head.
            queries = self.q_proj(hidden_states).view(*shape, -1, self.head_dim)  # [b, s, h, head_dim]
            keys = self.k_proj(hidden_states).view(*shape, -1, self.head_dim)
            values = self.v_proj(hidden_states).view(*shape, -1, self.head_dim)
            query, key = self.q_norm(queries).transpose(1, 2), self.k_norm(keys).transpose(1, 2)  # [b, h, s, head_dim]
            value = values.transpose(1, 2)
            if self.rotary and not self.own_positions:
                query, key = (self.rotary.apply_rotary(x, position_embeddings) for x in (query, key))
        gates, selected, scores = self.route(hidden_states, queries)
        layer, used = own_layer(past_key_values, self.layer_idx), local_heads(selected, query.shape[1])
        # transformers 4 finds the slots of a static cache by cache_position. Continuous batching finds its pages in
        # kwargs, and puts there what the attention needs.
        more = kwargs if "read_index" in kwargs else {"cache_position": cache_position}
        used = used.transpose(1, 2)  # [b, h, s]
        if present is not None:  # padding uses no head
            used = used & present.unsqueeze(1)
        static, num_keys = isinstance(layer, OwnKeysStaticLayer), key.shape[1]
        steps = static and query.shape[2] == 1 and self.config._attn_implementation == "sdpa"
        if self.own_positions and layer is not None:  # the cache keeps rotated keys
            query, key = self.turned(query, key, layer.positions(used[:, :: self.num_key_value_groups]))
        if static:
            more["used"] = used
            key, value = past_key_values.update(key, value, self.layer_idx, more)
        elif layer is not None:
            layer.keep(key, value, used)
        if steps:
            attention_mask = kept_mask(layer.members, num_keys, key.shape[1], attention_mask, key.dtype)
        elif static:
            key, value = (unpacked(part, layer.members, num_keys) for part in (key, value))
        if isinstance(layer, OwnKeysLayer) and layer.cumulative_length > query.shape[2]:
            key, value, attention_mask = layer.read(query.shape[2], attention_mask)
        elif self.own_keys and not steps:
            query = marked_query(query, used, self.num_key_value_groups, self.config.head_dim)
            key, value = marked_key(key, value, layer.members if static else used, self.config.head_dim)
        if past_key_values is not None and layer is None:
            key, value = past_key_values.update(key, value, self.layer_idx, more)
        if self.own_positions and layer is None:  # all keys are here, and their marks say which tokens use them
            if not isinstance(past_key_values, DynamicCache | None):
                raise ValueError("routed_positions head: this cache cannot count tokens; choose a DynamicCache")
            query, key = self.turned(query, key, positions_in_heads(key[..., self.head_dim] == 0))
        if self.projects:
            key, value = self.expand(key, value)
        if self.cope is not None:
            attention_mask = self.cope(query, key, attention_mask)

        # vLLM recognises the attention by this assignment, and by the one call of the name that it assigns.
        attention_interface = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attention_interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        if steps:
            attention_interface = kept_attention_forward
        output, weights = attention_interface(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling,
            sliding_window=self.sliding_window, position_ids=position_ids, **kwargs,
        )  # fmt: skip
        output = output.reshape(*shape, -1, query.shape[-1])[..., : self.head_dim]  # [b, s, h, head_dim]
        if self.gated:
            output = output * local_heads(gates, output.shape[-2]).unsqueeze(-1).to(output.dtype)
        if self.g_proj is not None:
            output = output * (2 * self.g_proj(hidden_states).sigmoid()).view(output.shape)
        return self.o_proj(self.joined(output)), weights, gates, selected, scores  # Eq. 4
