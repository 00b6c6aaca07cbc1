"""What an attention layer costs: multiplications, bytes of the backward pass, and what a cache of it keeps and reads.

All of it follows from the ``ModelConfig``. Pipeline stages, FLOPs, memory and the cache of generation ask here. A model
has one of three kinds of attention: heads that may share keys and values, heads of several widths (``--head-dims``), or
multi-head latent attention (``--attention latent``).

Sizes: d hidden size, e head dimension, h query heads, k key/value heads, r = h / k.
"""

import math

import numpy as np

from moh_lm.kernels.masks import mean_keys
from moh_lm.kernels.selected_keys import marked_features
from moh_lm.model.gates import FORMS, form_of
from moh_lm.units import words


def key_shares(config, layer_index, active_heads=None):
    """(share of the key/value heads that every token uses, share of the others that a token uses on average), if all
    routed heads are selected equally often. active_heads: see ``attention_products``.

    r query heads share a key/value head, which is used if one of them is selected: of E routed experts K are, none of r
    with a chance of (E - r over K) / (E over K).
    """
    if config.chooses_in_groups:  # every group is asked
        return 1.0, 1.0
    config = config.of_layer(layer_index)
    heads, unit = config.num_attention_heads, config.heads_per_expert
    always = config.always_on_heads(layer_index) if config.heads.head_selection != "all" else heads
    r, of_shared = heads // config.num_key_value_heads, -(-always * config.num_key_value_heads // heads)
    active = config.active_heads(layer_index) if active_heads is None else active_heads
    experts, active = (heads - always) // unit, (active - always) / unit
    chances = (max(0.0, 1 - active / (experts - i)) for i in range(min(r // unit, experts)))
    return of_shared / config.num_key_value_heads, 1 - math.prod(chances)


def cache_shares(config, layer_index):
    """Shares, of the keys and values of all tokens and heads: (kept, read by a token) on average. With top-p it is the
    most. A layer with a window keeps, and masks, the keys of all tokens in it, though heads have their own. A latent is
    kept and read whole, whichever heads a token uses."""
    if config.attention == "latent":
        return 1.0, 1.0
    shared, used = key_shares(config, layer_index)
    if not config.own_keys(layer_index):
        return 1.0, shared + (1 - shared) * used
    if config.window[layer_index]:
        return 1.0, 1.0
    return shared + (1 - shared) * used, shared + (1 - shared) * used**2


def cache_width(config):
    """Numbers that a cache keeps of a token in a layer. config: of the layer."""
    if config.attention == "latent":
        return config.kv_lora_rank + config.qk_rope_head_dim
    return 2 * config.num_key_value_heads * config.head_dim


def describe_kv(config):
    """What keys and values are made of, in words."""
    if config.attention == "latent":
        return f"latent keys of {config.kv_lora_rank} + {config.qk_rope_head_dim} features"
    return f"{words(config.num_key_value_heads)} key/value heads"


def head_products(config):
    """Multiplications of a token: (for each head, for each score and what it weighs, for all keys and values)."""
    d, e, h = config.hidden_size, config.head_dim, config.num_attention_heads
    if config.head_dims:
        total = sum(config.head_dims)
        return 2 * d * (total / h), 2 * (total / h), 2 * d * total
    if config.attention == "latent":
        t, rank, latent = config.qk_rope_head_dim, config.q_lora_rank, config.kv_lora_rank
        return (rank or d) * (e + t) + d * e, 2 * e + t, d * ((rank or 0) + latent + t) + 2 * h * latent * e
    return (2 + config.element_gates) * d * e, 2 * e, 2 * d * config.num_key_value_heads * e


def attention_products(config, layer_index, seq_length, active_heads=None):
    """Multiplications of a token on average in the forward pass: {"dense", "active"}.

    "dense" counts every head. "active" leaves out the queries, scores and outputs of the heads that a token does not
    use, and where heads keep their own tokens only, the keys and values that it does not keep and the scores of tokens
    that it does not see. active_heads: how many it uses, by default the most that it may. ``mean_keys`` says how much
    of the sequence a head sees.
    """
    config = config.of_layer(layer_index)
    d, always = config.hidden_size, 0
    active = config.active_heads(layer_index) if active_heads is None else active_heads
    seen = mean_keys(seq_length, config.window[layer_index])
    per_head, per_score, keys = head_products(config)
    scores = seen * per_score
    if config.position[layer_index] == "cope":
        scores += (seen + config.cope_max_position + 1) * config.head_dim  # gates; what each position adds
    if config.heads.head_selection == "mixture":
        layer = config.routed_layer(layer_index)
        form = form_of(config.heads.routing, layer.of_group(), config.heads.two_stage, layer.groups)
        width = config.heads.gate_width or d
        always += width * sum(rows for rows, _ in form.weights(0, width).values())
    heads, shared_heads, seeing, kept = config.num_attention_heads, config.always_on_heads(layer_index), active, keys
    if config.own_keys(layer_index):
        seeing = shared_heads + (active - shared_heads) ** 2 / (heads - shared_heads)
        shared, used = key_shares(config, layer_index, active)
        kept = keys * (shared + (1 - shared) * used)
    return {
        "dense": always + keys + heads * (per_head + scores),
        "active": always + kept + active * per_head + seeing * scores,
    }


def attention_activation_bytes(config, width, tp, counted=0):
    """Bytes that autograd keeps for a token on one rank, in numbers of ``width`` bytes. config: of the layer.

    The gathered input; of the rank's heads q, k, v, context and gated context; for a form that reads queries their
    norms, in fp32; with --qk-norm what it normalises, in fp32, and normalised. With marks (selected_keys.py) all but
    the gated context are wider: here the mean over layers. Latent values are padded; the latent's norms keep their
    input in fp32 and give their output. Heads of several widths are padded too, but for the last context. counted: keys
    whose positions are counted by CoPE, which keeps seven numbers for each score, and the queries and keys of its
    products. Gates of features keep their sigmoid, themselves and what they give. Positions that count the tokens of a
    head keep cos and sin of every head. Where heads are chosen inside their groups, queries and context are those of
    the chosen heads; if a group has several, they are put in their places before the gates: a copy of h heads.
    """
    d, e, h, k = config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads
    by_queries = config.heads.head_selection == "mixture" and FORMS[config.heads.routing].reads_queries
    if config.head_dims:
        return width * ((4 * h * e + sum(config.head_dims) + by_queries * h * e * 4 / width) / tp + d)
    if config.attention == "latent":
        padded, norms = e + config.qk_rope_head_dim, (4 + 2 * width) * (config.kv_lora_rank + (config.q_lora_rank or 0))
        heads = h * (4 * padded + e) + by_queries * h * padded * 4 / width
        return width * (heads / tp + d) + norms
    gated = config.heads.head_selection != "all"
    keys = k if k >= tp else tp if k == 1 else h  # of all ranks: see ``HeadPartition.kv_replication``
    marks = sum(map(config.own_keys, range(config.num_layers))) / config.num_layers * marked_features(e, h // k)
    active = [config.active_heads(layer) for layer in range(config.num_layers)] if config.chooses_in_groups else [h]
    asked, placed = np.mean(active), config.chooses_in_groups * np.mean(np.array(active) > k)
    counting = np.mean([config.own_positions(layer) for layer in range(config.num_layers)])
    heads = width * ((2 * asked + 2 * keys) * (e + marks) + (gated + placed + 2 * counting) * h * e)
    heads += by_queries * 4 * h * e
    heads += config.element_gates * 3 * width * h * e
    heads += config.qk_norm * (4 + width) * (h + k) * e
    if counted:
        heads += h * (28 * counted + 8 * config.cope_max_position + 12 * e) + 2 * width * (h - k) * e
    return heads / tp + width * d
