"""The recovery curve: how much of a dense model's quality a Mixture-of-Head model made from it regains, and how soon.

    python launch/quickstart_recovery.py --mixture RUN --control RUN [--output PREFIX]
    python launch/quickstart_recovery.py --mixture RUN --original RUN

Mixture and control began with the same dense model and were trained on the same samples. docs/continue.md defines the
recovered shares, for the mean over sources and for each source. PREFIX.csv receives all numbers, and PREFIX.png the
curve if matplotlib is installed. With --original, the run of the imported model, it prints what the mixture has lost.
The exit code is 2 if the runs cannot be compared.
"""

import csv
import sys
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import run_file
from moh_lm.config import Config, ConfigError
from moh_lm.monitor.events import complete_rows


def main(texts):
    return run_file(__file__, __doc__, add_flags, run, texts)


def add_flags(parser):
    parser.add_argument("--mixture", type=Path, metavar="RUN", required=True, help="run directory of the mixture")
    against = parser.add_mutually_exclusive_group(required=True).add_argument
    against("--control", type=Path, metavar="RUN", help="run directory of the dense model, trained as long")
    against("--original", type=Path, metavar="RUN", help="run directory of the import, to print its losses beside")
    parser.add_argument("--output", type=Path, metavar="PREFIX", help="of the files to write")


def run(arguments):
    mixture, control = (evaluations(run) for run in (arguments.mixture, arguments.control or arguments.original))
    if arguments.original:
        return print_losses(arguments, mixture, control)
    if 0 not in mixture:
        raise ConfigError([f"--mixture {arguments.mixture}: was not evaluated before its first step; give another run"])
    if mixture.keys() != control.keys() or mixture[0].keys() != control[0].keys():
        raise ConfigError(["--control: was not evaluated at the same steps on the same sources as --mixture"])
    tokens_after = Config.load(arguments.mixture / "config.json").tokens_after
    rows = [row(tokens_after(step), mixture[0], control[0], mixture[step], control[step]) for step in sorted(mixture)]
    print_table(rows, list(mixture[0]))
    if arguments.output:
        write_table(f"{arguments.output}.csv", rows)
        try:
            draw(f"{arguments.output}.png", rows, list(mixture[0]))
        except ModuleNotFoundError:
            print("no picture: matplotlib is not installed")


def evaluations(run):
    """Return {step: {source, and "mean": validation loss}} of a run."""
    rows = [row for _, row in complete_rows(run / "metrics.jsonl") if "evaluation" in row]
    if any(row["evaluation_mean"] is None for row in rows):
        raise ConfigError([f"{run}: has diverged: a validation loss is not finite; give a run that has not"])
    return {row["step"]: {"mean": row["evaluation_mean"], **row["evaluation"]} for row in rows}


def row(tokens, mixture_0, control_0, mixture, control):
    """Return the numbers after ``tokens`` tokens: losses and shares, for the mean and for every source."""
    found = {"tokens": tokens}
    for name in mixture:
        regained = mixture_0[name] - mixture[name]
        found[f"loss/{name}"] = mixture[name]
        found[f"control/{name}"] = control[name]
        found[f"recovered/{name}"] = share(regained, mixture_0[name] - control_0[name])
        found[f"against_control/{name}"] = share(regained, mixture_0[name] - control[name])
    return found


def share(regained, lost):
    """Return the regained share of the loss; NaN if the mixture starts as good as the dense model."""
    return regained / lost if lost > 0 else float("nan")


def print_losses(arguments, mixture, original):
    tokens_after, dense = Config.load(arguments.mixture / "config.json").tokens_after, original.get(0)
    if dense is None:
        raise ConfigError([f"--original {arguments.original}: was not evaluated before its first step; give another"])
    if arguments.output:
        raise ConfigError([f"--output {arguments.output}: is for a recovery curve; leave it out, or give --control"])
    rows = {"original": dense}
    for step, losses in sorted(mixture.items()):
        rows[f"mixture after {tokens_after(step):,} tokens" if step else "mixture before training"] = losses
    print(f"{'loss in nats per token':<32}" + "".join(f"{name:>12}" for name in dense) + f"{'lost':>12}")
    for label, losses in rows.items():
        found = "".join(f"{losses[name]:12.3f}" for name in dense)
        print(f"{label:<32}{found}{losses['mean'] - dense['mean']:+12.3f}")


def print_table(rows, names):
    sources = [name for name in names if name != "mean"]
    first = rows[0]
    print("validation loss per token     " + "".join(f"{name:>12}" for name in names))
    for title, kind, figures in (
        ("dense, end of stage 1", "control", first),
        ("mixture before training", "loss", first),
        ("mixture after training", "loss", rows[-1]),
        ("dense, trained as long", "control", rows[-1]),
    ):
        print(f"{title:<30}" + "".join(f"{figures[f'{kind}/{name}']:>12.4f}" for name in names))
    print()
    print(f"{'tokens':>10}{'loss':>9}{'dense':>9}{'recovered':>11}{'against control':>17}  recovered of each source")
    for figures in rows:
        each = "  ".join(f"{name} {figures[f'recovered/{name}']:7.1%}" for name in sources)
        print(
            f"{figures['tokens']:>10,}{figures['loss/mean']:>9.4f}{figures['control/mean']:>9.4f}"
            f"{figures['recovered/mean']:>11.1%}{figures['against_control/mean']:>17.1%}  {each}"
        )


def write_table(path, rows):
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path}")


def draw(path, rows, names):
    """Draw the curves of ``recovered``: thick for the mean, thin for each source; dashed against the control."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    tokens = [row["tokens"] / 1e6 for row in rows]
    for name in names:
        style = dict(linewidth=2.5, color="black") if name == "mean" else dict(linewidth=1)
        axes.plot(tokens, [100 * row[f"recovered/{name}"] for row in rows], label=name, **style)
    strict = [100 * row["against_control/mean"] for row in rows]
    axes.plot(tokens, strict, "--", color="black", label="mean, against control")
    axes.axhline(100, color="gray", linewidth=0.8)
    axes.set(xlabel="tokens of stage 2 (millions)", ylabel="share of the dense model's quality regained (%)")
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
