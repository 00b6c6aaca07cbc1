"""Configuration: what a run is, in eight small dataclasses.

A field says its name, type, default and meaning once. Flags (``moh_lm.flags``) and the flat ``config.json`` are made
from the fields, so names are unique over all sections. Values that follow from others (the head dimension, one head
budget per layer, the number of iterations) are filled in when a section is made: what the program sees is always
resolved.

Checks return sentences instead of raising: each gives the key, the value, what is allowed and the remedy, and all of
them are shown at once, before any process group is opened. This module needs the standard library only.
"""

import json
import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import NamedTuple


class ConfigError(Exception):
    """What the user has to mend; ``problems`` holds one sentence each. Programs print them and exit with code 2.

    local_rank: of the first rank on a node that sees them, which says so.
    """

    def __init__(self, problems: list[str], local_rank: int = 0):
        super().__init__("\n".join(problems))
        self.problems = problems
        self.local_rank = local_rank


def option(default, help, **metadata):
    """A dataclass field with its help text; moh_lm.flags reads choices, parse, binary and replaces of ``metadata``."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class HeadsConfig:
    """heads: which attention heads a token uses (paper, section 3)"""

    head_selection: str = option(
        "mixture",
        "all: ordinary attention; mixture: shared heads and a router's top-K of the others; static: the first heads; "
        "gated: all heads, each with a gate of --routing sigmoid, which is a mixture of shared heads only",
        choices=("all", "mixture", "static", "gated"),
    )
    num_shared_heads: tuple[int, ...] = option(
        (), "heads that are always on: one number, or one per layer (default: half of the heads)", parse=int
    )
    num_active_routed_heads: tuple[int, ...] = option(
        (), "K, routed heads per token: one number, or one per layer (default: a quarter of the heads)", parse=int
    )
    head_budget: float | None = option(
        None, "share of the heads that a token uses, of all layers: gives the numbers above that are not", parse=float
    )
    head_budget_slope: float = option(0.0, "of --head-budget: share in the last layer minus that in the first")
    routing: str = option(
        "paper",
        "gates as in Eq. 5-6; times a constant, so that they begin at 1; as in the authors' released code; "
        "2 sigmoid of each score; from query norms (Eq. 9-10); or ReLU of each score, K then being an average",
        choices=("paper", "paper_scaled", "released", "sigmoid", "query_norm", "relu"),
    )
    routing_unit: str = option(
        "head",
        "what a token selects: heads, or whole key/value groups of grouped-query attention; budgets count heads",
        choices=("head", "key_value_group"),
    )
    routing_dtype: str = option(
        "fp32", "in which scores are ranked; bf16: as in MoH-LLaMA3, equal ones by torch.topk", choices=("fp32", "bf16")
    )
    routing_top_p: float | None = option(
        None,
        "select the fewest routed heads whose probabilities add up to this, at most K (default: always K)",
        parse=float,
    )
    routing_entropy_coefficient: float = option(1e-4, "of the mean entropy of the routers, with --routing-top-p")
    two_stage: bool = option(True, "weigh shared against routed heads by [a1, a2] of Eq. 6; false: a1 = a2 = 1")
    load_balance_coefficient: float = option(0.01, "beta of Eq. 8")
    router_z_loss: float = option(0.0, "of the mean squared logsumexp of the routed scores; 0: none")
    load_balance_scope: str = option(
        "sequence",
        "tokens over which Eq. 7 counts selections: each sequence (our choice of its T), or the whole previous step",
        choices=("sequence", "micro_batch", "global_batch"),
    )
    router_gumbel_noise: float = option(0.0, "scale of Gumbel noise on the scores that select in training; 0: none")
    dense_warmup_iters: int = option(
        0, "first iterations of a mixture in which all heads have gate 1, without a balance loss; routers rest"
    )
    load_balance_bias_rate: float = option(
        0.0, "select by a bias too, which moves so far in each step, up for heads below the mean load; 0: no bias"
    )


SPREAD = ("head_budget", "head_budget_slope")  # of HeadsConfig: said again by the budgets of the layers
TRAINING_ONLY = (  # of HeadsConfig: no part of the function that is trained
    "load_balance_coefficient", "load_balance_scope", "routing_entropy_coefficient", "router_z_loss",
    "router_gumbel_noise", "dense_warmup_iters",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """model: shape of the decoder (defaults: LLM-S of the paper)"""

    num_layers: int = option(12, "decoder layers")
    hidden_size: int = option(768, "width of the residual stream")
    intermediate_size: int = option(2048, "width of the SwiGLU MLP")
    num_attention_heads: int = option(12, "query heads per layer")
    num_key_value_heads: int | None = option(None, "key/value heads (default: one per query head)", parse=int)
    head_dim: int | None = option(None, "width of a head (default: hidden size / attention heads)", parse=int)
    vocab_size: int = option(65_536, "rows of the embedding; at least the tokenizer's pieces")
    rope_theta: float = option(10_000.0, "base of the rotary frequencies")
    rope_type: str = option(
        "default",
        "rotary frequencies as they are, divided by --rope-factor, as in LLaMA 3.1, or by YaRN",
        choices=("default", "linear", "llama3", "yarn"),
    )
    rope_factor: float | None = option(None, "how much slower rotary embeddings turn, at most", parse=float)
    rope_low_freq_factor: float | None = option(None, "of llama3: waves longer than L / this are slower", parse=float)
    rope_high_freq_factor: float | None = option(None, "of llama3: waves shorter than L / this stay", parse=float)
    rope_original_length: int | None = option(None, "L of llama3, yarn: sequence length before it", parse=int)
    window: tuple[int, ...] = option(
        (),
        "keys that a token sees, its own the last of them (Mistral's sliding window: token i sees i-W+1 to i); one "
        "number, or one per layer; 0: the whole sequence (default: 0)",
        parse=int,
    )
    rms_norm_eps: float = option(1e-5, "epsilon under the root of RMSNorm")
    tie_embeddings: bool = option(False, "use the embedding matrix as output head")
    qk_norm: bool = option(False, "RMSNorm of each head's query and key, before their positions, as in Qwen3")
    post_norm: bool = option(False, "norms after attention and MLP instead of before them, as in OLMo 2")
    heads: HeadsConfig = field(default_factory=HeadsConfig)

    def __post_init__(self):
        heads = self.num_attention_heads
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", heads)
        if self.head_dim is None and heads > 0:
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        if self.heads.head_selection == "gated":
            if self.heads.routing not in (HeadsConfig.routing, "sigmoid"):
                given = f"--head-selection gated: contradicts --routing {self.heads.routing}"
                raise ConfigError([f"{given}, for its gates are those of sigmoid; leave one of them out"])
            gated = dict(head_selection="mixture", routing="sigmoid", num_shared_heads=(heads,))
            object.__setattr__(self, "heads", replace(self.heads, **gated, num_active_routed_heads=(0,)))
        if not self.heads.num_active_routed_heads:
            object.__setattr__(self, "heads", replace(self.heads, **spread_budget(self, self.heads.num_shared_heads)))
        budgets = {
            "num_shared_heads": self.heads.num_shared_heads or (heads // 2,),
            "num_active_routed_heads": self.heads.num_active_routed_heads or (max(1, heads // 4),),
        }
        per_layer = {key: value * self.num_layers if len(value) == 1 else value for key, value in budgets.items()}
        object.__setattr__(self, "heads", replace(self.heads, **per_layer))
        window = self.window or (0,)
        object.__setattr__(self, "window", window * self.num_layers if len(window) == 1 else window)

    def leading_heads(self, layer):
        """Heads of ``layer`` that are always on, at the front of the order: the shared, or the static, ones."""
        heads = self.heads
        if heads.head_selection == "all":
            return 0
        routed = heads.num_active_routed_heads[layer] if heads.head_selection == "static" else 0
        return heads.num_shared_heads[layer] + routed

    def active_heads(self, layer):
        """Heads of ``layer`` that a token uses."""
        heads = self.heads
        if heads.head_selection == "all":
            return self.num_attention_heads
        return heads.num_shared_heads[layer] + heads.num_active_routed_heads[layer]

    def after(self, step):
        """The model as it is after ``step`` iterations: with all heads in the dense warm-up of a mixture."""
        warming_up = self.heads.head_selection == "mixture" and step < self.heads.dense_warmup_iters
        return replace(self, heads=replace(self.heads, head_selection="all")) if warming_up else self

    def active_share(self):
        """Share of all heads that a token uses, at most."""
        active = sum(map(self.active_heads, range(self.num_layers)))
        return active / (self.num_layers * self.num_attention_heads)

    @property
    def heads_per_expert(self):
        """Heads that a router selects together: one, or all that share a key/value head."""
        grouped = self.heads.routing_unit == "key_value_group"
        return self.num_attention_heads // self.num_key_value_heads if grouped else 1

    def routed_layer(self, index):
        """The ``RoutedLayer`` of a layer of a mixture."""
        size, shared = self.heads_per_expert, self.heads.num_shared_heads[index]
        active, routed = self.heads.num_active_routed_heads[index], self.num_attention_heads - shared
        by_sign = self.heads.routing == "relu"
        budget = (shared // size, routed // size, active // size)
        return RoutedLayer(index, *budget, size, self.heads.routing_top_p, by_sign)

    def routed_layers(self):
        """A ``RoutedLayer`` for every layer that balances the load of routed heads, in order."""
        if self.heads.head_selection != "mixture":
            return []
        layers = map(self.routed_layer, range(self.num_layers))
        return [layer for layer in layers if layer.num_routed]


def spread_budget(model, shared, tensor_parallel_size=1):
    """{field of HeadsConfig: a number per layer} of --head-budget B and --head-budget-slope S.

    The share of layer l of L is B + S (l / (L - 1) - 1/2). Whole heads, or groups of them, come as near as they can to
    the sum of the shares so far; then they are sorted, since rounding leaves a few out of order. Heads that are always
    on come in what every tensor-parallel rank can hold, unless ``shared`` gives their numbers. {} where the shares, or
    the heads, are none that moh_lm.checks lets pass.
    """
    heads, number, layers = model.heads, model.num_attention_heads, model.num_layers
    if not (0 < (heads.head_budget or 0) <= 1 and abs(heads.head_budget_slope) <= 1 and number >= 1):
        return {}
    group = number // max(1, model.num_key_value_heads) or 1
    unit = step = group if heads.routing_unit == "key_value_group" else 1
    if tensor_parallel_size > 1:
        step = tensor_parallel_size * group
    if heads.head_selection == "static":
        unit = step
    active, due = [], 0.0
    for layer in range(layers):
        due += number * (heads.head_budget + heads.head_budget_slope * (layer / max(1, layers - 1) - 0.5))
        active.append(min(max(round((due - sum(active)) / unit) * unit, unit), number))
    active.sort(reverse=heads.head_budget_slope < 0)
    routed = max(unit, number // 4)
    shared = shared or tuple(max(0, count - routed) // step * step for count in active)
    shared = shared * layers if len(shared) == 1 else shared
    rest = (min(max(count - on, unit), number - on) for count, on in zip(active, shared, strict=False))
    return {"num_shared_heads": shared, "num_active_routed_heads": tuple(rest)}


class RoutedLayer(NamedTuple):
    """What a layer of a mixture routes: its number, and its numbers of experts, which are heads or groups of them.

    With ``top_p``, num_active is the most that a token selects; ``by_sign``, what tokens select on average.
    """

    index: int
    num_shared: int
    num_routed: int
    num_active: int
    heads_per_expert: int = 1
    top_p: float | None = None
    by_sign: bool = False

    @property
    def varies(self):
        """Whether a token selects more experts than another."""
        return self.by_sign or self.top_p is not None

    @property
    def unit(self):
        """What an expert is called."""
        return "head" if self.heads_per_expert == 1 else "group"


@dataclass(frozen=True)
class ParallelConfig:
    """parallel: how the model is spread over processes"""

    tensor_parallel_size: int = option(1, "ranks that share each layer's heads, MLP columns and vocabulary")
    pipeline_parallel_size: int = option(1, "stages of consecutive layers")
    zero_stage: int = option(
        1, "shard over data-parallel ranks: 1 optimizer states, 2 also gradients, 3 also weights", choices=(1, 2, 3)
    )
    offload_optimizer: bool = option(False, "keep optimizer states, and step, in the memory of the CPU")


@dataclass(frozen=True)
class DataConfig:
    """data: token shards and their mixture"""

    data_dir: str = option("", "directory written by data_prep/tokenize.py")
    data_mix: tuple[tuple[str, str], ...] = option(
        (), "NAME=WEIGHT of each source, weights of any sum (default: in proportion to tokens)", parse=str
    )
    validation_fraction: float = option(0.001, "share of every source that is held out for validation")
    reset_at_documents: bool = option(False, "attend to, and predict, tokens of the same document only")
    allow_data_change: bool = option(False, "go on with other shards or another mix than those of the checkpoint")
    decay_mix: tuple[tuple[str, str], ...] = option(
        (), "NAME=WEIGHT from the beginning of the decay of --schedule wsd on (default: no other mix)", parse=str
    )


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
    decay_iters: int | None = option(None, "last iterations, in which wsd decays (default: a tenth)", parse=int)
    decay_shape: str = option(
        "linear", "of wsd's decay: a line, 1 - sqrt, or half a cosine", choices=("linear", "sqrt", "cosine")
    )
    weight_decay: float = option(0.1, "decoupled weight decay of matrices; norms have none")
    embedding_weight_decay: float | None = option(
        None, "of the embedding and the output head (default: --weight-decay)", parse=float
    )
    adam_beta1: float = option(0.9, "decay of the first moment")
    adam_beta2: float = option(0.95, "decay of the second moment")
    gradient_clipping: float = option(1.0, "largest global gradient norm; 0 does not clip")
    train_only: str = option("all", "what is trained; all else is frozen", choices=("all", "router"))
    router_learning_rate_scale: float = option(1.0, "learning rate of the routers over that of all else")
    router_gradient_clipping: float = option(
        0.0, "largest norm of all routers' gradients together, clipped before --gradient-clipping; 0 does not clip"
    )
    z_loss: float = option(0.0, "of the mean squared logsumexp of the output logits, such as 1e-5; 0: none")
    optimizer: str = option(
        "adamw", "muon: for the matrices of the blocks, beside AdamW for the others", choices=("adamw", "muon")
    )
    muon_split: str = option(
        "matrix",
        "what Muon orthogonalises of q, k, v and o: the matrix, each head, or the heads that share a key/value head",
        choices=("matrix", "head", "group"),
    )
    muon_scale: str = option(
        "match_rms_adamw",
        "of an update of m rows and n columns: 0.2 sqrt(max(m, n)), or sqrt(max(1, m / n))",
        choices=("match_rms_adamw", "original"),
    )
    muon_momentum: float = option(0.95, "decay of Muon's momentum, which is Nesterov's")
    matrix_learning_rate: float | None = option(
        None, "peak learning rate of Muon, which follows the same schedule (default: --learning-rate)", parse=float
    )
    matrix_weight_decay: float | None = option(
        None, "decoupled weight decay of Muon's matrices (default: --weight-decay)", parse=float
    )

    def decay(self, train_iters):
        """Iterations of the decay of wsd."""
        return math.ceil(train_iters / 10) if self.decay_iters is None else self.decay_iters


@dataclass(frozen=True)
class RunConfig:
    """run: batch, budget, precision, files"""

    seq_length: int = option(2048, "tokens per sequence")
    batch_tokens: int = option(4 * 2**20, "tokens per iteration, all ranks; K, M, G are powers of 1024", binary=True)
    micro_batch_size: int = option(1, "sequences per rank in one forward pass")
    train_tokens: int | None = option(
        None, "budget in tokens, rounded up to iterations; K, M, B, T are powers of 1000", binary=False,
        replaces="train_iters",
    )
    train_iters: int | None = option(
        None, "budget in iterations; of this flag and --train-tokens the later one counts", parse=int,
        replaces="train_tokens",
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
    eval_samples: int = option(128, "held-out sequences evaluated per source")
    eval_tasks: str = option("", "file of tools/evaluate_prepare.py: tasks that are scored with every evaluation")
    log_interval: int = option(10, "iterations per line of the log")
    peak_tflops: float | None = option(
        None, "of one device in this precision, for the MFU (default: of the GPUs that are known)", parse=float
    )
    wandb: str = option("", "project of Weights & Biases that gets the log too")
    run_report: bool = option(False, "write report.html, a page on the run, when it is complete or stops")
    recompute: bool = option(False, "recompute each layer's activations in the backward pass")
    compile: bool = option(False, "have torch.compile make the kernels of each layer; the first step takes a minute")
    attention_backend: str = option(
        "auto",
        "attention of the selected heads only (triton, flex, cpu_sparse), of all (dense), or what was measured faster",
        choices=("auto", "dense", "triton", "flex", "cpu_sparse"),
    )

    def __post_init__(self):
        if self.train_iters is None and self.train_tokens is not None and self.tokens_per_iteration > 0:
            object.__setattr__(self, "train_iters", math.ceil(self.train_tokens / self.tokens_per_iteration))
        if self.train_tokens is None and self.train_iters is not None:
            object.__setattr__(self, "train_tokens", self.train_iters * self.tokens_per_iteration)

    @property
    def global_batch_size(self):
        """Sequences per iteration over all ranks."""
        return self.batch_tokens // max(1, self.seq_length)

    @property
    def tokens_per_iteration(self):
        return self.global_batch_size * self.seq_length


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


@dataclass(frozen=True)
class Config:
    """A whole run. ``problems`` is empty if and only if the run can start on ``world_size`` processes."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)
    alarms: AlarmConfig = field(default_factory=AlarmConfig)

    def data_parallel_size(self, world_size):
        return world_size // (self.parallel.tensor_parallel_size * self.parallel.pipeline_parallel_size)

    @property
    def routers_apart(self):
        """Whether the optimizer treats routers in another way than other weights, for some of the run at least."""
        settings, warmup = self.optimizer, self.model.heads.dense_warmup_iters
        return warmup > 0 or settings.router_learning_rate_scale != 1 or settings.router_gradient_clipping > 0

    def gradient_accumulation_steps(self, world_size):
        return self.run.global_batch_size // (self.run.micro_batch_size * self.data_parallel_size(world_size))

    def decay_begins(self):
        """The first sample of --decay-mix; None without one."""
        if not self.data.decay_mix or self.optimizer.schedule != "wsd" or self.run.train_iters is None:
            return None
        stable = self.run.train_iters - self.optimizer.decay(self.run.train_iters)
        return stable * self.run.global_batch_size

    def to_dict(self):
        """Every field under its own name, sections joined: the content of config.json."""
        return {field.name: getattr(section, field.name) for section, field in walk(self)}

    @classmethod
    def from_dict(cls, values):
        """The inverse of ``to_dict``; keys that are absent keep their defaults. Raises ConfigError for unknown keys."""
        known = {field.name for _, field in walk(cls())}
        unknown = [f"config key {key!r} is unknown: remove it" for key in values if key not in known]
        if unknown:
            raise ConfigError(unknown)
        tp = values.get("tensor_parallel_size", 1)
        if tp > 1 and not values.get("num_active_routed_heads"):
            shared = as_tuples(values.get("num_shared_heads", ()))
            values = {**values, **spread_budget(build(ModelConfig, values), shared, tp)}
        return build(cls, values)

    @classmethod
    def load(cls, path):
        """The configuration in a config.json. Raises ConfigError if the file is absent or not such a file."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError([f"{path}: no configuration ({error}); give a directory made by a run"]) from error
        return cls.from_dict(values)


def walk(section):
    """(section, field) for every leaf field below ``section``, in order."""
    for entry in fields(section):
        value = getattr(section, entry.name)
        if is_dataclass(value):
            yield from walk(value)
        else:
            yield section, entry


def build(section_type, values):
    """A section, and the sections in it, from a flat mapping of field names."""
    arguments = {}
    for entry in fields(section_type):
        if is_dataclass(entry.type):
            arguments[entry.name] = build(entry.type, values)
        elif entry.name in values:
            arguments[entry.name] = as_tuples(values[entry.name])
    return section_type(**arguments)


def as_tuples(value):
    """JSON has lists only; fields hold tuples."""
    return tuple(map(as_tuples, value)) if isinstance(value, list | tuple) else value


def flag(name):
    return "--" + name.replace("_", "-")
