"""Pictures of tables of runs: curves.png and multipliers.png, if matplotlib is installed.

table: {size: {variant: {seed: run}}} of report.py. Each form has a colour, and each budget of heads has a line style.
"""

import io
from statistics import mean

from moh_lm.data.files import publish_own

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
except ImportError:  # the tables do not need it
    pyplot = None


def draw(out, table, variants, multipliers):
    """Write the pictures of a report to ``out``.

    variants: those of the ``Table``. multipliers: {size: {variant: (center, low, high, inside)}}, from the report.
    """
    forms = list(dict.fromkeys(variant.form for variant in variants))
    styles = {variant.name: line(forms.index(variant.form), variant.name) for variant in variants}
    if pyplot is None:
        print("no pictures: matplotlib is not installed")
    elif table:
        draw_curves(out / "curves.png", table, variants[0].name, styles.get)
        draw_multipliers(out / "multipliers.png", multipliers)


def line(number, name):
    """Return a colour for form ``number`` and a line style for the budget of heads; after ten forms, another style."""
    of_budget = {"": "-.", "75": "--", "25": ":"}.get(name.partition("-")[2], "-")
    return {"color": f"C{number % 10}", "linestyle": of_budget if number < 10 else ("-.", ":", "--")[number // 10 % 3]}


def draw_curves(path, table, reference, style):
    """Draw the validation loss against tokens, and its difference to the ``reference`` variant with the same seeds.

    The picture has a column for each size. style: the settings of a variant's line.
    """
    figure, axes = pyplot.subplots(2, len(table), figsize=(5 * len(table) + 1, 8), layout="constrained", squeeze=False)
    for (upper, lower), (size, variants) in zip(axes.T, table.items(), strict=True):
        dense = variants.get(reference, {})
        for name, runs in variants.items():
            common = sorted(runs.keys() & dense.keys())
            if not common or runs[common[0]]["config"].run.train_iters != dense[common[0]]["config"].run.train_iters:
                continue  # runs of other lengths have other schedules
            mine, theirs = (curve([each[seed] for seed in common]) for each in (runs, dense))
            steps = [step for step in mine if step and step in theirs]
            tokens = [step * runs[common[0]]["config"].run.tokens_per_iteration / 1e6 for step in steps]
            upper.plot(tokens, [mine[step] for step in steps], label=name, **style(name))
            lower.plot(tokens, [mine[step] - theirs[step] for step in steps], label=name, **style(name))
        upper.set(title=f"size {size}", ylabel="validation loss (nats per token)")
        lower.set(xlabel="tokens (millions)", ylabel=f"difference to {reference}, same seeds")
    finish(figure, axes, path)


def finish(figure, axes, path):
    """Add one legend with every line of the picture, and write the file."""
    lines = {}
    for axis in (axis for row in axes for axis in row):
        handles, labels = axis.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, dpi=100)
    publish_own(path.parent, {path.name: file.getvalue()})
    pyplot.close(figure)
    print(f"wrote {path}")


def curve(runs):
    """Return {step: mean over ``runs`` and sources of the validation loss} where it is finite in all of them."""
    finite = ({step for step, of in run["evaluations"].items() if None not in of.values()} for run in runs)
    steps = sorted(set.intersection(*finite))
    return {step: mean(mean(run["evaluations"][step].values()) for run in runs) for step in steps}


def draw_multipliers(path, multipliers):
    """Draw the dense model's tokens over those of the form, with 90% intervals; a point per form and size."""
    names = list(dict.fromkeys(name for found in multipliers.values() for name in found))
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
