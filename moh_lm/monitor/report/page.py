"""The report of one run, or of several for comparison: a single HTML file. page.html is the template.

matplotlib and Jinja2 come with the extra ``plot``.
"""

import os
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import colormaps

from moh_lm.config import Config, ConfigError
from moh_lm.data.files import publish
from moh_lm.monitor.report import pictures, tables
from moh_lm.monitor.report.curves import HEAD_FIGURES
from moh_lm.monitor.report.series import RunRecord, in_words

QUIET = ("saved", "started")  # events without a row
MARKS = (b'content="MoH-LM"', b"Software\0MoH-LM")  # near the beginning of our pages and pictures
MOST_NAMED = 8  # largest number of layers in a legend
CAPTIONS = {  # how to read a picture
    "load": "Each band is a layer, each row one of its routed heads, and the run goes from left to right. Rows in the "
    "colour of the red mark get their fair share of the tokens; few tokens select a dark row.",
    "loss": "Lines are training, points are held-out samples. The axis leaves out the loss before training.",
}


def write_page(directories, output, config_type=Config, with_png=False, replaces=False, progress=lambda: None):
    """Write the report of the runs to ``output``, an HTML file, with PNGs beside it. Returns the files written.

    config_type: class of their configurations. replaces: whether ``output`` may be a file of someone else. progress:
    called for each row that is read. Raises ConfigError if a directory is not that of a run, or such a file is in the
    way, OSError if one cannot be written.
    """
    runs = [read_run(directory, config_type, progress) for directory in directories]
    is_one = len(runs) == 1
    figures = figures_of_run(runs[0]) if is_one else figures_of_comparison(runs)
    has_bits = any(run.last_evaluation and "evaluation_bits_per_byte" in run.last_evaluation for run in runs)
    drawn = {name: Markup(pictures.svg(figure, name)) for name, (_, figure) in figures.items()}  # noqa: S704 - ours
    page = template_beside(__file__).render(
        title=tables.title(runs[0]) if is_one else "Runs compared",
        runs=runs,
        names=names_of(runs),
        summary=tables.summary_rows(runs),
        figures=[(name, title, drawn[name], CAPTIONS.get(name, "")) for name, (title, _) in figures.items()],
        losses=tables.loss_rows(evaluations_of(runs[0]) if is_one else [run.last_evaluation or {} for run in runs]),
        measure=runs[0].config.unit + (" (bits per byte)" if has_bits else ""),
        times=tables.time_rows(runs[0]) if is_one else [],
        differences=tables.differences(runs),
        samples=tables.sample_rows(dict(zip(names_of(runs), runs, strict=True))),
        traces=[(os.path.relpath(path, Path(output).parent), path.name) for run in runs for path in run.traces],
        events=tables.event_rows([event for event in runs[0].told_events() if event["event"] not in QUIET]),
        left_out=[f"{run.directory / name}: {count}" for run in runs for name, count in run.left_out.items()],
        settings=[(key, in_words(value)) for key, value in runs[0].config.to_dict().items()],
    )
    files = {Path(output): page.encode(errors="replace")}  # a path may have bytes that are not text
    if with_png:
        stem = Path(output).name.removesuffix(".html")  # a name such as rate-0.5 keeps its dot
        files |= {Path(output).with_name(f"{stem}.{name}.png"): pictures.png(of) for name, (_, of) in figures.items()}
    for path in list(files)[replaces:]:
        if path.is_file() and not any(mark in path.read_bytes()[:4096] for mark in MARKS):
            raise ConfigError([f"{path}: is not a file of this program; move it, or give another --output FILE.html"])
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        publish(path, content)
    return list(files)


def read_run(directory, config_type, progress):
    """Return the ``RunRecord`` of a directory. Raises ConfigError if it is none, or if a file cannot be read."""
    try:
        return RunRecord(directory, config_type, progress)
    except TimeoutError:  # of ``progress``
        raise
    except OSError as error:
        place = error.filename or directory
        raise ConfigError([f"{place}: cannot be read ({error.strerror}); make it readable"]) from error


def evaluations_of(run):
    """Return the first evaluation and the last one, if there are two."""
    found = {row["step"]: row for row in (run.first_evaluation, run.last_evaluation) if row}
    return list(found.values())


def template_beside(file, **filters):
    """Return the template page.html in the folder of ``file``."""
    loader, blocks = FileSystemLoader(Path(file).parent), dict(trim_blocks=True, lstrip_blocks=True)
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **blocks)
    found.filters.update(filters)
    return found.get_template("page.html")


