"""Llama with mixture-of-head attention (MoH, arXiv 2410.11842) as remote code for transformers 4.46 to 5.x.

A token x uses its shared heads and K of the routed heads, and the gates g weigh the heads' outputs H:

    MoH(x) = sum_i g_i H_i W_O_i                                                    (Eq. 4)

moh_router.py has the gates (Eq. 5, 6, 9, 10) and the balance loss (Eq. 7), moh_positions.py the rotary positions,
moh_own_keys.py the heads that keep their own tokens. Every head is computed here, and the inactive ones are weighted by
zero.

Each of these, as an argument or in the configuration, adds to the outputs:

    output_router_gates   router_gates, the g_i of every layer in fp32 [b, s, h], and router_selections, the heads that
                          a token uses, bool [b, s, h]: a gate can underflow to 0 and its head be selected all the same
    output_router_logits  router_logits, the scores of the routed heads [b, s, E] of every layer that has some, and
                          aux_loss, their load-balance loss; with labels, router_aux_loss_coef times aux_loss is added
                          to the loss, as in training:

    L = L_task + beta * (mean of L_b over the sequences and the layers)             (Eq. 8)

Shapes: b batch, s new tokens, k cached and new tokens, h heads, d hidden size. Names of arguments and attributes and
the form of ``MoHLlamaAttention.forward`` follow the transformers interface, which vLLM's Transformers backend reads.
"""

import copy
import functools
import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    SequenceClassifierOutputWithPast,
)

from .configuration_moh import MoHLlamaConfig
from .moh_own_keys import (
    DynamicLayer,
    OwnKeysLayer,
    OwnKeysStaticLayer,
    StaticLayer,
    can_keep_less,
    kept_attention_forward,
    kept_mask,
    marked_key,
    marked_query,
    own_layer,
    unpacked,
)
from .moh_positions import MoHLlamaRotaryEmbedding, rotary_table, rotate
from .moh_router import MoHLlamaRouter, load_balance_loss, query_norm_routing

try:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError:  # transformers before 4.48
    ALL_ATTENTION_FUNCTIONS = {}

try:
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    MASK_ARGUMENTS = set(inspect.signature(create_causal_mask).parameters)  # they differ between versions 4 and 5
except ImportError:  # transformers before 4.53
    create_causal_mask = None

CACHE_ARGUMENTS = inspect.signature(DynamicCache.__init__).parameters  # of new versions: config, with its windows


def repeat_key_value(x, groups):
    """One key or value head per query head: [b, h / groups, k, head_dim] -> [b, h, k, head_dim]."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    """Attention in plain operations: query [b, h, s, head_dim] -> output [b, s, h, head_dim], weights [b, h, s, k]."""
    key = repeat_key_value(key, module.num_key_value_groups)
    value = repeat_key_value(value, module.num_key_value_groups)
    scores = query @ key.transpose(2, 3) * scaling  # [b, h, s, k]
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def sdpa_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    """The same through torch's scaled_dot_product_attention, for transformers that have no attention interface."""
    key = repeat_key_value(key, module.num_key_value_groups)
    value = repeat_key_value(value, module.num_key_value_groups)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def local_heads(gates, num_local):
    """The gates of this rank's heads: [b, s, h] -> [b, s, num_local], fewer under tensor parallelism."""
    ranks = gates.shape[-1] // num_local
    return gates if ranks == 1 else gates.narrow(-1, torch.distributed.get_rank() % ranks * num_local, num_local)


if not ALL_ATTENTION_FUNCTIONS:
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward


