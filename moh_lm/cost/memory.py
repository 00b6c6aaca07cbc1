"""Number of parameters and memory of each rank, estimated before a run.

Parameter counts come from the model itself, built on the meta device. The memory of activations counts the tensors that
autograd keeps for the backward pass; tests compare it with the tensors that are actually kept.

Symbols: s sequence, b micro-batch, d hidden size, h query heads, k key/value heads, e head dimension, i intermediate
size, V vocabulary, tp, pp, cp, dp the degrees of tensor, pipeline, context and data parallelism.
"""

import functools
import math
from dataclasses import replace
from itertools import pairwise

import torch

from moh_lm.build import build_model
from moh_lm.config import REDUCE_BUCKET
from moh_lm.cost.attention import cache_shares, cache_width
from moh_lm.cost.flops import block_matrices
from moh_lm.cost.layers import is_copied, layer_activation_bytes, pipeline_costs, stage_bounds
from moh_lm.parallel.cross_entropy import CHUNK_BYTES
from moh_lm.parallel.ulysses import keys_of_ranks, order_of_ranks


@functools.lru_cache(maxsize=8)
def parameter_counts(model):
    """Return the number of parameters: {"total", "embedding" (with the output head), "router"}."""
    with torch.device("meta"):
        sizes = {name: parameter.numel() for name, parameter in build_model(model).named_parameters()}
    return {
        "total": sum(sizes.values()),
        "embedding": sum(size for name, size in sizes.items() if ".embed_" in name or "lm_head" in name),
        "router": sum(size for name, size in sizes.items() if ".router." in name),
    }


def cache_bytes(model, seq_length, width):
    """Return the bytes per token of a key/value cache: {"whole", "read" for the next token, "multi_head"}.

    "multi_head" is the cache of attention without shared keys and windows. width: bytes of a number.
    """
    layers = range(model.num_layers)
    ones = [width * cache_width(model.of_layer(layer)) for layer in layers]  # keys and values of a token
    windows = [min(window or seq_length, seq_length) / seq_length for window in model.window]
    seen = [one * share for one, share in zip(ones, windows, strict=True)]
    shares = [cache_shares(model, layer) for layer in layers]
    whole, read = (sum(map(math.prod, zip(seen, part, strict=True))) for part in zip(*shares, strict=True))
    heads = sum(model.of_layer(layer).num_attention_heads for layer in layers)
    multi_head = 2 * width * heads * model.head_dim
    return {"whole": whole, "read": read, "multi_head": multi_head}


def memory_estimate(config, world_size):
    """Return the bytes on the fullest rank by part: {"weights", "gradients", "optimizer", "activations", "loss"}.

    With a CUDA graph, "graph" is the memory of its gradients, and activations and loss are never free for other uses.
    Under ZeRO-3, "start" is the memory of the whole model before its weights are sharded. Fragmentation, the CUDA
    context and NCCL's buffers (about 1 GiB) are not counted. Neither are Muon's temporary copies of the largest matrix,
    because activations have been freed by then.
    """
    return max(stage_memory(config, world_size), key=lambda parts: sum(parts.values()))