def figures_of_run(run):
    """Return {name: (title, Figure)} of one run, in the order of the page."""
    curves, found, marks = run.curves, {}, {}
    for event in run.standing_events():
        if event["event"] in pictures.MARKS and event["step"] <= run.step:  # only events up to the last row
            marks.setdefault(event["event"], []).append(event["step"])
    if run.loads:
        found["load"] = "Head load", pictures.load_map(run.loads, fair_loads(run))
    losses = by_source(run, "loss/", "validation/")
    if sum(name.startswith("loss/") for name in curves) > 1:
        losses["all sources"] = (*curves["loss"], {"color": pictures.INK, "linewidth": 2})
    found["loss"] = "Loss", pictures.lines(losses, run.config.unit, marks)
    if "accuracy" in curves:
        shown = {"top-1": (*curves["accuracy"], {"marker": "o"})}
        found["accuracy"] = "Accuracy of held-out images", pictures.lines(shown, "share of images", marks)
    if bits := by_source(run, "bits/", "validation_bits/"):
        found["bits"] = "Bits per byte of text", pictures.lines(bits, "bits per byte", marks)
    rate = {"learning rate": (*curves["learning_rate"], {})}
    found["rate"] = "Learning rate", pictures.lines(rate, "of the last step of an interval", floor=0)
    norms = {"mean": (*curves["grad_norm"], {})}
    if not np.array_equal(curves["grad_norm"][1], curves["grad_norm_max"][1]):  # points that cover several intervals
        norms = {"largest": (*curves["grad_norm_max"], {"linewidth": 0.6}), **norms}
    found["norm"] = "Gradient norm", pictures.lines(norms, "before clipping", marks, logarithmic=True)
    speed = {"tokens per second": (*curves["tokens_per_second"], {})}
    found["speed"] = "Speed", pictures.lines(speed, "tokens per second", marks, floor=0)
    if np.any(curves["rank/seconds"][1] > curves["rank/median"][1]):
        ranks = {"slowest rank": (*curves["rank/seconds"], {}), "median of ranks like it": (*curves["rank/median"], {})}
        found["ranks"] = "Own work of a rank in a step", pictures.lines(ranks, "seconds", marks, floor=0)
    for key, of_layers in run.head_figures.items():
        found[key] = HEAD_FIGURES[key], pictures.lines(layer_lines(of_layers), "mean of a layer", marks)
    return found


def fair_loads(run):
    """Return the distinct loads that the heads of layers have if tokens select all of them equally often."""
    layers = {layer.index: layer for layer in run.config.model.gated_layers()}
    means = {layer: values.mean(0).tolist() for layer, (_, values) in run.loads.items() if layer in layers}
    return sorted({round(layers[layer].fair_load(load), 3) for layer, load in means.items()})


def by_source(run, training, validation):
    """Return lines of each source in its colour: the training loss, and points for held-out samples."""
    names = [name.removeprefix(of) for of in (training, validation) for name in run.curves if name.startswith(of)]
    names, found = list(dict.fromkeys(names)), {}
    for name, colour in zip(names, pictures.colours(len(names)), strict=True):
        if training + name in run.curves:
            found[name] = (*run.curves[training + name], {"color": colour})
        if validation + name in run.curves:
            style = {"color": colour, "marker": "o", "markersize": 4, "linestyle": "none"}
            style |= {"label": "_"} if name in found else {}  # a source that only the decay reads begins with these
            found[f"{name}, held out"] = (*run.curves[validation + name], style)
    return found


def layer_lines(of_layers):
    """Return lines of layers from dark to light; if there are many, only a few are named."""
    count, found = len(of_layers), {}
    named = {round(place * (count - 1) / (MOST_NAMED - 1)) for place in range(MOST_NAMED)}
    for place, (layer, of) in enumerate(of_layers.items()):
        colour = colormaps["viridis"](0.1 + 0.8 * place / max(1, count - 1))
        found[f"layer {layer}"] = (*of, {"color": colour, **({} if place in named else {"label": "_"})})
    return found


def figures_of_comparison(runs):
    """Return {name: (title, Figure)} with one line for each run."""
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
    """Return the runs' names, with the names of their directories where two are equal."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else str(run.directory) for name, run in zip(names, runs, strict=True)]
