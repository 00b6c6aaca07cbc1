"""The page of a run, or of several that are compared: one HTML file with everything in it. page.html is the template.

matplotlib and Jinja2 come with the extra ``plot``.
"""

import os
from itertools import groupby
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import colormaps

from moh_lm.config import Config
from moh_lm.data.files import publish
from moh_lm.monitor.record import rounded
from moh_lm.monitor.report import pictures
from moh_lm.monitor.report.series import HEAD_FIGURES, RunRecord, written
from moh_lm.units import short, time_left, words

MOST_EVENTS = 300  # rows of the table; the curves have all
MOST_ALIKE = 3  # events of a kind that follow one another and have a row each
QUIET = ("saved",)  # events that are not worth a row
MOST_NAMED = 8  # layers in a legend


def write_page(directories, output, config_type=Config, with_png=False):
    """Write the report of the runs at ``output``, an HTML file, and each picture as PNG beside it; the files written.

    config_type: of their configurations. Raises ConfigError if a directory is not that of a run, OSError if a file
    cannot be written.
    """
    runs = [RunRecord(directory, config_type) for directory in directories]
    figures = figures_of_run(runs[0]) if len(runs) == 1 else figures_of_comparison(runs)
    has_bits = any(run.last_evaluation and "evaluation_bits_per_byte" in run.last_evaluation for run in runs)
    drawn = {name: Markup(pictures.svg(figure, name)) for name, (_, figure) in figures.items()}  # noqa: S704 - ours
    page = template_beside(__file__).render(
        runs=runs,
        names=names_of(runs),
        compared=[
            [name, *(value for _, value in summary(run))] for name, run in zip(names_of(runs), runs, strict=True)
        ],
        figures=[(name, title, drawn[name]) for name, (title, _) in figures.items()],
        summary=[summary(run) for run in runs],
        losses=loss_rows(runs),
        measure=runs[0].config.unit + (" (bits per byte)" if has_bits else ""),
        differences=differences(runs),
        samples=sample_rows(runs),
        traces=[(os.path.relpath(path, Path(output).parent), path.name) for run in runs for path in run.traces],
        events=event_rows([event for event in runs[0].events if event["event"] not in QUIET]),
        left_out=[f"{run.directory / name}: {count}" for run in runs for name, count in run.left_out.items()],
        settings=[(key, written(value)) for key, value in runs[0].config.to_dict().items()],
    )
    files = {Path(output): page.encode(errors="replace")}  # a path may have bytes that are no text
    if with_png:
        stem = Path(output).name.removesuffix(".html")  # a name such as rate-0.5 has no other ending
        files |= {Path(output).with_name(f"{stem}.{name}.png"): pictures.png(of) for name, (_, of) in figures.items()}
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        publish(path, content)
    return list(files)


def template_beside(file, **filters):
    """page.html in the folder of ``file``, a template."""
    loader, blocks = FileSystemLoader(Path(file).parent), dict(trim_blocks=True, lstrip_blocks=True)
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **blocks)
    found.filters.update(filters)
    return found.get_template("page.html")


def figures_of_run(run):
    """{name: (title, Figure)} of one run, in the order of the page."""
    marks = [(event["step"], event["event"]) for event in run.standing_events() if event["event"] in pictures.MARKS]
    marks = [(step, event) for step, event in marks if step <= run.step]  # the rows end there
    curves = run.curves
    found = {"loss": ("Loss", pictures.lines(by_source(run, "loss/", "validation/"), run.config.unit, marks))}
    if "accuracy" in curves:
        shown = {"top-1": (*curves["accuracy"], {"marker": "o"})}
        found["accuracy"] = "Accuracy of held-out images", pictures.lines(shown, "share of images", marks)
    if bits := by_source(run, "bits/", "validation_bits/"):
        found["bits"] = "Bits per byte of text", pictures.lines(bits, "bits per byte", marks)
    rate = {"learning rate": (*curves["learning_rate"], {})}
    found["rate"] = "Learning rate", pictures.lines(rate, "of the last step of an interval", floor=0)
    norms = {"mean": (*curves["grad_norm"], {}), "largest": (*curves["grad_norm_max"], {"linewidth": 0.6})}
    found["norm"] = "Gradient norm", pictures.lines(norms, "before clipping", marks, logarithmic=True)
    speed = {"tokens per second": (*curves["tokens_per_second"], {})}
    found["speed"] = "Speed", pictures.lines(speed, "tokens per second", marks, floor=0)
    if np.any(curves["rank/seconds"][1] > curves["rank/median"][1]):
        ranks = {"slowest rank": (*curves["rank/seconds"], {}), "median of ranks like it": (*curves["rank/median"], {})}
        found["ranks"] = "Own work of a rank in a step", pictures.lines(ranks, "seconds", marks, floor=0)
    parts = {name.partition("/")[2]: of for name, of in curves.items() if name.startswith("seconds/") and len(of[0])}
    if parts:
        found["step"] = "Parts of a step", pictures.stack(parts, "seconds")
    if run.loads:
        found["load"] = "Head load", pictures.load_map(run.loads)
    for key, of_layers in run.head_figures.items():
        found[key] = HEAD_FIGURES[key], pictures.lines(layer_lines(of_layers), "mean of a layer", marks)
    return found


