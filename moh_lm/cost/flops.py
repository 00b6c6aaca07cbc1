"""FLOPs of training on one token, and what a device can do of them: their ratio is the MFU."""

import torch

from moh_lm.model.transformer import CausalLM, DecoderLayer

LIKELY_MFU = 0.4  # of a large model on fast GPUs; assumed where a run is planned
BACKWARD = 2  # a backward pass multiplies every matrix twice

# Dense bf16 TFLOPS by a part of the name, the first that fits; from the vendors' data sheets.
PEAK_TFLOPS = {
    "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989, "A100": 312, "A800": 312,
    "L40S": 362, "L40": 181, "A40": 150, "A10G": 70, "MI300X": 1307,
}


def flops_per_token(model, seq_length, measured=None):
    """FLOPs of training on one token, forward and backward: {"dense", "active"}.

    A multiplication and an addition are two FLOPs; causal attention sees half of the sequence on average, or the mean
    of its window. "dense" counts every head; "active" leaves out the queries, scores and outputs of the heads that a
    token does not select, which is what MoH promises to save. measured: {layer: heads that a token selects on average},
    for --routing-top-p; a layer that it does not have counts the most that a token may select.
    """
    measured = measured or {}
    layers = [DecoderLayer.cost(model, layer, seq_length, measured.get(layer)) for layer in range(model.num_layers)]
    return {
        kind: (1 + BACKWARD) * 2 * (CausalLM.head_cost(model) + sum(layer[kind] for layer in layers))
        for kind in ("dense", "active")
    }


def peak_flops(run, device):
    """FLOP/s of one device: --peak-tflops, or of a known GPU in bf16; None where neither is there. run: RunConfig."""
    if run.peak_tflops is not None:
        return run.peak_tflops * 1e12
    if device.type != "cuda" or run.precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)
