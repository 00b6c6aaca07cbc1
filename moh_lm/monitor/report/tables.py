"""The tables of a run report: summary of the run, losses, settings that differ, samples and events."""

from itertools import groupby

import numpy as np

from moh_lm.config import Config
from moh_lm.cost.description import describe_heads
from moh_lm.monitor.report.curves import PARTS
from moh_lm.monitor.report.series import in_words
from moh_lm.units import rounded, short, time_left

MOST_EVENTS = 300  # rows of the table; the curves show all events
IMAGE_MODELS = {"vit": "ViT", "dit": "DiT"}
MOST_ALIKE = 3  # consecutive events of a kind that have a row each


def title(run):
    """Return a title such as "quickstart: MoH with 3.4M parameters, 500 steps"."""
    model = run.config.model
    form = "MoH" if model.routed_layers() else "gated heads" if model.gated_layers() else "dense attention"
    if model.heads.head_selection == "static":
        form = "static heads"
    of_text = isinstance(run.config, Config)
    what = form if of_text else f"{IMAGE_MODELS[run.config.kind]}, {form}"
    return f"{run.name}: {' with '.join([what, *size(run)])}, {run.config.run.train_iters:,} steps"


def size(run):
    """Return ["3.4M parameters"], or [] for a run that did not record its start."""
    total = run.started.get("parameters")
    number = f"{total / 1e6:.3g}M" if total and 1e6 <= total < 1e9 else short(total or 0)
    return [f"{number} parameters"] if total else []


def summary_rows(runs):
    """Return rows [what, then its value in each run]."""
    columns = [summary(run) for run in runs]
    return [[rows[0][0], *(value for _, value in rows)] for rows in zip(*columns, strict=True)]


def summary(run):
    """Return [(what, value)] of one run, with the same entries for every run of a program."""
    config, model, started = run.config, run.config.model, run.started
    of_text = isinstance(config, Config)
    heads = " to ".join(map(str, sorted({min(model.head_counts), max(model.head_counts)})))
    shape = f"{model.num_layers} layers of {heads} heads, width {model.hidden_size}"
    tokens = run.tokens_at(run.step), run.tokens_at(config.run.train_iters)
    return [
        ("state", run.state),
        ("model", ": ".join([*size(run), shape])),
        ("heads", describe_heads(model) if of_text else f"{model.active_share():.1%} of the heads per token"),
        ("tokens", " of ".join(map(short, tokens))),
        ("held-out loss", losses_told(run)),
        ("speed", f"{run.speed:,.0f} tokens/s" if run.speed else ""),
        ("time of training", time_left(run.seconds)),
        ("first started", run.events[0].get("time", "") if run.events else ""),
        ("machine", f"{started['ranks']} x {started['device']}" if started else ""),
        ("layout", layout(config)),
        ("software", software_of(started)),
        ("skipped steps", str(run.skipped)),
    ]


def losses_told(run):
    """Return the mean over the sources in the first evaluation and in the last one."""
    rows = [row for row in (run.first_evaluation, run.last_evaluation) if row and row["evaluation_mean"] is not None]
    found = {row["step"]: f"{row['evaluation_mean']:.4f} after step {row['step']:,}" for row in rows}
    return ", ".join(found.values()) + f" ({run.config.unit})" * bool(found)


def layout(config):
    parallel = config.parallel
    degrees = {
        "tensor": parallel.tensor_parallel_size, "pipeline": parallel.pipeline_parallel_size,
        "context": parallel.context_parallel_size,
    }  # fmt: skip
    parts = [f"{name} parallel {size}" for name, size in degrees.items() if size > 1]
    return ", ".join([*parts, f"ZeRO-{parallel.zero_stage}", config.run.precision])


def time_rows(run):
    """Return rows [part of a step, its seconds, its share], means over the steps of the run on rank 0."""
    means = {}
    for key in PARTS:
        steps, values = run.curves[f"seconds/{key}"]  # the means of one or more intervals; the last may be shorter
        if len(values):
            begun = max(0, run.first_row["step"] - run.config.run.log_interval)
            means[key] = np.average(values, weights=np.maximum(np.diff(steps, prepend=begun), 1))
    whole = sum(means.values())
    return [[PARTS[key], f"{mean:.4f}", f"{mean / whole:.1%}"] for key, mean in means.items() if whole]


def loss_rows(evaluations):
    """Return rows [source, then (loss, bits per byte) of each evaluation], none without evaluations."""
    sources = sorted({source for row in evaluations for source in row.get("evaluation", {})})
    rows = [[source, *(pair(row, source) for row in evaluations)] for source in sources]
    means = [f"{row['evaluation_mean']:.4f}" if row.get("evaluation_mean") is not None else "" for row in evaluations]
    steps = [f"{row['step']:,}" if row else "" for row in evaluations]
    return [*rows, ["mean", *means], ["after step", *steps]] if rows else []


def pair(row, source):
    loss, bits = (row.get(key, {}).get(source) for key in ("evaluation", "evaluation_bits_per_byte"))
    return ("" if loss is None else f"{loss:.4f}") + ("" if bits is None else f" ({bits:.4f})")


def differences(runs):
    """Return rows [setting, then its value in each run] for settings that differ between runs."""
    settings = [run.config.to_dict() for run in runs]
    rows = [[key, *(in_words(values[key]) for values in settings)] for key in settings[0]]
    return [row for row in rows if len(set(row[1:])) > 1]


def sample_rows(runs):
    """Return rows (prompt, run, step, continuation at that step), sorted by prompt.

    runs: {name: ``RunRecord``}.
    """
    rows = [(row["prompt"], name, row["step"], row["text"]) for name, run in runs.items() for row in run.samples]
    return sorted(rows, key=lambda row: row[:3])


def software_of(started):
    """Return the versions and the commit of a ``started`` event in words, "" for {}."""
    versions = [f"{name} {version}" for name, version in started.get("versions", {}).items()]
    return ", ".join(versions + ([f"commit {started['commit'][:9]}"] if "commit" in started else []))


def event_rows(events):
    """Return the last ``MOST_EVENTS`` rows (time, step, event, its facts in words).

    Consecutive skipped steps share a row, and so do other events of a kind if there are more than a few.
    """
    found = []
    for (name, *_), alike in groupby(events, lambda event: (event["event"], event.get("alarm"), "undone" in event)):
        same = list(alike)
        joined = len(same) > (1 if name == "skipped" else MOST_ALIKE)
        found += [same] if joined else [[event] for event in same]
    return [(same[0].get("time", ""), same[0]["step"], same[0]["event"], told(same)) for same in found[-MOST_EVENTS:]]


def told(same):
    """Return the facts of an event, or of several of a kind, in words."""
    what, last = "steps" if same[0]["event"] == "skipped" else "events", same[-1]
    several = f"{len(same)} {what} up to step {last['step']}; the last: " if len(same) > 1 else ""
    return several + facts_of(last)


def facts_of(event):
    """Return facts in words, such as "reason: spike"."""
    told = {key: value for key, value in event.items() if key not in ("time", "event", "step")}
    facts = {key: rounded(value) for key, value in told.items() if value not in (None, "", [], {})}
    return "; ".join(f"{key}: {changed(value)}" for key, value in facts.items())


def changed(value):
    """Return a fact in words; for {setting: [before, now]} such as "learning_rate 0.001, now 0.002"."""
    if not isinstance(value, dict) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value.values()):
        return in_words(value)
    return ", ".join(f"{name} {in_words(before)}, now {in_words(now)}" for name, (before, now) in value.items())
