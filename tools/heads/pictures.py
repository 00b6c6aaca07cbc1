"""Maps of heads, and curves, as PNG, in the colours of a light and of a dark page.

Rows are layers or domains; columns are heads, shared heads first, with a line between these and the routed ones. Small
maps show their numbers. A picture is 4 inches wide at 180 dots per inch, for half as many pixels of a page.
"""

import io

import numpy as np
from matplotlib import colormaps, rc_context, rcParams
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

from moh_lm.monitor.report.pictures import any_script
from tools.heads.findings import shown

WIDTH, DOTS = 4.0, 180
INKS = {"light": ("#1c1f23", "#ffffff"), "dark": ("#d8dce2", "#16181c")}  # colours of text and of the page
INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
PAPER = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
STYLE = {"axes.labelsize": 8, "axes.titlesize": 8, "axes.titlelocation": "left", "xtick.labelsize": 7,
         "ytick.labelsize": 7, "legend.fontsize": 7, "legend.frameon": False,
         "text.parse_math": False}  # fmt: skip
MOST_NUMBERS, MOST_COLUMNS = 200, 16  # limits for a map that shows its numbers
CLASS_COLOURS = ("#4477aa", "#66ccee", "#ee6677", "#ccbb44", "#9a9a9a")  # of CLASSES; unused has the page's


def themed(draw, *arguments):
    """{"light": PNG, "dark": PNG} of the figure that ``draw`` makes."""
    found = {}
    for theme, (ink, paper) in INKS.items():
        with rc_context(STYLE | dict.fromkeys(INKED, ink) | dict.fromkeys(PAPER, paper)):
            found[theme] = png(draw(*arguments))
    return found


def head_maps(panels, names, label, low, high, kinds=None):
    """Maps below one another. panels: [(title or None, values [rows, heads], NaN where there is none)].

    names: names of the rows. label: label of the scale, which goes from ``low`` to ``high``. kinds: kinds of the heads,
    [rows][heads].
    """
    rows, columns = panels[0][1].shape
    height = min(0.26, max(0.13 if isinstance(names[0], str) else 0.09, 3.2 / columns)) * rows
    figure = Figure(figsize=(WIDTH, len(panels) * (height + 0.28) + 0.75), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    colours = colormaps["cividis"].with_extremes(bad=(0.5, 0.5, 0.5, 0.25))
    for axis, (title, values) in zip(axes, panels, strict=True):
        image = axis.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        frame(axis, names, columns, kinds)
        if axis is not axes[-1]:
            axis.set_xticks([])
        axis.set_title(title)
        if values.size <= MOST_NUMBERS and columns <= MOST_COLUMNS:
            write_numbers(axis, values, image)
    axes[-1].set_xlabel("head")
    bar = figure.colorbar(image, ax=list(axes), location="bottom", fraction=0.05, pad=0.02, aspect=40, label=label)
    bar.outline.set_visible(False)
    return figure


def write_numbers(axis, values, image):
    digits = 0 if image.norm.vmax >= 100 else 1 if image.norm.vmax >= 10 else 2
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        red, green, blue, _ = image.cmap(image.norm(value))
        dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
        colour = "#ffffff" if dark else "#000000"
        text = f"{round(value, digits) + 0.0:.{digits}f}"  # no minus sign before zero
        axis.text(column, row, text, ha="center", va="center", fontsize=6.5, color=colour)


def class_map(classes, every, kinds):
    """The class of each head, [rows][heads], by its colour; every: all classes, in the order of the colours."""
    codes = np.array([[every.index(name) for name in row] for row in classes])
    rows, columns = codes.shape
    figure = Figure(figsize=(WIDTH, min(0.26, max(0.09, 3.2 / columns)) * rows + 0.85), layout="constrained")
    axis = figure.subplots()
    colours = ListedColormap([*CLASS_COLOURS, figure.get_facecolor()])
    axis.imshow(codes, cmap=colours, vmin=0, vmax=len(every) - 1, aspect="auto", interpolation="nearest")
    frame(axis, range(rows), columns, kinds)
    axis.set_xlabel("head")
    present = sorted(set(codes.flatten().tolist()))
    edge = {"edgecolor": rcParams["text.color"], "linewidth": 0.4}
    patches = [Patch(facecolor=colours(code), label=shown(every[code]), **edge) for code in present]
    figure.legend(handles=patches, loc="outside lower center", ncols=3)
    return figure


def curves(x, lines, x_label, y_label):
    """``lines``, {name: values at x}; x falls from left to right."""
    figure = Figure(figsize=(WIDTH, 2.4), layout="constrained")
    axis = figure.subplots()
    for name, values in lines.items():
        axis.plot(x, values, label=name, linewidth=1.4)
    axis.set(xlim=(max(x), min(x)), xlabel=x_label, ylabel=y_label)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend()
    return figure


def frame(axis, names, columns, kinds):
    names = list(names)
    are_words = isinstance(names[0], str)  # of domains, whose rows are high enough for all
    step = 1 if are_words else max(1, -(-len(names) // 16))
    labels = [shorten(name) if are_words else str(name) for name in names[::step]]
    axis.set_yticks(range(0, len(names), step), labels)
    axis.set_xticks(range(0, columns, max(1, columns // 16)))
    axis.tick_params(length=0)
    if not are_words:
        axis.set_ylabel("layer")
    axis.spines[:].set_visible(False)
    between = {"color": axis.figure.get_facecolor(), "linewidth": 0.6}
    axis.vlines(np.arange(0.5, columns - 1), -0.5, len(names) - 0.5, **between)
    axis.hlines(np.arange(0.5, len(names) - 1), -0.5, columns - 0.5, **between)
    for row, of_row in enumerate(kinds or []):
        edges = [head - 0.5 for head in range(1, columns) if of_row[head - 1 : head + 1] == ["shared", "routed"]]
        for edge in edges:
            axis.plot([edge, edge], [row - 0.5, row + 0.5], color="#ff5050", linewidth=1.6, solid_capstyle="butt")


def shorten(name, most=24):
    """Return ``name`` with at most so many characters, because the map would shrink beside a longer one."""
    return name if len(name) <= most else name[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def png(figure):
    """Return the picture in 256 colours, which need half of the bytes."""
    drawn, file = io.BytesIO(), io.BytesIO()
    with any_script():
        figure.savefig(drawn, format="png", dpi=DOTS)
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    return file.getvalue()
