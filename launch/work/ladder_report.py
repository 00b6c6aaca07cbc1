"""The report of a ladder: REPORT.md with its table, ladder.png, and predictions/SIZE.json.

Reads the complete runs OUT/runs/SIZE/tokens-R, R tokens per parameter. With C the FLOPs of a run, counted with the
heads that tokens use, and L its validation loss at the end, nats per token, mean over sources, the law is

    L = E + exp(a - alpha ln C + s ln R)

E is the best of a grid from 0 to just below the lowest loss, the others come by least squares in ln(L - E). Interval:
residuals, times sqrt(n / (n - 4)), are drawn anew, the law is fitted to each of 500 such sets of losses, and a residual
is added to what it predicts; 90% of that.
"""

import json
from datetime import datetime, timezone
from typing import NamedTuple

import numpy as np

from launch.work.pictures import finish, pyplot
from launch.work.results import final_loss, read_run, write_table
from moh_lm.config.presets import SIZES, parameters
from moh_lm.cost.flops import flops_per_token
from moh_lm.data.files import write_json

GRID, DRAWS = np.linspace(0, 0.98, 197), 500


class Point(NamedTuple):
    """ratio: tokens per parameter. loss: None of a run to come."""

    size: str
    ratio: float
    compute: float
    loss: float | None = None


def point_of(config, directory, loss=None):
    flops = flops_per_token(config.model, config.run.seq_length)["active"]
    compute = flops * config.run.train_iters * config.run.tokens_per_iteration
    return Point(directory.parent.name, float(directory.name.removeprefix("tokens-")), compute, loss)


def read_points(out):
    paths = [path.parent for path in out.glob("runs/*/tokens-*/config.json")]
    runs = [(path, run) for path in paths if (run := read_run(path))]
    points = [point_of(run["config"], path, final_loss(run)) for path, run in runs]
    return sorted(points, key=lambda point: (SIZES.index(point.size), point.ratio))


def design(points):
    """[points, 3]: 1, - ln C and ln R, which a, alpha and s multiply."""
    return np.array([(1, -np.log(point.compute), np.log(point.ratio)) for point in points])


def fit(x, losses):
    """E [draws] and (a, alpha, s) [draws, 3] of each row of ``losses`` [draws, points]; x: of ``design``."""
    floors = GRID[:, None] * losses.min(1)  # [grid, draws]
    weights = np.log(losses - floors[..., None]) @ np.linalg.pinv(x).T  # [grid, draws, 3]
    best = np.square(law(x, floors, weights) - losses).sum(-1).argmin(0), np.arange(len(losses))
    return floors[best], weights[best]


def law(x, floors, weights):
    return floors[..., None] + np.exp(weights @ x.T)


def predicted(known, points):
    """[(loss, low, high)] of ``points`` by the law fitted to those that are ``known``."""
    x, losses = design(known), np.array([[point.loss for point in known]])
    fitted, random = law(x, *fit(x, losses))[0], np.random.default_rng(0)
    residuals = (losses[0] - fitted) * np.sqrt(len(known) / max(1, len(known) - 4))
    drawn = law(design(points), *fit(x, fitted + random.choice(residuals, (DRAWS, len(known)))))
    bounds = np.quantile(drawn + random.choice(residuals, drawn.shape), (0.05, 0.95), axis=0)
    return np.stack([law(design(points), *fit(x, losses))[0], *bounds], axis=1).tolist()


def predict(out, size, runs):
    """Write what two or more smaller sizes say of ``runs``, [(Config, directory)], before the first is trained."""
    path, coming = out / "predictions" / f"{size}.json", [point_of(*run) for run in runs]
    known = [point for point in read_points(out) if parameters(point.size) < parameters(size)]
    if path.exists() or len({point.size for point in known}) < 2:
        return
    rows = [dict(tokens_per_parameter=point.ratio, flops=point.compute, loss=loss, low=low, high=high)
            for point, (loss, low, high) in zip(coming, predicted(known, coming), strict=True)]  # fmt: skip
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"date": now, "from": [point._asdict() for point in known], "runs": rows})
    print(f"predicted {size}: " + ", ".join(f"{row['loss']:.3f} [{row['low']:.3f}, {row['high']:.3f}]" for row in rows))


