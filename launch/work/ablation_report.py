"""The report of an ablation: REPORT.md with its tables, and curves.png if matplotlib is installed.

Reads OUT/runs/NAME-SEED; runs that are not complete, or whose last losses are not finite, are left out. With d the
difference of the final validation losses of two variants for one seed, mean over sources, and n seeds,

    difference = mean(d) +- t(n - 1) * s(d) / sqrt(n)

where s is the standard deviation and t the 97.5% point of Student's distribution: the interval that holds the true
mean with a confidence of 95%, seeds being all that varies. The report of the atlas reads and writes with the same
functions.
"""

import math
from statistics import mean, median, stdev

from launch.ablation import SHARES
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
    ("moh-75-shared-0", "moh-75", "75% without shared heads, and so in one stage (Table 6)"),
    ("moh-75-one-stage", "moh-75", "75% with shared heads in one stage (Table 6)"),
    *((f"moh-75-share-{share}", "moh-75", f"{share}% of used heads shared, for 66.7% (Table 7)") for share in SHARES),
    *((f"dense-heads-{heads}", "dense", f"{heads} heads of the same width in all") for heads in (1, 4, 16, 32)),
    ("moa-50", "gqa-dense", "half of the heads, one key/value head, gates that add up to 1 (MoA)"),
    ("switch-50", "moh-50", "sigmoid gates, no shared head (SwitchHead's gates)"),
    ("gqa-50", "gqa-dense", "50% under grouped-query attention"),
    ("gqa-50-groups", "gqa-50", "whole key/value groups instead of single heads"),
)


