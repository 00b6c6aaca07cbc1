"""The report of an ablation: REPORT.md with its tables, and curves.png if matplotlib is installed.

    python launch/ablation_report.py OUT

Reads OUT/runs/NAME-SEED of ``launch/ablation.py``; runs that are not complete, or whose last losses are not finite, are
left out. Variants are compared in
pairs, seed by seed: with d the difference of the final validation losses for one seed, mean over sources, and n seeds,

    difference = mean(d) +- t(n - 1) * s(d) / sqrt(n)

where s is the standard deviation and t the 97.5% point of Student's distribution: the interval that holds the true
mean with a confidence of 95%, seeds being all that varies. An interval that holds 0 tells nothing apart.
"""

import argparse
import math
from pathlib import Path
from statistics import mean, median, stdev

from moh_lm.config import Config
from moh_lm.cost.flops import flops_per_token
from moh_lm.cost.memory import parameter_counts
from moh_lm.monitor.journal import complete_rows

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
except ImportError:  # the tables are made without it
    pyplot = None

# 97.5% points of Student's distribution for 1, 2, ... degrees of freedom; beyond, that of 15, which is a little wide.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
QUESTIONS = (
    ("moh-75", "dense", "do 75% of the heads do as well as all?"),
    ("moh-50", "dense", "do 50%?"),
    ("moh-25", "dense", "do 25%?"),
    ("moh-50", "static-50", "does choosing heads for each token help?"),
    ("moh-75-released", "moh-75", "`released` or `paper`, 75%"),
    ("moh-50-released", "moh-50", "`released` or `paper`, 50%"),
    ("moh-50-global", "moh-50", "balance over the global batch or each sequence"),
    ("moh-50-released-global", "moh-50-released", "the same with `released`"),
    ("moh-50-one-stage", "moh-50", "without the second stage of the router"),
    ("moh-50-shared-0", "moh-50", "no shared heads instead of a quarter"),
    ("moh-50-shared-1", "moh-50", "an eighth shared"),
    ("moh-50-shared-3", "moh-50", "three eighths shared"),
    ("moh-top-p", "moh-75", "as many heads as a token needs, 2 to 6 of 8, instead of 6"),
    ("gqa-50", "gqa-dense", "50% under grouped-query attention"),
    ("gqa-50-groups", "gqa-50", "whole key/value groups instead of single heads"),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="directory of launch/ablation.py")
    write(parser.parse_args().out)


def write(out, order=()):
    """Write OUT/REPORT.md and OUT/curves.png; the variants in the ``order`` given, then by name."""
    runs = read_runs(out / "runs", order)
    text = markdown(runs)
    (out / "REPORT.md").write_text(text, encoding="utf-8")
    print(text)
    if pyplot is None:
        print("no picture: matplotlib is not installed")
    elif runs:
        draw(out / "curves.png", runs)


# --- Runs ---


def read_runs(directory, order=()):
    """{variant: {seed: {"config", "evaluations", "speed", "active_heads"}}} of the complete runs.

    evaluations: {step: {source: loss in nats per token}}. speed: tokens per second, the median over intervals.
    active_heads: {layer: heads of a token}, in the last interval, where --routing-top-p lets them differ.
    """
    runs = {}
    for path in sorted(directory.glob("*/config.json")):
        name, _, seed = path.parent.name.rpartition("-")
        config = Config.load(path)
        final = final_evaluation(path.parent, config.run.train_iters)
        if not final or None in final.values() or not seed.isdigit():
            continue
        rows = metrics(path.parent)
        runs.setdefault(name, {})[int(seed)] = {
            "config": config,
            "evaluations": {row["step"]: row["evaluation"] for row in rows if "evaluation" in row},
            "speed": median(row["tokens_per_second"] for row in rows if "tokens_per_second" in row),
            "active_heads": active_heads(rows),
        }
    place = {name: index for index, name in enumerate(order)}
    return {name: runs[name] for name in sorted(runs, key=lambda name: (place.get(name, len(place)), name))}


def active_heads(rows):
    """Of the last row that has them; empty without top-p."""
    last = [row["heads"] for row in rows if "active_heads" in row.get("heads", {})][-1:]
    return dict(zip(last[0]["layer"], last[0]["active_heads"], strict=True)) if last else {}


def metrics(run):
    """The rows of metrics.jsonl; none if there is no such file."""
    return [row for _, row in complete_rows(run / "metrics.jsonl")]


def final_evaluation(run, iterations):
    """The losses of the run's sources after ``iterations``; None if it has not come so far."""
    rows = [row for row in metrics(run) if "evaluation" in row and row["step"] == iterations]
    return rows[-1]["evaluation"] if rows else None


def final_loss(run):
    """Validation loss at the end, mean over sources."""
    evaluations = run["evaluations"]
    return mean(evaluations[max(evaluations)].values())


# --- Tables ---


