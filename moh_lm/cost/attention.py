"""The cost of an attention layer: multiplications, bytes kept for the backward pass, and the size of its cache.

All of it follows from the ``ModelConfig``. A model has one of three kinds of attention: heads that may share keys and
values, heads of several widths (``--head-dims``), or multi-head latent attention (``--attention latent``).

Sizes: d hidden size, e head dimension, h query heads, k key/value heads, r = h / k.
"""

import math
from statistics import fmean

from moh_lm.kernels.masks import mean_keys
from moh_lm.kernels.selected_keys import marked_features
from moh_lm.model.gates import FORMS, form_of


def key_shares(config, layer_index, active_heads=None):
    """Return the share of key/value heads that every token uses, and the mean share of the others that a token uses.

    Routed heads are assumed to be selected equally often. A key/value head is used if one of its r query heads is
    selected. If K of E routed experts are selected, none of the r is with probability (E - r over K) / (E over K).
    active_heads: see ``attention_products``.
    """
    if config.chooses_in_groups:  # every group is used
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
    """Return the mean shares of the keys and values of all tokens and heads that are (kept, read by a token).

    With top-p these are upper bounds. With a window or a latent, all keys are kept, whichever heads use them.
    """
    if config.attention == "latent":
        return 1.0, 1.0
    shared, used = key_shares(config, layer_index)
    if not config.own_keys(layer_index):
        return 1.0, shared + (1 - shared) * used
    if config.window[layer_index]:
        return 1.0, 1.0
    return shared + (1 - shared) * used, shared + (1 - shared) * used**2


def cache_width(config):
    """Return how many numbers a cache keeps per token in the layer of ``config``."""
    if config.attention == "latent":
        return config.kv_lora_rank + config.qk_rope_head_dim
    return 2 * config.num_key_value_heads * config.head_dim


def head_products(config):
    """Return a token's multiplications for each head, for each score with its value, and for all keys and values."""
    d, e, h = config.hidden_size, config.head_dim, config.num_attention_heads
    if config.head_dims:
        total = sum(config.head_dims)
        return 2 * d * (total / h), 2 * (total / h), 2 * d * total
    if config.attention == "latent":
        t, rank, latent = config.qk_rope_head_dim, config.q_lora_rank, config.kv_lora_rank
        return (rank or d) * (e + t) + d * e, 2 * e + t, d * ((rank or 0) + latent + t) + 2 * h * latent * e
    return (2 + config.element_gates) * d * e, 2 * e, 2 * d * config.num_key_value_heads * e


def heads_of_mean_width(config, always_on, active):
    """Return how many heads of mean width have the features of ``active`` ones: the leading ones and some others."""
    widths = config.head_dims
    if not widths:
        return active
    features = sum(widths[:always_on]) + (active - always_on) * fmean(widths[always_on:] or (0,))
    return features / fmean(widths)


def attention_products(config, layer_index, seq_length, active_heads=None):
    """Return a token's mean multiplications in the forward pass: {"dense", "active"}.

    "dense" counts every head. "active" leaves out queries, scores and outputs of unused heads. If heads keep only their
    own tokens, it also leaves out the keys, values and scores of other tokens. active_heads: heads that a token uses,
    by default the most that it may.
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
    heads, shared_heads, kept = config.num_attention_heads, config.always_on_heads(layer_index), keys
    active = seeing = heads_of_mean_width(config, shared_heads, active)
    if config.own_keys(layer_index):
        seeing = shared_heads + (active - shared_heads) ** 2 / (heads - shared_heads)
        shared, used = key_shares(config, layer_index, active)
        kept = keys * (shared + (1 - shared) * used)
    return {
        "dense": always + keys + heads * (per_head + scores),
        "active": always + kept + active * per_head + seeing * scores,
    }


def attention_activation_bytes(config, width, tp, counted=0):
    """Return the bytes that autograd keeps per token on one rank, in numbers of ``width`` bytes.

    These are the gathered input and this rank's queries, keys, values, context and gated context. Some settings add to
    them: query norms in fp32; inputs and outputs of --qk-norm; marks (selected_keys.py), averaged over the layers;
    padding of latent values and of heads of several widths; element gates; cos and sin of positions in heads. Heads in
    groups keep queries and context of the chosen heads, and a copy of all heads if groups have several chosen ones.
    counted: number of keys whose positions CoPE counts. CoPE keeps seven numbers per score and its products' inputs.
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
    asked, placed = fmean(active), config.chooses_in_groups * fmean(count > k for count in active)
    counting = fmean(map(config.own_positions, range(config.num_layers)))
    heads = width * ((2 * asked + 2 * keys) * (e + marks) + (gated + placed + 2 * counting) * h * e)
    heads += by_queries * 4 * h * e
    heads += config.element_gates * 3 * width * h * e
    heads += config.qk_norm * (4 + width) * (h + k) * e
    if counted:
        heads += h * (28 * counted + 8 * config.cope_max_position + 12 * e) + 2 * width * (h - k) * e
    return heads / tp + width * d
