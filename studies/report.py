"""The report of a table of runs: REPORT.md with its tables, and the pictures of pictures.py.

Reads OUT/runs/SIZE/VARIANT/rate-FACTOR-seed-N; runs that are not complete are left out. So are those that diverged, or
have other tokens or sources than most: the report names them. L is the validation loss at the
end of a run, nats per token, mean over sources. The multiplier of a form is T_dense(L) / T: the tokens with which the
dense model ends at the form's loss, over the form's own. docs/history/atlas.md says how T_dense is interpolated. The
interval of a multiplier is that of its logarithm. In FLOPs it is multiplied by FLOPs(dense) / FLOPs(form), with the
heads that tokens use.
"""

import math
from collections import Counter
from itertools import pairwise
from statistics import mean

from moh_lm.cost.memory import parameter_counts
from studies import results
from studies.pictures import draw
from studies.results import (
    differences,
    factor_and_seed,
    final_loss,
    final_losses,
    flops,
    has_diverged,
    interval,
    read_run,
    results_table,
    significance,
)
from studies.table import TUNING_SEED

DENSE, LENGTHS = "dense", ("dense-half", "dense", "dense-double")


def write(out, table):
    """Write OUT/REPORT.md and its pictures. table: a ``Table``."""
    found, left_out = read_runs(out / "runs", table)
    forms = {variant.name: variant.form for variant in table.variants}
    tuned = tuning_losses(found.get(table.sizes[0].name, {}))
    of_form = {forms[name]: losses for name, losses in reversed(tuned.items())}  # the first of a form is tuned
    best = {name: of_form.get(form, {}) for name, form in forms.items()}
    sizes = {size: alike(compared(variants, best), left_out.setdefault(size, [])) for size, variants in found.items()}
    sizes = {size: variants for size, variants in sizes.items() if variants}
    factors = {size: multipliers(variants) for size, variants in sizes.items()}
    text = markdown(sizes, factors, table, tuned, left_out)
    (out / "REPORT.md").write_text(text, encoding="utf-8")
    print(text)
    draw(out, sizes, table.variants, factors)


def read_runs(directory, table):
    """{size: {variant: {factor of the learning rate: {seed: run}}}} of the complete runs, in the order of the table.

    Also {size: [words about a run that diverged]}, without those that tune.
    """
    found, diverged = {}, {}
    for size in table.sizes:
        for variant in table.variants:
            for path in sorted((directory / size.name / variant.name).glob("rate-*-seed-*/config.json")):
                factor, seed = factor_and_seed(path.parent) or (None, TUNING_SEED)
                run = read_run(path.parent) if factor else None
                if run:
                    factors = found.setdefault(size.name, {}).setdefault(variant.name, {})
                    factors.setdefault(factor, {})[seed] = run
                elif seed != TUNING_SEED and has_diverged(path.parent):
                    diverged.setdefault(size.name, []).append(f"{variant.name}, seed {seed}: diverged")
    return found, diverged


def compared(variants, tuned):
    """{variant: {seed: run}} of the seeds that are compared, at the factor that its form was tuned to.

    tuned: {variant: {factor: loss}} of the tuning of its form. A variant without a run at the best factor is compared
    at the one that has most seeds; of as many, at the better one, or else at that which most variants have.
    """
    found, common = {}, Counter(factor for of in variants.values() for factor in of if {*of[factor]} - {TUNING_SEED})
    for name, factors in variants.items():
        losses = tuned.get(name, {})
        seeds = {factor: {seed: runs[seed] for seed in runs if seed != TUNING_SEED} for factor, runs in factors.items()}
        factor = min(losses, key=losses.get, default=None)
        if not seeds.get(factor):
            factor = max(seeds, key=lambda each: (len(seeds[each]), -losses.get(each, math.inf), common[each]))
        found[name] = seeds[factor]
    return {name: dict(sorted(seeds.items())) for name, seeds in found.items() if seeds}


