"""Checks the optimizer, the budget, the kernels, the windows, the reliability and the alarms of a run."""

import importlib.util
import math
import os
import shutil

import torch

from moh_lm.checks.attention import length_problems
from moh_lm.checks.ranges import below, not_default
from moh_lm.checks.schedule import batch_warmup_problems
from moh_lm.config import FUSED, OptimizerConfig, flag
from moh_lm.config.fields import tuple_of
from moh_lm.kernels import devices
from moh_lm.kernels.measured import TRITON_HEAD_DIMS
from moh_lm.model.gates import FORMS

YEAR = 365 * 86400  # seconds
OF_MUON = ("muon_split", "muon_scale", "muon_momentum", "matrix_learning_rate", "matrix_weight_decay")


def optimizer_problems(optimizer):
    found = below(optimizer, 0, "warmup_iters", "weight_decay", "gradient_clipping", "z_loss")
    found += below(optimizer, 0, "router_learning_rate_scale", "router_gradient_clipping")
    peak = optimizer.learning_rate
    if not 0 < peak < math.inf:
        found.append(f"--learning-rate {peak:g}: must be above 0, such as 3e-4")
    for key in ("min_learning_rate", "warmup_init_lr") if 0 < peak < math.inf else ():
        if not 0 <= getattr(optimizer, key) <= peak:
            found.append(f"{flag(key)} {getattr(optimizer, key):g}: must be between 0 and --learning-rate {peak:g}")
    found += below(optimizer, 0, "embedding_weight_decay", "matrix_weight_decay")
    rate = optimizer.matrix_learning_rate
    if rate is not None and not 0 < rate < math.inf:
        found.append(f"--matrix-learning-rate {rate:g}: must be above 0, such as {peak:g}")
    if optimizer.optimizer != "muon":
        found += not_default(optimizer, OF_MUON, "has no meaning with --optimizer adamw; leave it out")
    for key in ("adam_beta1", "adam_beta2", "muon_momentum"):
        if not 0 <= getattr(optimizer, key) < 1:
            found.append(f"{flag(key)} {getattr(optimizer, key):g}: must be at least 0 and below 1")
    return found


def split_problems(config):
    """Check that blocks of heads have one size and are whole on a rank, and that gathered parts have one size."""
    split, tp = config.optimizer.muon_split, config.parallel.tensor_parallel_size
    if config.optimizer.optimizer != "muon":
        return []
    fewest = min(tuple_of(config.model.num_key_value_heads), default=0)
    if split == "group" and 0 < fewest < tp:
        given = f"--muon-split group: the heads that share one of {fewest} key/value heads"
        return [f"{given} are on several ranks with --tensor-parallel-size {tp}; choose head or matrix"]
    if not config.model.head_dims:
        return []
    found = [f"--muon-split {split}: --head-dims has heads of several widths; choose matrix"] * (split != "matrix")
    advice = "choose 1, or --optimizer adamw"
    uneven = f"--tensor-parallel-size {tp}: Muon needs equal parts of a matrix, which --head-dims rules out; {advice}"
    return found + [uneven] * (tp > 1)


def frozen_problems(config):
    """Check what --train-only router needs: active routers with weights, on one pipeline stage."""
    heads, stages = config.model.heads, config.parallel.pipeline_parallel_size
    with_weights = heads.head_selection == "mixture" and not FORMS[heads.routing].reads_queries
    if config.optimizer.train_only == "all" or (with_weights and heads.dense_warmup_iters == 0 and stages == 1):
        return []
    return [
        f"--train-only {config.optimizer.train_only}: needs routers with weights (--head-selection mixture, another "
        "--routing than query_norm), no --dense-warmup-iters and --pipeline-parallel-size 1"
    ]


def router_problems(config):
    """Check that settings for router weights are only given if routers have weights."""
    heads, optimizer = config.model.heads, config.optimizer
    if heads.head_selection != "mixture" or not FORMS[heads.routing].reads_queries:
        return []
    return [
        f"{flag(key)} {getattr(optimizer, key):g}: --routing {heads.routing} has no router weights; leave it out"
        for key in ("router_learning_rate_scale", "router_gradient_clipping")
        if getattr(optimizer, key) != getattr(OptimizerConfig(), key)
    ]


def run_problems(run):
    found = base_problems(run) + below(run, 1, "seq_length", "sample_tokens") + below(run, 0, "eval_samples")
    found += batch_warmup_problems(run)
    if run.train_iters is None:
        if run.train_tokens is None:
            found.append("--train-tokens is missing: give a budget such as 100B, or --train-iters")
    elif run.train_iters < 1:
        found.append(f"--train-iters {run.train_iters}: must be at least 1")
    elif run.train_tokens >= 2**63:
        found.append(f"--train-iters {run.train_iters}: reads {run.train_tokens} tokens, and must read less than 2^63")
    return found


