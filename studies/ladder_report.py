"""The reports of a ladder: REPORT.md with the losses of its runs; WIDTHS.md and widths.png for runs with --widths."""

from moh_lm.config.presets import SIZES
from moh_lm.data.files import publish_own
from studies.pictures import finish, pyplot
from studies.results import final_loss, flops, read_run, tokens_of, write_table


def write(out):
    """Write OUT/REPORT.md: a row for every complete run OUT/runs/SIZE/tokens-R, R being tokens per parameter."""
    paths = [path.parent for path in out.glob("runs/*/tokens-*/config.json") if place_of(path.parent)]
    rows = []
    for path in sorted(paths, key=place_of):
        run = read_run(path)
        if not run:
            continue
        numbers = f"{tokens_of(run):,}", f"{flops(run) * tokens_of(run):.3g}", f"{final_loss(run):.4f}"
        rows.append([path.parent.name, path.name.removeprefix("tokens-"), *numbers])
    publish(out / "REPORT.md", write_table(["size", "tokens per parameter", "tokens", "FLOPs", "loss"], rows))


def place_of(path):
    """Return (place of the size, tokens per parameter) of a run's directory, or None for any other."""
    try:
        return SIZES.index(path.parent.name), float(path.name.removeprefix("tokens-"))
    except ValueError:
        return None


def write_widths(out):
    """Write OUT/WIDTHS.md and OUT/widths.png: loss against learning rate by width, with and without a base width."""
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
    finish(figure, out / "widths.png")


def publish(path, lines):
    text = "\n".join(lines) + "\n"
    publish_own(path.parent, {path.name: text.encode()})
    print(text)
