"""The configuration of a language model: its data, its batch and budget, and the whole run."""

import math
from dataclasses import dataclass, field, replace

from moh_lm.config.fields import as_tuples, build, option
from moh_lm.config.model import ModelConfig
from moh_lm.config.presets import SIZES, preset
from moh_lm.config.resolve import run_values, spread_over_ranks
from moh_lm.config.run import RunBase
from moh_lm.config.task import UNNAMED, TaskConfig
from moh_lm.units import quantity


@dataclass(frozen=True)
class DataConfig:
    """data: token shards and their mixture"""

    data_dir: str = option("", "directory written by data_prep/tokenize.py")
    data_mix: tuple[tuple[str, str], ...] = option(
        (), "NAME=WEIGHT for each source; weights need not sum to 1 (default: in proportion to tokens)"
    )
    validation_fraction: float = option(
        0.001,
        "share of every source that is held out for validation; unless it is 1, 2 or 5 times 0.0001, 0.001 or 0.01, a "
        "start reads the index of every shard on every rank",
    )
    packing: str = option(
        "concatenate",
        "concatenate: cut the joined documents of a source every --seq-length tokens; best_fit: put documents into "
        "rows so that few are cut",
        choices=("concatenate", "best_fit"),
    )
    reset_at_documents: bool = option(False, "restrict attention and prediction to tokens of the same document")
    seq_length_warmup: str = option(
        "",
        "cut every sequence into parts of LENGTH tokens that do not see each other, twice as long each time until they "
        "are whole after ITERS iterations",
        metavar="LENGTH:ITERS",
    )
    allow_data_change: bool = option(False, "resume with other shards or another mix than the checkpoint's")
    decay_mix: tuple[tuple[str, str], ...] = option(
        (), "NAME=WEIGHT for each source, used once the decay of --schedule wsd begins (default: no other mix)"
    )

    @property
    def length_warmup(self):
        """The (length, iterations) of --seq-length-warmup. Raises ValueError if it is absent or malformed."""
        length, _, iterations = self.seq_length_warmup.partition(":")
        return int(length), int(iterations)