def base_problems(run):
    """Check a ``RunBase``, whatever is trained."""
    found = below(run, 1, "micro_batch_size", "log_interval") + below(run, 0, "eval_interval", "seed")
    if not run.checkpoint_dir:
        found.append("--checkpoint-dir is missing: give the directory of this run")
    if run.peak_tflops is not None and not 0 < run.peak_tflops < math.inf:
        found.append(f"--peak-tflops {run.peak_tflops:g}: must be above 0, such as 989 for an H100 in bf16")
    found += below(run, 0, "gpu_hour_price") + profile_problems(run)
    if run.wandb and importlib.util.find_spec("wandb") is None:
        found.append(f"--wandb {run.wandb}: the package wandb is not installed; pip install wandb, or leave it out")
    return found


def profile_problems(run):
    """Check the steps to be traced."""
    try:
        sound = not run.profile or (run.profiled_steps and run.profiled_steps[0] > 0)
    except ValueError:
        sound = False
    if not sound:
        return [f"--profile {run.profile}: write the first and the last step as FROM:TO, such as 10:12"]
    if run.profile and run.train_iters and run.profiled_steps[0] > run.train_iters:
        return [f"--profile {run.profile}: begins after the run's {run.train_iters} iterations; choose earlier steps"]
    if run.profile_memory and not run.profile:
        return ["--profile-memory: is a part of a profile; give --profile FROM:TO too, such as 10:12"]
    return []


def projection_problems(config):
    """Check that a rank holds the weights of its joined projections."""
    if config.run.fused_projections and config.parallel.zero_stage == 3:
        return ["--fused-projections: --zero-stage 3 gathers the weights one by one; choose 2, or leave the flag out"]
    return []


def kernel_problems(config, on_gpu):
    """Check that the requested kernels can compute this run on this machine."""
    asked = [name for name in ("fused_loss", "fused_router") if getattr(config.run, name)]
    if asked and importlib.util.find_spec("triton") is None:
        return [f"{flag(asked[0])}: the package triton is not installed; install it, or leave the flag out"]
    found = fused_router_problems(config.model.heads) if config.run.fused_router else []
    if asked and not found and not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        found.append(f"{flag(asked[0])}: its kernels need a GPU, and this machine shows none; leave the flag out")
    return found or (needs_compiler(flag(asked[0]), "leave the flag out") if asked else [])


def graph_problems(config, on_gpu):
    """Name what a micro-batch that is captured in a CUDA graph rules out."""
    if not config.run.cuda_graph:
        return []
    given, parallel = "--cuda-graph", config.parallel
    found = []
    if not on_gpu:
        found.append(f"{given}: needs a CUDA GPU, and this machine shows none; leave it out")
    if parallel.pipeline_parallel_size > 1:
        stages = f"--pipeline-parallel-size {parallel.pipeline_parallel_size}"
        found.append(f"{given}: {stages} sends and receives within a pass; leave one of the two out")
    if parallel.zero_stage == 3:
        found.append(f"{given}: --zero-stage 3 moves the weights within a pass; choose 2, or leave the graph out")
    if config.run.window_strategy == "entropy":
        found.append(f"{given}: --window-strategy entropy moves its windows after every step; leave one of the two out")
    return found


def fused_router_problems(heads):
    """Name what the kernels of --fused-router do not compute."""
    refused = {
        "--head-selection": heads.head_selection != "mixture" and heads.head_selection,
        "--routing": heads.routing not in FUSED and heads.routing,
        "--routing-top-p": heads.routing_top_p,
        "--routing-dtype": heads.routing_dtype == "bf16" and heads.routing_dtype,
        "--router-z-loss": heads.router_z_loss,
        "--router-gumbel-noise": heads.router_gumbel_noise,
    }
    return [f"--fused-router: its kernels do not compute {name} {value}; leave one of the two out"
            for name, value in refused.items() if value]  # fmt: skip


def backend_problems(config, on_gpu):
    """Check that a backend requested by name can compute this model on this machine."""
    backend, head_dim = config.run.attention_backend, config.model.query_dim
    if backend in ("auto", "dense") or length_problems(config.model):
        return []
    given = f"--attention-backend {backend}"
    found = []
    if backend == "groups" and not config.model.chooses_in_groups:
        found.append(f"{given}: needs equally many heads per group; add --routing-unit head_in_group, or choose auto")
    if config.run.compile and backend == "cpu_sparse":
        found.append(f"--compile: does not support {given}, whose shapes vary; choose auto")
    if "cope" in config.model.position:
        found.append(f"{given}: --position cope needs all scores; choose dense, or auto, which is dense in its layers")
    if backend == "cpu_sparse" and on_gpu:
        found.append(f"{given}: is for machines without a GPU; choose auto")
    if backend == "triton" and on_gpu and torch.version.hip:
        found.append(f"{given}: its kernels do not compile on AMD GPUs; choose auto")
    if backend == "triton" and not on_gpu:
        found.append(f"{given}: needs a CUDA GPU, and this machine shows none; choose auto")
    own = [window for layer, window in enumerate(config.model.window) if config.model.own_keys(layer)]
    limits = ["--window"] * any(own) + ["--reset-at-documents"] * (config.data.reset_at_documents and bool(own))
    limits += ["--seq-length-warmup"] * bool(config.data.seq_length_warmup and own)
    if backend == "triton" and limits:
        found.append(f"{given}: does not support --routed-keys selected with {limits[0]}; choose auto or dense")
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        found.append(f"{given}: the package triton is not installed; pip install triton, or choose auto")
    if backend == "triton" and head_dim not in TRITON_HEAD_DIMS:
        allowed = ", ".join(map(str, TRITON_HEAD_DIMS))
        found.append(f"{given}: has no kernels for heads of {head_dim} features, only for {allowed}; choose auto")
    return found or (needs_compiler(given, "choose auto") if backend == "triton" else [])


