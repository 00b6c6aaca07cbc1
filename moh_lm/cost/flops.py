"""FLOPs of training on one token, and the peak of a device; their ratio gives the MFU."""

import functools
import math

import torch

from moh_lm.build import build_model
from moh_lm.cost.devices import known_device
from moh_lm.cost.layers import is_copied, layer_products, output_head_products
from moh_lm.model.matrices import NEWTON_SCHULZ_STEPS, blocks_of, is_block_matrix

BACKWARD = 2  # a backward pass multiplies every matrix twice


def flops_per_token(model, seq_length, measured=None):
    """Return the FLOPs of training on one token, forward and backward: {"dense", "active"}.

    A multiplication and an addition are two FLOPs. Causal attention sees half of the sequence on average, or the mean
    of its window. "dense" counts every head; "active" leaves out the queries, scores and outputs of heads that a token
    does not use. measured: {layer: mean number of selected heads}, for --routing-top-p; layers that it lacks count
    their maximum.
    """
    measured = measured or {}
    layers = [layer_products(model, layer, seq_length, measured.get(layer)) for layer in range(model.num_layers)]
    return {
        kind: (1 + BACKWARD) * 2 * (output_head_products(model) + sum(layer[kind] for layer in layers))
        for kind in ("dense", "active")
    }


def computed_share(optimizer):
    """Return the FLOPs of a step over those of one that trains all weights; frozen matrices have no gradients."""
    return 1 if optimizer.train_only == "all" else 2 / (1 + BACKWARD)


def block_matrices(model):
    """Yield the matrices that Muon updates: (model with the heads of the layer, name in the layer, weight on meta)."""
    with torch.device("meta"):
        layers = build_model(model).model.layers
    for index, layer in enumerate(layers):
        for name, weight in layer.named_parameters():
            if is_block_matrix(name):
                yield model.of_layer(index), name, weight


@functools.lru_cache(maxsize=8)
def muon_flops(model, split, tp=1):
    """Return the mean FLOPs of Muon's iterations on a decoder layer per step: {"whole", "blocks"}.

    ``tp`` tensor-parallel ranks share "blocks", and each computes "whole": matrices that are not divided, and copies of
    keys and values. An iteration on m rows and n columns, m <= n, takes 2 m m n + m m m multiplications. split:
    --muon-split.
    """
    found = {"whole": 0, "blocks": 0}
    for layer, name, weight in block_matrices(model):
        blocks = blocks_of(name, layer, split)
        shape = blocks.shape(weight.shape) if blocks else weight.shape
        small, large = sorted(shape)
        count = weight.numel() // math.prod(shape)
        shared = blocks and not is_copied(name, layer, tp)
        found["blocks" if shared else "whole"] += count * 2 * NEWTON_SCHULZ_STEPS * (2 * large + small) * small**2
    return {kind: flops / model.num_layers for kind, flops in found.items()}


def peak_flops(run, device):
    """Return one device's peak FLOP/s: --peak-tflops, or that of a known GPU in bf16, or None."""
    if run.peak_tflops is not None:
        return run.peak_tflops * 1e12
    if device.type != "cuda" or run.precision != "bf16":
        return None
    known = known_device(torch.cuda.get_device_name(device))
    return known and known.tflops * 1e12
