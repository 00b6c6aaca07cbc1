"""What an attention layer costs: multiplications, bytes of the backward pass, and what a cache of it keeps and reads.

All of it follows from the ``ModelConfig``, and so do the words for its keys. Stages of a pipeline, FLOPs, memory and
the cache of generation ask here. Names of sizes: as of attention.py.
"""

import math

from moh_lm.kernels.masks import mean_keys
from moh_lm.kernels.selected_keys import marked_features
from moh_lm.model.gates import FORMS
from moh_lm.units import words


class AttentionCost:
    """The part of ``Attention`` that needs no weights."""

    @staticmethod
    def key_shares(config, layer_index, active_heads=None):
        """(share of the key/value heads that every token uses, share of the others that a token uses on average), if
        all routed heads are selected equally often. active_heads: as of ``cost``.

        r query heads share a key/value head, which is used if one of them is selected: of E routed experts K are, none
        of r with a chance of (E - r over K) / (E over K).
        """
        config = config.of_layer(layer_index)
        heads, unit = config.num_attention_heads, config.heads_per_expert
        always = config.leading_heads(layer_index) if config.heads.head_selection != "all" else heads
        r, of_shared = heads // config.num_key_value_heads, -(-always * config.num_key_value_heads // heads)
        active = config.active_heads(layer_index) if active_heads is None else active_heads
        experts, active = (heads - always) // unit, (active - always) / unit
        chances = (max(0.0, 1 - active / (experts - i)) for i in range(min(r // unit, experts)))
        return of_shared / config.num_key_value_heads, 1 - math.prod(chances)

    @staticmethod
    def cache_shares(config, layer_index):
        """Shares, of the keys and values of all tokens and heads: (kept, read by a token) on average. With top-p it is
        the most. A layer with a window keeps, and masks, the keys of all tokens in it, though heads have their own."""
        shared, used = AttentionCost.key_shares(config, layer_index)
        if not config.own_keys(layer_index):
            return 1.0, shared + (1 - shared) * used
        if config.window[layer_index]:
            return 1.0, 1.0
        return shared + (1 - shared) * used, shared + (1 - shared) * used**2

    @staticmethod
    def products(config):
        """Multiplications of a token: (for each head, for each score and what it weighs, for all keys and values)."""
        d, e = config.hidden_size, config.head_dim
        return 2 * d * e, 2 * e, 2 * d * config.num_key_value_heads * e

    @staticmethod
    def cache_width(config):
        """Numbers that a cache keeps of a token: keys and values of a layer."""
        return 2 * config.num_key_value_heads * config.head_dim

    @staticmethod
    def describe_kv(config):
        """What keys and values are made of."""
        return f"{words(config.num_key_value_heads)} key/value heads"

    @classmethod
    def cost(cls, config, layer_index, seq_length, active_heads=None):
        """Multiplications of a token on average in the forward pass: {"dense", "active"}.

        "dense" counts every head. "active" leaves out the queries, scores and outputs of the heads that a token does
        not use, and where heads keep their own tokens only the keys and values that it does not keep, and the scores of
        tokens that it does not see. active_heads: how many it uses, by default the most that it may. How much of the
        sequence a head sees is said by ``mean_keys``.
        """
        config = config.of_layer(layer_index)
        d, always = config.hidden_size, 0
        active = config.active_heads(layer_index) if active_heads is None else active_heads
        seen = mean_keys(seq_length, config.window[layer_index])
        per_head, per_score, keys = cls.products(config)
        scores = seen * per_score
        if config.position[layer_index] == "cope":
            scores += (seen + config.cope_max_position + 1) * config.head_dim  # gates; what each position adds
        if config.heads.head_selection == "mixture":
            form = FORMS[config.heads.routing](config.routed_layer(layer_index), config.heads.two_stage)
            always += d * sum(rows for rows, _ in form.weights(0, d).values())
        heads, leading, seeing, kept = config.num_attention_heads, config.leading_heads(layer_index), active, keys
        if config.own_keys(layer_index):
            seeing = leading + (active - leading) ** 2 / (heads - leading)
            shared, used = AttentionCost.key_shares(config, layer_index, active)
            kept = keys * (shared + (1 - shared) * used)
        return {
            "dense": always + keys + heads * (per_head + scores),
            "active": always + kept + active * per_head + seeing * scores,
        }

    @staticmethod
    def activation_bytes(config, width, tp, counted=0):
        """Bytes that autograd keeps for a token on one rank; numbers of ``width`` bytes. counted: keys whose positions
        are counted by CoPE, which keeps seven numbers for each score, and the queries and keys of its products.

        The gathered input; of the rank's heads q, k, v, context and gated context; for a form that reads queries their
        norms, in fp32; with --qk-norm what it normalises, in fp32, and normalised. With marks (own_keys.py) all but the
        gated context are wider: here the mean over layers.
        """
        d, e, h, k = config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads
        gated = config.heads.head_selection != "all"
        keys = k if k >= tp else tp if k == 1 else h  # of all ranks: see ``kv_replication``
        marks = sum(map(config.own_keys, range(config.num_layers))) / config.num_layers * marked_features(e, h // k)
        heads = width * ((2 * h + 2 * keys) * (e + marks) + gated * h * e)
        if config.heads.head_selection == "mixture" and FORMS[config.heads.routing].reads_queries:
            heads += 4 * h * e
        heads += config.qk_norm * (4 + width) * (h + k) * e
        if counted:
            heads += h * (28 * counted + 8 * config.cope_max_position + 12 * e) + 2 * width * (h - k) * e
        return heads / tp + width * d
