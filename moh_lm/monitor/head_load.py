"""Metrics of heads from the sums of an interval: how evenly they are used, by which sources, and with which gates.

With --routing-unit key_value_group, heads are key/value groups here. docs/monitoring.md has the formulas.
"""

import math

import numpy as np

from moh_lm.model.balance import A1, BALANCE, COUNTS, GATES, SQUARES, row_width

ALWAYS = 0.95  # such a load is suspicious even where all but few heads are active


def high_load(fair, high):
    """Return the load above which a head is overused: ``high`` times ``fair``, but at most ``ALWAYS``, or halfway from
    the fair load to 1 if that is more. There is no limit if ``high`` is 0, or if nearly all heads are always active."""
    return min(high * fair, max(ALWAYS, (1 + fair) / 2)) if high and fair <= ALWAYS else math.inf


@np.errstate(invalid="ignore")  # undefined values, such as the mean gate if no head is used, become NaN
def head_figures(layers, sums, names, sequences, seq_length, high, parallel):
    """Return {"layer": [number of each layer], "load": [[E] of each], "entropy", ..., "source_load"}.

    layers: ``RoutedLayer``s. sums: [sources, sum of (4 + E)] float64, of the rows of routers (moh_lm.model.balance).
    sequences: [sources], the number of sequences in these sums, each of ``seq_length`` tokens. ``load_evenness`` and
    balance_loss are None in layers without routed heads, a1 in those without the second stage. source_load: {source
    that was seen: [[E] of each layer]}, source_gate_rms: {source that was seen: [of each layer]}.
    """
    figures, source_load, source_rms = {"layer": [layer.index for layer in layers]}, {}, {}
    parts = np.split(sums, np.cumsum([row_width(layer) for layer in layers])[:-1], axis=1)
    for layer, part in zip(layers, parts, strict=True):
        balance, a1, counts = part[:, BALANCE].sum(), part[:, A1].sum(), part[:, COUNTS].sum(0)
        length = seq_length / layer.stride
        tokens = sum(sequences) * length
        load = counts / tokens
        in_use = tokens * layer.num_shared + counts.sum()  # gates of heads in use
        found = {
            "load": load.tolist(),
            **load_evenness(layer, counts, load, high, parallel),
            "a1": float(a1 / tokens) or None,
            "balance_loss": float(balance / sum(sequences)) if layer.num_routed else None,
            "gate_mean": float(part[:, GATES].sum() / in_use),
            "gate_rms": float(np.sqrt(part[:, SQUARES].sum() / in_use)),
        }
        if layer.varies:
            found["active_heads"] = float(layer.heads_per_expert * (layer.num_shared + load.sum()))
        for key, value in found.items():
            figures.setdefault(key, []).append(value)
        for name, of_source, number in zip(names, part, sequences, strict=True):
            if number:
                load = of_source[COUNTS] / (number * length)
                source_load.setdefault(name, []).append(load.tolist())
                square = of_source[SQUARES] / (number * length) / (layer.num_shared + load.sum())
                source_rms.setdefault(name, []).append(float(np.sqrt(square)))
    return figures | {"source_load": source_load, "source_gate_rms": source_rms}


def load_evenness(layer, counts, load, high, parallel):
    """Return metrics of how evenly a layer uses its routed heads, or None if it has none. counts, load: [E].

    tensor_parallel_imbalance and context_parallel_imbalance exist only with several such ranks.
    """
    tp, cp = parallel.tensor_parallel_size, parallel.context_parallel_size
    ranks = {kind: number for kind, degree, number in (("tensor", tp, tp), ("context", cp, tp * cp)) if degree > 1}
    keys = "entropy", "unused", "overused", *(f"{kind}_parallel_imbalance" for kind in ranks)
    if not layer.num_routed:
        return dict.fromkeys(keys)
    overused = load > high_load(layer.fair_load(load), high)
    found = [entropy(counts), float((counts == 0).mean()), float(overused.mean())]
    for number in ranks.values():  # routed heads lie on the ranks in order
        of_ranks = counts.repeat(layer.heads_per_expert).reshape(number, -1).sum(1)
        found.append(float(of_ranks.max() / of_ranks.mean()))
    return dict(zip(keys, found, strict=True))


def entropy(counts):
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum() / np.log(len(counts))) if len(counts) > 1 else 1.0