class MoHLlamaContextualPositions(nn.Module):
    """Contextual position encoding, CoPE (arXiv 2405.18719).

    Key j counts sigmoid(q_i k_j) for query i. Its position p is the sum of what the keys from j to i count, at most P.
    q_i e[p] is added to its score, where e is a table of each head, interpolated between whole positions.
    """

    def __init__(self, config, num_heads):
        super().__init__()
        self.most = config.cope_max_position
        self.weight = nn.Parameter(torch.empty(num_heads, self.most + 1, config.head_dim))

    def forward(self, query, key, attention_mask):
        """What is added to the scores, [b, h, s, k]. attention_mask [b, 1, s, k]: true, or 0, for what is seen."""
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        wide = torch.promote_types(query.dtype, torch.float32)
        key = repeat_key_value(key, query.shape[1] // key.shape[1])
        gates = (query @ key.transpose(2, 3)).to(wide).sigmoid() * visible
        position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.most)
        below = position.detach().floor().clamp(max=self.most - 1).long()
        table = local_heads(self.weight.movedim(0, -1), query.shape[1]).movedim(-1, 0)
        whole = torch.einsum("bhse,hpe->bhsp", query, table).to(wide)  # at whole positions
        added = whole.gather(-1, below) + whole.diff(dim=-1).gather(-1, below) * (position - below)
        return added.to(query.dtype).masked_fill(~visible, torch.finfo(query.dtype).min)


