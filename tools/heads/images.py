"""The loads of all routed heads of an image model in one picture, a map for each layer with any.

Rows are all images, the first classes, and for a MoH-DiT tenths of the steps. Columns are heads; shared ones are empty.
"""

import math

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from tools.heads.pictures import frame, themed

ROWS, ACROSS = 16, 4  # most rows of a map; maps side by side
MAP_WIDTH, ROW_HEIGHT = 2.0, 0.14  # inches


def picture(report):
    """PNG of a report. See image_report.py."""
    steps = report["steps"]
    classes = report["classes"][: ROWS - 1 - len(steps)]
    classes = [name.encode(errors="surrogateescape").decode(errors="replace") for name in classes]  # may not be UTF-8
    names = ["all", *classes, *(f"t {first}-{last}" for first, last in steps)]
    maps = {}
    for layer, shared, mean, load, step_load in zip(
        *(report[key] for key in ("layer", "shared", "mean_load", "load", "step_load")), strict=True
    ):
        rows = [mean, *load[: len(classes)], *step_load[: len(steps)]]
        maps[f"layer {layer}"] = np.pad(100 * np.stack(rows)[:, shared:], ((0, 0), (shared, 0)), constant_values=np.nan)
    return themed(load_maps, maps, names)["light"]


def load_maps(maps, names):
    """maps: {title: loads in percent [rows, heads], NaN where there is none}. names: names of the rows."""
    across = min(ACROSS, len(maps))
    down = math.ceil(len(maps) / across)
    size = across * MAP_WIDTH + 0.8, down * (len(names) * ROW_HEIGHT + 0.4) + 0.7
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    highest = max(np.nanmax(loads) for loads in maps.values())
    colours = colormaps["cividis"].with_extremes(bad=(0.5, 0.5, 0.5, 0.25))
    for place, (axis, (title, loads)) in enumerate(zip(axes, maps.items(), strict=False)):
        image = axis.imshow(loads, cmap=colours, vmin=0, vmax=highest, aspect="auto", interpolation="nearest")
        frame(axis, names, loads.shape[1], None)
        axis.set_xticks(range(0, loads.shape[1], max(1, loads.shape[1] // 8)))
        axis.tick_params(labelleft=place % across == 0)
        axis.set_title(title)
    for axis in axes[len(maps) :]:
        axis.set_axis_off()
    bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.5, aspect=40, pad=0.01, label="load in percent")
    bar.outline.set_visible(False)
    return figure
