"""The report of a table of runs: REPORT.md with its tables, and the pictures of pictures.py.

Reads OUT/runs/SIZE/VARIANT/rate-FACTOR-seed-N and OUT/times. Runs that are not complete are left out. So are those
that diverged, or have other tokens or sources than most: the report names them. docs/study.md defines the columns.
"""

import math
from collections import Counter
from statistics import mean, median

from moh_lm.cost.memory import parameter_counts
from moh_lm.data.files import publish_own
from studies import results
from studies.multipliers import multipliers
from studies.pictures import draw
from studies.questions import answers
from studies.recorded import recorded
from studies.results import DENSE, LENGTHS, final_loss, final_losses, flops, significance, spread, tokens_of
from studies.table import TUNING_SEED
from studies.times import read_times
from studies.tuning import choosing_losses, tuning_sections


def write(out, table):
    """Write OUT/REPORT.md, its pictures, and OUT/runs.jsonl. table: a ``Table``."""
    found, diverged = read_runs(out / "runs", table)
    left_out = {
        size: [f"{name}, seed {seed}, factor {factor:g}: diverged" for name, factor, seed in runs]
        for size, runs in diverged.items()
    }
    forms = {variant.name: variant.form for variant in table.variants}
    tuned = tuning_losses(found.get(table.sizes[0].name, {}), forms)
    best = {name: choosing_losses(tuned.get(form, {})) for name, form in forms.items()}
    chosen = {name: min(losses, key=losses.get) for name, losses in best.items() if losses}
    placed = {size: compared(variants, best) for size, variants in found.items()}
    sizes = {size: alike(runs, left_out.setdefault(size, [])) for size, (runs, _) in placed.items()}
    sizes = {size: variants for size, variants in sizes.items() if variants}
    scale = {size: multipliers(variants) for size, variants in sizes.items()}
    times = {size.name: read_times(out, size.name, DENSE) for size in table.sizes}
    diverged = {
        size: {(name, seed) for name, factor, seed in runs if factor == chosen.get(name, factor)}
        for size, runs in diverged.items()
    }
    elsewhere = {
        size: {name for name, factor in factors.items() if factor != chosen.get(name, factor)}
        for size, (_, factors) in placed.items()
    }
    text = markdown(sizes, scale, table, tuned, left_out, times, answers(sizes, table, diverged, elsewhere))
    publish_own(out, {"REPORT.md": text.encode(), "runs.jsonl": recorded(out, table)})
    print(text)
    draw(out, sizes, times)


def read_runs(directory, table):
    """Return {size: {variant: {learning rate factor: {seed: run}}}} of complete runs, in the order of the table.

    Also returns {size: [(variant, factor, seed) of a run that diverged]}, without tuning runs.
    """
    found, diverged = {}, {}
    for size in table.sizes:
        for variant in table.variants:
            for path in sorted((directory / size.name / variant.name).glob("rate-*-seed-*/config.json")):
                factor, seed = results.factor_and_seed(path.parent) or (None, TUNING_SEED)
                run = results.read_run(path.parent) if factor else None
                if run:
                    factors = found.setdefault(size.name, {}).setdefault(variant.name, {})
                    factors.setdefault(factor, {})[seed] = run
                elif seed != TUNING_SEED and results.has_diverged(path.parent):
                    diverged.setdefault(size.name, []).append((variant.name, factor, seed))
    return found, diverged


def compared(variants, tuned):
    """Return {variant: {seed: run}} of the compared seeds, at the factor to which the form was tuned, and {variant:
    factor}.

    tuned: {variant: {factor: loss}} of the tuning of its form. A variant without a run at the best factor is compared
    at the factor with most seeds; among equals, at the better one, or else at the one that most variants have.
    """
    found, factors = {}, {}
    common = Counter(factor for of in variants.values() for factor in of if {*of[factor]} - {TUNING_SEED})
    for name, tried in variants.items():
        losses = tuned.get(name, {})
        seeds = {factor: {seed: runs[seed] for seed in runs if seed != TUNING_SEED} for factor, runs in tried.items()}
        factor = min(losses, key=losses.get, default=None)
        if not seeds.get(factor):
            factor = max(seeds, key=lambda each: (len(seeds[each]), -losses.get(each, math.inf), common[each]))
        if seeds[factor]:
            found[name], factors[name] = dict(sorted(seeds[factor].items())), factor
    return found, factors


