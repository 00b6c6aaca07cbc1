"""The search for the learning rate of a form: one seed brackets it, three others choose.

The bracket is cheap: it tries a few factors of the learning rate with seed 0, and goes on while the best is at an edge.
One seed is too few to choose, because it may be an outlier (docs/history/study.md). So seeds 1 to 3 are trained with
the best factor of seed 0 and with its neighbours, and the lowest mean wins.
"""

import math
from statistics import mean

from studies.results import section
from studies.table import SEEDS, TUNING_SEED, factor

MOST_RATES = 6  # most rates tried for a form whose best is always at the edge


def mean_losses(losses, seeds):
    """Return {factor: mean loss of ``seeds``} for the factors that have them all, given {factor: {seed: loss}}."""
    return {each: mean(map(of.get, seeds)) for each, of in losses.items() if of.keys() >= {*seeds}}


def choosing_losses(losses):
    """Return the {factor: loss} by which a factor is chosen: means of three seeds, or losses of seed 0 until then."""
    return mean_losses(losses, SEEDS) or mean_losses(losses, [TUNING_SEED])


def search(losses, rates, bracket=()):
    """Return (factors to try, the best one or None), given {factor: loss} so far and the initial ``rates``.

    While the best is the lowest or the highest tried, a factor beyond it is added: the next of the ``bracket`` that an
    earlier search tried, or else one as far from it as its neighbour. A factor that diverged has the loss inf.
    """
    wanted = [*rates, *(each for each in losses if each not in rates)]
    while len(wanted) < MOST_RATES and losses.keys() >= set(wanted):
        best, ordered = min(wanted, key=losses.get), sorted(wanted)
        if ordered[0] < best < ordered[-1]:
            break
        neighbour = ordered[1] if best == ordered[0] else ordered[-2]
        beyond = [each for each in bracket if (each - best) * (best - neighbour) > 0]
        extrapolated = factor(f"{best * best / neighbour:.3g}")
        wanted.append(min(beyond, key=lambda each: abs(each - best), default=extrapolated))
    known = losses.keys() >= set(wanted) and min(map(losses.get, wanted)) < math.inf
    return wanted, min(wanted, key=losses.get) if known else None


def neighbours(best, factors):
    """Return ``best`` with the factors on both sides of it, or on one side at an edge."""
    ordered = sorted(factors)
    place = ordered.index(best)
    return ordered[max(0, place - 1) : place + 2]


def tuning_sections(tuned, size):
    """The losses of each form by factor of the learning rate: of the seed that brackets it, then means of the others.

    tuned: {form: {factor: {seed: loss}}}."""
    said = False
    for seeds, words in ((TUNING_SEED,), f"seed {TUNING_SEED}"), (SEEDS, f"mean of seeds {SEEDS[0]} to {SEEDS[-1]}"):
        found = {form: losses for form, of in tuned.items() if len(losses := mean_losses(of, seeds)) > 1}
        if not found:
            continue
        said = True
        factors = sorted({factor for losses in found.values() for factor in losses})
        rows = []
        for form, losses in found.items():
            cells = {factor: f"{losses[factor]:.4f}" if factor in losses else "" for factor in factors}
            best = min(losses, key=losses.get)
            cells[best] = f"**{cells[best]}**"
            rows.append([form, *cells.values()])
        rates = (f"{factor * size.rate:g}" for factor in factors)
        yield from section(f"Learning rates: size {size.name}, {words}", ["", *rates], rows)
    if said:
        yield "A form is compared at every size at the factor with the lowest mean, times the size's own rate; until it"
        yield f"has one, at that of seed {TUNING_SEED}'s lowest loss; without a run there, at the rate in its row."