def stage_memory(config, world_size):
    """Return the ``memory_estimate`` of a rank in every pipeline stage."""
    model, run, parallel = config.model, config.run, config.parallel
    tp, pp, cp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.context_parallel_size
    dp = config.data_parallel_size(world_size) * cp  # ZeRO shards over both
    micro_batches = config.gradient_accumulation_steps(world_size)
    width = 2 if run.precision == "bf16" else 4
    tokens = run.micro_batch_size * run.seq_length // cp
    matrices = layer_matrices(model, tp) if config.optimizer.optimizer == "muon" else 0
    found = []
    for stage, (_, parameters, blocks) in enumerate(stages(model, run.seq_length, pp, tp)):
        trained, of_muon = parameters, blocks * matrices  # these have one moment
        if config.optimizer.train_only == "router":
            trained, of_muon = parameter_counts(model)["router"], 0
        in_flight = min(pp - stage, micro_batches)  # 1F1B: forward passes of stage 0 before its first backward pass
        share = model.position.count("cope") / model.num_layers  # with --recompute one such layer determines the peak
        counted = run.seq_length * (share > 0 if run.recompute else share)
        layer_bytes = tokens * layer_activation_bytes(exchanged(model, tp, cp), width, tp, counted)
        input_bytes = tokens * width * model.hidden_size / tp
        kept = blocks * input_bytes * in_flight + layer_bytes if run.recompute else blocks * layer_bytes * in_flight
        is_last = stage == pp - 1
        # DeepSpeed sums gradients in a buffer, in two with a pipeline, or in none under ZeRO-1 in bf16 without offload.
        buffers = (1 if pp == 1 else 2) * (parallel.zero_stage > 1 or width == 4 or parallel.offload_optimizer)
        bucket = buffers * (width if parallel.zero_stage == 2 else 4) * min(REDUCE_BUCKET, trained)
        found.append(
            {
                "weights": width * parameters / (dp if parallel.zero_stage == 3 else 1),
                "gradients": 4 * trained / (dp if parallel.zero_stage > 1 else 1) + bucket,
                "optimizer": 0 if parallel.offload_optimizer else (3 * 4 * trained - 4 * of_muon) / dp,
                "activations": kept,
                "loss": is_last * loss_bytes(model, width, tokens, tp, run.fused_loss, trained < parameters),
            }
        )
        if run.cuda_graph:
            found[-1]["graph"] = width * trained
        if parallel.zero_stage == 3:
            found[-1]["start"] = max(0, width * parameters - sum(found[-1].values()))
    return found


@functools.lru_cache(maxsize=64)
def exchanged(model, tp, cp):
    """Return ``model`` with the key/value heads that the ranks hold together when they share sequences."""
    if cp == 1:
        return model
    keys = []
    for layer in range(model.num_layers):
        of_layer = model.of_layer(layer)
        order = order_of_ranks(of_layer.num_attention_heads, model.always_on_heads(layer), tp * cp)
        keys.append(len(keys_of_ranks(order, of_layer.queries_per_key, tp * cp)))
    return replace(model, num_key_value_heads=tuple(keys) if len(model.head_counts) > 1 else max(keys))


@functools.lru_cache(maxsize=8)
def layer_matrices(model, tp=1):
    """Return the mean number of parameters of a decoder layer on a rank in matrices that Muon updates."""
    parts = [weight.numel() / (1 if is_copied(name, of, tp) else tp) for of, name, weight in block_matrices(model)]
    return sum(parts) / model.num_layers


@functools.lru_cache(maxsize=64)
def stages(model, seq_length, num_stages, tp=1):
    """Return (cost, parameters of a rank, decoder layers) of each pipeline stage; see ``pipeline_costs``."""
    with torch.device("meta"):
        layers = build_model(model).in_order()
    costs, found = pipeline_costs(model, seq_length), []
    for start, stop in pairwise(stage_bounds(costs, num_stages)):
        blocks = sum(prefix.startswith("model.layers.") for prefix, _ in layers[start:stop])
        named = (part for prefix, layer in layers[start:stop] for part in layer.named_parameters(prefix))
        weights = {weight: name for name, weight in named}  # a tied one once
        parts = [weight.numel() / (1 if is_copied(name, model, tp) else tp) for weight, name in weights.items()]
        found.append((sum(costs[start:stop]), sum(parts), blocks))
    return found


def largest_stage(model, seq_length, num_stages, tp):
    """Return the most of any stage: (share of the compute, parameters of a rank, decoder layers)."""
    costs, sizes, blocks = zip(*stages(model, seq_length, num_stages, tp), strict=True)
    return max(costs) / sum(costs), max(sizes), max(blocks)


def loss_bytes(model, width, tokens, tp, fused=False, frozen=False):
    """Return the peak bytes of output head and loss on one rank; see moh_lm.parallel.cross_entropy.

    They hold the logits of a chunk in the model's precision and, unless the loss is ``fused``, in fp32; and gradients
    of hidden states and, unless it is ``frozen``, of the weight. A fused loss peaks where a second product joins the
    gradient of the weight.
    """
    rows = model.vocab_size / tp
    chunk = min(CHUNK_BYTES, 4 * tokens * rows)
    copied = width < 4  # logits to fp32, or if fused the first product
    of_weight = 0 if frozen else rows * (4 + width * (1 + (copied and fused)))
    gradients = model.hidden_size * (tokens * width + of_weight)
    return chunk * (width / 4 + (copied and not fused)) + gradients
