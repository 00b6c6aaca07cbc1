"""Checks of a configuration: every reason why a run could not start, found before any process group is opened.

A check returns sentences. Each gives the flag, its value, what is allowed and the remedy; all of them are shown at
once.
"""

import importlib.util
import math
import os
import shutil

import torch

from moh_lm.config import OptimizerConfig, flag
from moh_lm.data.mixture import data_problems
from moh_lm.kernels.break_even import TRITON_HEAD_DIMS
from moh_lm.model.rotary import NEEDS
from moh_lm.model.routing import FORMS, gates_of_one, layer_gates


def config_problems(config, world_size):
    """Sentences for what is wrong with ``config`` on ``world_size`` processes; empty if the run can start."""
    return [
        *model_problems(config.model),
        *data_problems(config.data),
        *optimizer_problems(config.optimizer),
        *schedule_problems(config),
        *frozen_problems(config),
        *run_problems(config.run),
        *backend_problems(config),
        *compile_problems(config),
        *reliability_problems(config.reliability),
        *alarm_problems(config.alarms),
        *layout_problems(config, world_size),
    ]


def below(section, lowest, *keys):
    """A sentence for each of ``keys`` whose value is not a finite number of at least ``lowest``."""
    values = {key: getattr(section, key) for key in keys}
    return [
        f"{flag(key)} {value:g}: must be {lowest} or above"
        for key, value in values.items()
        if not lowest <= value < math.inf
    ]


