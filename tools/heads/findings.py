"""Conclusions from the measures of heads: their classes, how similarly domains use them, and which are specialised or
alike.

    similarity     of domains a and b: 1 - mean over layers with routed heads of 1/2 sum_i |p_a(i) - p_b(i)|, where
                   p_d(i) = load_d(i) / sum_j load_d(j) over the routed heads of the layer: 1 - total variation, the
                   share of the selections that both domains have in common. A domain is compared with itself by its
                   even and its odd windows, and only chance keeps the result below 1.
    specialisation of a routed head: H(mean_d load_d) - mean_d H(load_d) in bits, H(p) = - p lb p - (1 - p) lb (1 - p):
                   the Jensen-Shannon divergence of its use over the domains, each with the same weight. It is how
                   much one token's use of the head tells about its domain: 0 if the load is equal in all, at most 1.
    class          the first of these that holds:
                   previous-token   offset 1 for at least 90% of the queries (Voita et al. 2019), or a mean weight above
                                    0.8 on the token before
                   positional       another offset for at least 90%, or such a weight on the one before that
                   induction        prefix matching of at least 0.4 (Olsson et al. 2022 give scores and no threshold;
                                    0.4 is that of TransformerLens' tutorials)
                   rare-token       at least half of the queries (more than half in Voita et al. 2019)
                   none             (no clear pattern, or no measure: too few tokens use the head)
                   unused           no token uses the head
"""

import math
from typing import NamedTuple

import numpy as np

POSITIONAL, WEIGHT, INDUCTION, RARE = 0.9, 0.8, 0.4, 0.5
CLASSES = ("previous-token", "positional", "induction", "rare-token", "none", "unused")
SHOWN = {"none": "no clear pattern"}  # names of classes for a reader, if they differ
SPAN = 32  # tokens of an excerpt


def kinds_of(model):
    """The kind of each head, [L][h]: "shared" or "routed", or without a router "on" or "off"."""
    found = []
    config = model.config
    names = {"all": ("on", "on"), "static": ("on", "off"), "mixture": ("shared", "routed")}
    for layer in range(config.num_layers):
        first, others = names[config.heads.head_selection]
        always_on = {*config.numbers_always_on(layer)}
        heads = range(config.of_layer(layer).num_attention_heads)
        found.append([first if head in always_on else others for head in heads])
    return found


def classes_of(measures):
    """Class of each head: [L][h]. measures: result of ``measure_text``, with ``prefix`` and ``rare``."""
    used = used_heads(measures)
    keys = ("offset", "offset_share", "previous", "second", "prefix", "rare")
    return [
        [
            class_of(*(measures[key][layer, head] for key in keys)) if used[layer, head] else "unused"
            for head in range(used.shape[1])
        ]
        for layer in range(len(used))
    ]


def shown(name):
    """The name of a class as the page shows it."""
    return SHOWN.get(name, name)


def used_heads(measures):
    """Return the heads that some token of some domain uses, bool [L, h]."""
    return sum(measures["load"].values()) > 0


def class_of(offset, share, previous, second, prefix, rare):
    if share >= POSITIONAL and offset == 1 or previous > WEIGHT:
        return "previous-token"
    if share >= POSITIONAL or second > WEIGHT:
        return "positional"
    if prefix >= INDUCTION:
        return "induction"
    return "rare-token" if rare >= RARE else "none"


def routed_mask(kinds):
    """Return which heads are routed, bool [L, h]."""
    return np.array(kinds) == "routed"


def similarity(one, other, routed):
    """1 - total variation of two loads [L, h], the mean over layers with routed heads that both use."""
    values = []
    for a, b, heads in zip(one, other, routed, strict=True):
        a, b = a[heads], b[heads]
        if a.sum() > 0 and b.sum() > 0:
            values.append(1 - np.abs(a / a.sum() - b / b.sum()).sum() / 2)
    return float(np.mean(values)) if values else float("nan")


def similarities(measures, routed):
    """{domain: {domain: similarity}}; NaN for a domain of one window with itself."""
    loads, halves = measures["load"], measures["half_load"]
    return {
        a: {
            b: similarity(loads[a], loads[b], routed) if a != b
            else similarity(*halves[a], routed) if a in halves else float("nan")
            for b in loads
        }
        for a in loads
    }  # fmt: skip


def specialisation(loads, routed):
    """The specialisation in bits, [L, h]; NaN for heads that are not routed. loads: {domain: [L, h]}."""
    loads = np.stack(list(loads.values()))
    return np.where(routed, binary_entropy(loads.mean(0)) - binary_entropy(loads).mean(0), np.nan)


def chance(sizes):
    """Return the bits of specialisation, about, of a head that all domains use alike. sizes: the tokens of each."""
    return (len(sizes) - 1) / len(sizes) ** 2 * sum(1 / size for size in sizes) / (2 * math.log(2))


def binary_entropy(p):
    parts = [np.where(q > 0, q * np.log2(np.where(q > 0, q, 1)), 0) for q in (p, 1 - p)]
    return -sum(parts)


class Ranked(NamedTuple):
    """A head with its rank."""

    layer: int
    head: int
    value: float


def ranked(values, allowed, count, largest=True):
    """The ``count`` heads with the largest or smallest of ``values`` [L, h] among those ``allowed``, as ``Ranked``."""
    order = np.argsort(-values if largest else values, axis=None, kind="stable")
    places = [np.unravel_index(index, values.shape) for index in order]
    return [Ranked(int(i), int(j), float(values[i, j])) for i, j in places if allowed[i, j]][:count]


def alike(cka, used, count):
    """The ``count`` pairs of used heads with the highest CKA: [(layer, head, other head, CKA)]."""
    pairs = [
        (layer, i, j, float(cka[layer, i, j]))
        for layer in range(len(cka))
        for i in range(cka.shape[1])
        for j in range(i)
        if used[layer, i] and used[layer, j] and not np.isnan(cka[layer, i, j])  # NaN: one output does not vary
    ]
    return sorted(pairs, key=lambda pair: -pair[3])[:count]


def nearest(cka, used):
    """The highest CKA of each head with another used head of its layer, [L, h], NaN if there is none; and the number of
    that head."""
    others = np.nan_to_num(cka, nan=-1)
    others[:, np.arange(cka.shape[1]), np.arange(cka.shape[1])] = -1
    others[np.broadcast_to(~used[:, None, :], others.shape)] = -1
    best, which = others.max(2), others.argmax(2)
    return np.where(used & (best >= 0), best, np.nan), which


class Excerpt(NamedTuple):
    domain: str
    tokens: list  # ids
    gates: list


def excerpts(measures, domains, layer, head, count):
    """The ``count`` spans of at most ``SPAN`` tokens with the largest sums of gates, at most one from each window."""
    found = []
    for domain in domains:
        for tokens, gates in zip(domain.windows, measures["gates"][domain.name], strict=True):
            of_head = gates[:, layer, head].astype(np.float64)
            span = min(SPAN, len(of_head))
            sums = np.convolve(of_head, np.ones(span), "valid")
            start = int(sums.argmax())
            part = slice(start, start + span)
            found.append((sums[start], Excerpt(domain.name, tokens[part].tolist(), of_head[part].tolist())))
    found.sort(key=lambda pair: -pair[0])
    return [excerpt for total, excerpt in found[:count] if total > 0]