def markdown(runs):
    """The whole report."""
    if not runs:
        return "No complete run yet.\n"
    first = next(iter(next(iter(runs.values())).values()))["config"]
    tokens = first.run.train_iters * first.run.tokens_per_iteration
    model = first.model
    lines = [
        "# Ablation",
        "",
        f"{sum(map(len, runs.values()))} runs of {tokens:,} tokens ({first.run.train_iters:,} iterations of "
        f"{first.run.tokens_per_iteration:,}); {model.num_layers} layers, width {model.hidden_size}, "
        f"{model.num_attention_heads} heads of {model.head_dim}, sequences of {first.run.seq_length}.",
        "",
        *results_table(runs),
        "",
        "Loss: validation, nats per token, at the end; mean and standard deviation over seeds. FLOPs: of training on",
        "one token with the heads that it uses; with top-p, those of the last interval on average. Speed: of runs that",
        "shared the machine with others, so a hint only.",
        "",
        *questions_table(runs),
        "",
        "Differences of the mean loss seed by seed, with the 95% interval of Student's distribution over seeds. Seeds",
        "are all that it takes into account: not another corpus, other held-out text, size or length of training. Of",
        "twenty comparisons where nothing differs, one is told apart by chance.",
    ]
    return "\n".join(lines) + "\n"


def results_table(runs):
    every = {name: [run for _, run in sorted(seeds.items())] for name, seeds in runs.items()}
    reference, *_ = every
    first = every[reference][0]
    sources, whole = list(first["evaluations"][0]), flops(first)["active"]
    yield f"| | heads | parameters | FLOPs, {reference} = 1 | seeds | " + " | ".join(sources) + " | mean | tokens/s |"
    yield "|---" * (7 + len(sources)) + "|"
    for name, found in every.items():
        config = found[0]["config"]
        final = [run["evaluations"][max(run["evaluations"])] for run in found]
        losses = [spread([losses[source] for losses in final]) for source in sources]
        cells = [
            name,
            heads(found[0]),
            f"{parameter_counts(config.model)['total']:,}",
            f"{mean(flops(run)['active'] for run in found) / whole:.3f}",
            str(len(found)),
            *losses,
            f"**{spread([final_loss(run) for run in found])}**",
            f"{median(run['speed'] for run in found):,.0f}",
        ]
        yield "| " + " | ".join(cells) + " |"


def questions_table(runs):
    yield "| | against | | seeds | difference | |"
    yield "|---|---|---|---|---|---|"
    for name, against, question in QUESTIONS:
        seeds = sorted(runs.get(name, {}).keys() & runs.get(against, {}).keys())
        if not seeds:
            continue
        differences = [final_loss(runs[name][seed]) - final_loss(runs[against][seed]) for seed in seeds]
        center, width = interval(differences)
        verdict = "not told apart" if abs(center) <= width else "better" if center < 0 else "worse"
        shown = f"{center:+.4f} ± {width:.4f}" if width < math.inf else f"{center:+.4f}"
        yield f"| {name} | {against} | {question} | {len(seeds)} | {shown} | {verdict} |"


def interval(values, points=STUDENT):
    """(mean, half the width of the interval with these ``points``: 95%); the width of one value is infinite."""
    if len(values) == 1:
        return values[0], math.inf
    t = points[min(len(values) - 1, len(points)) - 1]
    return mean(values), t * stdev(values) / math.sqrt(len(values))


def spread(values):
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def flops(run):
    return flops_per_token(run["config"].model, run["config"].run.seq_length, run["active_heads"])


def heads(run):
    """How many of the heads a token uses, in words; of the first layer where layers differ."""
    model = run["config"].model
    chosen, total = model.heads, model.num_attention_heads
    if chosen.head_selection == "all":
        return f"all {total}"
    shared, active = chosen.num_shared_heads[0], chosen.num_active_routed_heads[0]
    if chosen.head_selection == "static":
        return f"{shared + active} of {total}"
    if shared == total:
        return f"all {total}, gated"
    if run["active_heads"]:
        return f"{shared} + at most {active} of {total - shared}, {mean(run['active_heads'].values()):.1f} in all"
    return f"{shared} + {active} of {total - shared}"


# --- Curves ---


def draw(path, runs):
    """Validation loss against tokens: of every variant, and relative to the first one, mean over common seeds."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    reference, *_ = runs
    styles = [dict(color=f"C{index % 10}", linestyle=("-", "--")[index // 10 % 2]) for index in range(len(runs))]
    for (name, seeds), style in zip(runs.items(), styles, strict=True):
        common = sorted(seeds.keys() & runs[reference].keys())
        if common:
            mine, theirs = (curve([runs[each][seed] for seed in common]) for each in (name, reference))
            steps = sorted(step for step in mine.keys() & theirs.keys() if step)
            tokens = [step * seeds[common[0]]["config"].run.tokens_per_iteration / 1e6 for step in steps]
            left.plot(tokens, [mine[step] for step in steps], label=name, **style)
            right.plot(tokens, [mine[step] - theirs[step] for step in steps], label=name, **style)
    left.set(xlabel="tokens (millions)", ylabel="validation loss (nats per token)")
    right.set(xlabel="tokens (millions)", ylabel=f"difference to {reference}, same seeds")
    right.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=100)
    print(f"wrote {path}")


def curve(runs):
    """{step: mean over ``runs`` and sources of the validation loss}."""
    steps = set.intersection(*(set(run["evaluations"]) for run in runs))
    return {step: mean(mean(run["evaluations"][step].values()) for run in runs) for step in sorted(steps)}


if __name__ == "__main__":
    main()
