"""The cost of a model's layers, and how a pipeline divides them: functions of the ``ModelConfig``."""

import math
import re

from moh_lm.cost.attention import attention_activation_bytes, attention_products


def layer_products(config, layer_index, seq_length, active_heads=None):
    """Return a token's multiplications in a decoder layer: {"dense", "active"}; see ``attention_products``."""
    mlp = 3 * config.hidden_size * config.intermediate_size
    attention = attention_products(config, layer_index, seq_length, active_heads)
    return {kind: value + mlp for kind, value in attention.items()}


def output_head_products(config):
    """Return a token's multiplications in the output head."""
    return config.hidden_size * config.vocab_size


def layer_activation_bytes(config, width, tp, counted=0):
    """Return the bytes that autograd keeps per token in a decoder layer on one rank, averaged over the layers.

    Beyond ``attention_activation_bytes`` these are the inputs of both norms in fp32, their outputs, and the MLP's
    input, gate, up, silu and product.
    """
    norms = (2 * 4 + 2 * width) * config.hidden_size / tp
    layers = [config.of_layer(layer) for layer in range(len(config.head_counts))]
    attention = sum(attention_activation_bytes(layer, width, tp, counted) for layer in layers) / len(layers)
    mlp = width * (4 * config.intermediate_size / tp + config.hidden_size)
    return norms + attention + mlp


def pipeline_costs(config, seq_length):
    """Return the multiplications per token, with all heads, of each layer of a pipeline; see ``CausalLM.in_order``."""
    blocks = [round(layer_products(config, layer, seq_length)["dense"]) for layer in range(config.num_layers)]
    first = [0] * (1 + ("learned" in config.position))
    return [*first, *blocks, 0, output_head_products(config)]


def stage_bounds(costs, num_stages):
    """Return the first layer of every stage, and the end, such that the costs of stages differ as little as possible.

    A costly output head may be a stage of its own. If several divisions are equally good, the one with the latest
    bounds is used, as in DeepSpeed's ``partition_balanced``.
    """
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + max(1, cost))
    if len(costs) <= num_stages:
        return [min(stage, len(costs)) for stage in range(num_stages + 1)]
    best = {(0, 0): (0, 0, math.inf, 0)}  # (layers, stages): difference, largest and smallest stage, last bound
    for stop in range(1, len(costs) + 1):
        for stages in range(1, min(stop, num_stages) + 1):
            for start in range(stop):
                if (start, stages - 1) not in best:
                    continue
                _, largest, smallest, _ = best[start, stages - 1]
                stage = sums[stop] - sums[start]
                largest, smallest = max(largest, stage), min(smallest, stage)
                if (stop, stages) not in best or best[stop, stages][0] >= largest - smallest:
                    best[stop, stages] = largest - smallest, largest, smallest, start
    bounds = [len(costs)]
    for stages in range(num_stages, 0, -1):
        bounds.append(best[bounds[-1], stages][3])
    return bounds[::-1]


def is_copied(name, model, tp):
    """Return whether every tensor-parallel rank holds the whole parameter ``name``. A name within a layer comes with
    the ``model`` of that layer."""
    if re.search("[kv]_proj", name):
        layer = re.search(r"layers\.(\d+)", name)
        return (model.of_layer(int(layer[1])) if layer else model).num_key_value_heads < tp
    return re.search("q_a_|kv_a_|router|norm|embed_positions", name) is not None