def alike(variants, left_out):
    """{variant: {seed: run}} without runs whose tokens are not those of most of their variant, or whose sources are not
    those of most of the size; words on them join ``left_out``."""
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


def tuning_losses(variants):
    """{variant: {factor: final loss}} of the seed that tunes."""
    found = {
        name: {factor: final_loss(runs[TUNING_SEED]) for factor, runs in sorted(factors.items()) if TUNING_SEED in runs}
        for name, factors in variants.items()
    }
    return {name: losses for name, losses in found.items() if losses}


def tokens_of(run):
    return run["config"].tokens_after(run["config"].run.train_iters)


def tokens_of_dense(points, loss):
    """(T at which the dense model ends at ``loss``, whether it lies between the points); None if they do not say.

    points: {T: loss} of dense runs, at least two, lower with more tokens. Linear in ln T between neighbours, and
    beyond the first and the last two.
    """
    ordered = sorted(points.items())
    if len(ordered) < 2 or any(more >= less for (_, less), (_, more) in pairwise(ordered)):
        return None
    for (tokens, left), (next_tokens, right) in pairwise(ordered):  # noqa: B007 (the last stays, if none is left)
        if loss >= right:
            break
    place = (left - loss) / (left - right)
    return tokens * (next_tokens / tokens) ** place, ordered[-1][1] <= loss <= ordered[0][1]


def multipliers(variants):
    """{variant: (multiplier in tokens, low, high of its 90% interval, whether every seed lies between dense runs)}."""
    dense = [variants.get(name, {}) for name in LENGTHS]
    found = {}
    for name, runs in variants.items():
        if name in LENGTHS:
            continue
        told = []
        for seed, run in runs.items():
            points = {tokens_of(of[seed]): final_loss(of[seed]) for of in dense if seed in of}
            told.append(tokens_of_dense(points, final_loss(run)))
        logs = [math.log(told_[0] / tokens_of(run)) for told_, run in zip(told, runs.values(), strict=True) if told_]
        if logs:
            center, width = interval(logs)
            bounds = (math.exp(center + side) if width < math.inf else None for side in (-width, width))
            found[name] = (math.exp(center), *bounds, all(told_[1] for told_ in told if told_))
    return found


def markdown(sizes, factors, table, tuned, left_out):
    """The whole report. sizes: {size: {variant: {seed: run}}}. factors: {size: ``multipliers``}."""
    heads = {size.name: size.heads for size in table.sizes}
    told = any(factors.values())
    lines = ["# Report", "", *([] if sizes else ["Nothing is compared yet.", ""])]
    lines += [*summary(sizes, factors), ""] if told else []
    for size, variants in sizes.items():
        lines += [*size_section(size, heads[size], variants, factors[size]), ""]
        lines += answers(variants, table.questions)
    named = [f"- size {size}, {words}" for size, of in left_out.items() for words in of]
    lines += ["Left out. A form whose runs diverge is worse than its row says.", "", *named, ""] if named else []
    lines += [
        "Loss: validation, nats per token, at the end; mean and standard deviation over seeds. FLOPs: of training on a",
        "token with the heads that it uses; with top-p or ReLU those of the last interval. To dense, to static: mean",
        "of the differences seed by seed with its 90% interval of Student's distribution, to all heads and to as many",
        "heads that are always the same. Seeds are all that it takes into account: not another corpus, size or",
        "length of training. Of ten comparisons without a true difference, one appears significant by chance, and one",
        "seed alone shows nothing.",
        "",
    ]
    lines += [
        "Tokens x: tokens with which the dense model ends at this loss, over the tokens of the run, with its 90%",
        "interval; *: a seed lies beyond the dense runs of half and twice the tokens. A seed with one length of dense",
        "runs only, or whose dense losses do not fall with the tokens, is left out. FLOPs x: the same in FLOPs.",
        "",
    ] * told
    return "\n".join([*lines, *tuning_section(tuned, table.sizes[0])]) + "\n"


