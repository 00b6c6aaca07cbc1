"""The report of a ladder: REPORT.md with its table, ladder.png, and predictions/SIZE.json.

    python -m launch.ladder_report OUT

Reads the complete runs OUT/runs/SIZE/tokens-R, R tokens per parameter. With C the FLOPs of a run, counted with the
heads that tokens use, and L its validation loss at the end, nats per token, mean over sources, the law is

    L = E + exp(a - alpha ln C + s ln R)

E is the best of a grid from 0 to just below the lowest loss. The other three come by least squares in ln(L - E). The
interval is that of a bootstrap: residuals, made larger by sqrt(n / (n - 4)), are drawn anew, the law is fitted again to
each of 500 such sets of losses, and a residual is added to what it predicts; 90% of that. It tells what the scatter of
the runs leaves open. That the law may have another form, or another seed other losses, it does not tell.
"""

import argparse
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import numpy as np

from launch.ablation_report import final_loss, finish, flops, pyplot, read_run, table
from moh_lm.config.presets import SIZES, parameters
from moh_lm.cost.flops import flops_per_token
from moh_lm.data.files import write_json

GRID, DRAWS = np.linspace(0, 0.98, 197), 500


class Point(NamedTuple):
    """ratio: tokens per parameter."""

    size: str
    ratio: float
    compute: float
    loss: float


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="directory of launch/ladder.py")
    write(parser.parse_args().out)


def read_points(out):
    found = []
    for path in out.glob("runs/*/tokens-*/config.json"):
        if run := read_run(path.parent):
            compute = flops(run) * tokens(run["config"])
            ratio = float(path.parent.name.removeprefix("tokens-"))
            found.append(Point(path.parent.parent.name, ratio, compute, final_loss(run)))
    return sorted(found, key=lambda point: (SIZES.index(point.size), point.ratio))


def tokens(config):
    return config.run.train_iters * config.run.tokens_per_iteration


def design(compute, ratio):
    """[points, 3]: 1, - ln C and ln R, which a, alpha and s multiply."""
    return np.stack([np.ones(len(compute)), -np.log(compute), np.log(ratio)], axis=1)


def fit(x, losses):
    """E [draws] and (a, alpha, s) [draws, 3] of each row of ``losses`` [draws, points]; x: of ``design``."""
    floors = GRID[:, None] * losses.min(1)  # [grid, draws]
    weights = np.log(losses - floors[..., None]) @ np.linalg.pinv(x).T  # [grid, draws, 3]
    errors = np.square(law(x, floors, weights) - losses).sum(-1)
    best = errors.argmin(0), np.arange(len(losses))
    return floors[best], weights[best]


def law(x, floors, weights):
    return floors[..., None] + np.exp(weights @ x.T)


def predicted(points, x):
    """Losses [3, rows of x]: of the law fitted to ``points``, and the ends of its interval."""
    known, losses = design([point.compute for point in points], [point.ratio for point in points]), losses_of(points)
    fitted = law(known, *fit(known, losses))[0]
    residuals = (losses[0] - fitted) * np.sqrt(len(points) / max(1, len(points) - 4))
    random = np.random.default_rng(0)
    drawn = law(x, *fit(known, fitted + random.choice(residuals, (DRAWS, len(points)))))
    drawn += random.choice(residuals, drawn.shape)
    return np.stack([law(x, *fit(known, losses))[0], *np.quantile(drawn, (0.05, 0.95), axis=0)])


def losses_of(points):
    return np.array([[point.loss for point in points]])


def predict(out, size, configs):
    """Write what the smaller sizes say of the runs of ``configs``, once, before the first of them is trained."""
    path = out / "predictions" / f"{size}.json"
    points = [point for point in read_points(out) if parameters(point.size) < parameters(size)]
    if path.exists() or len({point.size for point in points}) < 2:
        return
    compute = [flops_per_token(each.model, each.run.seq_length)["active"] * tokens(each) for each in configs]
    # The budgets are those of the other rungs: R is in the names of their directories.
    ratios = [float(Path(each.run.checkpoint_dir).name.removeprefix("tokens-")) for each in configs]
    found = predicted(points, design(compute, ratios)).T
    path.parent.mkdir(exist_ok=True)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    rows = [dict(zip(("tokens_per_parameter", "flops", "loss", "low", "high"), map(float, row), strict=True))
            for row in zip(ratios, compute, *found.T, strict=True)]  # fmt: skip
    write_json(path, {"date": now, "from": [point._asdict() for point in points], "runs": rows})
    print(f"predicted {size}: " + ", ".join(f"{row['loss']:.3f} [{row['low']:.3f}, {row['high']:.3f}]" for row in rows))


