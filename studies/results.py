"""The results of complete runs: their losses, differences by seed, and tables in Markdown.

A run that is not complete is left out. So is one whose last losses are not finite, and the report names it. The loss of
a run is the mean over its sources. Intervals contain the true mean with a confidence of 90% if only seeds vary.
"""

import math
import re
import sys
from statistics import mean, stdev

from moh_lm.config import Config, ConfigError
from moh_lm.cost.flops import flops_per_token
from moh_lm.cost.memory import cache_bytes
from moh_lm.monitor.alarms import BALANCE, COLLAPSE, DRIFT
from moh_lm.monitor.events import complete_rows

DENSE, LENGTHS = "dense", ("dense-half", "dense", "dense-double")  # the reference, and its numbers of tokens
# 95% points of Student's distribution for 1, 2, ... degrees of freedom; beyond 15, that of 15, which is slightly wide.
STUDENT = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753)


def read_run(directory):
    """Return a run, or None if it is not complete, its last losses are not finite or, with a note, config.json is bad.

    {"config", "evaluations": {step: {source: loss in nats per token}}, "rows": of metrics.jsonl, "active_heads":
    {layer: heads of a token} in the last interval, only with --routing-top-p or --routing relu, "alarms": the number
    that fired about heads, NaN without an events.jsonl}.
    """
    try:
        config = Config.load(directory / "config.json")
    except ConfigError as error:
        print(f"left out: {error.problems[0]}", file=sys.stderr)
        return None
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
        "alarms": alarms_about_heads(directory / "events.jsonl"),
    }


def alarms_about_heads(path):
    """Return how many alarms about heads a run's events.jsonl has, without those whose step was trained again after a
    stop; NaN without the file."""
    steps = []
    for _, row in complete_rows(path):
        if row.get("event") == "started":
            steps = [step for step in steps if step <= row.get("step", 0)]
        elif row.get("event") == "alarm" and row.get("alarm") in (COLLAPSE, BALANCE, DRIFT):
            steps.append(row.get("step", 0))
    return len(steps) if path.exists() else math.nan


def factor_and_seed(directory):
    """Return (factor of the learning rate, seed) of a run's directory, rate-FACTOR-seed-N, or None for any other."""
    found = re.fullmatch(r"rate-(\d[\d.e+-]*)-seed-(\d{1,18})", directory.name)
    try:
        factor, seed = float(found[1]), int(found[2])
    except (TypeError, ValueError):
        return None
    return (factor, seed) if directory.name == run_name(factor, seed) else None


def run_name(factor, seed):
    """The name of a run's directory, which ``factor_and_seed`` reads."""
    return f"rate-{factor:g}-seed-{seed}"


def has_diverged(directory):
    """Whether the run gave up, or its last losses are not finite."""
    try:
        final = final_evaluation(directory, Config.load(directory / "config.json").run.train_iters)
    except ConfigError:
        return False
    return None in final.values() if final else events(directory)[-1:] == ["failed"]


def events(run):
    """The names of a run's events in order, without those of --after-save, which may come after its end."""
    names = (row.get("event") for _, row in complete_rows(run / "events.jsonl"))
    return [name for name in names if isinstance(name, str) and name != "after-save failed"]


def metrics(run):
    """The rows of metrics.jsonl; none if there is no such file."""
    rows = [row for _, row in complete_rows(run / "metrics.jsonl")]
    return [row for row in rows if isinstance(row.get("evaluation", {}), dict)]


def final_evaluation(run, iterations):
    """Return the losses of the run's sources after ``iterations``, or None if it has not reached them."""
    rows = [row for row in metrics(run) if "evaluation" in row and row["step"] == iterations]
    return rows[-1]["evaluation"] if rows else None


def final_losses(run):
    """{source: validation loss at the end}."""
    return run["evaluations"][run["config"].run.train_iters]


def final_loss(run):
    """The mean over sources of a run's final losses."""
    return mean(final_losses(run).values())


def tokens_of(run):
    """The tokens that a run has read."""
    return run["config"].tokens_after(run["config"].run.train_iters)


def differences(runs, against):
    """Return L(runs) - L(against) for the seeds that both have, [d, ...]. Both are {seed: run}."""
    return [final_loss(runs[seed]) - final_loss(against[seed]) for seed in sorted(runs.keys() & against.keys())]


def write_table(head, rows):
    """Lines of a table in Markdown."""
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def section(title, head, rows):
    """Lines of a section with one table."""
    return [f"## {title}", "", *write_table(head, rows), ""]


def significance(differences):
    """Return (the mean difference and half its interval, in words; the verdict)."""
    center, width = interval(differences)
    if width == math.inf:
        return f"{center:+.4f}", "one seed"
    return f"{center:+.4f} ± {width:.4f}", "significant" if abs(center) > width else "not significant"


def interval(values):
    """Return (mean, half the width of its 90% interval); the width for one value is infinite."""
    if len(values) == 1:
        return values[0], math.inf
    t = STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
    return mean(values), t * stdev(values) / math.sqrt(len(values))


def spread(values):
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def kept(run):
    """Return the numbers that generation keeps per token of a whole sequence: keys and values of all layers."""
    return cache_bytes(run["config"].model, run["config"].run.seq_length, width=1)["whole"]


def flops(run):
    """FLOPs of training on a token, with the heads that it uses."""
    return flops_per_token(run["config"].model, run["config"].run.seq_length, run["active_heads"])["active"]


def heads(run):
    """Describe how many of the heads a token uses; in the first layer, if layers differ."""
    model = run["config"].model
    chosen, total = model.heads, model.of_layer(0).num_attention_heads
    if chosen.head_selection == "all":
        return f"all {total}"
    shared, active = chosen.num_shared_heads[0], chosen.num_active_routed_heads[0]
    if chosen.head_selection == "static":
        return f"{shared + active} of {total}"
    if shared == total:
        return f"all {total}, gated"
    if run["active_heads"]:
        number = "about" if model.heads.routing == "relu" else "at most"
        used = mean(run["active_heads"][layer.index] for layer in model.routed_layers())
        return f"{shared} + {number} {active} of {total - shared}, {used:.1f} in all"
    return f"{shared} + {active} of {total - shared}"
