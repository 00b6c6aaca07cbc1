"""The sections of the configuration that say how a model is trained, whatever it is: layout, optimizer, reliability."""

import math
from dataclasses import dataclass

from moh_lm.config.fields import option, text_option

REDUCE_BUCKET = 500_000_000  # gradients at most that DeepSpeed sums over the ranks at once


@dataclass(frozen=True)
class ParallelConfig:
    """parallel: how the model is spread over processes"""

    tensor_parallel_size: int = text_option(1, "ranks that share each layer's heads, MLP columns and vocabulary")
    pipeline_parallel_size: int = text_option(1, "stages of consecutive layers")
    context_parallel_size: int = text_option(1, "ranks that share each sequence, for long contexts; attention by heads")
    zero_stage: int = option(
        1, "shard over data-parallel ranks: 1 optimizer states, 2 also gradients, 3 also weights", choices=(1, 2, 3)
    )
    offload_optimizer: bool = option(False, "keep optimizer states, and step, in the memory of the CPU")

    def ranks_of_a_sequence(self):
        """Ranks that read the same samples."""
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
        "after the warm-up: cosine to the end of the run; wsd: stable, then a decay at its end",
        choices=("cosine", "wsd"),
    )
    decay_iters: int | None = option(None, "last iterations, in which wsd decays (default: a tenth)")
    decay_shape: str = option(
        "linear", "of wsd's decay: a line, 1 - sqrt, or half a cosine", choices=("linear", "sqrt", "cosine")
    )
    weight_decay: float = option(0.1, "decoupled weight decay of matrices; norms have none")
    embedding_weight_decay: float | None = text_option(
        None, "of the embedding, the output head and tables of positions (default: --weight-decay)"
    )
    adam_beta1: float = option(0.9, "decay of the first moment")
    adam_beta2: float = option(0.95, "decay of the second moment")
    gradient_clipping: float = option(1.0, "largest global gradient norm; 0 does not clip")
    train_only: str = option("all", "what is trained; all else is frozen", choices=("all", "router"))
    router_learning_rate_scale: float = option(1.0, "learning rate of the routers over that of all else")
    router_gradient_clipping: float = option(
        0.0, "largest norm of all routers' gradients together, clipped before --gradient-clipping; 0 does not clip"
    )
    z_loss: float = text_option(0.0, "of the mean squared logsumexp of the output logits, such as 1e-5; 0: none")
    optimizer: str = text_option(
        "adamw", "muon: for the matrices of the blocks, beside AdamW for the others", choices=("adamw", "muon")
    )
    muon_split: str = text_option(
        "matrix",
        "what Muon orthogonalises of q, k, v and o: the matrix, each head, or the heads that share a key/value head",
        choices=("matrix", "head", "group"),
    )
    muon_scale: str = text_option(
        "match_rms_adamw",
        "of an update of m rows and n columns: 0.2 sqrt(max(m, n)), or sqrt(max(1, m / n))",
        choices=("match_rms_adamw", "original"),
    )
    muon_momentum: float = text_option(0.95, "decay of Muon's momentum, which is Nesterov's")
    matrix_learning_rate: float | None = text_option(
        None, "peak learning rate of Muon, which follows the same schedule (default: --learning-rate)"
    )
    matrix_weight_decay: float | None = text_option(
        None, "decoupled weight decay of Muon's matrices (default: --weight-decay)"
    )

    def decay(self, train_iters):
        """Iterations of the decay of wsd."""
        return math.ceil(train_iters / 10) if self.decay_iters is None else self.decay_iters


@dataclass(frozen=True)
class RunBase:
    """What the run of every task has. Subclasses say ``global_batch_size``, the samples of an iteration over all ranks,
    and ``batch_given``, the flag that it follows from.
    """

    micro_batch_size: int = option(1, "sequences per rank in one forward pass")
    train_iters: int | None = option(
        None, "budget in iterations; if --train-tokens is given too, the later flag counts", replaces="train_tokens"
    )
    precision: str = option(
        "bf16", "bf16: bf16 weights with fp32 masters, moments and gradient sums", choices=("bf16", "fp32")
    )
    seed: int = option(1234, "seed of the initial weights and of the order of samples")
    checkpoint_dir: str = option("", "run directory: config.json, metrics.jsonl, tensorboard/, checkpoints/")
    allow_routing_change: bool = option(
        False, "go on with other losses, noise or warm-up of routers than the checkpoint's, or without its routers"
    )
    eval_interval: int = option(1000, "iterations between evaluations; 0: only before the first and after the last")
    log_interval: int = option(10, "iterations per line of the log")
    peak_tflops: float | None = option(
        None, "peak TFLOPS of one device in this precision, for MFU (default: those of a known GPU)"
    )
    gpu_hour_price: float | None = option(
        None, "price of an hour of one device, for what --dry-run and tools/plan.py estimate"
    )
    wandb: str = option("", "project of Weights & Biases that gets the log too")
    run_report: bool = option(True, "write report.html, a page on the run, when it is complete or stops")
    recompute: bool = option(False, "recompute each layer's activations in the backward pass")
    compile: bool = option(False, "have torch.compile make the kernels of each layer; the first step takes a minute")


@dataclass(frozen=True)
class ReliabilityConfig:
    """reliability: checkpoints, time limits, bad numbers"""

    save_interval: int = option(1000, "iterations between checkpoints; 0: only at the end")
    keep_last: int = option(0, "newest verified checkpoints that are kept; 0: all")
    keep_every: int = option(0, "checkpoints of iterations divisible by this are kept for ever; 0: none")
    require_checkpoint: bool = option(False, "refuse to begin with weights drawn at random: there must be a checkpoint")
    async_save: bool = option(True, "write checkpoints in the background, from a copy in the memory of the CPU")
    exit_after: int | None = option(None, "save and stop after this time, such as 3h50m", duration=True)
    hang_timeout: int = option(1800, "end the run if a rank makes no progress for so long, such as 30m", duration=True)
    max_skipped_steps: int = option(10, "stop if more of the last --spike-window iterations were skipped")
    absurd_factor: float = option(
        1e6,
        "a step is skipped whose loss or gradient norm is above this many times the median of --spike-window good "
        "steps, or above this if the median is less than 1; a weight above this ends the run; 0: no limits",
    )
    spike_sigmas: float = option(
        0.0, "a loss or gradient norm so many standard deviations above the mean is a spike; 0: no spikes"
    )
    spike_window: int = option(128, "iterations over which mean and deviation are taken")
    on_spike: str = option("skip", "what is done about a spike", choices=("skip", "report"))
    replica_check_interval: int = option(
        1, "iterations between comparisons of the weights that several ranks hold; 0: none"
    )


@dataclass(frozen=True)
class AlarmConfig:
    """alarms: what the log calls attention to; 0 turns one off"""

    alarm_intervals: int = option(3, "intervals in a row before an alarm of heads, gates, speed or balance fires")
    alarm_head_low: float = option(0.1, "fires for a routed head selected by less than this share of its fair load")
    alarm_head_high: float = option(3.0, "fires for a routed head selected by this many times its fair load, or by 95%")
    alarm_throughput: float = option(0.7, "fires for a throughput below this share of the running median")
    alarm_balance_loss: float = option(1.2, "fires for a layer whose balance loss is so many times its running median")
    alarm_gate_drift: float = option(
        1.5, "fires for a layer whose mean gate is so many times its running median, or the median so many times it"
    )