class MoHLlamaAttention(nn.Module):
    """Self-attention whose heads are weighted by gates, Eq. 4. projects: whether it has a way of its own to queries,
    keys and values."""

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
        self.sliding_window = config.layer_windows[layer_idx] or None  # read by flash attention, which has no mask
        self.in_bf16 = config.routing_dtype == "bf16"
        self.num_shared = config.num_shared_heads[layer_idx]
        self.num_active = config.num_active_routed_heads[layer_idx]
        self.make_projections(config)
        size = sum(config.head_dims) or self.num_heads * self.head_dim
        self.o_proj = nn.Linear(size, config.hidden_size, bias=False)
        self.rotary = config.layer_positions[layer_idx] == "rotary"
        cope = config.layer_positions[layer_idx] == "cope"
        self.cope = MoHLlamaContextualPositions(config, self.num_heads) if cope else None
        routed = config.head_selection == "mixture" and self.num_shared < self.num_heads
        self.own_keys = routed and config.routed_keys == "selected"
        r = self.num_key_value_groups
        self.num_kept_heads = self.num_heads // r  # the key/value heads that a token can use
        if config.routing != "relu":
            used = -(-self.num_shared // r) + self.num_active // config.heads_per_expert
            self.num_kept_heads = min(self.num_kept_heads, used)
        self.router = None
        if config.head_selection == "mixture" and (config.routing != "query_norm" or config.load_balance_bias_rate):
            self.router = MoHLlamaRouter(config, layer_idx)
        self.gated = self.router is not None or self.num_shared < self.num_heads  # else every gate is 1

    def make_projections(self, config):
        key_value_size = self.num_heads // self.num_key_value_groups * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_value_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_value_size, bias=False)
        self.q_norm, self.k_norm = (
            MoHLlamaRMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def joined(self, output):
        """[b, s, h, head_dim] -> what the output projection takes."""
        return output.flatten(2)

    def route(self, hidden_states, query):
        """Gates, selection and scores as ``MoHLlamaRouter``; query [b, s, h, head_dim] before norm and rotary."""
        num_heads = self.num_heads
        if self.router is not None and self.config.routing != "query_norm":
            return self.router(hidden_states)
        if self.config.head_selection == "mixture" and self.num_shared < num_heads:
            if query.shape[-2] < num_heads:
                raise NotImplementedError("query_norm routing compares all heads: run it without tensor parallelism")
            size = self.config.heads_per_expert
            more = {} if self.router is None else {"biased": self.router.biased}
            shared, active = self.num_shared // size, self.num_active // size
            return query_norm_routing(query, shared, active, size, self.in_bf16, **more)
        always_on = torch.arange(num_heads, device=query.device) < self.num_shared + self.num_active
        selected = always_on.expand(*query.shape[:-2], num_heads)
        return selected.float(), selected, query.new_zeros(*query.shape[:-2], 0)

    def forward(
        self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, cache_position=None,
        present=None, position_ids=None, **kwargs,
    ):  # fmt: skip
        shape = hidden_states.shape[:-1]
        if self.projects:
            queries, query, key, value = self.project(hidden_states, position_embeddings, position_ids)
        else:
            # vLLM fuses the three where their names are not assigned again. Then ranks can share a key/value head.
            queries = self.q_proj(hidden_states).view(*shape, -1, self.head_dim)  # [b, s, h, head_dim]
            keys = self.k_proj(hidden_states).view(*shape, -1, self.head_dim)
            values = self.v_proj(hidden_states).view(*shape, -1, self.head_dim)
            query, key = self.q_norm(queries).transpose(1, 2), self.k_norm(keys).transpose(1, 2)  # [b, h, s, head_dim]
            value = values.transpose(1, 2)
            if self.rotary:
                query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        gates, selected, scores = self.route(hidden_states, queries)
        layer, used = own_layer(past_key_values, self.layer_idx), local_heads(selected, query.shape[1])
        # transformers 4 finds the slots of a static cache by cache_position
        more, used = {"cache_position": cache_position}, used.transpose(1, 2)  # [b, h, s]
        static, num_keys = isinstance(layer, OwnKeysStaticLayer), key.shape[1]
        steps = static and query.shape[2] == 1 and self.config._attn_implementation == "sdpa"
        if static:
            more["used"] = used
            key, value = past_key_values.update(key, value, self.layer_idx, more)
        elif layer is not None:
            layer.keep(key, value, used, present)
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
        return self.o_proj(self.joined(output)), weights, gates, selected, scores  # Eq. 4


class MoHLlamaLatentAttention(MoHLlamaAttention):
    """Keys and values of all heads are made of one latent of a token and one key that turns (arXiv 2405.04434), which
    are all that a cache keeps. In the weights of queries the features that turn are the last, in here the first."""

    projects = True

    def make_projections(self, config):
        self.latent_dim, self.turning_dim = config.kv_lora_rank, config.turning_dim
        size = self.num_heads * (self.head_dim + self.turning_dim)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(config.hidden_size, size, bias=False)
        else:
            self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = MoHLlamaRMSNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, self.latent_dim + self.turning_dim, bias=False)
        self.kv_a_layernorm = MoHLlamaRMSNorm(self.latent_dim, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.latent_dim, 2 * self.num_heads * self.head_dim, bias=False)

    def project(self, hidden_states, position_embeddings, position_ids):
        """Queries [b, s, h, t + e]; at their positions [b, h, s, t + e]; the key that turns [b, 1, s, t]; the latent
        [b, 1, s, r]."""
        if self.config.q_lora_rank is None:
            queries = self.q_proj(hidden_states)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        queries = queries.unflatten(-1, (-1, self.head_dim + self.turning_dim)).roll(self.turning_dim, -1)
        latent, key = self.kv_a_proj_with_mqa(hidden_states).split((self.latent_dim, self.turning_dim), -1)
        query, key = queries.transpose(1, 2), key.unsqueeze(1)
        if self.rotary:
            query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        return queries, query, key, self.kv_a_layernorm(latent).unsqueeze(1)

    def expand(self, key, value):
        """Keys and values of heads, of what a cache has kept."""
        still, value = self.kv_b_proj(value[:, 0]).unflatten(-1, (-1, 2 * self.head_dim)).transpose(1, 2).chunk(2, -1)
        key = torch.cat((key.expand(-1, still.shape[1], -1, -1), still), -1)
        return key, F.pad(value, (0, self.turning_dim))  # kernels have keys and values of one width


class MoHLlamaUnevenAttention(MoHLlamaAttention):
    """Heads of several widths: padded with zeros to the widest, each turned by the angles of its own width."""

    projects = True

    def make_projections(self, config):
        size = sum(config.head_dims)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(config.hidden_size, size, bias=False) for _ in range(3))

    def project(self, hidden_states, position_embeddings, position_ids):
        """Queries, padded [b, s, h, e]; and queries, keys and values [b, h, s, e] at their positions."""
        widths, wide, tables = self.config.head_dims, self.head_dim, {}
        if self.rotary:
            tables = {width: rotary_table(self.config, width, hidden_states, position_ids) for width in {*widths}}

        def padded(heads, turned=False, scaled=False):
            placed = []
            for head in heads:
                width = head.shape[-1]
                head = rotate(head.unsqueeze(1), *tables[width]).squeeze(1) if turned and self.rotary else head
                placed.append(F.pad(head * ((wide / width) ** 0.5 if scaled else 1), (0, wide - width)))
            return torch.stack(placed, 1)

        query, key, value = (
            project(hidden_states).split(widths, -1) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        given = padded(query).transpose(1, 2)
        return given, padded(query, True, scaled=True), padded(key, True), padded(value)  # scores are over sqrt(e)

    def expand(self, key, value):
        return key, value

    def joined(self, output):
        return torch.cat([output[:, :, head, :width] for head, width in enumerate(self.config.head_dims)], -1)


class MoHLlamaRMSNorm(nn.Module):
    """Root-mean-square norm in fp32, as Llama's."""

    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class MoHLlamaMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoHLlamaDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        kind = MoHLlamaLatentAttention if config.attention == "latent" else MoHLlamaAttention
        self.self_attn = (MoHLlamaUnevenAttention if config.head_dims else kind)(config, layer_idx)
        self.mlp = MoHLlamaMLP(config)
        self.post_norm = config.post_norm
        if self.post_norm:
            self.post_feedforward_layernorm = MoHLlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        else:
            self.input_layernorm = MoHLlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = MoHLlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, output_details=False, **kwargs):
        """hidden_states [b, s, d] -> [b, s, d]; with details, a tuple of it and what the attention returns besides."""
        if self.post_norm:
            attended, *details = self.self_attn(hidden_states, **kwargs)
            hidden_states = hidden_states + self.post_attention_layernorm(attended)
            hidden_states = hidden_states + self.post_feedforward_layernorm(self.mlp(hidden_states))
        else:
            attended, *details = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
            hidden_states = hidden_states + attended
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return (hidden_states, *details) if output_details else hidden_states