def window_problems(config):
    """Check what the window strategies need or contradict."""
    run = config.run
    if run.window_strategy == "fixed":
        return not_default(run, ("window_min", "window_max"), "needs --window-strategy sequence or entropy")
    found, given = below(run, 2, "window_min"), f"--window-strategy {run.window_strategy}"
    if run.window_max < run.window_min:
        found.append(f"--window-max {run.window_max}: must be at least --window-min {run.window_min}")
    if run.window_strategy == "sequence" and {*config.model.window} != {config.half_window()}:
        were = f"the windows are {' '.join(map(str, sorted({*config.model.window})))}, not {config.half_window()}"
        found.append(f"{given}: {were}; leave --window out, or resume with the run's --seq-length")
    if run.window_strategy == "entropy" and run.compile:
        why = "its windows change with every step, and --compile needs fixed ones"
        found.append(f"{given}: {why}; leave one of the two out")
    if run.window_strategy == "entropy" and config.model.heads.routed_keys == "selected":
        found.append(f"{given}: entropies are those of heads that see all tokens; leave out --routed-keys selected")
    return found


def compile_problems(run, on_gpu):
    """Check what torch.compile needs."""
    if not run.compile:
        return []
    if on_gpu:
        return needs_compiler("--compile", "give --compile false")
    if shutil.which(os.environ.get("CXX", "g++")):
        return []
    return ["--compile: needs a C++ compiler on a machine without a GPU; install g++, or leave it out"]


def needs_compiler(given, instead):
    """Check that Triton can compile for ``given``. Of other machines, for which a run is planned, nothing is known."""
    missing = devices.missing_for_triton() if devices.on_gpu() else None
    return [f"{given}: Triton compiles while the run starts and lacks {missing}, or {instead}"] if missing else []


def reliability_problems(reliability):
    found = below(reliability, 0, "save_interval", "keep_last", "keep_every", "max_skipped_steps", "spike_sigmas")
    found += below(reliability, 0, "replica_check_interval") + below(reliability, 2, "spike_window")
    found += below(reliability, 1, "hang_timeout")
    if reliability.hang_timeout > YEAR:  # timers of the system overflow after centuries
        found.append(f"--hang-timeout {reliability.hang_timeout}: must be at most {YEAR}, a year; choose 1d or less")
    found += below(reliability, 1, "exit_after")
    if reliability.max_skipped_steps >= reliability.spike_window:
        found.append(
            f"--max-skipped-steps {reliability.max_skipped_steps}: is counted over --spike-window "
            f"{reliability.spike_window} steps, which cannot hold more; choose a smaller number"
        )
    if reliability.absurd_factor != 0 and not 100 <= reliability.absurd_factor < math.inf:
        found.append(
            f"--absurd-factor {reliability.absurd_factor:g}: must be 100 or above, or sound steps would be skipped; "
            "choose 1e6, or 0 to accept any finite step"
        )
    if reliability.keep_every and not reliability.keep_last:
        found.append(f"--keep-every {reliability.keep_every}: all checkpoints are kept already; give --keep-last too")
    return found


def alarm_problems(alarms):
    found = below(alarms, 1, "alarm_intervals")
    found += below(alarms, 0, "alarm_head_low", "alarm_head_high", "alarm_throughput", "alarm_balance_loss")
    found += below(alarms, 0, "alarm_gate_drift", "alarm_slow_rank")
    found += [
        f"{flag(key)} {getattr(alarms, key):g}: would fire in every healthy run; choose {choice}, or 0 for none"
        for key, wrong, choice in (
            ("alarm_head_low", alarms.alarm_head_low >= 1, "a number below 1"),
            ("alarm_head_high", 0 < alarms.alarm_head_high <= 1, "a number above 1"),
            ("alarm_throughput", alarms.alarm_throughput >= 1, "a number below 1"),
            ("alarm_balance_loss", 0 < alarms.alarm_balance_loss <= 1, "a number above 1"),
            ("alarm_slow_rank", 0 < alarms.alarm_slow_rank <= 1, "a number above 1"),
            ("alarm_gate_drift", 0 < alarms.alarm_gate_drift <= 1, "a number above 1"),
        )
        if wrong
    ]
    return found