def write(out, order=()):
    """Write OUT/REPORT.md and OUT/curves.png; the variants in the ``order`` given, then by name."""
    runs = read_runs(out / "runs", order)
    text = markdown(runs)
    (out / "REPORT.md").write_text(text, encoding="utf-8")
    print(text)
    if pyplot is None:
        print("no picture: matplotlib is not installed")
    elif runs:
        styles = [dict(color=f"C{index % 10}", linestyle=("-", "--")[index // 10 % 2]) for index in range(len(runs))]
        draw_curves(out / "curves.png", {"": runs}, next(iter(runs)), dict(zip(runs, styles, strict=True)).get)


def read_runs(directory, order=()):
    """{variant: {seed: run}} of the complete runs, each as ``read_run`` gives it."""
    runs = {}
    for path in sorted(directory.glob("*/config.json")):
        name, _, seed = path.parent.name.rpartition("-")
        if seed.isdigit() and (run := read_run(path.parent)):
            runs.setdefault(name, {})[int(seed)] = run
    place = {name: index for index, name in enumerate(order)}
    return {name: runs[name] for name in sorted(runs, key=lambda name: (place.get(name, len(place)), name))}


def read_run(directory):
    """A run of either report; None if it is not complete, or a loss at its end is not finite.

    {"config", "evaluations": {step: {source: loss in nats per token}}, "rows": of metrics.jsonl, "active_heads":
    {layer: heads of a token} in the last interval, with --routing-top-p only}.
    """
    config = Config.load(directory / "config.json")
    final = final_evaluation(directory, config.run.train_iters)
    if not final or None in final.values():
        return None
    rows = metrics(directory)
    heads = [row["heads"] for row in rows if "active_heads" in row.get("heads", {})][-1:]
    return {
        "config": config,
        "evaluations": {row["step"]: row["evaluation"] for row in rows if "evaluation" in row},
        "rows": rows,
        "active_heads": {layer: n for of in heads for layer, n in zip(of["layer"], of["active_heads"], strict=True)},
    }


def metrics(run):
    """The rows of metrics.jsonl; none if there is no such file."""
    return [row for _, row in complete_rows(run / "metrics.jsonl")]


def final_evaluation(run, iterations):
    """The losses of the run's sources after ``iterations``; None if it has not come so far."""
    rows = [row for row in metrics(run) if "evaluation" in row and row["step"] == iterations]
    return rows[-1]["evaluation"] if rows else None


def final_losses(run):
    """{source: validation loss at the end}."""
    return run["evaluations"][max(run["evaluations"])]


def final_loss(run):
    """Their mean over sources."""
    return mean(final_losses(run).values())


def differences(runs, against):
    """L(runs) - L(against) of the seeds that both have: [d, ...]. Both are {seed: run}."""
    return [final_loss(runs[seed]) - final_loss(against[seed]) for seed in sorted(runs.keys() & against.keys())]


def markdown(runs):
    """The whole report."""
    if not runs:
        return "No complete run yet.\n"
    reference, *_ = runs
    first = next(iter(runs[reference].values()))["config"]
    tokens = first.run.train_iters * first.run.tokens_per_iteration
    model = first.model
    before = {"parameters": lambda name, each: f"{parameter_counts(each[0]['config'].model)['total']:,}"}
    after = {"tokens/s": lambda name, each: f"{median(map(speed, each)):,.0f}"}
    lines = [
        "# Ablation",
        "",
        f"{sum(map(len, runs.values()))} runs of {tokens:,} tokens ({first.run.train_iters:,} iterations of "
        f"{first.run.tokens_per_iteration:,}); {model.num_layers} layers, width {model.hidden_size}, "
        f"{model.num_attention_heads} heads of {model.head_dim}, sequences of {first.run.seq_length}.",
        "",
        *results_table(runs, reference, before, after),
        "",
        "Loss: validation, nats per token, at the end; mean and standard deviation over seeds. FLOPs: of training on",
        "one token with the heads that it uses; with top-p, those of the last interval on average. Speed: of runs that",
        "shared the machine with others, so a hint only.",
        "",
        *table(["", "against", "", "seeds", "difference", ""], answers(runs)),
        "",
        "Differences of the mean loss seed by seed, with the 95% interval of Student's distribution over seeds. Seeds",
        "are all that it takes into account: not another corpus, other held-out text, size or length of training. Of",
        "twenty comparisons where nothing differs, one is told apart by chance.",
    ]
    return "\n".join(lines) + "\n"


def answers(runs):
    for name, against, question in QUESTIONS:
        if found := differences(runs.get(name, {}), runs.get(against, {})):
            yield [name, against, question, str(len(found)), *told_apart(found, STUDENT)]


def speed(run):
    """Tokens per second, the median over intervals."""
    return median(row["tokens_per_second"] for row in run["rows"] if "tokens_per_second" in row)


def table(head, rows):
    """Lines of a table in Markdown."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def results_table(variants, reference, before, after):
    """A row for each of ``variants``, {name: {seed: run}}, with its FLOPs over those of the ``reference``, a name.

    before, after: {title: function(name, [run])} of the columns before FLOPs and after losses.
    """
    sources = list(final_losses(next(iter(next(iter(variants.values())).values()))))
    whole = [flops(run) for run in variants.get(reference, {}).values()][:1]
    rows = []
    for name, runs in variants.items():
        each = [run for _, run in sorted(runs.items())]
        rows.append([
            name,
            heads(each[0]),
            *(write(name, each) for write in before.values()),
            *(f"{mean(map(flops, each)) / dense:.3f}" for dense in whole),
            str(len(each)),
            *(spread([final_losses(run)[source] for run in each]) for source in sources),
            f"**{spread(list(map(final_loss, each)))}**",
            *(write(name, each) for write in after.values()),
        ])
    titles = [*before, *(f"FLOPs, {reference} = 1" for _ in whole), "seeds", *sources, "mean", *after]
    return table(["", "heads", *titles], rows)


def told_apart(differences, points):
    """(their mean and half of the interval with these ``points``, what follows from it)."""
    center, width = interval(differences, points)
    if width == math.inf:
        return f"{center:+.4f}", "one seed"
    verdict = "not told apart" if abs(center) <= width else "better" if center < 0 else "worse"
    return f"{center:+.4f} ± {width:.4f}", verdict


def interval(values, points=STUDENT):
    """(mean, half the width of the interval with these ``points``: 95%); the width of one value is infinite."""
    if len(values) == 1:
        return values[0], math.inf
    t = points[min(len(values) - 1, len(points)) - 1]
    return mean(values), t * stdev(values) / math.sqrt(len(values))


def spread(values):
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def flops(run):
    """Of training on a token, with the heads that it uses."""
    return flops_per_token(run["config"].model, run["config"].run.seq_length, run["active_heads"])["active"]


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


def draw_curves(path, table, reference, style):
    """The validation loss against tokens, and its difference to the ``reference`` variant with the same seeds.

    table: {title: {variant: {seed: run}}}, a column of the picture each. style: the settings of a variant's line.
    """
    figure, axes = pyplot.subplots(2, len(table), figsize=(5 * len(table) + 1, 8), layout="constrained", squeeze=False)
    for (upper, lower), (title, variants) in zip(axes.T, table.items(), strict=True):
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
        upper.set(title=title, ylabel="validation loss (nats per token)")
        lower.set(xlabel="tokens (millions)", ylabel=f"difference to {reference}, same seeds")
    finish(figure, axes, path)


def finish(figure, axes, path):
    """One legend with every line of the picture, then the file."""
    lines = {}
    for axis in (axis for row in axes for axis in row):
        handles, labels = axis.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    print(f"wrote {path}")


def curve(runs):
    """{step: mean over ``runs`` and sources of the validation loss}."""
    steps = set.intersection(*(set(run["evaluations"]) for run in runs))
    return {step: mean(mean(run["evaluations"][step].values()) for run in runs) for step in sorted(steps)}
