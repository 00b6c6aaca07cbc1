"""Curves over the steps of a run, made from the rows of metrics.jsonl.

They are reduced to at most ``POINTS`` points, each the mean of equally many rows.
"""

import math
from contextlib import suppress

import numpy as np

POINTS = 400
ODD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)  # errors of a malformed row
PARTS = {  # of the time of a step
    "data": "waiting for data", "forward_backward": "forward and backward", "optimizer": "optimizer", "log": "log",
    "save": "saving",
}  # fmt: skip
HEAD_FIGURES = {  # metrics of a layer, in the order of the page; docs/monitoring.md defines them
    "entropy": "Entropy of the load (1: all heads are used alike)",
    "unused": "Share of unused heads",
    "a1": "a1, weight of the shared heads; a2 is the rest",
    "gate_rms": "RMS of the gates",
    "balance_loss": "Balance loss",
    "sink": "Attention to the first token, mean over sources",
}


def thinned(rows):
    """Return ``rows`` in at most ``POINTS`` groups of neighbours, [[row, ...], ...]."""
    ends = np.linspace(0, len(rows), min(len(rows), POINTS) + 1).astype(int)
    return [rows[start:end] for start, end in zip(ends[:-1], ends[1:], strict=True)]


def curve(groups, value):
    """Return (last step of each group, mean of ``value(row)`` over it), without groups that have no value."""
    return points(groups, [map(value, group) for group in groups])


def points(groups, numbers):
    """Return (last step of each group, mean of its ``numbers``), without groups that have none."""
    found = []
    for group, of in zip(groups, numbers, strict=True):
        values = [number for number in of if number is not None and math.isfinite(number)]
        if values:
            found.append((group[-1]["step"], sum(values) / len(values)))
    steps, means = zip(*found, strict=True) if found else ((), ())
    return np.array(steps), np.array(means)


def training_curves(groups):
    """Return curves of the rows with a loss; for the gradient norm, also the maximum of each group."""
    curves = {key: curve(groups, lambda row, key=key: row[key]) for key in ("loss", "learning_rate", "grad_norm")}
    largest = [[max(group, key=lambda row: row["grad_norm"] or 0)] for group in groups]
    curves["grad_norm_max"] = curve(largest, lambda row: row["grad_norm"])
    curves["tokens_per_second"] = curve(groups, lambda row: row["tokens_per_second"])
    for group, name in (("source_loss", "loss/"), ("source_bits_per_byte", "bits/")):
        for source in sorted({source for rows in groups for row in rows for source in row[group]}):
            curves[name + source] = curve(groups, lambda row, g=group, s=source: row[g].get(s))
    for part in PARTS:
        curves[f"seconds/{part}"] = curve(groups, lambda row, part=part: row["runtime"]["seconds"].get(part))
    for key in ("median", "seconds"):
        curves[f"rank/{key}"] = curve(groups, lambda row, key=key: row["runtime"].get("slowest_rank", {}).get(key))
    return curves


def evaluation_curves(groups):
    """Return curves of the held-out windows: validation loss, its bits per byte, and each source."""
    curves = {"validation": curve(groups, lambda row: row["evaluation_mean"])}
    for key, name in (("evaluation", "validation/"), ("evaluation_bits_per_byte", "validation_bits/")):
        for source in sorted({source for rows in groups for row in rows for source in row.get(key, {})}):
            curves[name + source] = curve(groups, lambda row, key=key, s=source: row.get(key, {}).get(s))
    return curves


def accuracy_curves(groups):
    """Return the curve of the share of held-out images that are recognised, or {}."""
    return {"accuracy": curve(groups, lambda row: row["accuracy"]["top_1"]["share"])} if groups else {}


def of_one_shape(training):
    """Return the rows with head metrics whose layers have as many routed heads as in most rows."""
    alike = {}
    for row in (row for row in training if "heads" in row):
        with suppress(*ODD):
            alike.setdefault(shape_of(row), []).append(row)
    return max(alike.values(), key=len, default=[])


def shape_of(row):
    """Return ((layer, number of routed heads), ...) of a row with head metrics."""
    both = zip(row["heads"]["layer"], row["heads"]["load"], strict=True)
    return tuple((int(layer), len(load)) for layer, load in both if load)


def head_curves(groups):
    """Return {layer: (steps, mean loads [points, heads])} of routed layers, and {figure: {layer: (steps, values)}}."""
    if not groups:
        return {}, {}
    loads, figures = {}, {}
    steps = np.array([group[-1]["step"] for group in groups])
    last = groups[-1][-1]["heads"]
    of_groups = [values_of_layers(rows, "load") for rows in groups]
    for layer, load in zip(last["layer"], last["load"], strict=True):
        if load:
            loads[layer] = steps, np.array([np.mean(of[layer], 0) for of in of_groups])
    for key in HEAD_FIGURES:
        of_groups = [values_of_layers(rows, key) for rows in groups]
        for layer in last["layer"]:
            found = points(groups, [of.get(layer, ()) for of in of_groups])
            if np.any(found[1]):
                figures.setdefault(key, {})[layer] = found
    return loads, figures


def sink_curves(groups):
    """Return {"sink": {layer: (steps, mean over the sources)}}, or {} if none were measured."""
    if not groups:
        return {}
    layers = range(len(next(iter(groups[0][0]["sink"].values()))))
    return {"sink": {layer: curve(groups, lambda row, layer=layer: mean_sink(row, layer)) for layer in layers}}


def mean_sink(row, layer):
    found = [layers[layer] for layers in row["sink"].values() if layer < len(layers) and layers[layer] is not None]
    return sum(found) / len(found) if found else None


def values_of_layers(rows, key):
    """Return {layer: its values of a metric, of the rows that have it}."""
    found = {}
    for heads in (row["heads"] for row in rows):
        for layer, value in zip(heads["layer"], heads[key], strict=True) if heads.get(key) is not None else ():
            found.setdefault(layer, []).append(value)
    return found