def model_problems(model):
    found = below(model, 1, "num_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    found += below(model, 1, "num_key_value_heads", "vocab_size")
    if found:
        return found
    heads, key_value_heads = model.num_attention_heads, model.num_key_value_heads
    if model.hidden_size % heads and model.head_dim == model.hidden_size // heads:
        found.append(
            f"--num-attention-heads {heads}: does not divide --hidden-size {model.hidden_size}; "
            f"choose one of {divisors(model.hidden_size, 64)}, or give --head-dim"
        )
    elif model.head_dim < 2 or model.head_dim % 2:
        found.append(f"--head-dim {model.head_dim}: rotary embeddings pair features; choose an even number")
    if heads % key_value_heads:
        found.append(
            f"--num-key-value-heads {key_value_heads}: must divide --num-attention-heads {heads}; "
            f"choose one of {divisors(heads, heads)}"
        )
    for key in ("rope_theta", "rms_norm_eps"):
        if not 0 < getattr(model, key) < math.inf:
            found.append(f"{flag(key)} {getattr(model, key):g}: must be above 0")
    found += rope_problems(model)
    if len(model.window) != model.num_layers:
        found.append(f"--window has {len(model.window)} numbers: {per_layer(model)}")
    found += [
        f"--window {width}: must be 0, for the whole sequence, or at least 2; with 1 a token sees itself only"
        for width in sorted({*model.window})
        if width < 0 or width == 1
    ]
    found += below(model.heads, 0, "load_balance_coefficient", "routing_entropy_coefficient", "router_z_loss")
    found += below(model.heads, 0, "router_gumbel_noise", "load_balance_bias_rate")
    found += bias_problems(model)
    if model.heads.head_selection == "mixture":
        found += top_p_problems(model.heads)
        reason, z_loss = FORMS[model.heads.routing].refuses_z_loss, model.heads.router_z_loss
        if reason and z_loss > 0:
            found.append(f"--router-z-loss {z_loss:g}: --routing {model.heads.routing} {reason}; leave it out")
        budgets = budget_problems(model)
        return found + (budgets or warmup_problems(model))
    return found if model.heads.head_selection == "all" else found + budget_problems(model)


def per_layer(model):
    return f"give one for all layers, or one for each of --num-layers {model.num_layers}"


def rope_problems(model):
    """The scaling of rotary embeddings: each type needs its own flags, and has no use for the others."""
    keys = ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_length")
    needed = [f"rope_{name}" for name in NEEDS[model.rope_type]]
    found = [
        f"{flag(key)} is missing: --rope-type {model.rope_type} needs it"
        for key in needed
        if getattr(model, key) is None
    ]
    found += [
        f"{flag(key)} {getattr(model, key):g}: has no meaning with --rope-type {model.rope_type}; leave it out"
        for key in keys
        if key not in needed and getattr(model, key) is not None
    ]
    if found:
        return found
    found = below(model, 1, *(key for key in needed if key in ("rope_factor", "rope_original_length")))
    if model.rope_type == "yarn" and not model.rope_theta > 1:
        found.append(f"--rope-theta {model.rope_theta:g}: must be above 1 with --rope-type yarn, such as 10000")
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if model.rope_type == "llama3" and not 0 < low < high < math.inf:
        found.append(
            f"--rope-low-freq-factor {low:g} and --rope-high-freq-factor {high:g}: must be above 0, the first below "
            "the second; LLaMA 3.1 has 1 and 4"
        )
    return found


def warmup_problems(model):
    """A dense warm-up must end with gates near those that it had: 1."""
    iterations, heads = model.heads.dense_warmup_iters, model.heads
    found = below(heads, 0, "dense_warmup_iters")
    if iterations <= 0 or found or gates_of_one(model):
        return found
    shared, selected = layer_gates(model, 0)
    return [
        f"--dense-warmup-iters {iterations}: the gates of --routing {heads.routing} begin near {shared:.3g} (shared) "
        f"and {selected:.3g} (selected), so that the output of attention would shrink to that part of itself where "
        f"gates of 1 end; choose --routing paper_scaled, which has the same gates times a constant, or released"
    ]


def top_p_problems(heads):
    top_p = heads.routing_top_p
    if top_p is None:
        return []
    if heads.routing_dtype != "fp32":
        return [f"--routing-top-p {top_p:g}: probabilities in {heads.routing_dtype} do not add up; leave one flag out"]
    reason = FORMS[heads.routing].refuses_top_p
    if reason:
        return [
            f"--routing-top-p {top_p:g}: --routing {heads.routing} {reason}; leave it out, or choose --routing paper "
            "or released"
        ]
    return [] if 0 < top_p <= 1 else [f"--routing-top-p {top_p:g}: must be above 0 and at most 1, such as 0.4"]


def spread_problems(model):
    """--head-budget and its slope: shares between none and all of the heads, and those that the layers have."""
    rate, slope = model.heads.head_budget, model.heads.head_budget_slope
    if rate is None:
        return [] if slope == 0 else [f"--head-budget-slope {slope:g}: needs --head-budget, such as 0.75"]
    if not 0 < rate <= 1:
        return [f"--head-budget {rate:g}: must be above 0 and at most 1, such as 0.75"]
    most, share = 2 * min(rate, 1 - rate), model.active_share()
    if not abs(slope) <= most + 1e-9:
        return [
            f"--head-budget-slope {slope:g}: shares from {rate - slope / 2:.3g} to {rate + slope / 2:.3g} are not all "
            f"between 0 and 1; choose at most {most:.3g}"
        ]
    if abs(share - rate) > model.heads_per_expert / model.num_attention_heads:
        return [
            f"--head-budget {rate:g}: the numbers of shared and routed heads use {share:.1%} of all; choose another "
            "share, or leave out --num-shared-heads or --num-active-routed-heads"
        ]
    return []


def bias_problems(model):
    heads = model.heads
    if not heads.load_balance_bias_rate > 0:
        return []
    given = f"--load-balance-bias-rate {heads.load_balance_bias_rate:g}"
    if heads.routing_top_p is not None:
        return [
            f"{given}: --routing-top-p {heads.routing_top_p:g} adds up the probabilities of what is selected, and a "
            "bias changes their order; leave one of them out"
        ]
    reason = FORMS[heads.routing].refuses_bias
    if reason:
        return [f"{given}: --routing {heads.routing} {reason}; leave it out"]
    if model.routed_layers() or budget_problems(model):
        return []
    return [f"{given}: no layer has routed heads; leave it out"]


def budget_problems(model):
    """The numbers of shared and routed heads, layer by layer."""
    heads = model.num_attention_heads
    size = max(1, model.heads_per_expert) if model.heads.head_selection == "mixture" else 1
    budgets = {key: getattr(model.heads, key) for key in ("num_shared_heads", "num_active_routed_heads")}
    found = [
        f"{flag(key)} has {len(budget)} numbers: {per_layer(model)}"
        for key, budget in budgets.items()
        if len(budget) != model.num_layers
    ]
    if found:
        return found
    first_layer = {}  # of each sentence: the same mistake in every layer is said once
    for layer, (shared, active) in enumerate(zip(*budgets.values(), strict=True)):
        routed = heads - shared
        if not 0 <= shared <= heads:
            sentence = (
                f"--num-shared-heads {shared}: must be between 0 and --num-attention-heads {heads}; "
                f"half of them, {heads // 2}, is the share of the paper's LLaMA3"
            )
        elif not min(1, routed) <= active <= routed:
            sentence = (
                f"--num-active-routed-heads {active}: must be between {min(1, routed)} and {routed}, "
                f"the heads that --num-shared-heads {shared} leaves of {heads}"
            )
        elif shared % size or active % size:
            sentence = (
                f"--num-shared-heads {shared} and --num-active-routed-heads {active}: --routing-unit key_value_group "
                f"selects {size} heads together; choose multiples of {size}"
            )
        else:
            continue
        first_layer.setdefault(sentence, layer)
    return [f"{sentence} (layer {layer})" for sentence, layer in first_layer.items()] or spread_problems(model)


def optimizer_problems(optimizer):
    found = below(optimizer, 0, "warmup_iters", "weight_decay", "gradient_clipping", "z_loss")
    found += below(optimizer, 0, "router_learning_rate_scale", "router_gradient_clipping")
    peak = optimizer.learning_rate
    if not 0 < peak < math.inf:
        found.append(f"--learning-rate {peak:g}: must be above 0, such as 3e-4")
    for key in ("min_learning_rate", "warmup_init_lr"):
        if not 0 <= getattr(optimizer, key) <= peak:
            found.append(f"{flag(key)} {getattr(optimizer, key):g}: must be between 0 and --learning-rate {peak:g}")
    optional = ("embedding_weight_decay", "matrix_weight_decay")
    found += below(optimizer, 0, *(key for key in optional if getattr(optimizer, key) is not None))
    rate = optimizer.matrix_learning_rate
    if rate is not None and not 0 < rate < math.inf:
        found.append(f"--matrix-learning-rate {rate:g}: must be above 0, such as {peak:g}")
    if optimizer.optimizer != "muon":
        found += [
            f"{flag(key)} {getattr(optimizer, key)}: has no meaning with --optimizer adamw; leave it out"
            for key in ("muon_split", "muon_scale", "muon_momentum", "matrix_learning_rate", "matrix_weight_decay")
            if getattr(optimizer, key) != getattr(OptimizerConfig(), key)
        ]
    for key in ("adam_beta1", "adam_beta2", "muon_momentum"):
        if not 0 <= getattr(optimizer, key) < 1:
            found.append(f"{flag(key)} {getattr(optimizer, key):g}: must be at least 0 and below 1")
    return found


def frozen_problems(config):
    """What --train-only router needs: routers with weights, that do not rest, on one pipeline stage."""
    heads, stages = config.model.heads, config.parallel.pipeline_parallel_size
    with_weights = heads.head_selection == "mixture" and not FORMS[heads.routing].reads_queries
    if config.optimizer.train_only == "all" or (with_weights and heads.dense_warmup_iters == 0 and stages == 1):
        return []
    return [
        f"--train-only {config.optimizer.train_only}: needs routers with weights (--head-selection mixture, another "
        "--routing than query_norm), no --dense-warmup-iters and --pipeline-parallel-size 1"
    ]


def schedule_problems(config):
    """What the numbers of iterations of a run contradict."""
    iterations, train_iters = config.model.heads.dense_warmup_iters, config.run.train_iters
    if config.model.after(0) != config.model and train_iters is not None and iterations >= train_iters:
        return [
            f"--dense-warmup-iters {iterations}: the mixture would never be trained; choose less than the "
            f"{train_iters} iterations of the run"
        ]
    return decay_problems(config)


def decay_problems(config):
    """A decay needs the schedule that has one, and room behind the warm-up."""
    optimizer, train_iters = config.optimizer, config.run.train_iters
    given = f"--decay-iters {optimizer.decay_iters}"
    if optimizer.schedule != "wsd" and config.data.decay_mix:
        return ["--decay-mix: --schedule cosine has no decay; choose wsd"]
    if optimizer.schedule != "wsd":
        return [] if optimizer.decay_iters is None else [f"{given}: --schedule cosine has no decay; choose wsd"]
    if train_iters is None or train_iters < 1:
        return []
    decay = optimizer.decay(train_iters)
    most = train_iters - optimizer.warmup_iters
    if not 0 <= decay <= most:
        return [
            f"--decay-iters {decay}: must be between 0 and {max(0, most)}, the {train_iters} iterations of the run "
            f"without the --warmup-iters {optimizer.warmup_iters}"
        ]
    return []


def run_problems(run):
    found = below(run, 1, "seq_length", "micro_batch_size", "log_interval")
    found += below(run, 0, "eval_interval", "eval_samples", "seed")
    if not run.checkpoint_dir:
        found.append("--checkpoint-dir is missing: give the directory of this run")
    if run.train_iters is None:
        if run.train_tokens is None:
            found.append("--train-tokens is missing: give a budget such as 100B, or --train-iters")
    elif run.train_iters < 1:
        found.append(f"--train-iters {run.train_iters}: must be at least 1")
    if run.peak_tflops is not None and not 0 < run.peak_tflops < math.inf:
        found.append(f"--peak-tflops {run.peak_tflops:g}: must be above 0, such as 989 for an H100 in bf16")
    if run.wandb and importlib.util.find_spec("wandb") is None:
        found.append(f"--wandb {run.wandb}: the package wandb is not installed; pip install wandb, or leave it out")
    return found


def backend_problems(config):
    """Attention backends asked for by name that could not compute this model here."""
    backend, head_dim = config.run.attention_backend, config.model.head_dim
    if backend in ("auto", "dense"):
        return []
    given = f"--attention-backend {backend}"
    found = []
    if backend == "cpu_sparse" and torch.cuda.is_available():
        found.append(f"{given}: is for machines without a GPU; choose auto")
    if backend != "cpu_sparse" and not torch.cuda.is_available():
        found.append(f"{given}: needs a CUDA GPU, and this machine shows none; choose auto")
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        found.append(f"{given}: the package triton is not installed; pip install triton, or choose auto")
    if backend == "triton" and head_dim not in TRITON_HEAD_DIMS:
        allowed = ", ".join(map(str, TRITON_HEAD_DIMS))
        found.append(f"{given}: has no kernels for --head-dim {head_dim}, only for {allowed}; choose auto")
    return found


def compile_problems(config):
    """What torch.compile cannot make graphs of."""
    if not config.run.compile:
        return []
    found = []
    if not torch.cuda.is_available() and not shutil.which(os.environ.get("CXX", "g++")):
        found.append("--compile: needs a C++ compiler on a machine without a GPU; install g++, or leave it out")
    if config.run.attention_backend == "cpu_sparse":
        found.append("--compile: does not know --attention-backend cpu_sparse, whose shapes vary; choose auto")
    return found


def reliability_problems(reliability):
    found = below(reliability, 0, "save_interval", "keep_last", "keep_every", "max_skipped_steps", "spike_sigmas")
    found += below(reliability, 0, "replica_check_interval") + below(reliability, 2, "spike_window")
    found += below(reliability, 1, "hang_timeout")
    if reliability.exit_after is not None:
        found += below(reliability, 1, "exit_after")
    if reliability.absurd_factor != 0 and not 100 <= reliability.absurd_factor < math.inf:
        found.append(
            f"--absurd-factor {reliability.absurd_factor:g}: must be 100 or above, or honest steps would be skipped; "
            "choose 1e6, or 0 to take any finite step"
        )
    if reliability.keep_every and not reliability.keep_last:
        found.append(f"--keep-every {reliability.keep_every}: all checkpoints are kept already; give --keep-last too")
    return found


def alarm_problems(alarms):
    found = below(alarms, 1, "alarm_intervals")
    found += below(alarms, 0, "alarm_head_low", "alarm_head_high", "alarm_throughput", "alarm_balance_loss")
    found += below(alarms, 0, "alarm_gate_drift")
    found += [
        f"{flag(key)} {getattr(alarms, key):g}: would fire at the usual value; choose {choice}, or 0 for none"
        for key, wrong, choice in (
            ("alarm_head_low", alarms.alarm_head_low >= 1, "a number below 1"),
            ("alarm_head_high", 0 < alarms.alarm_head_high <= 1, "a number above 1"),
            ("alarm_throughput", alarms.alarm_throughput >= 1, "a number below 1"),
            ("alarm_balance_loss", 0 < alarms.alarm_balance_loss <= 1, "a number above 1"),
            ("alarm_gate_drift", 0 < alarms.alarm_gate_drift <= 1, "a number above 1"),
        )
        if wrong
    ]
    return found


def layout_problems(config, world_size):
    """The arithmetic of processes and batches; only asked once the numbers by themselves are sound."""
    run, parallel = config.run, config.parallel
    found = below(parallel, 1, "tensor_parallel_size", "pipeline_parallel_size")
    if found or run.seq_length < 1 or run.micro_batch_size < 1:
        return found
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if world_size % (tp * pp):
        return [
            f"{world_size} processes: not a multiple of tensor_parallel_size({tp}) * pipeline_parallel_size({pp}) "
            f"= {tp * pp}; start a multiple of {tp * pp} processes or change the degrees"
        ]
    found = [*tensor_problems(config.model, tp), *pipeline_problems(config)]
    length, tokens = run.seq_length, run.batch_tokens
    if length % tp:
        found.append(f"--seq-length {length}: must be a multiple of --tensor-parallel-size {tp}, whose ranks share it")
    if tokens < length or tokens % length:
        nearest = [str(n) for n in (tokens // length * length, (tokens // length + 1) * length) if n > 0]
        return found + [
            f"--batch-tokens {tokens}: not a whole number of sequences of --seq-length {length}; "
            f"choose {' or '.join(nearest)}"
        ]
    dp = config.data_parallel_size(world_size)
    chunk = run.micro_batch_size * dp
    if run.global_batch_size % chunk:
        return found + [
            f"--batch-tokens {tokens}: its {run.global_batch_size} sequences are not a multiple of "
            f"micro_batch_size({run.micro_batch_size}) * data_parallel_size({dp}) = {chunk}; "
            f"choose {math.ceil(run.global_batch_size / chunk) * chunk * length} or another --micro-batch-size"
        ]
    return found


def pipeline_problems(config):
    parallel, pp = config.parallel, config.parallel.pipeline_parallel_size
    if pp == 1:
        return []
    found = []
    if parallel.zero_stage > 1:
        found.append(
            f"--zero-stage {parallel.zero_stage}: DeepSpeed's pipeline schedule needs whole gradients and weights; "
            f"choose --zero-stage 1, or --pipeline-parallel-size 1"
        )
    if parallel.offload_optimizer:
        found.append("--offload-optimizer: not together with a pipeline; choose --pipeline-parallel-size 1")
    if pp > config.model.num_layers:
        found.append(
            f"--pipeline-parallel-size {pp}: is more stages than decoder layers; choose at most "
            f"--num-layers {config.model.num_layers}"
        )
    return found


def tensor_problems(model, tp):
    """Every tensor-parallel rank holds the same number of shared (or static) and of other heads, in whole KV groups
    unless there are fewer groups than ranks."""
    if tp == 1 or model_problems(model):
        return []
    heads, shared_by = model.num_attention_heads, model.num_attention_heads // model.num_key_value_heads
    whole_groups = f", in whole key/value groups; choose a multiple of --tensor-parallel-size {tp} * {shared_by} query "
    whole_groups += f"heads per key/value head = {tp * shared_by}"
    step = tp * shared_by
    if model.num_key_value_heads < tp:
        step, whole_groups = tp, f"; choose a multiple of --tensor-parallel-size {tp}"
    found = []
    if model.intermediate_size % tp:
        found.append(f"--intermediate-size {model.intermediate_size}: not a multiple of --tensor-parallel-size {tp}")
    if heads % step:
        found.append(
            f"--tensor-parallel-size {tp}: must divide --num-key-value-heads {model.num_key_value_heads}, or be above "
            f"it, and divide --num-attention-heads {heads}"
        )
    else:
        leading = {model.leading_heads(layer) for layer in range(model.num_layers)}
        found += [
            f"{number} heads always on: every rank must hold as many{whole_groups}"
            for number in sorted(leading - set(range(0, heads + 1, step)))
        ]
    return found


def divisors(number, most):
    return ", ".join(str(n) for n in range(1, most + 1) if number % n == 0)