def predictions(out):
    """{(size, tokens per parameter): its row of a file, with the date}."""
    files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in out.glob("predictions/*.json")}
    return {(size, row["tokens_per_parameter"]): {**row, "date": content["date"]}
            for size, content in files.items() for row in content["runs"]}  # fmt: skip


def write(out):
    """Write OUT/REPORT.md and OUT/ladder.png."""
    points, before, rows = read_points(out), predictions(out), []
    for size, ratio, compute, loss in points:
        row = before.get((size, ratio))
        said = "{loss:.4f} [{low:.4f}, {high:.4f}], {date}".format(**row) if row else ""
        missed = f"{loss - row['loss']:+.4f}" if row else ""
        rows.append([size, f"{ratio:g}", f"{compute:.3g}", f"{loss:.4f}", said, missed])
    lines = write_table(["size", "tokens per parameter", "FLOPs", "loss", "predicted before", "missed by"], rows)
    told = len({point.size for point in points}) > 1
    if told:
        (floor,), ((a, alpha, s),) = fit(design(points), np.array([[point.loss for point in points]]))
        lines = [*lines, "", f"L = {floor:.4f} + exp({a:.4f} - {alpha:.4f} ln C {s:+.4f} ln R)"]
    publish(out / "REPORT.md", lines)
    if pyplot is None or not points:
        return
    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for number, ratio in enumerate(sorted({point.ratio for point in points})):
        mine, colour = [point for point in points if point.ratio == ratio], f"C{number}"
        axis.plot([p.compute for p in mine], [p.loss for p in mine], "o", color=colour, label=f"R = {ratio:g}")
        if told:
            line = [Point("", ratio, compute) for compute in np.geomspace(mine[0].compute, 5 * mine[-1].compute)]
            center, low, high = zip(*predicted(points, line), strict=True)
            axis.plot([p.compute for p in line], center, color=colour)
            axis.fill_between([p.compute for p in line], low, high, color=colour, alpha=0.2)
        for row in (row for (_, of), row in before.items() if of == ratio):
            bar = [[row["loss"] - row["low"]], [row["high"] - row["loss"]]]
            axis.errorbar(row["flops"], row["loss"], bar, fmt="x", capsize=4, color=colour)
    axis.set(xscale="log", xlabel="FLOPs", ylabel="validation loss (nats per token)", title="x: predicted before")
    finish(figure, [[axis]], out / "ladder.png")


def write_widths(out):
    """Write OUT/WIDTHS.md and OUT/widths.png: loss against learning rate at every width, with and without."""
    found = {}
    for path in sorted(out.glob("runs/width-*/config.json")):
        if run := read_run(path.parent):
            model, rate = run["config"].model, run["config"].optimizer.learning_rate
            found.setdefault((model.hidden_size, model.base_width), {})[rate] = final_loss(run)
    rates = sorted({rate for losses in found.values() for rate in losses})
    rows = [[str(width), str(base), *(f"{losses[rate]:.4f}" if rate in losses else "" for rate in rates)]
            for (width, base), losses in sorted(found.items())]  # fmt: skip
    publish(out / "WIDTHS.md", write_table(["width", "base width", *(f"{rate:g}" for rate in rates)], rows))
    if pyplot is None or not found:
        return
    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    widths = sorted({width for width, _ in found})
    for (width, base), losses in sorted(found.items()):
        style = f"C{widths.index(width)}o" + ("--" if base == width else "-")
        axis.plot(sorted(losses), [losses[rate] for rate in sorted(losses)], style, label=f"{width}, base {base}")
    axis.set(xscale="log", xlabel="learning rate", ylabel="validation loss (nats per token)", title="width, base width")
    axis.minorticks_off()
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    finish(figure, [[axis]], out / "widths.png")


def publish(path, lines):
    text = "\n".join(lines) + "\n"
    path.write_text(text, encoding="utf-8")
    print(text)
