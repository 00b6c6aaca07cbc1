"""What a run says about itself: one console line per interval, ``metrics.jsonl`` and TensorBoard.

Sums over the steps of an interval become means when it ends. The sums are part of a checkpoint, so that an interval
in which a run was stopped and resumed reads like any other. Rank 0 writes; a resumed run first drops what it wrote
after its checkpoint.
"""

import json
import math
import sys
import time
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

from moh_lm.journal import Rows


class Interval:
    """Sums of ``StepResult``s since the last line of the log; the same on every rank."""

    def __init__(self, num_sources, routed_layers, device):
        self.layers = routed_layers
        self.losses = torch.zeros(num_sources, 2, dtype=torch.float64, device=device)
        self.widths = [1 + layer.num_routed for layer in routed_layers]
        self.routers = torch.zeros(sum(self.widths), dtype=torch.float64, device=device)
        self.skipped_steps = 0
        self.tokens = 0  # in the steps that were not skipped, also those that have no label
        self.seconds = self.timed_tokens = 0  # of this process only

    def add(self, result, seconds, tokens):
        if result.skipped:
            self.skipped_steps += 1
        else:
            self.tokens += tokens
            self.losses += result.losses
            self.routers += result.routers
        self.seconds += seconds
        self.timed_tokens += tokens

    def clear(self):
        self.losses.zero_()
        self.routers.zero_()
        self.skipped_steps = self.tokens = self.seconds = self.timed_tokens = 0

    def tokens_per_second(self):
        return round(ratio(self.timed_tokens, self.seconds), 1)

    def loss(self):
        """Mean training loss per token."""
        return ratio(*self.losses.sum(0).tolist())

    def source_losses(self, names):
        """Mean training loss per token of every source that was seen."""
        rows = zip(names, self.losses.tolist(), strict=True)
        return {name: total / tokens for name, (total, tokens) in rows if tokens}

    def balance_loss(self, seq_length):
        """L_b of Eq. 8: the mean over layers and sequences."""
        losses = [row[0].item() for row in self.router_rows()]
        sequences = self.tokens / seq_length
        return ratio(sum(losses), len(losses) * sequences) if losses else 0.0

    def head_loads(self):
        """(layer, head, share of tokens that selected it) for every routed head."""
        for layer, row in zip(self.layers, self.router_rows(), strict=True):
            for index, count in enumerate(row[1:].tolist()):
                yield layer.index, layer.num_shared + index, ratio(count, self.tokens)

    def router_rows(self):
        return self.routers.split(self.widths) if self.widths else ()

    def state(self):
        """JSON-able; ``restore`` takes it back."""
        return {
            "losses": self.losses.tolist(),
            "routers": self.routers.tolist(),
            "tokens": self.tokens,
            "skipped_steps": self.skipped_steps,
        }

    def restore(self, state):
        self.losses.copy_(torch.tensor(state["losses"], dtype=torch.float64))
        self.routers.copy_(torch.tensor(state["routers"], dtype=torch.float64))
        self.tokens = state["tokens"]
        self.skipped_steps = state["skipped_steps"]


class RunLog:
    """The writer of rank 0: console, ``directory``/metrics.jsonl, ``directory``/tensorboard.

    first_step: iterations done when the run starts or resumes; anything logged for later ones is dropped.
    """

    def __init__(self, directory, first_step, train_iters):
        self.first_step = first_step
        self.train_iters = train_iters
        self.started = time.perf_counter()
        path = Path(directory) / "metrics.jsonl"
        keep_rows(path, first_step)
        self.rows = Rows(path)
        purge_step = first_step + 1 if first_step else 0
        self.board = SummaryWriter(str(Path(directory) / "tensorboard"), purge_step=purge_step)

    def training(self, row, head_loads):
        """Log an interval. row: the object for metrics.jsonl. head_loads: (layer, head, share of tokens)."""
        step = row["step"]
        self.write(row)
        for key in ("loss", "load_balance_loss", "learning_rate", "grad_norm"):
            self.scalar(f"train/{key}", row[key], step)
        for name, loss in row["source_loss"].items():
            self.scalar(f"train_loss/{name}", loss, step)
        self.scalar("runtime/tokens_per_second", row["tokens_per_second"], step)
        for layer, head, load in head_loads:
            self.scalar(f"heads/layer_{layer:02d}/load_head_{head:02d}", load, step)
        seconds_per_step = (time.perf_counter() - self.started) / (step - self.first_step)
        skipped = f"  skipped {row['skipped_steps']}" if row["skipped_steps"] else ""
        print(
            f"step {step:>{len(str(self.train_iters))}}/{self.train_iters}"
            f"  loss {row['loss']:.4f}  balance {row['load_balance_loss']:.4f}  lr {row['learning_rate']:.3e}"
            f"  grad norm {row['grad_norm']:.3f}  {row['tokens_per_second']:,.0f} tokens/s{skipped}"
            f"  {duration((self.train_iters - step) * seconds_per_step)} left",
            flush=True,
        )

    def evaluation(self, step, losses):
        """Log the validation loss of each source, and its exponential, the perplexity of a token."""
        mean = sum(losses.values()) / len(losses)
        perplexity = {name: perplexity_of(loss) for name, loss in losses.items()}
        self.write({"step": step, "evaluation": losses, "evaluation_mean": mean, "perplexity": perplexity})
        for name, loss in losses.items():
            self.scalar(f"validation_loss/{name}", loss, step)
            self.scalar(f"validation_perplexity/{name}", perplexity[name], step)
        self.scalar("validation/mean_of_sources", mean, step)
        shown = "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        print(f"validation loss after {step} steps: {shown}", flush=True)

    def tasks(self, step, scores):
        """Log the scores of tasks: {task: {metric: share}}."""
        self.write({"step": step, "tasks": scores})
        for name, metrics in scores.items():
            for metric, value in metrics.items():
                self.scalar(f"tasks/{name}/{metric}", value, step)
        shown = "  ".join(f"{name} {list(metrics.values())[-1]:.1%}" for name, metrics in scores.items())
        print(f"tasks after {step} steps: {shown}", flush=True)

    def scalar(self, tag, value, step):
        try:
            if self.board is not None:
                self.board.add_scalar(tag, value, step)
        except OSError as error:  # of its thread, which has ended by it
            print(f"tensorboard: {error.strerror}; no more of it until the run is started again", file=sys.stderr)
            self.board = None

    def write(self, row):
        self.rows.add(finite(row))

    def close(self):
        if self.board is not None:
            self.board.close()


def perplexity_of(loss):
    return math.exp(loss) if loss < 700 else math.inf  # which ``finite`` writes as null


def finite(value):
    """``value`` with null for numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def keep_rows(path, last_step):
    """Drop the rows of ``path`` that the run is about to write again: those after ``last_step``, or all if it is 0."""
    if not path.exists():
        return
    if last_step == 0:
        path.unlink()
        return
    rows = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [row for row in rows if complete(row) and json.loads(row)["step"] <= last_step]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(row + "\n" for row in kept), encoding="utf-8")
    temporary.replace(path)


def last_step(path):
    """The largest step of the rows of ``path``; 0 without any."""
    rows = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return max((json.loads(row)["step"] for row in rows if complete(row)), default=0)


def complete(row):
    """Whether a line was written to its end."""
    try:
        return isinstance(json.loads(row)["step"], int)
    except (ValueError, TypeError, KeyError):
        return False


def ratio(total, count):
    return total / count if count else math.nan


def duration(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}h" if days else f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s"