def causal_mask_before_4_53(hidden_states, attention_mask, past_key_values, cache_position, window):
    """Additive mask [b, 1, s, k]; k is the whole length of a static cache. A mask of that form is left as it is."""
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    batch, length = hidden_states.shape[:2]
    total = length
    if past_key_values is not None:
        total = past_key_values.get_max_cache_shape() or past_key_values.get_seq_length() + length
    behind = cache_position[:, None] - torch.arange(total, device=hidden_states.device)  # [s, k]
    visible = (behind >= 0) & (behind < (window or total))
    visible = visible.expand(batch, 1, length, total)
    if attention_mask is not None:
        not_padding = F.pad(attention_mask, (0, max(0, total - attention_mask.shape[1])))[:, :total].bool()
        visible = visible & not_padding[:, None, None, :]
    mask = torch.zeros(visible.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    return mask.masked_fill(~visible, torch.finfo(mask.dtype).min)


def causal_mask(config, hidden_states, attention_mask, past_key_values, cache_position, position_ids, window):
    """The mask in the form that the attention implementation wants, made by transformers where it can.

    window: the last keys that a token sees, 0 for all.
    """
    if create_causal_mask is None:
        return causal_mask_before_4_53(hidden_states, attention_mask, past_key_values, cache_position, window)
    available = {
        "config": config,
        "input_embeds": hidden_states,  # the name in transformers 4
        "inputs_embeds": hidden_states,  # the name in transformers 5
        "attention_mask": attention_mask,
        "cache_position": cache_position,  # transformers 4 only
        "past_key_values": past_key_values,
        "position_ids": position_ids,
    }
    arguments = {name: value for name, value in available.items() if name in MASK_ARGUMENTS}
    if not window or config._attn_implementation == "vllm":  # which has masks of its own
        return create_causal_mask(**arguments)
    if window < config.sliding_window:  # which is the largest one
        arguments["and_mask_function"] = lambda batch, head, query, key: key > query - window
    return create_sliding_window_causal_mask(**arguments)


class MoHLlamaPreTrainedModel(PreTrainedModel):
    config_class = MoHLlamaConfig
    base_model_prefix = "model"
    _no_split_modules = ["MoHLlamaDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = _supports_flex_attn = create_causal_mask is not None  # which makes the masks that they take
    _supports_attention_backend = True
    _supports_cache_class = True  # read by transformers before 4.57, as the next one
    _supports_static_cache = True

    def _init_weights(self, module):
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, MoHLlamaRouter):
            for weight in module.parameters(recurse=False):
                nn.init.normal_(weight, std=std) if weight.is_floating_point() else nn.init.zeros_(weight)
        elif isinstance(module, MoHLlamaContextualPositions):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, MoHLlamaRMSNorm):
            nn.init.ones_(module.weight)


