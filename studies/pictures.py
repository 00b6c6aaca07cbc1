"""Pictures of tables of runs: losses.png, and seconds.png for every machine and size, if matplotlib is installed.

sizes: {size: {variant: {seed: run}}} of report.py. Differences are to dense with the same seeds, with 90% intervals.
"""

import io
import math
from statistics import mean, median

from moh_lm.data.files import publish_own
from studies.results import DENSE, LENGTHS, differences, interval, tokens_of

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
except ImportError:  # the tables do not need it
    pyplot = None


def draw(out, sizes, times):
    """Write the pictures of a report to ``out``. times: {size: {machine: {variant: [seconds, dense = 1]}}}."""
    if pyplot is None:
        print("no pictures: matplotlib is not installed")
        return
    leads = {size: leads_of(variants) for size, variants in sizes.items()}
    if any(of.keys() - {*LENGTHS} for of in leads.values()):
        draw_losses(out / "losses.png", leads)
    for size, machines in times.items():
        for machine, seconds in machines.items() if DENSE in leads.get(size, {}) else ():
            draw_seconds(out / f"seconds-{size}-{machine}.png", sizes[size], leads[size], seconds)


def leads_of(variants):
    """{variant: (loss minus that of dense, half of its interval, number of seeds)} of a size."""
    found = {name: differences(runs, variants.get(DENSE, {})) for name, runs in variants.items()}
    return {name: (*interval(values), len(values)) for name, values in found.items() if values}


def draw_losses(path, leads):
    """Draw the losses minus those of dense: a row for each variant, and a mark for each size; hollow with one seed."""
    names = list(dict.fromkeys(name for of in leads.values() for name in of if name not in LENGTHS))
    figure, axis = pyplot.subplots(figsize=(7, 1.2 + 0.28 * len(names)), layout="constrained")
    for number, (size, of) in enumerate(leads.items()):
        for name in of.keys() & {*names}:
            center, width, _ = of[name]
            place = names.index(name) + 0.2 * (number - (len(leads) - 1) / 2)
            face = "white" if width == math.inf else f"C{number}"
            axis.errorbar(
                center, place, xerr=finite(width), fmt="os^"[number % 3], color=f"C{number}", mfc=face, capsize=2
            )
        axis.plot([], [], "os^"[number % 3], color=f"C{number}", label=f"size {size}")
    axis.axvline(0, color="gray", linewidth=1)
    axis.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    axis.set_xlabel("validation loss minus that of dense (nats per token)")
    axis.locator_params(axis="x", nbins=6)  # more would overlap
    finish(figure, path)


def draw_seconds(path, variants, leads, seconds):
    """Draw the losses minus those of dense against the seconds of a step, with the range of the rounds.

    The line is dense itself with more or fewer tokens: what lies below it is better in the same time. seconds:
    {variant: [those of each round, dense = 1]}.
    """
    names = sorted((name for name in seconds if name in leads and name not in LENGTHS), key=lambda name: leads[name][0])
    figure, axis = pyplot.subplots(figsize=(7, 2 + 0.22 * len(names)), layout="constrained")
    tokens = {name: mean(map(tokens_of, variants[name].values())) for name in LENGTHS if name in leads}
    points = sorted((tokens[name] / tokens[DENSE], *leads[name][:2]) for name in tokens)
    places, centers, widths = zip(*points, strict=True)
    axis.set_xscale("log")
    axis.plot(1, 0, "s", color="gray")
    for number, name in enumerate(names):
        center, width, _ = leads[name]
        middle, least, most = median(seconds[name]), min(seconds[name]), max(seconds[name])
        axis.errorbar(middle, center, finite(width), [[middle - least], [most - middle]], fmt="o", elinewidth=0.7)
        aside = 1.05, (number + 0.5) / len(names)  # beside the axes, where no name covers another
        line = {"arrowstyle": "-", "color": "lightgray", "relpos": (0, 0.5)}
        axis.annotate(name, (middle, center), aside, textcoords="axes fraction", va="center", arrowprops=line)
    limits = axis.axis()  # without the ends of the line, which are far away
    axis.errorbar(places, centers, list(map(finite, widths)), color="gray", label="dense, more or fewer tokens")
    axis.axis(limits)
    axis.set_xlabel("seconds of training, dense = 1")
    axis.set_ylabel("validation loss minus that of dense (nats per token)")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter("{x:g}")
    finish(figure, path)


def finite(width):
    """Half of an interval as a bar: none if only one seed is known."""
    return 0 if width == math.inf else width


def finish(figure, path):
    """Add a legend with every line of the picture, and write the file."""
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    file = io.BytesIO()
    figure.savefig(file, dpi=100)
    publish_own(path.parent, {path.name: file.getvalue()})
    pyplot.close(figure)
    print(f"wrote {path}")
