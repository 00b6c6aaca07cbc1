"""FLOPs of training on one token, and what a device can do of them: their ratio is the MFU."""

import functools
import math

import torch

from moh_lm.build import build_model
from moh_lm.cost.devices import known_device
from moh_lm.cost.layers import head_products, layer_products
from moh_lm.model.matrices import NEWTON_SCHULZ_STEPS, blocks_of, is_block_matrix

BACKWARD = 2  # a backward pass multiplies every matrix twice


def flops_per_token(model, seq_length, measured=None):
    """FLOPs of training on one token, forward and backward: {"dense", "active"}.

    A multiplication and an addition are two FLOPs; causal attention sees half of the sequence on average, or the mean
    of its window. "dense" counts every head; "active" leaves out the queries, scores and outputs of the heads that a
    token does not select, which is what MoH promises to save. measured: {layer: heads that a token selects on average},
    for --routing-top-p; a layer that it does not have counts the most that a token may select.
    """
    measured = measured or {}
    layers = [layer_products(model, layer, seq_length, measured.get(layer)) for layer in range(model.num_layers)]
    return {
        kind: (1 + BACKWARD) * 2 * (head_products(model) + sum(layer[kind] for layer in layers))
        for kind in ("dense", "active")
    }


def block_matrices(model):
    """The matrices that Muon updates: (the model with the heads of the layer, name in the layer, weight on meta)."""
    with torch.device("meta"):
        layers = build_model(model).model.layers
    for index, layer in enumerate(layers):
        for name, weight in layer.named_parameters():
            if is_block_matrix(name):
                yield model.of_layer(index), name, weight


@functools.lru_cache(maxsize=8)
def muon_flops(model, split):
    """FLOPs of Muon's iterations on a decoder layer, their mean, in a step: {"whole": of matrices that are
    orthogonalised whole, "blocks"}. split: --muon-split. An iteration on m rows and n columns, m <= n, multiplies
    2 m m n + m m m times."""
    found = {"whole": 0, "blocks": 0}
    for layer, name, weight in block_matrices(model):
        blocks = blocks_of(name, layer, split)
        shape = blocks.shape(weight.shape) if blocks else weight.shape
        small, large = sorted(shape)
        count = weight.numel() // math.prod(shape)
        found["blocks" if blocks else "whole"] += count * 2 * NEWTON_SCHULZ_STEPS * (2 * large + small) * small**2
    return {kind: flops / model.num_layers for kind, flops in found.items()}


def peak_flops(run, device):
    """FLOP/s of one device: --peak-tflops, or of a known GPU in bf16; None where neither is there. run: RunConfig."""
    if run.peak_tflops is not None:
        return run.peak_tflops * 1e12
    if device.type != "cuda" or run.precision != "bf16":
        return None
    known = known_device(torch.cuda.get_device_name(device))
    return known and known.tflops * 1e12