@dataclass
class MoHLlamaModelOutput(BaseModelOutputWithPast):
    router_gates: tuple[torch.FloatTensor, ...] | None = None
    router_selections: tuple[torch.BoolTensor, ...] | None = None
    router_logits: tuple[torch.FloatTensor, ...] | None = None
    aux_loss: torch.FloatTensor | None = None


@dataclass
class MoHLlamaCausalLMOutput(CausalLMOutputWithPast):
    router_gates: tuple[torch.FloatTensor, ...] | None = None
    router_selections: tuple[torch.BoolTensor, ...] | None = None
    router_logits: tuple[torch.FloatTensor, ...] | None = None
    aux_loss: torch.FloatTensor | None = None


class MoHLlamaModel(MoHLlamaPreTrainedModel):
    """The decoder without its output head."""

    def __init__(self, config):
        super().__init__(config)
        if config._attn_implementation == "vllm" and len({*config.layer_windows} - {0}) > 1:
            raise ValueError(f"layer_windows {config.layer_windows}: vLLM has one window for all layers that have one")
        if "cope" in config.layer_positions and config._attn_implementation not in ("eager", "sdpa"):
            given = config._attn_implementation
            raise ValueError(f"attn_implementation {given}: cannot count positions (cope); choose sdpa or eager")
        if config._attn_implementation == "vllm" and len({*config.layer_heads}) > 1:
            raise ValueError(f"layer_heads {config.layer_heads}: vLLM needs as many in every layer; use transformers")
        if config._attn_implementation == "vllm" and (config.attention == "latent" or config.head_dims):
            raise ValueError("attention latent, head_dims: vLLM keeps heads of one width; use transformers")
        self.config_of_masks = None
        if "cope" in config.layer_positions:  # its layers need to know what is seen
            self.config_of_masks = copy.copy(config)
            self.config_of_masks._attn_implementation = "eager"
        marked = config.head_selection == "mixture" and config.routed_keys == "selected"
        if config._attn_implementation == "vllm" and marked and config.head_dim == config.query_dim:
            r, e = config.queries_per_key, config.head_dim
            override = f'{{"head_dim": {-(-(e + r) // 16) * 16}, "query_dim": {e}}}'
            raise ValueError(f"routed_keys selected: vLLM's cache has no room for it; use --hf-overrides '{override}'")
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = None
        if "learned" in config.layer_positions:
            self.embed_positions = nn.Embedding(config.learned_positions, config.hidden_size)
        self.layers = nn.ModuleList(MoHLlamaDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = MoHLlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = MoHLlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()
        if config._attn_implementation == "vllm":  # which gives every parameter the dtype of the model
            self._keep_in_fp32_modules_strict = {"bias_steps"}

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value

    def keep_own_keys(self, cache, attention_mask, length):
        """Have the layers of a cache that is empty keep what heads use only. -> Which of the last ``length`` tokens are
        no padding, bool [b, length], or None for all."""
        for index, cached in enumerate([] if torch.compiler.is_compiling() else getattr(cache, "layers", None) or []):
            own = self.layers[index].self_attn
            if own.own_keys and StaticLayer and type(cached) is StaticLayer and can_keep_less(cached, own.head_dim):
                cache.layers[index] = OwnKeysStaticLayer(cached.max_cache_len, own.num_kept_heads)
        simple = attention_mask is None or attention_mask.dim() == 2
        plain = type(cache) is DynamicCache and DynamicLayer and not torch.compiler.is_compiling()
        if simple and plain and self.config._attn_implementation in ("eager", "sdpa") and not cache.get_seq_length():
            cache.layers += [DynamicLayer() for _ in range(len(cache.layers), len(self.layers))]
            for index, layer in enumerate(self.layers):
                if layer.self_attn.own_keys and type(cache.layers[index]) is DynamicLayer:
                    cache.layers[index] = OwnKeysLayer()
        return attention_mask[:, -length:].bool() if simple and attention_mask is not None else None

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
        use_cache=None, output_attentions=None, output_hidden_states=None, output_router_gates=None,
        output_router_logits=None, return_dict=None, cache_position=None, **kwargs,
    ):  # fmt: skip
        """input_ids [b, s] or inputs_embeds [b, s, d] -> last hidden state [b, s, d], cache, and what is asked for."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        config = self.config
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output_router_gates = config.output_router_gates if output_router_gates is None else output_router_gates
        output_router_logits = config.output_router_logits if output_router_logits is None else output_router_logits
        use_cache = config.use_cache if use_cache is None else use_cache
        if output_attentions and self.config._attn_implementation != "eager":
            raise ValueError("output_attentions: load the model with attn_implementation='eager'")
        recompute = self.gradient_checkpointing and self.training
        if use_cache and past_key_values is None and not recompute:  # a layer computed again would cache its keys twice
            past_key_values = DynamicCache(**({"config": config} if "config" in CACHE_ARGUMENTS else {}))

        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if cache_position is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            cache_position = torch.arange(x.shape[1], device=x.device) + past
        if position_ids is None:
            position_ids = cache_position.unsqueeze(0)
        first_stage = not isinstance(self.layers[0], nn.Identity)  # vLLM has one for each layer of other stages
        if self.embed_positions is not None and first_stage:
            x = x + self.embed_positions(position_ids)
        seen = (self.config_of_masks or config, x, attention_mask, past_key_values, cache_position, position_ids)
        present = None
        if config.routed_keys == "selected" and past_key_values is not None:
            present = self.keep_own_keys(past_key_values, attention_mask, x.shape[1])
        masks = {
            window: causal_mask(*seen, window)
            for window in {*config.layer_windows}
        }
        position_embeddings = self.rotary_emb(x, position_ids)

        output_details = output_attentions or output_router_gates or output_router_logits
        states, details = [], []
        for layer, window in zip(self.layers, config.layer_windows, strict=False):  # vLLM leaves a stage's layers only
            states.append(x)
            layer = functools.partial(
                layer,
                position_embeddings=position_embeddings,
                attention_mask=masks[window],
                past_key_values=past_key_values,
                position_ids=position_ids,
                cache_position=cache_position,
                present=present,
                output_details=output_details,
                **kwargs,
            )
            x = self._gradient_checkpointing_func(layer, x) if recompute else layer(x)
            if output_details:
                x, *of_layer = x
                details.append(of_layer)
        x = self.norm(x)
        weights, gates, selections, scores = zip(*details, strict=True) if details else (None,) * 4
        aux_loss = None
        if output_router_logits:
            aux_loss = load_balance_loss(self.config, scores, selections, attention_mask).to(x.device)
        outputs = MoHLlamaModelOutput(
            last_hidden_state=x,
            past_key_values=past_key_values,
            hidden_states=(*states, x) if output_hidden_states else None,
            attentions=weights if output_attentions else None,
            router_gates=gates if output_router_gates else None,
            router_selections=selections if output_router_gates else None,
            router_logits=tuple(part for part in scores if part.shape[-1]) if output_router_logits else None,
            aux_loss=aux_loss,
        )
        return outputs.to_tuple() if return_dict is False else outputs


class MoHLlamaForCausalLM(MoHLlamaPreTrainedModel, GenerationMixin):
    """The language model. ``labels`` gives the cross-entropy of the next token, see also ``output_router_logits``."""

    # transformers 5 reads the mapping, transformers 4 the keys.
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config):
        super().__init__(config)
        self.model = MoHLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    @staticmethod
    def create_masks_for_generate(attention_mask=None, **others):
        """The mask of the padding as it is: ``forward`` makes one for each window of it."""
        return attention_mask

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
        labels=None, use_cache=None, logits_to_keep=0, num_logits_to_keep=None, return_dict=None, **kwargs,
    ):  # fmt: skip
        """input_ids [b, s] -> logits [b, s, vocab]; ``logits_to_keep``: only of so many last tokens, or these indices.

        ``num_logits_to_keep`` is the name of ``logits_to_keep`` in transformers 4.46 and 4.47.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        keep = logits_to_keep if num_logits_to_keep is None else num_logits_to_keep
        kept = slice(-keep, None) if isinstance(keep, int) else keep  # slice(0, None) keeps every token
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            if outputs.aux_loss is not None:
                share = share_of_batch(labels, **kwargs)
                loss = loss + self.config.router_aux_loss_coef * share * outputs.aux_loss
        outputs = MoHLlamaCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_gates=outputs.router_gates,
            router_selections=outputs.router_selections,
            router_logits=outputs.router_logits,
            aux_loss=outputs.aux_loss,
        )
        return outputs.to_tuple() if return_dict is False else outputs


