"""The sections of the configuration for training any model: layout, optimizer, reliability, alarms."""

import math
from dataclasses import dataclass

from moh_lm.config.fields import option, text_option

REDUCE_BUCKET = 500_000_000  # the most gradients that DeepSpeed sums over the ranks at once


@dataclass(frozen=True)
class ParallelConfig:
    """parallel: how the model is spread over processes"""

    tensor_parallel_size: int = text_option(1, "ranks that share the heads, MLP columns and vocabulary of every layer")
    pipeline_parallel_size: int = text_option(1, "pipeline stages of consecutive layers")
    context_parallel_size: int = text_option(
        1, "ranks that share each sequence by exchanging tokens for heads, for long contexts"
    )
    zero_stage: int = option(
        1,
        "what is sharded over data-parallel ranks: 1: optimizer states; 2: gradients as well; 3: weights as well",
        choices=(1, 2, 3),
    )
    offload_optimizer: bool = option(False, "keep the optimizer states in CPU memory and run the optimizer there")

    def ranks_of_a_sequence(self):
        """Return the number of ranks that read the same samples."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size


@dataclass(frozen=True)
class OptimizerConfig:
    """optimizer: AdamW or Muon, and the schedule of the learning rate"""

    learning_rate: float = option(3e-4, "peak learning rate")
    min_learning_rate: float = option(3e-5, "learning rate at the end of the run")
    warmup_init_lr: float = option(1e-7, "learning rate of the first iteration")
    warmup_iters: int = option(2000, "iterations of linear warm-up")
    schedule: str = option(
        "cosine",
        "after the warm-up: cosine decay to the end of the run, or wsd: a constant rate with a decay at the end",
        choices=("cosine", "wsd"),
    )
    decay_iters: int | None = option(
        None, "length of the final decay, for --schedule wsd (default: a tenth of the run)"
    )
    decay_shape: str = option(
        "linear",
        "shape of the final decay, for --schedule wsd: linear, 1 - sqrt, or half a cosine",
        choices=("linear", "sqrt", "cosine"),
    )
    weight_decay: float = option(0.1, "decoupled weight decay of matrices; norms have none")
    embedding_weight_decay: float | None = text_option(
        None, "weight decay of the embedding, the output head and position tables (default: --weight-decay)"
    )
    adam_beta1: float = option(0.9, "decay rate of Adam's first moment")
    adam_beta2: float = option(0.95, "decay rate of Adam's second moment")
    gradient_clipping: float = option(1.0, "maximum global gradient norm; 0: no clipping")
    train_only: str = option("all", "which weights are trained; all others are frozen", choices=("all", "router"))
    router_learning_rate_scale: float = option(1.0, "learning rate of the routers relative to all other weights")
    router_gradient_clipping: float = option(
        0.0, "maximum norm of all router gradients together, applied before --gradient-clipping; 0: no clipping"
    )
    z_loss: float = text_option(
        0.0, "weight of the mean squared logsumexp of the output logits, for example 1e-5; 0: none"
    )
    optimizer: str = text_option(
        "adamw",
        "muon trains the matrices of the blocks with Muon and everything else with AdamW",
        choices=("adamw", "muon"),
    )
    muon_split: str = text_option(
        "matrix",
        "what Muon orthogonalizes in the attention projections: the whole matrix, each head, or the heads that share "
        "a key/value head",
        choices=("matrix", "head", "group"),
    )
    muon_scale: str = text_option(
        "match_rms_adamw",
        "scale of an update with m rows and n columns: 0.2 sqrt(max(m, n)), or sqrt(max(1, m / n))",
        choices=("match_rms_adamw", "original"),
    )
    muon_momentum: float = text_option(0.95, "decay rate of Muon's Nesterov momentum")
    matrix_learning_rate: float | None = text_option(
        None, "peak learning rate of Muon, which follows the same schedule (default: --learning-rate)"
    )
    matrix_weight_decay: float | None = text_option(
        None, "decoupled weight decay of Muon's matrices (default: --weight-decay)"
    )

    def decay(self, train_iters):
        """Return the number of decay iterations of wsd."""
        return math.ceil(train_iters / 10) if self.decay_iters is None else self.decay_iters


@dataclass(frozen=True)
class RunBase:
    """The run section of every task. Subclasses define ``global_batch_size``, the samples per iteration over all ranks,
    and ``batch_given``, the flag that it follows from."""

    micro_batch_size: int = option(1, "sequences per rank in one forward pass")
    train_iters: int | None = option(
        None,
        "training budget in iterations; if --train-tokens is given too, the last one takes effect",
        replaces="train_tokens",
    )
    precision: str = option(
        "bf16", "bf16: bf16 weights with fp32 master weights, moments and gradient sums", choices=("bf16", "fp32")
    )
    seed: int = option(1234, "seed of the initial weights and of the sample order")
    checkpoint_dir: str = option("", "run directory: config.json, metrics.jsonl, tensorboard/, checkpoints/")
    allow_routing_change: bool = option(
        False, "resume with other router losses, noise or warm-up than the checkpoint's, or without its routers"
    )
    eval_interval: int = option(
        1000, "iterations between evaluations; 0: only before the first iteration and after the last"
    )
    log_interval: int = option(10, "iterations per line of the log")
    peak_tflops: float | None = option(
        None, "peak TFLOPS of one device in this precision, for MFU (default: known for common GPUs)"
    )
    gpu_hour_price: float | None = text_option(
        None, "price of one device-hour, for the cost estimates of --dry-run and tools/plan.py"
    )
    wandb: str = option("", "Weights & Biases project that receives the log as well", metavar="PROJECT")
    head_curves: bool = option(
        False, "draw the load of every single routed head in TensorBoard and Weights & Biases, besides the maps"
    )
    run_report: bool = option(True, "write report.html, the run report, whenever the run stops or completes")
    profile: str = option(
        "", "first and last step of a trace of torch.profiler, written to profile/ of the run", metavar="FROM:TO"
    )
    profile_ranks: str = option("first", "ranks that --profile traces", choices=("first", "all"))
    profile_memory: bool = option(False, "trace allocations too, for --profile; on a GPU with a memory snapshot")
    recompute: bool = option(False, "recompute each layer's activations in the backward pass to save memory")
    compile: bool = option(False, "compile each layer with torch.compile; the first step takes about a minute")

    @property
    def stages(self):
        """Return [(iterations before, samples before, samples per iteration)] for each size of the global batch."""
        return [(0, 0, self.global_batch_size)]

    def samples_after(self, steps):
        """Return the number of samples in the first ``steps`` iterations."""
        first, before, size = next(stage for stage in reversed(self.stages) if stage[0] <= max(0, steps))
        return before + (steps - first) * size

    def batch_at(self, samples):
        """Return the number of samples in the iteration that begins after ``samples`` samples."""
        return next(size for _, before, size in reversed(self.stages) if before <= samples)

    def iterations(self, samples):
        """Return the number of iterations that together have at least ``samples`` samples."""
        first, before, size = next(stage for stage in reversed(self.stages) if stage[1] <= samples)
        return first + math.ceil((samples - before) / size)

    @property
    def profiled_steps(self):
        """Return the steps of --profile as a range, empty without it. Raises ValueError."""
        first, _, last = self.profile.partition(":")
        return range(int(first), int(last) + 1) if self.profile else range(0)


@dataclass(frozen=True)
class ReliabilityConfig:
    """reliability: checkpoints, time limits, bad numbers"""

    save_interval: int = option(1000, "iterations between checkpoints; 0: only at the end")
    keep_last: int = option(0, "number of newest verified checkpoints to keep; 0: all")
    keep_every: int = option(0, "always keep checkpoints whose iteration is a multiple of this; 0: none")
    require_checkpoint: bool = option(False, "fail instead of starting from random weights if there is no checkpoint")
    async_save: bool = option(True, "write checkpoints in the background from a copy in CPU memory")
    after_save: str = option(
        "", "shell command after every checkpoint, in the background; {path} is its directory", metavar="COMMAND"
    )
    exit_after: int | None = option(None, "save and exit after this time, for example 3h50m", duration=True)
    hang_timeout: int = option(1800, "abort if a rank makes no progress for this long, for example 30m", duration=True)
    max_skipped_steps: int = option(
        10, "stop if more than this many of the last --spike-window iterations were skipped"
    )
    absurd_factor: float = option(
        1e6,
        "skip a step whose loss or gradient norm exceeds this multiple of the median over --spike-window good steps, "
        "or of 1 if the median is smaller; a weight above it ends the run; 0: no limits",
    )
    spike_sigmas: float = option(
        0.0, "number of standard deviations above the mean at which a loss or gradient norm counts as a spike; 0: off"
    )
    spike_window: int = option(128, "iterations over which --spike-sigmas takes mean and deviation")
    on_spike: str = option("skip", "what to do about a spike", choices=("skip", "report"))
    replica_check_interval: int = option(
        1, "iterations between checks that ranks hold identical copies of shared weights; 0: off"
    )


@dataclass(frozen=True)
class AlarmConfig:
    """alarms: what the log calls attention to; 0 turns one off"""

    alarm_intervals: int = option(
        3, "consecutive log intervals before an alarm about heads, gates, speed or balance is raised"
    )
    alarm_head_low: float = option(
        0.1, "raise an alarm if a routed head is selected by less than this share of its fair load"
    )
    alarm_head_high: float = option(
        3.0,
        "raise an alarm if a routed head is selected by more than this multiple of its fair load, or by 95% of the "
        "tokens",
    )
    alarm_throughput: float = option(0.7, "raise an alarm if throughput falls below this share of its running median")
    alarm_slow_rank: float = option(
        1.5, "raise an alarm if a rank's own work takes this multiple of the median over the ranks that do the same"
    )
    alarm_balance_loss: float = option(
        1.2, "raise an alarm if a layer's load-balancing loss exceeds this multiple of its running median"
    )
    alarm_gate_drift: float = option(
        1.5, "raise an alarm if a layer's mean gate differs from its running median by more than this factor"
    )
