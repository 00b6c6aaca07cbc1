"""What a model loses without a head: ablation, pruning and trained gates are what their formulas say."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from tests.tools.heads.models import nothing, random_model


def test_importance_is_the_rise_of_the_loss_without_the_head(tools, model, texts):
    losses, rises = tools["ablation"].measure_ablation(model, texts, 80, nothing)
    batches = {"one": [0, 2], "other": [0, 1]}  # two windows of each

    def loss(name):
        windows = next(d.windows for d in texts if d.name == name)
        with torch.no_grad():
            return np.mean([model(windows[i][None, :-1], windows[i][None, 1:])[0].item() for i in batches[name]])

    for name in batches:
        assert losses[name] == pytest.approx(loss(name), rel=1e-9)
        for layer, head in ((0, 0), (0, 7), (1, 3)):
            weight = model.model.layers[layer].self_attn.o_proj.weight
            kept = weight.detach().clone()
            with torch.no_grad():
                weight[:, head * 8 : head * 8 + 8] = 0
                rise = loss(name) - losses[name]
                weight.copy_(kept)
            assert rises[name][layer, head] == pytest.approx(rise, abs=1e-9)
    assert max(abs(rise).max() for rise in rises.values()) > 1e-3

    curve = tools["ablation"].measure_pruning(model, texts, 80, rises, np.ones((2, 8), bool))
    assert (curve["kept"][0], curve["kept"][-1]) == (1, 0)
    order = np.argsort(np.mean(list(rises.values()), 0), axis=None, kind="stable")
    weights = [layer.self_attn.o_proj.weight for layer in model.model.layers]
    kept = [weight.detach().clone() for weight in weights]
    for point in (0, len(curve["kept"]) // 2, -1):
        removed = order[: round(order.size * (1 - curve["kept"][point]))]
        with torch.no_grad():
            for place in removed:
                weights[place // 8][:, place % 8 * 8 : place % 8 * 8 + 8] = 0
            for name in batches:
                assert curve["loss"][name][point] == pytest.approx(loss(name), abs=1e-9)
            for weight, values in zip(weights, kept, strict=True):
                weight.copy_(values)


def test_a_trained_gate_is_0_where_a_head_is_not_worth_it(tools, texts, monkeypatch):
    gates = tools["gates"]
    monkeypatch.setattr(gates, "STEPS", 80)
    model, used = random_model("element gates, tied"), np.ones((2, 8), bool)
    weights = [layer.self_attn.o_proj.weight for layer in model.model.layers]
    with torch.no_grad():
        weights[1][:, 24:32] = 0  # head 3 of layer 1 writes nothing
    losses, rises = tools["ablation"].measure_ablation(model, texts, 80, nothing)
    rows = gates.measure_gates(model, texts, 80, [1e-9, 1e9], used, nothing)
    few, none = rows
    assert (few["kept"], none["kept"]) == (1, 0) and few["heads"].all() and not none["heads"].any()
    curve = tools["ablation"].measure_pruning(model, texts, 80, rises, used)
    assert none["loss"] == pytest.approx({name: of[-1] for name, of in curve["loss"].items()})
    windows = [domain.windows[0][None] for domain in texts]
    z = gates.trained_gates(model, windows, 1e-3, used)
    assert z[1, 3] == 0 and (z > 0).sum() > 4  # what the others write lowers the loss of these very windows
    (row,) = gates.measure_gates(model, texts[:1], 40, [1e-3], used, nothing)
    z = gates.trained_gates(model, windows[:1], 1e-3, used)
    with torch.no_grad():
        for weight, of_layer in zip(weights, z, strict=True):
            weight *= of_layer.repeat_interleave(8)
        expected = model(windows[0][:, :-1], windows[0][:, 1:])[0].item()
    assert row["loss"] == {texts[0].name: pytest.approx(expected, rel=1e-9)}


def test_gates_are_trained_as_the_formulas_say(tools, texts, monkeypatch):
    gates = tools["gates"]
    monkeypatch.setattr(gates, "STEPS", 12)
    model, used, penalty = random_model("element gates, tied"), np.ones((2, 8), bool), 0.3
    used[0, 5] = False
    windows = [domain.windows[0][None] for domain in texts]
    found = gates.trained_gates(model, windows, penalty, used)
    random, log_alpha = torch.Generator().manual_seed(0), torch.full((2, 8), gates.START, requires_grad=True)
    adam = torch.optim.Adam([log_alpha], lr=gates.RATE)
    for step in range(12):
        u = torch.rand(2, 8, generator=random)
        s = 1 / (1 + torch.exp(-(torch.log(u) - torch.log(1 - u) + log_alpha) / (2 / 3)))
        z = torch.clamp(1.2 * s - 0.1, 0, 1).double()
        names = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1)]
        weights = {name: model.get_parameter(name) * z[layer].repeat_interleave(8) for layer, name in enumerate(names)}
        tokens = windows[step % 2]
        loss, _ = torch.func.functional_call(model, weights, (tokens[:, :-1], tokens[:, 1:]))
        active = 1 / (1 + torch.exp(-(log_alpha - 2 / 3 * math.log(0.1 / 1.1))))
        adam.zero_grad()
        (loss + penalty * active[torch.from_numpy(used)].sum()).backward()
        adam.step()
    expected = torch.clamp(1.2 * torch.sigmoid(log_alpha.detach()) - 0.1, 0, 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert expected[0, 5] > expected[used].min() + 0.01


def test_gates_are_trained_in_the_precision_of_the_model(tools, texts, monkeypatch):
    monkeypatch.setattr(tools["gates"], "STEPS", 2)
    model, used = random_model("element gates, tied").bfloat16(), np.ones((2, 8), bool)
    (row,) = tools["gates"].measure_gates(model, texts[:1], 40, [1e-9], used, nothing)
    assert row["kept"] == 1 and math.isfinite(row["loss"][texts[0].name])


def test_the_chance_of_a_gate_above_0_is_that_of_its_draws(tools):
    gates, log_alpha = tools["gates"], torch.tensor([-3.0, -1.5, 0.0, 2.0]).double()
    u = torch.rand(400_000, 1, generator=torch.Generator().manual_seed(1)).double().clamp(1e-9, 1 - 1e-9)
    s = 1 / (1 + torch.exp(-(u.log() - (1 - u).log() + log_alpha) / (2 / 3)))
    drawn = (1.2 * s - 0.1 > 0).double().mean(0)
    torch.testing.assert_close(gates.above_0(log_alpha), drawn, rtol=0, atol=0.003)
    by_hand = 1.2 / (1 + math.exp(-0.5)) - 0.1
    assert gates.stretched(torch.tensor([0.5, 9.0, -9.0])).tolist() == pytest.approx([by_hand, 1, 0])
