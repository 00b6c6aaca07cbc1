"""Writes what a run reports: config.json, a console line per interval, metrics.jsonl, TensorBoard, Weights & Biases.

Rank 0 writes; a resumed run first drops rows that were written after its checkpoint. docs/monitoring.md has every
metric with its formula. TensorBoard sorts tags by name, and their names put the loss first.
"""

import math
import time
from pathlib import Path

from moh_lm.data.files import write_json
from moh_lm.monitor.console import show_progress, styled
from moh_lm.monitor.events import Rows
from moh_lm.monitor.head_map import head_map
from moh_lm.monitor.record import bits_per_byte, finite, keep_rows
from moh_lm.monitor.writers import Writers
from moh_lm.units import rounded, time_left, wrapped

SHOWN_HEADS = (
    "entropy", "unused", "overused", "a1", "balance_loss", "gate_mean", "gate_rms", "active_heads",
    "tensor_parallel_imbalance", "context_parallel_imbalance",
)  # fmt: skip
LINES = 20  # of intervals from one head map to the next, and from one line of names to the next


class RunLog:
    """The log of rank 0: console, ``directory``/metrics.jsonl, and ``Writers``.

    first_step: iterations done when the run starts or resumes; rows of later ones are dropped.
    """

    def __init__(self, directory, first_step, config):
        self.first_step = first_step
        self.run, self.train_iters = config.run, config.run.train_iters
        self.model, self.head_curves = config.model, config.run.head_curves
        self.started = time.perf_counter()
        self.step_width = 2 * len(str(self.train_iters)) + 1
        self.printed = 0
        paths = [Path(directory) / name for name in ("metrics.jsonl", "samples.jsonl")]
        last = [keep_rows(path, first_step) for path in paths]  # a row of training has its loss
        self.is_evaluated = any(row.get("step") == first_step and "loss" not in row for row in last)
        write_json(Path(directory) / "config.json", config.to_dict())  # last: a resume judges old rows by it
        self.rows, self.sample_rows = map(Rows, paths)
        self.writers = Writers(directory, first_step, config.run.wandb, config.to_dict())

    def training(self, record, figures):
        """Log an interval. record: ``training_record``. figures: ``head_figures``, or None."""
        step = record["step"]
        self.write(record)
        runtime = record["runtime"]
        scalars = {"loss/train": record["loss"], "loss/load_balance": record["load_balance_loss"]}
        scalars |= {f"optimization/{key}": record[key] for key in ("learning_rate", "grad_norm", "skipped_steps")}
        scalars |= {f"loss_train/{name}": loss for name, loss in record["source_loss"].items()}
        scalars |= {f"loss_train_bits_per_byte/{name}": bits for name, bits in record["source_bits_per_byte"].items()}
        scalars["runtime/tokens_per_second"] = record["tokens_per_second"]
        scalars |= {f"runtime/mfu_{kind}": share for kind, share in runtime["mfu"].items()}
        scalars |= {f"runtime/seconds_{part}": seconds for part, seconds in runtime["seconds"].items()}
        scalars["runtime/seconds_data_slowest"] = runtime["slowest_data"]["seconds"]
        scalars["runtime/seconds_rank_slowest"] = runtime["slowest_rank"]["seconds"]
        scalars["runtime/seconds_rank_median"] = runtime["slowest_rank"]["median"]
        scalars["runtime/memory_gib"] = runtime["memory"]["gib"]
        scalars |= {f"window/layer_{index:02d}": width for index, width in enumerate(record.get("window", ()))}
        self.writers.scalars(scalars | head_scalars(self.model, figures, self.head_curves), step)
        if step % (LINES * self.run.log_interval) == 0 or step == self.train_iters:
            self.head_maps(figures, step)  # drawing takes longer than the rest of the log, and all ranks wait for it
        print("\n".join(self.lines(record)), flush=True)

    def head_maps(self, figures, step):
        """Log a picture of all layers and heads for the whole mix, and for each source."""
        if figures and any(figures["load"]):
            columns = max(self.model.head_counts) // self.model.heads_per_expert
            sources = {f"routed_heads_load_of_source/{name}": loads for name, loads in figures["source_load"].items()}
            for tag, loads in {"routed_heads_load/all": figures["load"], **sources}.items():
                picture = head_map(self.model.gated_layers(), loads, self.model.num_layers, columns)
                self.writers.picture(tag, picture, step)

    def lines(self, record):
        """Return the console's line of an interval, below the names of the columns in the first of ``LINES``."""
        step, mfu = record["step"], record["runtime"]["mfu"]
        cells = (
            ("step", f"{step}/{self.train_iters}", self.step_width),
            ("loss", f"{record['loss']:.4f}", 9),
            ("balance", f"{record['load_balance_loss']:.4f}", 8),
            ("lr", f"{record['learning_rate']:.2e}", 10),
            ("norm", f"{record['grad_norm']:#.3g}", 9),
            ("skip", record["skipped_steps"], 5),
            ("tokens/s", f"{record['tokens_per_second']:,.0f}", 11),
            ("MFU", f"{mfu['dense']:.0%}" if mfu else "-", 6),
            ("left", time_left(self.seconds_left(step)), 9),
        )
        names, figures = ("".join(f"{cell[place]:>{cell[2]}}" for cell in cells) for place in (0, 1))
        self.printed += 1
        return [styled(names, "head"), figures] if self.printed % LINES == 1 else [figures]

    def say(self, step, text, style=None, break_words=False):
        """Print a text that belongs to ``step``, aligned with the lines of intervals."""
        begin = f"{step}/{self.train_iters}".rjust(self.step_width) + "  "
        text = wrapped(begin + text, len(begin), break_words)
        print(styled(text, style) if style else text, flush=True)

    def restart_clock(self):
        """Count the time left from here on, because it is that of steps only."""
        self.started = time.perf_counter()

    def progress(self, step):
        """Show on a quiet terminal how far the run has come."""
        left = time_left(self.seconds_left(step))
        show_progress(step, self.train_iters, self.first_step, time.perf_counter() - self.started, left)

    def seconds_left(self, step):
        """Return the seconds to the end of the run if samples are read as fast as since its start."""
        first, done, last = map(self.run.samples_after, (self.first_step, step, self.train_iters))
        return (time.perf_counter() - self.started) / (done - first) * (last - done)

    def evaluation(self, step, losses, bytes_per_token=None, sinks=None):
        """Log the validation loss of each source, and for text also the perplexity and the bits per byte. sinks:
        {source: ``Sinks.means``}, for text."""
        record = {"step": step, "evaluation": losses, "evaluation_mean": sum(losses.values()) / len(losses)}
        scalars = {f"loss_validation/{name}": loss for name, loss in losses.items()}
        scalars["loss/validation"] = record["evaluation_mean"]
        if bytes_per_token is not None:
            perplexity = {name: math.inf if loss >= 700 else math.exp(loss) for name, loss in losses.items()}
            bits = bits_per_byte(losses, bytes_per_token)
            record |= {"perplexity": perplexity, "evaluation_bits_per_byte": bits}  # an infinite one is null
            scalars |= {f"loss_validation_perplexity/{name}": value for name, value in perplexity.items()}
            scalars |= {f"loss_validation_bits_per_byte/{name}": value for name, value in bits.items()}
        if sinks:
            record["sink"] = rounded(sinks)
            for name, layers in sinks.items():
                scalars |= {f"sink/layer_{index:02d}/{name}": share for index, share in enumerate(layers)}
        self.write(record)
        self.writers.scalars(scalars, step)
        parts = "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        mean = f"mean {record['evaluation_mean']:.4f}  " if len(losses) > 1 else ""
        self.say(step, f"validation loss  {mean}{parts}", "result")

    def tasks(self, step, scores, title="tasks"):
        """Log the scores of tasks: {task: {metric: share}}."""
        self.write({"step": step, title: scores})
        scalars = {
            f"{title}/{name}/{metric}": value for name, found in scores.items() for metric, value in found.items()
        }
        self.writers.scalars(scalars, step)
        shown = "  ".join(f"{name} {list(metrics.values())[-1]:.1%}" for name, metrics in scores.items())
        self.say(step, f"{title}  {shown}", "result")

    def samples(self, step, texts):
        """Log how the model continues each prompt: {prompt: text}."""
        for prompt, text in texts.items():
            self.sample_rows.add({"step": step, "prompt": prompt, "text": text})
            self.say(step, f"sample: {prompt!r} continues with {text!r}", break_words=True)
        text = "\n\n".join(f"**{prompt}**{text}" for prompt, text in texts.items())
        self.writers.draw("add_text", "samples", text, step)

    def alarm(self, step, text):
        """Print a line about alarms and send it to the writers; events.jsonl has the facts."""
        text = f"step {step}: {text}"
        print(styled(wrapped(text, 2), "warning"), flush=True)
        self.writers.alarm(text, step)

    def write(self, record):
        self.rows.add(finite(record))

    def close(self, code=0):
        """Close the writers. code: 0 unless the run failed."""
        self.writers.close(code)


def head_scalars(model, figures, with_loads):
    """Return {TensorBoard's tag: value} of ``head_figures``: metrics of each layer, and with ``with_loads`` the load of
    each head."""
    found = {}
    for place, layer in enumerate(model.gated_layers() if figures else ()):
        tag = f"routed_heads/layer_{layer.index:02d}"
        numbered = zip(layer.routed_numbers, figures["load"][place], strict=True) if with_loads else ()
        for number, load in numbered:
            found[f"{tag}/load_{layer.unit}_{number:02d}"] = load
        for key in SHOWN_HEADS:
            if key in figures and figures[key][place] is not None:
                found[f"{tag}/{key}"] = figures[key][place]
    return found