def by_source(run, training, validation):
    """Lines of each source in its colour: of the training, and points of the held-out samples."""
    names = [name.removeprefix(training) for name in run.curves if name.startswith(training)]
    found = {}
    for index, name in enumerate(names):
        colour = pictures.COLOURS[index % len(pictures.COLOURS)]
        found[name] = (*run.curves[training + name], {"color": colour})
        if validation + name in run.curves:
            style = {"color": colour, "marker": "o", "markersize": 3.5, "linestyle": "--", "linewidth": 0.6}
            found[f"{name}, held out"] = (*run.curves[validation + name], style)
    return found


def layer_lines(of_layers):
    """Lines of layers from dark to light; only a few of many are named."""
    count, found = len(of_layers), {}
    named = {round(place * (count - 1) / (MOST_NAMED - 1)) for place in range(MOST_NAMED)}
    for place, (layer, of) in enumerate(of_layers.items()):
        shown = count <= MOST_NAMED or place in named
        colour = colormaps["viridis"](0.1 + 0.8 * place / max(1, count - 1))
        found[f"layer {layer}"] = (*of, {"color": colour, **({} if shown else {"label": "_"})})
    return found


def figures_of_comparison(runs):
    """{name: (title, Figure)}: one line for each run."""
    unit = runs[0].config.unit
    wanted = {
        "validation": ("Loss on held-out samples, mean over sources", unit, {"marker": "o", "markersize": 3}),
        "loss": ("Loss of training", unit, {}),
        "grad_norm": ("Gradient norm", "before clipping", {}),
        "tokens_per_second": ("Speed", "tokens per second", {}),
    }
    found = {}
    for key, (title, label, style) in wanted.items():
        series = {name: (*run.curves[key], style) for name, run in zip(names_of(runs), runs, strict=True)}
        if any(len(steps) for steps, _, _ in series.values()):
            found[key] = title, pictures.lines(series, label, logarithmic=key == "grad_norm")
    return found


def names_of(runs):
    """The runs' names; with their directory's where two are alike."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.directory) for name, run in zip(names, runs, strict=True)]


def summary(run):
    """[(what, value)] of one run."""
    model = run.config.model
    heads = f"{words(model.num_attention_heads)} heads"
    if model.routed_layers():
        heads += f", {model.heads.head_selection} with routing {model.heads.routing}"
    elif model.gated_layers():
        heads += f", each with a gate of {model.heads.routing}"
    return [
        ("state", run.state),
        ("model", f"{model.num_layers} layers of {heads}, width {model.hidden_size}"),
        ("tokens", f"{short(run.tokens_at(run.step))} of {short(run.tokens_at(run.config.run.train_iters))}"),
        ("time of training", time_left(run.seconds)),
        ("skipped steps", str(run.skipped)),
    ]


def loss_rows(runs):
    """[source, then (loss, bits per byte) of each run] of the last evaluations."""
    last = [run.last_evaluation or {} for run in runs]
    sources = sorted({source for row in last for source in row.get("evaluation", {})})
    rows = [[source, *(pair(row, source) for row in last)] for source in sources]
    means = [f"{row['evaluation_mean']:.4f}" if row.get("evaluation_mean") is not None else "" for row in last]
    steps = [f"{row['step']:,}" if row else "" for row in last]
    return [*rows, ["mean", *means], ["after step", *steps]] if rows else []


def pair(row, source):
    loss, bits = (row.get(key, {}).get(source) for key in ("evaluation", "evaluation_bits_per_byte"))
    return ("" if loss is None else f"{loss:.4f}") + ("" if bits is None else f" ({bits:.4f})")


def differences(runs):
    """[setting, then its value in each run] where not all are the same."""
    settings = [run.config.to_dict() for run in runs]
    rows = [[key, *(written(values[key]) for values in settings)] for key in settings[0]]
    return [row for row in rows if len(set(row[1:])) > 1]


def sample_rows(runs):
    """(prompt, run, step, what its checkpoint makes of the prompt), so that those of a prompt stand together."""
    found = [(row, name) for name, run in zip(names_of(runs), runs, strict=True) for row in run.samples]
    rows = [(row["prompt"], name, row["step"], row["text"]) for row, name in found]
    return sorted(rows, key=lambda row: row[:3])


def event_rows(events, most=MOST_EVENTS):
    """The last ``most`` of [(time, step, event, its facts in words)].

    Skipped steps that follow one another are one row, and so are more than a few other events of a kind.
    """
    found = []
    for (name, _), alike in groupby(events, lambda event: (event["event"], event.get("alarm"))):
        same = list(alike)
        joined = len(same) > (1 if name == "skipped" else MOST_ALIKE)
        found += [same] if joined else [[event] for event in same]
    return [(same[0].get("time", ""), same[0]["step"], same[0]["event"], told(same)) for same in found[-most:]]


def told(same):
    """The facts of an event, or of several of a kind."""
    what, last = "steps" if same[0]["event"] == "skipped" else "events", same[-1]
    several = f"{len(same)} {what} up to step {last['step']}; the last: " if len(same) > 1 else ""
    return several + facts_of(last)


def facts_of(event):
    """Such as "reason: spike"."""
    told = {key: value for key, value in event.items() if key not in ("time", "event", "step")}
    facts = {key: rounded(value) for key, value in told.items() if value not in (None, "", [], {})}
    return "; ".join(f"{key}: {changed(value)}" for key, value in facts.items())


def changed(value):
    """A fact in words; of {setting: [before, now]} such as "learning_rate 0.001, now 0.002"."""
    if not isinstance(value, dict) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value.values()):
        return written(value)
    return ", ".join(f"{name} {written(before)}, now {written(now)}" for name, (before, now) in value.items())
