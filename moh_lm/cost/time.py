"""Estimates how long a step takes on a number of GPUs, for a dry run and for tools/plan.py.

Matrix products reach ``efficiency`` of the peak, but no micro-batch is faster than the host, which launches every
kernel. That is why small micro-batches are slow. tools/plan.py describes the other parts.

Both figures were measured on one NVIDIA H200 (docs/results.md): a dense step of LLM-B on 2 x 8,192 tokens reached 34%
of the peak, and one of LLM-S on 8 x 2,048 tokens 20%, or 27% with --compile. With 2 x 2,048 tokens the host needed 7 ms
per layer of LLM-B, forward and backward, with routed heads and at most 3.3 ms without. --compile made a step 1.35 times
as fast. Its layers also say what a mixture gains or costs on the device (``against_dense``), with the rates of
moh_lm/kernels/choose.py: a router took 0.4 ms for 16,384 tokens. The bytes that --fused-router moves take an eighth of
that; no GPU has run it.
"""

import numpy as np

from moh_lm.cost.flops import computed_share, flops_per_token, muon_flops
from moh_lm.cost.memory import exchanged, largest_stage, layer_matrices, parameter_counts
from moh_lm.kernels.choose import ATTENTION

ROUTED_LAYER_S, LAYER_S, COMPILED = 7e-3, 3.3e-3, 1.35
ROUTER_S = 0.4e-3 / 16384  # per token and layer
FUSED_ROUTER = 1 / 8


def assumptions(machine):
    """Describe the assumptions of the estimate."""
    return (
        f"assumes {machine.efficiency:.0%} of {machine.gpu_tflops:g} TFLOPS (last measured: 34% on one H200 with "
        f"LLM-B, 20% with LLM-S), {1e3 * ROUTED_LAYER_S:g} ms of the host for a layer with routed heads and "
        f"{1e3 * LAYER_S:g} without, {machine.intra_node:g} GB/s in nodes of {machine.gpus_per_node} and "
        f"{machine.inter_node:g} between them"
    )


def host_seconds(config, layers):
    """Return the host's time for a micro-batch on a pipeline stage of ``layers`` layers."""
    routed = len(config.model.gated_layers()) / config.model.num_layers
    layer = routed * ROUTED_LAYER_S + (1 - routed) * LAYER_S
    return layers * layer * (4 / 3 if config.run.recompute else 1) / (COMPILED if config.run.compile else 1)


def against_dense(model, seq_length, machine, attention, router=1):
    """Return the time of a step over that of a dense one, both without the host.

    attention: ``head_time``, or 1 if all heads are computed. router: time of the routers over the measured one.
    """
    dense, others = (flops_per_token(model, length)["dense"] for length in (seq_length, 1))
    peak = machine.gpu_tflops * 1e12
    saved = (dense - others) / ATTENTION * (1 - attention) / peak
    return 1 + (model.num_layers * ROUTER_S * router - saved) / (dense / machine.efficiency / peak)


def step_seconds(config, machine):
    """Return the seconds of a step by part. machine: ``Machine``, or an object with the same fields."""
    model, run, parallel = config.model, config.run, config.parallel
    tp, pp, cp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.context_parallel_size
    dp = config.data_parallel_size(machine.gpus) * cp  # gradients are summed over both
    micro_batches = config.gradient_accumulation_steps(machine.gpus)
    width = 2 if run.precision == "bf16" else 4
    tokens = run.micro_batch_size * run.seq_length // cp
    compute_share, weights, layers = largest_stage(model, run.seq_length, pp, tp)
    only_routers = config.optimizer.train_only == "router"
    trained = parameter_counts(model)["router"] if only_routers else weights

    def bandwidth(ranks_spanned):
        return 1e9 * (machine.intra_node if ranks_spanned <= machine.gpus_per_node else machine.inter_node)

    share = computed_share(config.optimizer) + (1 / 3 if run.recompute else 0)  # recomputing is another forward pass
    flops = flops_per_token(model, run.seq_length)["dense"] * share
    speed = machine.gpu_tflops * 1e12 * machine.efficiency
    micro_batch = max(flops * tokens * compute_share / tp / speed, host_seconds(config, layers))
    activation = width * tokens * model.hidden_size
    gathers = (12 if run.recompute else 8) * layers
    heads, keys = np.mean(model.head_counts), np.mean(exchanged(model, tp, cp).num_key_value_heads)
    features = float(heads + keys) * (model.query_dim + model.head_dim)  # of queries, keys, values and outputs
    moved = (3 if run.recompute else 2) * layers * width * tokens * features / tp
    sums = micro_batches if parallel.zero_stage > 1 else 1
    gathered = (3 if run.recompute else 2) * micro_batches * weights if parallel.zero_stage == 3 else trained
    gradient_bytes = (1 if parallel.zero_stage == 3 else 2) * 4 * trained * sums  # ZeRO-1 and 2 reduce to all ranks
    work, sent = muon_flops(model, config.optimizer.muon_split, tp), 2 * 4 * layers * layer_matrices(model, tp)
    muon = (work["whole"] + work["blocks"] / tp) * layers / dp / speed
    muon += sent * (dp - 1) / dp / bandwidth(tp * dp)
    return {
        "compute": micro_batch * micro_batches,
        "bubble": micro_batch * (pp - 1),
        "tensor": gathers * micro_batches * activation * (tp - 1) / tp / bandwidth(tp),
        "context": moved * micro_batches * (cp - 1) / cp / bandwidth(tp * cp),
        "data": (gradient_bytes + width * gathered) * (dp - 1) / dp / bandwidth(tp * dp),
        "muon": muon if config.optimizer.optimizer == "muon" and not only_routers else 0.0,
        "pipeline": (pp > 1) * 2 * micro_batches * activation / tp / bandwidth(tp * dp * pp),
    }
