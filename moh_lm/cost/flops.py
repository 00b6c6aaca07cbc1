"""FLOPs of training on one token, and what a device can do of them: their ratio is the MFU."""

import torch

from moh_lm.build import build_model
from moh_lm.cost.devices import known_device
from moh_lm.cost.layers import head_products, layer_products
from moh_lm.model.matrices import is_block_matrix

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


def peak_flops(run, device):
    """FLOP/s of one device: --peak-tflops, or of a known GPU in bf16; None where neither is there. run: RunConfig."""
    if run.peak_tflops is not None:
        return run.peak_tflops * 1e12
    if device.type != "cuda" or run.precision != "bf16":
        return None
    known = known_device(torch.cuda.get_device_name(device))
    return known and known.tflops * 1e12