def predictions(out):
    """{(size, tokens per parameter): row of its file}, with the date."""
    found = {}
    for path in out.glob("predictions/*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        found |= {(path.stem, row["tokens_per_parameter"]): row | {"date": content["date"]} for row in content["runs"]}
    return found


def write(out):
    """Write OUT/REPORT.md and OUT/ladder.png."""
    points, before, rows = read_points(out), predictions(out), []
    for size, ratio, compute, loss in points:
        row = before.get((size, ratio))
        said = ["", ""]
        if row:
            said = ["{loss:.4f} [{low:.4f}, {high:.4f}], {date}".format(**row), f"{loss - row['loss']:+.4f}"]
        rows.append([size, f"{ratio:g}", f"{compute:.3g}", f"{loss:.4f}", *said])
    head = ["size", "tokens per parameter", "FLOPs", "loss", "predicted before", "missed by"]
    lines = ["# Ladder", "", *table(head, rows), ""]
    if len({point.size for point in points}) > 1:
        x = design([point.compute for point in points], [point.ratio for point in points])
        (floor,), ((a, alpha, s),) = fit(x, losses_of(points))
        lines.append(f"L = {floor:.4f} + exp({a:.4f} - {alpha:.4f} ln C {s:+.4f} ln R)")
    text = "\n".join(lines) + "\n"
    (out / "REPORT.md").write_text(text, encoding="utf-8")
    print(text)
    if pyplot and points:
        draw(out / "ladder.png", points, before)


def draw(path, points, before):
    """Loss against compute, a colour for each number of tokens per parameter; predictions as bars."""
    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for number, ratio in enumerate(sorted({point.ratio for point in points})):
        mine, colour = [point for point in points if point.ratio == ratio], f"C{number}"
        axis.plot([p.compute for p in mine], [p.loss for p in mine], "o", color=colour, label=f"{ratio:g} tokens per parameter")
        if len({point.size for point in points}) > 1:
            compute = np.geomspace(mine[0].compute, 5 * mine[-1].compute)
            center, low, high = predicted(points, design(compute, np.full(len(compute), ratio)))
            axis.plot(compute, center, color=colour)
            axis.fill_between(compute, low, high, color=colour, alpha=0.2)
        for row in (row for (_, of), row in before.items() if of == ratio):
            bar = [[row["loss"] - row["low"]], [row["high"] - row["loss"]]]
            axis.errorbar(row["flops"], row["loss"], bar, fmt="x", capsize=4, color=colour)
    axis.set(xscale="log", xlabel="FLOPs", ylabel="validation loss (nats per token)", title="x: predicted before")
    finish(figure, [[axis]], path)


def write_widths(out):
    """Write OUT/WIDTHS.md and OUT/widths.png: loss against learning rate at every width, with and without."""
    found = {}
    for path in out.glob("runs/width-*/config.json"):
        if run := read_run(path.parent):
            model, rate = run["config"].model, run["config"].optimizer.learning_rate
            found.setdefault((model.hidden_size, model.base_width), {})[rate] = final_loss(run)
    rates = sorted({rate for losses in found.values() for rate in losses})
    rows = [[f"{width}", f"{base}", *(f"{losses[rate]:.4f}" if rate in losses else "" for rate in rates)]
            for (width, base), losses in sorted(found.items())]  # fmt: skip
    text = "\n".join(table(["width", "base width", *(f"{rate:g}" for rate in rates)], rows)) + "\n"
    (out / "WIDTHS.md").write_text(text, encoding="utf-8")
    print(text)
    if pyplot is None or not found:
        return
    smallest = min(width for width, _ in found)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True, squeeze=False)
    for axis, kept in zip(axes[0], (True, False), strict=True):
        for (width, base), losses in sorted(found.items()):
            if base == (smallest if kept else width):
                axis.plot(sorted(losses), [losses[rate] for rate in sorted(losses)], "o-", label=f"width {width}")
        axis.set(xscale="log", xlabel="learning rate", title=f"--base-width {smallest}" if kept else "without")
    axes[0][0].set_ylabel("validation loss (nats per token)")
    finish(figure, axes, out / "widths.png")


if __name__ == "__main__":
    main()
