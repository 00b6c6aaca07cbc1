"""The pictures of a report: SVG for the page, PNG for papers, drawn by matplotlib.

An SVG takes the colours of its page: text and axes are drawn in one colour that is then replaced by ``currentColor``,
and the background is transparent.
"""

import io
import re
import warnings
from contextlib import contextmanager

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

INK = "#010203"  # replaced by the colour of the page's text
COLOURS = ("#4477aa", "#ee6677", "#228833", "#b8a020", "#30a0c0", "#aa3377", "#8a8a8a")
MARKS = {  # events that the curves show
    "resumed": "#228833", "skipped": "#ee6677", "spike": "#ee6677", "alarm": "#b8a020", "damaged": "#aa3377",
    "stopped": "#8a8a8a", "failed": "#aa3377", "unsaved": "#aa3377", "data changed": "#30a0c0",
    "routing changed": "#4477aa", "loss changed": "#4477aa", "training changed": "#4477aa",
}  # fmt: skip
SIZE, WIDE = (5.2, 3.1), 11  # inches; the width of a picture that fills a line of the page
COLUMNS = 800  # columns of the map of loads, and places for marks
DECADE = 10  # ratio of values from which a logarithmic axis shows more than a linear one
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "moh-lm", "font.size": 9, "font.family": "sans-serif", "text.color": INK,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "lines.linewidth": 1.4,
    "legend.frameon": False, "legend.fontsize": 8, "text.usetex": False,
}  # fmt: skip


def lines(series, label, marks=(), logarithmic=False, floor=None):
    """Draw a ``Figure``. series: {name: (steps, values, style)}, style of matplotlib's plot. marks: {event: its steps}.

    logarithmic: whether the axis may be logarithmic if the values need it. floor: the lowest value of the axis. Values
    in the first twentieth of the steps, such as the loss before training, do not stretch the axis upwards.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axis = figure.subplots()
        palette = colours(len(series))
        drawn = [(steps, values) for steps, values, _ in series.values() if len(values)]
        last = max((steps[-1] for steps, _ in drawn), default=0) or 1
        for index, (name, (steps, values, style)) in enumerate(series.items()):
            usual = {"color": palette[index], "marker": "o" if len(values) == 1 else None}
            axis.plot(steps, values, **{**usual, "label": legible(name), **style})
        mark(axis, marks, last)
        low = min((values.min() for _, values in drawn), default=0)
        late = [values[steps > last / 20] for steps, values in drawn if steps[-1] > last / 20]
        high = max((values.max() for values in late or [values for _, values in drawn]), default=0)
        if logarithmic and 0 < low * DECADE < high:
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axis.yaxis.set_minor_locator(NullLocator())
        else:
            space = 0.05 * abs(high - low) or 0.05
            axis.set_ylim(low - space if floor is None else floor, high + space)
        axis.set_xlim(-0.01 * last, 1.01 * last)
        frame(figure, axis, label)
    return figure


def colours(count):
    """Return ``count`` colours that differ."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    return [matplotlib.colormaps["turbo"]((place + 0.5) / count) for place in range(count)]


def load_map(loads, fair=()):
    """Draw a band for each layer and a row for each routed head, with steps to the right. loads: ``RunRecord.loads``.

    fair: loads that the scale marks, those of heads that are all used equally often.
    """
    heights = [values.shape[1] for _, values in loads.values()]
    most = max(values.max() for _, values in loads.values())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDE, min(9, 1 + 0.35 * len(loads) + 0.06 * sum(heights))), layout="constrained")
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
        bar = figure.colorbar(image, ax=list(axes), location="top", fraction=0.04, pad=0.02, aspect=80)
        for share in fair:
            bar.ax.axvline(share, color="#ee6677", linewidth=2)
        bar.set_label("share of the tokens that select the head" + "; red: the fair share" * bool(fair))
    return figure


def at_even_steps(steps, values):
    """Return the ``values`` at each of ``COLUMNS`` places from 0 to the last step, NaN before the first interval.

    steps: the ends of the intervals; the first is taken to be as long as the second, or to begin at 0 if it is alone.
    """
    places = (np.arange(COLUMNS) + 0.5) * steps[-1] / COLUMNS
    shown = values[np.searchsorted(steps, places)]
    begins = 2 * steps[0] - steps[1] if len(steps) > 1 else 0
    return np.where((places > begins)[:, None], shown, np.nan)


def mark(axis, marks, last):
    """Draw vertical lines at the events, those of a kind together; events closer than a column share a line."""
    for kind, steps in dict(marks).items():
        steps = np.array(steps)
        label = f"{kind} ({len(steps)})" if len(steps) > 1 else kind
        _, first = np.unique(steps * COLUMNS // (last + 1), return_index=True)
        places, heights = np.repeat(steps[first], 3), np.tile([0, 1, np.nan], len(first))
        style = dict(color=MARKS[kind], linewidth=0.8, linestyle=":", label=label)
        axis.plot(places, heights, transform=axis.get_xaxis_transform(), **style)


def frame(figure, axis, label):
    axis.set(xlabel="step", ylabel=label)
    axis.grid(axis="y", linewidth=0.3, color=INK, alpha=0.25)
    if names := axis.get_legend_handles_labels()[1]:
        columns = max(1, min(3, int(SIZE[0] / (0.55 + 0.065 * max(map(len, names))))))
        rows = -(-len(names) // columns)
        figure.set_figheight(SIZE[1] + 0.18 * max(0, rows - 2))  # many sources take no room from the curves
        for text in figure.legend(loc="outside upper left", ncols=columns).get_texts():
            text.set_parse_math(False)  # a $ in the name of a source does not begin a formula


def legible(name):
    """Return a name as a label; matplotlib leaves out labels that begin with an underscore."""
    name = name.encode(errors="replace").decode()  # names of directories may have bytes that are no text
    return f"\u200b{name}" if name.startswith("_") else name


@contextmanager
def any_script():
    """Context in which a name in a script that the font lacks becomes boxes, without a warning for each character."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        yield


def svg(figure, name):
    """Return the picture as SVG text for a page; ``name`` makes its ids different from those of other pictures."""
    file = io.StringIO()
    with matplotlib.rc_context(STYLE), any_script():
        figure.get_layout_engine().execute(figure)  # here, because savefig would draw everything again for it
        figure.set_layout_engine(None)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    return re.sub(r'<svg (.*?)width="[^"]*" |<svg height="[^"]*" ', r"<svg \1", text, count=1)


def png(figure):
    """Return the picture as PNG on white, 200 dots per inch."""
    file = io.BytesIO()
    with any_script():
        figure.savefig(file, format="png", dpi=200, facecolor="white", metadata={"Software": "MoH-LM"})
    return file.getvalue()
