"""The rows of metrics.jsonl: their content, and the rows that a resumed run keeps.

docs/monitoring.md has every metric with its formula.
"""

import math
import mmap
import os

from moh_lm.cost.flops import computed_share, peak_flops
from moh_lm.data.files import make_own
from moh_lm.monitor.accumulator import ratio
from moh_lm.monitor.events import complete_rows, row_of
from moh_lm.monitor.ranks import slowest_rank
from moh_lm.units import each_float, rounded


def training_record(config, dataset, accumulator, step, rate, grad_norm, figures, ranks, device, flops):
    """Return the row of metrics.jsonl for the interval that ends after ``step``; its head metrics are rounded.

    figures: ``MetricsAccumulator.head_figures``. ranks: result of ``rank_figures``. flops: FLOPs per token, from
    ``flops_per_token`` of moh_lm.cost.flops.
    """
    run, losses, speed = config.run, accumulator.source_losses(), accumulator.tokens_per_second()
    data, memory = [figures.data for figures in ranks], [figures.memory for figures in ranks]
    balance = [loss for loss in figures["balance_loss"] if loss is not None] if figures else []
    model = config.model.after(accumulator.began(step, config))
    length = config.length_at(run.samples_after(step - 1))
    return {
        "step": step,
        "loss": accumulator.loss(),
        "load_balance_loss": ratio(sum(balance), len(balance)) if model.routed_layers() else 0.0,
        "learning_rate": rate,
        "grad_norm": grad_norm,
        "tokens": dataset.tokens_read(run.samples_after(step)),
        "consumed_samples": run.samples_after(step),
        "source_loss": losses,
        "source_bits_per_byte": bits_per_byte(losses, dataset.bytes_per_token()),
        "tokens_per_second": round(speed, 1),
        "skipped_steps": accumulator.skipped_steps,
        **{name: list(getattr(config.model, name)) for name in config.moving},
        **({"heads": rounded(figures)} if figures else {}),
        "runtime": {
            "seconds": rounded(accumulator.seconds_per_step()),
            "slowest_data": {"rank": data.index(max(data)), "seconds": rounded(max(data))},
            "slowest_rank": rounded(slowest_rank(ranks)._asdict()),
            "mfu": rounded(utilization(config, model, length, speed, len(ranks), device, figures or {}, flops)),
            "memory": {"rank": memory.index(max(memory)), "gib": rounded(max(memory) / 2**30)},
        },
    }


def utilization(config, model, length, tokens_per_second, world_size, device, figures, flops):
    """Return the MFU, {"dense", "active"}: ``flops`` over the peak of all devices; {} if the peak is unknown.

    length: of the parts into which sequences are cut.
    """
    peak = peak_flops(config.run, device)
    if peak is None:
        return {}
    active = dict(zip(figures["layer"], figures["active_heads"], strict=True)) if "active_heads" in figures else {}
    found, share = flops(model, length, active), computed_share(config.optimizer)
    return {kind: value * share * tokens_per_second / (peak * world_size) for kind, value in found.items()}


def bits_per_byte(losses, bytes_per_token):
    """Return {source: loss in bits over its bytes per token}, for sources whose bytes are known."""
    known = {name: size for name, size in bytes_per_token.items() if size}
    return {name: loss / math.log(2) / known[name] for name, loss in losses.items() if name in known}


def finite(value):
    """Return ``value`` with null in place of numbers that JSON cannot represent."""
    return each_float(value, lambda number: number if math.isfinite(number) else None)


def keep_rows(path, last_step):
    """Cut off the rows of ``path`` that the run will write again: those after ``last_step``, or all if it is 0. Returns
    the last row that is kept, or {}."""
    if not path.exists():
        return {}
    make_own(path)
    with open(path, "rb+") as file:
        end, row = end_of_rows(file, last_step) if last_step else (0, {})
        file.truncate(end)
    return row


def end_of_rows(file, last_step):
    """Return the offset in a file of rows after the last one up to ``last_step``, and that row, or 0 and {}.

    Only what follows that row is read: a file of a long run has gigabytes, and steps never decrease from one row to the
    next.
    """
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return 0, {}
    with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as text:
        while end:
            start = text.rfind(b"\n", 0, end - 1) + 1
            row = row_of(text[start:end])
            if row and row["step"] <= last_step:
                return end, row
            end = start
    return 0, {}


def last_step(path):
    """Return the largest step in the rows of ``path``, 0 without rows."""
    return max((row["step"] for _, row in complete_rows(path)), default=0)