def share_of_batch(labels, num_items_in_batch=None, **kwargs):
    """Of the tokens over which Trainer's gradient accumulation takes the mean, the share that is here."""
    return 1 if num_items_in_batch is None else (labels[:, 1:] != -100).sum() / num_items_in_batch


class MoHLlamaForSequenceClassification(MoHLlamaPreTrainedModel):
    """A label for each sequence, from the state of its last token."""

    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = MoHLlamaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None, return_dict=None, **kwargs):
        """input_ids [b, s] -> logits [b, num_labels]. The last token is the last one of the mask, or before padding."""
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        logits = self.score(outputs.last_hidden_state)  # [b, s, num_labels]
        batch, length = logits.shape[:2]
        present = attention_mask
        if present is None and input_ids is not None and self.config.pad_token_id is not None:
            present = input_ids != self.config.pad_token_id
        if present is None and batch > 1:
            raise ValueError("give an attention_mask, or set pad_token_id: where does each sequence of the batch end?")
        index = torch.arange(length, device=logits.device)
        last = length - 1 if present is None else (index * present.to(index)).argmax(-1)
        pooled = logits[torch.arange(batch, device=logits.device), last]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=pooled, config=self.config)
        outputs = SequenceClassifierOutputWithPast(
            loss=loss,
            logits=pooled,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return outputs.to_tuple() if return_dict is False else outputs


# Then save_pretrained writes these files beside the weights in every version; transformers 4.46 does not by itself.
MoHLlamaModel.register_for_auto_class("AutoModel")
MoHLlamaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
MoHLlamaForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
