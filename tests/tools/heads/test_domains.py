"""Heads of domains: a planted one is found, and so are those that are alike."""

import json
import math
from argparse import Namespace

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from tests.tools.heads.models import ends_of_documents, nothing


def test_a_head_planted_for_a_domain_is_the_most_specialised_one(tools, planted):
    domains, model, even = planted
    findings = tools["findings"]
    figures = tools["measures"].measure_text(model, domains, nothing)
    loads = figures["load"]
    np.testing.assert_allclose(loads["code"][0], [1, even, 1 - even, 0])
    np.testing.assert_allclose(loads["prose"][0], [1, 0, 0, 1])
    np.testing.assert_allclose(loads["prose"][1], [1, 1, 0, 0])  # equal scores: the lower index

    kinds = findings.kinds_of(model)
    assert kinds == [["shared", "routed", "routed", "routed"]] * 2
    routed = findings.routed_mask(kinds)
    bits = findings.specialisation(loads, routed)

    def entropy(p):
        return -p * math.log2(p) - (1 - p) * math.log2(1 - p)

    assert np.isnan(bits[:, 0]).all()
    np.testing.assert_allclose(
        bits[0, 1:], [entropy(even / 2) - entropy(even) / 2, entropy((1 - even) / 2) - entropy(1 - even) / 2, 1]
    )
    assert bits[1, 1] == 0
    assert findings.ranked(bits, routed, 1) == [(0, 3, 1.0)]
    assert findings.ranked(bits, routed & (loads["code"] > 0), 1, largest=False) == [(1, 1, 0.0)]

    table = findings.similarities(figures, routed)
    assert table["code"]["prose"] == table["prose"]["code"] == pytest.approx((0 + 1) / 2)  # of both layers
    assert table["prose"]["prose"] == 1
    halves = [(torch.stack(domains[0].windows[half::2]) % 2 == 0).double().mean().item() for half in (0, 1)]
    assert table["code"]["code"] == pytest.approx((1 - abs(halves[0] - halves[1]) + 1) / 2)

    shown = findings.excerpts(figures, domains, 0, 3, count=3)
    assert len(shown) == 3 and {excerpt.domain for excerpt in shown} == {"prose"}
    assert all(gate > 0 for gate in shown[0].gates) and len(shown[0].tokens) == 32
    even = findings.excerpts(figures, domains, 0, 1, count=2)
    gates = [window[:, 0, 1].astype(float) for window in figures["gates"]["code"]]
    best = sorted((max(window[start : start + 32].sum() for start in range(33)) for window in gates), reverse=True)
    assert [sum(excerpt.gates) for excerpt in even] == pytest.approx(best[:2])
    assert [[gate > 0 for gate in excerpt.gates] for excerpt in even] == [
        [token % 2 == 0 for token in excerpt.tokens] for excerpt in even
    ]


def test_the_mean_gate_is_over_the_tokens_that_use_the_head(tools, planted):
    domains, model, _ = planted
    figures = tools["measures"].measure_text(model, domains, nothing)
    whole, uses = figures["gates"]["code"][..., 0, 1].astype(float), torch.stack(domains[0].windows) % 2 == 0
    assert figures["gate"]["code"][0, 1] == pytest.approx(whole.sum() / uses.sum().item(), rel=1e-3)
    assert np.isnan(figures["gate"]["code"][0, 3])


def test_alike_pairs_are_found_in_their_layer_among_used_heads(tools):
    cka = np.stack([np.eye(3), np.eye(3)])
    cka[0, 0, 1] = cka[0, 1, 0] = 0.4
    cka[1, 0, 2] = cka[1, 2, 0] = 0.9
    used = np.array([[True, True, True], [True, True, False]])
    assert tools["findings"].alike(cka, used, 1) == [(0, 1, 0, 0.4)]
    dead = cka.copy()
    dead[1, 0] = dead[1, :, 0] = np.nan
    assert tools["findings"].alike(dead, used, 9) == [(0, 1, 0, 0.4), (0, 2, 0, 0.0), (0, 2, 1, 0.0)]
    near, which = tools["findings"].nearest(cka, used)
    np.testing.assert_allclose(near, [[0.4, 0.4, 0], [0, 0, np.nan]])
    assert which[0, :2].tolist() == [1, 0]


def test_one_domain_has_loads_and_no_comparison(tools, planted):
    domains, model, _ = planted
    arguments = Namespace(model="m", ablation_tokens=None, l0=[], examples=5)
    tokenizer = ends_of_documents()
    report, pictures = tools["report"].report_of(arguments, model, tokenizer, domains[:1])
    page = tools["page"].page(report, pictures, lambda ids: " ".join(map(str, ids)))
    assert "give a second one" in page and "NaN" not in json.dumps(tools["report"].plain(report))