def summary(sizes, factors):
    """The difference to dense and the multiplier in tokens, for each form and size."""
    rows = []
    for name in dict.fromkeys(name for variants in sizes.values() for name in variants if name not in LENGTHS):
        rows.append([name])
        for size, variants in sizes.items():
            rows[-1].append(difference(variants.get(name, {}), variants.get(DENSE, {})))
            rows[-1].append(shown(factors[size][name], 1) if name in factors[size] else "")
    return results.write_table(["", *(title for size in sizes for title in (f"{size}: to dense", "tokens x"))], rows)


def answers(variants, questions):
    """The differences that the questions of the table ask for."""
    rows = []
    for name, against, question in questions:
        if found := differences(variants.get(name, {}), variants.get(against, {})):
            rows.append([name, against, question, str(len(found)), *significance(found)])
    return [*results.write_table(["", "against", "", "seeds", "difference", ""], rows), ""] if rows else []


def size_section(size, heads, variants, found):
    first = next(iter(next(iter(variants.values())).values()))
    model, dense = first["config"].model, variants.get(DENSE, {})
    whole = [flops(run) for run in dense.values()][:1]

    def outside(name, runs):
        counts = parameter_counts(runs[0]["config"].model)
        return f"{counts['total'] - counts['embedding']:,}"

    def in_flops(name, runs):
        return shown(found[name], whole[0] / mean(map(flops, runs))) if name in found and whole else ""

    before = {
        "peak rate": lambda name, runs: f"{runs[0]['config'].optimizer.learning_rate:g}",
        "parameters outside the embeddings": outside,
        "tokens": lambda name, runs: f"{tokens_of(runs[0]) / 1e6:.1f}M",
    }
    after = {
        "to dense": lambda name, runs: difference(variants[name], dense) if name not in LENGTHS else "",
        "to static": lambda name, runs: difference(variants[name], static_of(variants, name)),
    }
    if found:
        after |= {"tokens x": lambda name, runs: shown(found[name], 1) if name in found else "", "FLOPs x": in_flops}
    yield (
        f"## Size {size}: {model.num_layers} layers, width {model.hidden_size}, {heads} heads of "
        f"{model.head_dim}, {sum(map(len, variants.values()))} runs"
    )
    yield ""
    yield from results_table(variants, DENSE, before, after)


def static_of(variants, name):
    """The static runs with as many heads; none for static itself and for all heads."""
    form, _, share = name.partition("-")
    return variants.get(f"static-{share}", {}) if form != "static" else {}


def difference(runs, against):
    """The difference of the losses seed by seed, in words; empty if no seed is in both."""
    found = differences(runs, against)
    pairs = f" ({len(found)} of {len(runs)} seeds)" if len(found) < len(runs) else ""
    return ", ".join(significance(found)) + pairs if found else ""


def shown(found, factor):
    """A multiplier times ``factor``, with its interval."""
    center, low, high, inside = found
    limits = "" if low is None else f" [{low * factor:.2f}, {high * factor:.2f}]"
    return f"{center * factor:.2f}{limits}" + ("" if inside else "*")


def tuning_section(tuned, size):
    """The final loss of each form at every factor of the learning rate that was tried; the best is bold."""
    if not tuned:
        return
    factors = sorted({factor for losses in tuned.values() for factor in losses})
    yield f"## Learning rates: size {size.name}, seed {TUNING_SEED}"
    yield ""
    rows = []
    for name, losses in tuned.items():
        cells = {factor: f"{losses[factor]:.4f}" if factor in losses else "" for factor in factors}
        best = min(losses, key=losses.get)
        cells[best] = f"**{cells[best]}**"
        rows.append([name, *cells.values()])
    yield from results.write_table(["", *(f"{factor * size.rate:g}" for factor in factors)], rows)
    yield ""
    yield "The best factor of a form is used at every size, times the size's own rate, and with every other seed. A"
    yield "form that has no run with it yet is compared at the peak rate that its row gives."