def alike(variants, left_out):
    """Return {variant: {seed: run}} without runs whose tokens differ from most of their variant, or whose sources
    differ from most of the size; remarks about them join ``left_out``."""
    found, sources = {}, usual(frozenset(final_losses(run)) for runs in variants.values() for run in runs.values())
    for name, runs in variants.items():
        tokens = usual(map(tokens_of, runs.values()))
        for seed, run in runs.items():
            if (tokens_of(run), {*final_losses(run)}) == (tokens, sources):
                found.setdefault(name, {})[seed] = run
            else:
                left_out.append(f"{name}, seed {seed}: has other tokens or sources than most")
    return found


def usual(values):
    """The most frequent of ``values``; None if there are none."""
    return next((value for value, _ in Counter(values).most_common(1)), None)


def tuning_losses(variants, forms):
    """{form: {factor: {seed: final loss}}} of the first variant of each form, given the ``forms`` of all."""
    firsts = {form: name for name, form in reversed(forms.items())}
    return {
        form: {
            factor: {seed: final_loss(runs[seed]) for seed in runs} for factor, runs in sorted(variants[name].items())
        }
        for form, name in firsts.items()
        if name in variants
    }


def markdown(sizes, scale, table, tuned, left_out, times, answered):
    """The whole report. sizes: {size: {variant: {seed: run}}}. scale: ``multipliers`` by size. times: by size.
    answered: lines with the answers to the questions."""
    heads = {size.name: size.heads for size in table.sizes}
    lines = ["# Report", "", *([] if sizes else ["Nothing is compared yet.", ""])]
    for size, variants in sizes.items():
        lines += size_section(size, heads[size], variants, scale[size], times[size])
    for size, machines in times.items():
        lines += seconds_section(size, sizes.get(size, {}), machines)
    lines += answered
    named = [f"- size {size}, {words}" for size, of in left_out.items() for words in of]
    lines += ["Left out. A form whose runs diverge is worse than its row says.", "", *named, ""] if named else []
    lines += [
        "Loss: validation, nats per token, at the end; mean and standard deviation over seeds. FLOPs: of training on a",
        "token with the heads that it uses. KV: keys and values that generation keeps. Alarms: about heads, in a run.",
        "To dense, to static: means of the differences seed by seed with 90% intervals; before: at the evaluation",
        "before the last. Seconds: of a step, median and range over rounds. Sc: tokens with which dense ends at this",
        "loss, over own tokens; *: a seed lies beyond the dense runs. Sw: the same in seconds. Better, worse: the",
        "interval at the first size excludes zero, and the mean at the second has its sign (docs/history/study.md).",
        "",
    ]
    for size, variants in sizes.items():
        lines += losses_section(size, variants)
    return "\n".join([*lines, *tuning_sections(tuned, table.sizes[0])]) + "\n"


def losses_section(size, variants):
    """The final loss of every run of a size, a column for each seed."""
    seeds = sorted({seed for runs in variants.values() for seed in runs})
    rows = [
        [name, *(f"{final_loss(runs[seed]):.4f}" if seed in runs else "" for seed in seeds)]
        for name, runs in variants.items()
    ]
    return results.section(f"Final losses at size {size}", ["", *(f"seed {seed}" for seed in seeds)], rows)


