"""Maps of heads, and curves, as PNG, in the colours of a light and of a dark page.

Rows are layers or domains, columns heads, shared heads first; a line stands between these and the routed ones. Small
maps have their numbers in them. A picture is 4 inches wide at 180 dots per inch, for half as many pixels of a page.
"""

import io

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image

WIDTH, DOTS = 4.0, 180
INKS = {"light": ("#1c1f23", "#ffffff"), "dark": ("#d8dce2", "#16181c")}  # of text, of the page
MOST_NUMBERS, MOST_COLUMNS = 200, 16  # of a map that has its numbers in it
CLASS_COLOURS = ("#4477aa", "#66ccee", "#ee6677", "#ccbb44", "#9a9a9a")  # of CLASSES; unused is the page's own


def head_map(values, names, label, low, high, kinds):
    """{"light": PNG, "dark": PNG} of ``values`` [rows, heads], NaN where there is none.

    names: of the rows. label: of the scale, which goes from ``low`` to ``high``. kinds: of the heads, [rows][heads].
    """
    return {theme: draw([(None, values, kinds)], names, label, low, high, *inks) for theme, inks in INKS.items()}


def head_panels(panels, names, label, low, high):
    """The same for several maps below one another: panels: [(title, values)]."""
    panels = [(title, values, None) for title, values in panels]
    return {theme: draw(panels, names, label, low, high, *inks) for theme, inks in INKS.items()}


def draw(panels, names, label, low, high, ink, paper):
    rows, columns = panels[0][1].shape
    height = min(0.26, max(0.13 if isinstance(names[0], str) else 0.09, 3.2 / columns)) * rows
    figure = Figure(figsize=(WIDTH, len(panels) * (height + 0.28) + 0.75), facecolor=paper, layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False)[:, 0]
    colours = colormaps["cividis"].with_extremes(bad=(0.5, 0.5, 0.5, 0.25))
    for axis, (title, values, kinds) in zip(axes, panels, strict=True):
        image = axis.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
        frame(axis, names, columns, ink, kinds)
        if axis is not axes[-1]:
            axis.set_xticks([])
        if title:
            axis.set_title(title, fontsize=8, color=ink, loc="left")
        if values.size <= MOST_NUMBERS and columns <= MOST_COLUMNS:
            write_numbers(axis, values, image)
    axes[-1].set_xlabel("head", fontsize=8, color=ink)
    bar = figure.colorbar(image, ax=list(axes), location="bottom", fraction=0.05, pad=0.02, aspect=40)
    bar.ax.tick_params(labelsize=7, colors=ink)
    bar.outline.set_visible(False)
    bar.set_label(label, fontsize=8, color=ink)
    return png(figure)


def write_numbers(axis, values, image):
    digits = 0 if image.norm.vmax >= 100 else 1 if image.norm.vmax >= 10 else 2
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        red, green, blue, _ = image.cmap(image.norm(value))
        dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
        colour = "#ffffff" if dark else "#000000"
        text = f"{round(value, digits) + 0.0:.{digits}f}"  # no minus before a zero
        axis.text(column, row, text, ha="center", va="center", fontsize=6.5, color=colour)


def class_map(classes, every, kinds):
    """The class of each head, [rows][heads], by its colour; every: all classes, in the order of the colours."""
    codes = np.array([[every.index(name) for name in row] for row in classes])
    found = {}
    for theme, (ink, paper) in INKS.items():
        rows, columns = codes.shape
        height = min(0.26, max(0.09, 3.2 / columns)) * rows
        figure = Figure(figsize=(WIDTH, height + 0.85), facecolor=paper, layout="constrained")
        axis = figure.subplots()
        colours = ListedColormap([*CLASS_COLOURS, paper])
        axis.imshow(codes, cmap=colours, vmin=0, vmax=len(every) - 1, aspect="auto", interpolation="nearest")
        frame(axis, range(rows), columns, ink, kinds)
        axis.set_xlabel("head", fontsize=8, color=ink)
        present = sorted(set(codes.flatten().tolist()))
        patches = [Patch(facecolor=colours(code), edgecolor=ink, linewidth=0.4, label=every[code]) for code in present]
        figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=7, labelcolor=ink, frameon=False)
        found[theme] = png(figure)
    return found


def curves(x, lines, x_label, y_label):
    """{"light": PNG, "dark": PNG} of ``lines``, {name: values at x}; x falls from left to right."""
    found = {}
    for theme, (ink, paper) in INKS.items():
        figure = Figure(figsize=(WIDTH, 2.4), facecolor=paper, layout="constrained")
        axis = figure.subplots()
        axis.set_facecolor(paper)
        for name, values in lines.items():
            axis.plot(x, values, label=name, linewidth=1.4)
        axis.set_xlim(max(x), min(x))
        axis.set_xlabel(x_label, fontsize=8, color=ink)
        axis.set_ylabel(y_label, fontsize=8, color=ink)
        axis.tick_params(labelsize=7, colors=ink)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(ink)
        axis.legend(fontsize=7, labelcolor=ink, frameon=False)
        found[theme] = png(figure)
    return found


def frame(axis, names, columns, ink, kinds):
    names = list(names)
    axis.set_facecolor(axis.figure.get_facecolor())  # behind what is transparent
    step = max(1, -(-len(names) // 16))
    axis.set_yticks(range(0, len(names), step), [str(name) for name in names[::step]])
    axis.set_xticks(range(0, columns, max(1, columns // 16)))
    axis.tick_params(labelsize=7, colors=ink, length=0)
    if isinstance(names[0], int):
        axis.set_ylabel("layer", fontsize=8, color=ink)
    for spine in axis.spines.values():
        spine.set_visible(False)
    axis.set_xticks(np.arange(0.5, columns - 1), minor=True)
    axis.set_yticks(np.arange(0.5, len(names) - 1), minor=True)
    axis.grid(which="minor", color=axis.figure.get_facecolor(), linewidth=0.6)
    axis.tick_params(which="minor", length=0)
    for row, of_row in enumerate(kinds or []):
        if 0 < of_row.count("shared") < columns:
            edge = of_row.count("shared") - 0.5
            axis.plot([edge, edge], [row - 0.5, row + 0.5], color="#ff5050", linewidth=1.6, solid_capstyle="butt")


def png(figure):
    """The picture in 256 colours, half of the bytes."""
    drawn, file = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DOTS, facecolor=figure.get_facecolor())
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, "png", optimize=True)
    return file.getvalue()
