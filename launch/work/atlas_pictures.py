"""Pictures of the atlas: curves.png, multipliers.png and heads.png, if matplotlib is installed.

table: {size: {variant: {seed: run}}} of launch/atlas_report.py; forms keep their colour, budgets of heads have a line.
"""

from statistics import mean

from launch.atlas_forms import VARIANTS
from launch.work.ablation_report import draw_curves, finish, pyplot

HEAD_FIGURES = {  # of the rows of metrics.jsonl, as docs/monitoring.md defines them
    "entropy": "entropy of the load, 1 = all alike",
    "unused": "share of unused heads",
    "a1": "a1, weight of the shared heads",
    "gate_rms": "RMS of the gates",
}


def draw(out, table, multipliers):
    """multipliers: {size: {variant: (center, low, high, inside)}}, as of launch/atlas_report.py."""
    if pyplot is None:
        print("no pictures: matplotlib is not installed")
    elif table:
        draw_curves(out / "curves.png", {f"size {size}": of for size, of in table.items()}, "dense", style)
        draw_multipliers(out / "multipliers.png", multipliers)
        draw_heads(out / "heads.png", table)


def draw_multipliers(path, multipliers):
    """Tokens of the dense model over those of the form, with 90% intervals; a point per form and size."""
    names = [variant.name for variant in VARIANTS if any(variant.name in found for found in multipliers.values())]
    if not names:
        return
    figure, axis = pyplot.subplots(figsize=(4 + 0.7 * len(names), 4.5), layout="constrained")
    for number, (size, found) in enumerate(multipliers.items()):
        told = [(place, found[name]) for place, name in enumerate(names) if name in found]
        places = [place + 0.15 * (number - (len(multipliers) - 1) / 2) for place, _ in told]
        centers = [center for _, (center, *_) in told]
        widths = [(center - (low or center), (high or center) - center) for _, (center, low, high, _) in told]
        if told:
            axis.errorbar(places, centers, list(zip(*widths, strict=True)), fmt="o", capsize=3, label=f"size {size}")
    axis.axhline(1, color="gray", linewidth=1)
    axis.set(xticks=range(len(names)), xlim=(-0.5, len(names) - 0.5))
    axis.set_ylabel("tokens of dense for this loss / own tokens")
    axis.set_xticklabels(names, rotation=30, ha="right")
    finish(figure, [[axis]], path)


def draw_heads(path, table):
    """How evenly heads are used, and how they are weighed, through training; means over layers and seeds."""
    keys = [key for key in HEAD_FIGURES if any(series(runs, key) for of in table.values() for runs in of.values())]
    if not keys:
        return
    shape = (len(keys), len(table))
    size_of_all = (5 * shape[1] + 1, 3.5 * shape[0])
    figure, axes = pyplot.subplots(*shape, figsize=size_of_all, layout="constrained", squeeze=False)
    for row, key in zip(axes, keys, strict=True):
        for axis, (size, variants) in zip(row, table.items(), strict=True):
            for name, runs in variants.items():
                if points := series(runs, key):
                    axis.plot([tokens / 1e6 for tokens in points], list(points.values()), label=name, **style(name))
            axis.set(title=f"size {size}", xlabel="tokens (millions)", ylabel=HEAD_FIGURES[key])
    finish(figure, axes, path)


def series(runs, key):
    """{tokens: mean over layers and runs} of a figure of the heads; empty if no run has it."""
    found = {}
    for run in runs.values():
        for row in run["rows"]:
            values = [value for value in row.get("heads", {}).get(key, []) if value is not None]
            if values:
                found.setdefault(row["tokens"], []).append(mean(values))
    return {tokens: mean(values) for tokens, values in sorted(found.items())}


def style(name):
    """A colour for the form, a line for the budget of heads."""
    forms = list(dict.fromkeys(variant.form for variant in VARIANTS))
    form, _, budget = name.partition("-")
    lines = {"75": "--", "25": ":"}
    return {"color": f"C{forms.index(form)}", "linestyle": lines.get(budget, "-")}