@dataclass(frozen=True)
class RunConfig(RunBase):
    """run: batch, budget, precision, files"""

    seq_length: int = option(2048, "tokens per sequence")
    batch_tokens: int = option(
        4 * 2**20, "tokens per iteration over all ranks; K, M, G are powers of 1024", binary=True
    )
    batch_warmup: str = option(
        "",
        "begin with batches of BATCH tokens, twice as large each time until they are whole after TOKENS tokens; sizes "
        "as for --batch-tokens and --train-tokens",
        metavar="BATCH:TOKENS",
    )
    train_tokens: int | None = option(
        None,
        "training budget in tokens, rounded up to whole iterations; K, M, B, T are powers of 1000",
        binary=False,
        replaces="train_iters",
    )
    eval_samples: int = option(128, "held-out sequences that are evaluated per source")
    eval_tasks: str = option("", "file written by tools/evaluate_prepare.py with tasks to score at every evaluation")
    sample_prompts: tuple[str, ...] = option(
        (), "prompts that the model continues greedily at every evaluation", metavar="TEXT"
    )
    sample_tokens: int = option(40, "tokens generated per prompt, for --sample-prompts")
    window_strategy: str = option(
        "fixed",
        "fixed: windows as given by --window; sequence: half of --seq-length; entropy: adapt each layer's window to "
        "its attention entropy; the last two stay between --window-min and --window-max",
        choices=("fixed", "sequence", "entropy"),
    )
    window_min: int = option(512, "smallest window, for --window-strategy sequence and entropy")
    window_max: int = option(4096, "largest window, for --window-strategy sequence and entropy")
    attention_backend: str = option(
        "auto",
        "dense: compute all heads and scale them by their gates; triton, cpu_sparse: compute selected heads only; "
        "groups: the same by ordinary attention, for --routing-unit head_in_group; auto: whichever was measured to be "
        "faster, with groups in place of dense and triton for that unit",
        choices=("auto", "dense", "groups", "triton", "cpu_sparse"),
    )

    compile: bool = option(
        False,
        "compile each layer with torch.compile; the first step takes about a minute (launch scripts and presets do so "
        "on a GPU)",
    )
    fused_loss: bool = option(False, "compute loss and logit gradients with Triton kernels; they need a GPU")
    fused_router: bool = option(False, "compute routers and gates with Triton kernels; they need a GPU")
    fused_projections: bool = option(
        False, "compute queries, keys and values in one product, and gate and up of the MLP in another"
    )
    cuda_graph: bool = option(
        False, "launch forward pass, loss and backward pass of a micro-batch as one CUDA graph; it needs a GPU"
    )

    @property
    def global_batch_size(self):
        """The number of sequences per iteration over all ranks."""
        return self.batch_tokens // max(1, self.seq_length)

    @property
    def tokens_per_iteration(self):
        return self.global_batch_size * self.seq_length

    @property
    def first_batches(self):
        """(tokens of the first batch, tokens before the first whole one) of --batch-warmup. Raises ValueError."""
        batch, _, tokens = self.batch_warmup.partition(":")
        return quantity(1024)(batch), quantity(1000)(tokens)

    @property
    def stages(self):
        try:
            batch, tokens = self.first_batches
            size = batch // self.seq_length
            doublings = doublings_between(size, self.global_batch_size)
        except (ValueError, ZeroDivisionError):  # there is none, or moh_lm.checks refuses it
            return super().stages
        found = [(0, 0, size)]
        for number in range(1, doublings + 1):
            first, before, last = found[-1]
            begins = -(-tokens * number // (doublings * self.seq_length))
            steps = max(0, math.ceil((begins - before) / last))
            found.append((first + steps, before + steps * last, min(self.global_batch_size, size << number)))
        return found

    @property
    def batch_given(self):
        warmup = f" with --batch-warmup {self.batch_warmup}" if self.batch_warmup else ""
        return f"--batch-tokens {self.batch_tokens}{warmup}"


@dataclass(frozen=True, kw_only=True)
class Config(TaskConfig):
    """A whole run of a language model. moh_lm.checks says whether it can start."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    run: RunConfig = field(default_factory=RunConfig)
    program = UNNAMED
    about = "Pretrain a Mixture-of-Head language model. The scripts in launch/ hold the paper's values."
    presets, preset = SIZES, staticmethod(preset)
    of_presets = "sets sizes, numbers of heads, batch, budget and learning rate, unless other flags do"
    scripts_have_sizes = True
    unit, sample_name = "nats per token", "sequences"
    of_data = ("reset_at_documents", "seq_length_warmup")

    def half_window(self):
        """Return the window of --window-strategy sequence, in tokens."""
        return min(max(self.run.seq_length // 2, self.run.window_min), self.run.window_max)

    @property
    def seq_length(self):
        return self.run.seq_length

    def length_at(self, samples):
        """Return the length of the parts in the step after ``samples`` samples; see --seq-length-warmup."""
        whole = self.run.seq_length
        if not self.data.seq_length_warmup:
            return whole
        length, iterations = self.data.length_warmup
        doublings = doublings_between(length, whole)
        done = self.run.iterations(samples) * doublings // iterations
        return min(whole, length << min(done, doublings))

    @property
    def of_loss(self):
        counted = self.model.routed_layers() and self.model.heads.load_balance_scope == "micro_batch"
        return ("z_loss", "micro_batch_size") if counted else ("z_loss",)

    @property
    def moving(self):
        return ("window",) if self.run.window_strategy == "entropy" else ()

    def idle_fields(self):
        turns = "rotary" in self.model.position
        return {
            "without rotary positions": [] if turns else ["rope_theta"],
            "without --sample-prompts": [] if self.run.sample_prompts else ["sample_tokens"],
        }

    def decay_begins(self):
        """Return the first sample of --decay-mix; None without one."""
        if not self.data.decay_mix or self.optimizer.schedule != "wsd" or self.run.train_iters is None:
            return None
        stable = self.run.train_iters - self.optimizer.decay(self.run.train_iters)
        return self.run.samples_after(stable)

    @classmethod
    def from_dict(cls, values):
        tp, cp = (values.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "context"))
        if min(tp, cp) > 0 and tp * cp > 1 and not values.get("num_active_routed_heads"):
            shared = as_tuples(values.get("num_shared_heads", ()))
            values = {**values, **spread_over_ranks(build(ModelConfig, values), shared, tp, cp)}
        return super().from_dict(values)

    def resolved(self):
        """Return this configuration with its budget in iterations and tokens, and the windows of --window-strategy."""
        model, run = self.model, replace(self.run, **run_values(self.run))
        if run.window_strategy == "sequence" and not any(model.window):
            model = replace(model, window=(self.half_window(),))
        return replace(self, model=model, run=run)


def doublings_between(first, last):
    """Return how often a number doubles from ``first`` until it is at least ``last``."""
    return (math.ceil(last / first) - 1).bit_length()
