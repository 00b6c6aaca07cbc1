"""Sc: the tokens with which the dense model would reach the loss of a variant, over those of the variant.

docs/study.md defines it. Dense runs with half, one and two times the tokens give the loss that tokens are worth.
"""

import math
from itertools import pairwise

from studies.results import LENGTHS, final_loss, interval, tokens_of


def tokens_of_dense(points, loss):
    """Return (T at which the dense model reaches ``loss``, whether it lies between the points), or None if unknown.

    points: {T: loss} of dense runs, at least two, lower with more tokens. The loss is linear in ln T between
    neighbours, and extrapolated from the first and the last two.
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
    """{variant: (multiplier in tokens, low, high of its 90% interval, whether every seed lies between dense runs, their
    number)}: the geometric mean over the seeds at which all dense runs exist and improve with tokens."""
    dense = [variants.get(name, {}) for name in LENGTHS]
    found = {}
    for name, runs in variants.items():
        told = [  # (ln of a seed's multiplier, whether it lies between dense runs)
            (math.log(at[0] / tokens_of(run)), at[1])
            for seed, run in runs.items()
            if name not in LENGTHS
            and all(seed in of for of in dense)
            and (at := tokens_of_dense({tokens_of(of[seed]): final_loss(of[seed]) for of in dense}, final_loss(run)))
        ]
        if told:
            center, width = interval([log for log, _ in told])
            bounds = (math.exp(center + side) if width < math.inf else None for side in (-width, width))
            found[name] = (math.exp(center), *bounds, all(inside for _, inside in told), len(told))
    return found