def size_section(size, heads, variants, found, times):
    """The table of one size: a row for each variant. times: {machine: ``read_times``}."""
    first = next(iter(next(iter(variants.values())).values()))
    model, dense, sources = first["config"].model, variants.get(DENSE, {}), list(final_losses(first))
    statics = {name: of for name in variants if (of := static_of(variants, name))}

    def outside(name, runs):
        counts = parameter_counts(runs[0]["config"].model)
        return f"{counts['total'] - counts['embedding']:,}"

    def to_dense(measure):
        """Return a column of ``measure(run)`` over the value of dense."""
        return lambda name, runs: f"{mean(map(measure, runs)) / measure([*dense.values()][0]):.3f}"

    def multiplier(seconds):
        """Return a column of the multiplier over the ``seconds`` of a step, {variant: those of each round}."""

        def cell(name, runs):
            if name not in found or name not in seconds:
                return ""
            return shown(found[name], 1 / median(seconds[name]), len(runs))

        return cell

    columns = {
        "heads": lambda name, runs: results.heads(runs[0]),
        "peak rate": lambda name, runs: f"{runs[0]['config'].optimizer.learning_rate:g}",
        "parameters outside the embeddings": outside,
        "tokens": lambda name, runs: f"{tokens_of(runs[0]) / 1e6:.1f}M",
    }
    if dense:
        columns |= {f"{title}, {DENSE} = 1": to_dense(of) for title, of in (("FLOPs", flops), ("KV", results.kept))}
    columns |= {
        "alarms": lambda name, runs: f"{mean(run['alarms'] for run in runs):.3g}".replace("nan", "unknown"),
        "seeds": lambda name, runs: str(len(runs)),
    }
    for source in sources:
        columns[source] = lambda name, runs, source=source: spread([final_losses(run)[source] for run in runs])
    columns |= {
        "mean": lambda name, runs: f"**{spread(list(map(final_loss, runs)))}**",
        "to dense": lambda name, runs: difference(variants[name], dense) if name not in LENGTHS else "",
        "to dense, before": lambda name, runs: before(variants[name], dense) if name not in LENGTHS else "",
    }
    if statics:
        columns["to static"] = lambda name, runs: difference(variants[name], statics.get(name, {}))
    if found:
        columns["Sc"] = multiplier(dict.fromkeys(found, [1]))
    for machine, seconds in times.items():
        columns[f"seconds on {machine}"] = lambda name, runs, seconds=seconds: in_rounds(seconds.get(name))
        columns[f"Sw on {machine}"] = multiplier(seconds)
    shape = f"{model.num_layers} layers, width {model.hidden_size}, {heads} heads of {model.head_dim}"
    title = f"Size {size}: {shape}, {sum(map(len, variants.values()))} runs"
    ordered = {name: [run for _, run in sorted(runs.items())] for name, runs in variants.items()}
    rows = [[name, *(write(name, runs) for write in columns.values())] for name, runs in ordered.items()]
    return results.section(title, ["", *columns], rows)


def seconds_section(size, variants, times):
    """The seconds of timed variants without a row in the table of their size. times: {machine: ``read_times``}."""
    names = sorted({name for of in times.values() for name in of} - {DENSE, *variants})
    rows = [[name, *(in_rounds(of.get(name)) for of in times.values())] for name in names]
    title = f"Seconds of a step at size {size}, {DENSE} = 1, of variants that are not compared yet"
    return results.section(title, ["", *times], rows) if rows else []


def in_rounds(ratios):
    """The seconds of a step over those of dense, by round: their median and range; empty without any."""
    return f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else ""


def static_of(variants, name):
    """Return the static runs with the same number of heads; none for static itself and for all heads."""
    form, _, share = name.partition("-")
    return variants.get(f"static-{share}", {}) if form != "static" else {}


def difference(runs, against):
    """The difference of the losses seed by seed, in words; empty if no seed is in both."""
    found = results.differences(runs, against)
    pairs = f" ({len(found)} of {len(runs)} seeds)" if len(found) < len(runs) else ""
    return ", ".join(significance(found)) + pairs if found else ""


def before(runs, against):
    """The mean difference of the losses seed by seed at the evaluation before the last one; empty if there is none."""
    pairs = [(runs[seed], against[seed]) for seed in sorted(runs.keys() & against.keys())]
    steps = [finite_steps(run) for pair in pairs for run in pair]
    if not steps or not (common := set.intersection(*steps)):
        return ""
    mine, theirs = ([mean(run["evaluations"][max(common)].values()) for run in of] for of in zip(*pairs, strict=True))
    return f"{mean(mine) - mean(theirs):+.4f}"


def finite_steps(run):
    """The steps of a run's evaluations between the first and the final ones, if their losses are finite. One less than
    an interval before the end counts as final, too."""
    last, interval = run["config"].run.train_iters, run["config"].run.eval_interval
    most = last - max(1, min(interval, last // 2))
    return {step for step, losses in run["evaluations"].items() if 0 < step <= most and None not in losses.values()}


def shown(found, factor, seeds):
    """A multiplier times ``factor``, with its interval; it tells if it is known for fewer than all ``seeds``."""
    center, low, high, inside, number = found
    ends = "" if low is None else f" [{low * factor:.2f}, {high * factor:.2f}]"
    pairs = f" ({number} of {seeds} seeds)" if number < seeds else ""
    return f"{center * factor:.2f}{ends}" + ("" if inside else "*") + pairs
