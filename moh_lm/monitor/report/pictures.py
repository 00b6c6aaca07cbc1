"""The pictures of a report: SVG for the page, PNG for papers, drawn by matplotlib.

An SVG has the colours of the page it stands in: text and axes are drawn in one colour that is then replaced by
``currentColor``, and what is behind them is transparent.
"""

import io
import re

import matplotlib
import numpy as np
from matplotlib.figure import Figure

INK = "#010203"  # replaced by the colour of the page's text
COLOURS = ("#4477aa", "#ee6677", "#228833", "#b8a020", "#30a0c0", "#aa3377", "#8a8a8a")
MARKS = {  # events that are drawn into the curves
    "resumed": "#228833", "skipped": "#ee6677", "spike": "#ee6677", "alarm": "#b8a020", "damaged": "#aa3377",
    "stopped": "#8a8a8a", "failed": "#aa3377", "data changed": "#30a0c0",
    "routing changed": "#4477aa", "loss changed": "#4477aa", "training changed": "#4477aa",
}  # fmt: skip
SIZE = (5.2, 3.1)  # inches
COLUMNS = 800  # of the map of loads, and places of marks
FEW = 20  # points of a curve that are all shown
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "moh-lm", "font.size": 9, "font.family": "sans-serif", "text.color": INK,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "lines.linewidth": 1.4,
    "legend.frameon": False, "legend.fontsize": 8, "text.usetex": False,
}  # fmt: skip


def lines(series, label, marks=(), logarithmic=False, floor=None):
    """A ``Figure``. series: {name: (steps, values, style)}, style of matplotlib's plot. marks: (step, event) pairs.

    floor: the lowest value of the axis. The first twentieth of a curve of many points does not stretch it upwards.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axis = figure.subplots()
        last = max((steps[-1] for steps, values, _ in series.values() if len(values)), default=0) or 1
        for index, (name, (steps, values, style)) in enumerate(series.items()):
            usual = {"color": COLOURS[index % len(COLOURS)], "marker": "o" if len(values) == 1 else None}
            usual["label"] = legible(name)
            axis.plot(steps, values, clip_on=len(values) > FEW, **usual | style)
        mark(axis, marks, last)
        late = [values[steps > last / 20] if len(values) > FEW else values for steps, values, _ in series.values()]
        late = np.concatenate([values for values in late if len(values)] or [np.zeros(1)])
        if logarithmic and late.min() > 0:
            axis.set_yscale("log")
        else:
            space = 0.05 * (late.max() - late.min()) or 0.05
            axis.set_ylim(late.min() - space if floor is None else floor, late.max() + space)
        axis.set_xlim(0, last)
        frame(figure, axis, label)
    return figure


def stack(series, label):
    """A ``Figure`` of shares of a whole. series: {name: (steps, values)} with the same steps."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axis = figure.subplots()
        steps = next(iter(series.values()))[0]
        labels, values = map(legible, series), [values for _, values in series.values()]
        axis.stackplot(steps, values, labels=list(labels), colors=COLOURS, alpha=0.8)
        axis.set(xlim=(0, steps[-1]), ylim=(0, None))
        frame(figure, axis, label)
    return figure


def load_map(loads):
    """A ``Figure``: a band for each layer, a row for each routed head, steps to the right. loads: of ``RunRecord``."""
    heights = [values.shape[1] for _, values in loads.values()]
    most = max(values.max() for _, values in loads.values())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(SIZE[0], min(9, 0.8 + 0.35 * len(loads) + 0.06 * sum(heights))), layout="constrained")
        axes = figure.subplots(len(loads), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for axis, (layer, (steps, values)) in zip(axes, loads.items(), strict=True):
            extent = (0, steps[-1], values.shape[1] - 0.5, -0.5)
            shown = at_even_steps(steps, values)
            image = axis.imshow(shown.T, "cividis", aspect="auto", vmin=0, vmax=most, extent=extent)
            image.set_interpolation("nearest")
            axis.set_yticks([])
            axis.set_ylabel(str(layer), rotation=0, ha="right", va="center")
        axes[-1].set_xlabel("step")
        figure.supylabel("layer, and its routed heads", fontsize=9)
        bar = figure.colorbar(image, ax=list(axes), location="top", fraction=0.04, pad=0.02, aspect=50)
        bar.set_label("share of the tokens that select the head")
    return figure


def at_even_steps(steps, values):
    """The ``values`` of the interval at each of ``COLUMNS`` places from 0 to the last step; NaN before the first.

    steps: the ends of the intervals; the first is taken to be as long as the second, or to begin at 0 if it is alone.
    """
    places = (np.arange(COLUMNS) + 0.5) * steps[-1] / COLUMNS
    shown = values[np.searchsorted(steps, places)]
    begins = 2 * steps[0] - steps[1] if len(steps) > 1 else 0
    return np.where((places > begins)[:, None], shown, np.nan)


def mark(axis, marks, last):
    """Lines down the events, those of a kind drawn together; events closer than a column share a line."""
    for kind in dict.fromkeys(event for _, event in marks):
        steps = np.array([step for step, event in marks if event == kind])
        label = f"{kind} ({len(steps)})" if len(steps) > 1 else kind
        _, first = np.unique(steps * COLUMNS // (last + 1), return_index=True)
        places, heights = np.repeat(steps[first], 3), np.tile([0, 1, np.nan], len(first))
        style = dict(color=MARKS[kind], linewidth=0.8, linestyle=":", label=label)
        axis.plot(places, heights, transform=axis.get_xaxis_transform(), **style)


def frame(figure, axis, label):
    axis.set(xlabel="step", ylabel=label)
    axis.grid(axis="y", linewidth=0.3, color=INK, alpha=0.25)
    if axis.get_legend_handles_labels()[0]:
        for text in figure.legend(loc="outside upper left", ncols=3).get_texts():
            text.set_parse_math(False)  # a $ in the name of a source is no formula


def legible(name):
    """A name as a label: matplotlib leaves out those that begin with an underscore."""
    return f"\u200b{name}" if name.startswith("_") else name


def svg(figure, name):
    """The picture as text that can stand in a page; ``name`` keeps its ids apart from those of other pictures."""
    file = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    return re.sub(r'<svg (.*?)width="[^"]*" |<svg height="[^"]*" ', r"<svg \1", text, count=1)


def png(figure):
    """The picture on white, 200 dots per inch."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=200, facecolor="white")
    return file.getvalue()
