"""tools/head_report.py: heads built by hand are recognised, and measures are what their formulas say."""

import importlib
import json
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from moh_lm.config import ConfigError, HeadsConfig, ModelConfig
from moh_lm.data.shards import ShardWriter, write_manifest
from moh_lm.model.transformer import CausalLM
from tests.distributed import run_ranks
from tests.tokenizing import json_lines, train_model
from tests.tools.test_export import PAPER, make_weights, write_checkpoint
from tools import head_report
from tools.work import head_report as report

TOOLS = Path(__file__).resolve().parents[2] / "tools"
NAMES = ("ablation", "changes", "findings", "gates", "importance", "measures", "page", "syntax", "text")


@pytest.fixture(scope="module")
def tools():
    """The program and the modules of tools/heads/."""
    return {name: importlib.import_module(f"tools.heads.{name}") for name in NAMES} | {"report": report}


def domain(tools, name, windows):
    return tools["text"].Domain(name, list(windows), Counter())


def nothing(*_):
    pass


# --- Heads built by hand ---

VOCAB, HEAD_DIM = 64, 128
SPACE = slice(1, 1 + VOCAB), slice(1 + VOCAB, 1 + 2 * VOCAB)  # of the residual stream: this token, the one before it
SLOW = [*range(32, 64), *range(96, 128)]  # features of a head that hardly turn: one for each token


def built_by_hand(ranks):
    """Two dense layers: previous-token, offset 5, rare-token, none; and induction, offset 3, none, rare-token.

    The embedding of a token is a one and a one-hot; the first head adds the one-hot of the token before.
    """
    config = ModelConfig(
        num_layers=2, hidden_size=2 + 2 * VOCAB, intermediate_size=4, num_attention_heads=4, head_dim=HEAD_DIM,
        vocab_size=VOCAB, rope_theta=1e8, heads=HeadsConfig(head_selection="all"),
    )  # fmt: skip
    model = CausalLM(config)
    model.initialize(seed=0)
    with torch.no_grad():
        for layer in model.model.layers:
            for parameter in (*layer.self_attn.parameters(), *layer.mlp.parameters()):
                parameter.zero_()
        embedding = model.model.embed_tokens.weight.zero_()
        embedding[:, 0] = 1
        embedding[:, SPACE[0]] = torch.eye(VOCAB)
        first, second = (layer.self_attn for layer in model.model.layers)
        looks_back(first, 0, 1)
        copies_tokens(first, 0)
        looks_back(first, 1, 5)
        looks_for_rare(first, 2, ranks)
        query, key = head_rows(second, 0)
        query[SLOW, SPACE[0]] = key[SLOW, SPACE[1]] = 5 * torch.eye(VOCAB)
        looks_back(second, 1, 3)
        looks_for_rare(second, 3, ranks)
    return model.eval()


def head_rows(attention, head):
    """Query and key matrices of a head, [e, d] each."""
    rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    return attention.q_proj.weight[rows], attention.k_proj.weight[rows]


def looks_back(attention, head, offset):
    """The same query and key for all tokens, turned against each other: they agree at one distance."""
    query, key = head_rows(attention, head)
    angle = offset * 1e8 ** (-torch.arange(16) / 64.0)  # of the 16 fastest pairs
    query[:16, 0] = 4
    key[:16, 0], key[64:80, 0] = 4 * angle.cos(), 4 * angle.sin()


def looks_for_rare(attention, head, ranks):
    query, key = head_rows(attention, head)
    query[63, 0] = 10
    key[63, SPACE[0]] = ranks.float()


def copies_tokens(attention, head):
    rows = slice(head * HEAD_DIM, head * HEAD_DIM + VOCAB)
    attention.v_proj.weight[rows, SPACE[0]] = torch.eye(VOCAB)
    attention.o_proj.weight[SPACE[1], rows] = torch.eye(VOCAB)


@pytest.fixture(scope="module")
def zipf(tools):
    """A domain of 40 windows whose tokens are the rarer, the higher their id."""
    generator = torch.Generator().manual_seed(1)
    shares = 1 / torch.arange(1.0, VOCAB + 1)
    return domain(tools, "zipf", shares.expand(40, -1).multinomial(64, True, generator=generator))


def test_heads_built_by_hand_are_recognised(tools, zipf):
    measures, findings = tools["measures"], tools["findings"]
    ranks, counts = tools["text"].frequency_ranks([zipf], VOCAB)
    model = built_by_hand(ranks)
    figures = measures.measure_text(model, [zipf], nothing)
    figures["prefix"] = measures.measure_prefix(model, tools["text"].repeated_sequences(ranks, counts, start=0))
    figures["rare"], chance = measures.measure_rare(model, [zipf], ranks)
    assert findings.classes_of(figures) == [
        ["previous-token", "positional", "rare-token", "none"],
        ["induction", "positional", "none", "rare-token"],
    ]
    assert figures["offset"][0, :2].tolist() == [1, 5] and figures["offset"][1, 1] == 3
    assert figures["offset_share"][[0, 0, 1], [0, 1, 1]].tolist() == [1, 1, 1]
    assert figures["previous"][0, 0] > 0.99 and figures["prefix"][1, 0] > 0.99
    assert figures["rare"][[0, 1], [2, 3]].tolist() == [1, 1] and 0 < chance < 0.2
    assert figures["prefix"][0].max() < 0.1


def test_a_head_is_positional_by_its_largest_weights_or_by_its_mean_weight(tools):
    nan, class_of = math.nan, tools["findings"].class_of
    assert class_of(7, 0.95, 0.1, 0.1, 0.9, 0.9) == "positional" and class_of(1, 0.95, 0.5, 0.2, 0, 0)[:4] == "prev"
    assert class_of(3, 0.4, 0.81, 0.1, 0.9, 0)[:4] == "prev" and class_of(3, 0.4, 0.1, 0.81, 0.9, 0) == "positional"
    assert class_of(2, 0.89, 0.1, 0.79, 0.9, 0) == "induction" and class_of(-1, nan, nan, nan, nan, nan) == "none"


# --- Formulas ---

SMALL = dict(num_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=8, head_dim=8, vocab_size=80)
MODELS = {
    "paper, window": (dict(num_shared_heads=(2,), num_active_routed_heads=(3,)), dict(window=(9, 0))),
    "query norm, grouped": (dict(routing="query_norm", num_shared_heads=(4,)), dict(num_key_value_heads=4)),
    "own keys, grouped": (dict(num_shared_heads=(4,), routed_keys="selected"), dict(num_key_value_heads=4)),
    "static": (dict(head_selection="static", num_shared_heads=(2,), num_active_routed_heads=(3,)), {}),
    "dense, tied": (dict(head_selection="all"), dict(tie_embeddings=True)),
}


def random_model(name):
    heads, sizes = MODELS[name]
    model = CausalLM(ModelConfig(**(SMALL | sizes), heads=HeadsConfig(**heads)))
    model.initialize(seed=5)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter *= 10
    return model.eval()


@pytest.fixture(params=MODELS)
def model(request):
    return random_model(request.param)


@pytest.fixture(scope="module")
def texts(tools):
    generator = torch.Generator().manual_seed(2)
    one, other = (torch.randint(0, 80, (count, 40), generator=generator) for count in (3, 2))
    other[1] %= 5  # a window of frequent tokens alone
    return [domain(tools, "one", one), domain(tools, "other", other)]


def attended(model, tokens):
    """[(weights [h, s, s], used [s, h])] of each layer for tokens [s], from what the layers are given and compute."""
    inputs, gates, handles = [], {}, []
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        handles.append(attention.register_forward_pre_hook(lambda _, given: inputs.append(given[0])))
        if attention.router is not None:
            handles.append(attention.router.register_forward_hook(
                lambda _, __, out, index=index: gates.__setitem__(index, out[0])
            ))
    with torch.no_grad():
        model(tokens[None])
        found = []
        for index, (layer, x) in enumerate(zip(model.model.layers, inputs, strict=True)):
            query, key = layer.self_attn.project(x)[:2]
            key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
            scores = torch.einsum("qhe,khe->hqk", query[:, 0], key[:, 0]) / math.sqrt(query.shape[-1])
            scores += torch.full(scores.shape[1:], -math.inf).triu(1)
            scores += torch.full(scores.shape[1:], -math.inf).tril(-(layer.self_attn.window or len(tokens)))
            used = gates[index][:, 0] != 0 if index in gates else torch.ones(len(tokens), query.shape[2]).bool()
            if layer.self_attn.selection == "static":
                used[:, 5:] = False
            if layer.self_attn.own_keys:
                scores.masked_fill_(~used.t()[:, None] & ~torch.eye(len(x)).bool(), -math.inf)
            found.append((scores.softmax(-1), used))
    for handle in handles:
        handle.remove()
    return found


def test_the_curve_begins_with_the_loss_of_the_model_whatever_the_positions(tools):
    model = make_weights(replace(PAPER, position=("learned",), learned_positions=16)).double()
    texts = [domain(tools, "one", torch.arange(32).view(2, 16) % model.model.embed_tokens.weight.shape[0])]
    losses, rises = tools["ablation"].measure_ablation(model, texts, 32, nothing)
    curve = tools["ablation"].measure_pruning(model, texts, 32, rises, np.ones((2, 4), bool))
    assert curve["loss"]["one"][0] == pytest.approx(losses["one"], rel=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("position", [("cope", "none"), ("learned",)])
def test_the_attention_that_is_measured_makes_the_output_whatever_the_positions(tools, position):
    model = make_weights(replace(PAPER, position=position, learned_positions=16, window=(0, 5))).double()
    tokens, measures = torch.arange(16)[None], tools["measures"]
    x = model.model.embed(tokens)
    for layer in model.model.layers:
        heads, value = measures.read_heads(layer, x), layer.self_attn.project(layer.input_layernorm(x)).value
        for head in range(4):
            output = torch.einsum("bqk,kbe->qbe", heads.attention(head), value[:, :, head // 2])
            torch.testing.assert_close(heads.output[:, :, head], output)
        x = measures.finish(layer, x, heads.weighted())
    torch.testing.assert_close(model.model.norm(x), model.model(tokens))


def test_offsets_and_loads_are_counts_over_the_attention_of_the_model(tools, model, texts):
    figures = tools["measures"].measure_text(model, texts, nothing)
    layers = [[attended(model, window)[layer] for d in texts for window in d.windows] for layer in (0, 1)]
    for layer, maps in enumerate(layers):
        first = [used for _, used in maps[:3]]
        np.testing.assert_allclose(figures["load"]["one"][layer], torch.cat(first).double().mean(0))
        np.testing.assert_allclose(figures["half_load"]["one"][1, layer], first[1].double().mean(0))
        for head in range(8):
            queries = [(w[head, t], t) for w, used in maps for t in range(1, 40) if used[t, head]]
            if len(queries) < 20:
                assert math.isnan(figures["previous"][layer, head])
                continue
            shares = []
            for offset in range(21):
                asked = [(row, t) for row, t in queries if t >= offset]
                hits = sum(t - int(row.argmax()) == offset for row, t in asked)
                shares.append(hits / len(asked) if len(asked) >= 20 else 0)
            assert figures["offset"][layer, head] == np.argmax(shares)
            assert figures["offset_share"][layer, head] == pytest.approx(max(shares))
            for key, back in (("previous", 1), ("second", 2), ("first", None)):
                asked = [(row, t) for row, t in queries if t >= (back or 1)]
                expected = np.mean([row[0 if back is None else t - back].item() for row, t in asked])
                assert figures[key][layer, head] == pytest.approx(expected, abs=1e-6)
    place = 0
    for domain in texts:
        for layer, maps in enumerate(layers):
            of_domain = maps[place : place + len(domain.windows)]
            rests = [w[head, t, 0] for w, used in of_domain for t in range(1, 40) for head in range(8) if used[t, head]]
            assert figures["sink"][domain.name][layer] == pytest.approx(torch.stack(rests).mean().item(), abs=1e-6)
            gates = figures["gates"][domain.name][:, :, layer]
            used = figures["load"][domain.name][layer].sum() * 40 * len(domain.windows)
            rms = math.sqrt(np.square(gates, dtype=np.float64).sum() / used)
            assert figures["gate_rms"][domain.name][layer] == pytest.approx(rms, rel=1e-3)  # gates are float16
        place += len(domain.windows)


def test_a_distance_of_fewer_than_20_queries_has_no_mean_weight(tools):
    offsets = tools["measures"].Offsets(1, 8)
    offsets.queries[0] = torch.tensor([20, 20, 19, 18, 17])
    offsets.weights[0] = torch.tensor([5.0, 5.0, 5.0])
    found = offsets.figures()
    assert (found["previous"], found["first"]) == (0.25, 0.25) and np.isnan(found["second"])


def test_prefix_matching_and_rare_tokens_are_counts_too(tools, model, texts):
    measures, text = tools["measures"], tools["text"]
    ranks, counts = text.frequency_ranks(texts, 80)
    sequences = text.repeated_sequences(ranks, counts, start=79, examples=2)
    prefix = measures.measure_prefix(model, sequences)
    rare, chance = measures.measure_rare(model, texts, ranks)
    pieces = [window[:32] for d in texts for window in d.windows]
    for layer in (0, 1):
        for head in range(8):
            sums, hits, chances = [], [], []
            for tokens in sequences:
                weights, used = attended(model, tokens)[layer]
                for t in range(26, 101):
                    after = [u for u in range(1, t) if tokens[u - 1] == tokens[t]]
                    assert len(after) == (t - 1) // 25
                    if used[t, head]:
                        sums.append(sum(weights[head, t, u].item() for u in after))
            for piece in pieces:
                weights, used = attended(model, piece)[layer]
                for t in range(8, 32):
                    seen = sorted({ranks[token].item() for token in piece[: t + 1]}, reverse=True)
                    if seen[0] < 10:
                        continue
                    chances.append(np.mean([ranks[token].item() in seen[:2] for token in piece[: t + 1]]))
                    if used[t, head]:
                        hits.append(ranks[piece[int(weights[head, t].argmax())]].item() in seen[:2])
            if used[:, head].any():
                assert prefix[layer, head] == pytest.approx(np.mean(sums), abs=1e-6)
                assert rare[layer, head] == pytest.approx(np.mean(hits))
                assert chance == pytest.approx(np.mean(chances))
            else:
                assert math.isnan(prefix[layer, head]) and math.isnan(rare[layer, head])


def test_the_output_of_a_head_is_its_attention_over_the_values(tools, model, texts):
    tokens = texts[0].windows[0][None]
    for layer, _, heads in tools["measures"].sweep(model, [tokens]):
        weights = torch.stack([heads.attention(head)[0] for head in range(8)])
        attention, shared_by = model.model.layers[layer].self_attn, heads.query.shape[2] // heads.key.shape[2]
        with torch.no_grad():
            x = model.model.embed_tokens(tokens)
            for before in model.model.layers[:layer]:
                x = before(x)
            x = model.model.layers[layer].input_layernorm(x)
            value = attention.split_heads(attention.v_proj(x))[:, 0].repeat_interleave(shared_by, 1)
            compared = heads.used[:, 0] if attention.own_keys else ...  # what an unused head sees then means nothing
            mine = torch.einsum("hqk,khe->qhe", weights, value)
            torch.testing.assert_close(mine[compared], heads.output[:, 0][compared])
            torch.testing.assert_close(attention.o_proj(heads.weighted().flatten(2)), attention(x)[0])


def test_redundancy_is_linear_cka_and_written_the_norm_in_the_residual_stream(tools, texts):
    model = random_model("paper, window")
    figures = tools["measures"].measure_text(model, texts, nothing)
    outputs = [[], []]
    for layer, _, heads in tools["measures"].sweep(model, [w[None] for d in texts for w in d.windows]):
        outputs[layer].append((heads.output[:, 0].double(), heads.gates[:, 0].double()))
    for layer in (0, 1):
        output, gates = (torch.cat(part) for part in zip(*outputs[layer], strict=True))
        n = len(output)
        centring = torch.eye(n).double() - 1 / n
        kernels = [centring @ (output[:, head] @ output[:, head].t()) @ centring for head in range(8)]
        hsic = torch.tensor([[(a * b).sum() for b in kernels] for a in kernels])  # trace of K H L H
        expected = hsic / torch.outer(hsic.diag(), hsic.diag()).sqrt()
        np.testing.assert_allclose(figures["cka"][layer], expected, rtol=1e-6)
        weight = model.model.layers[layer].self_attn.o_proj.weight.detach().double()
        for head in range(8):
            added = (gates[:, head, None] * output[:, head]) @ weight[:, head * 8 : head * 8 + 8].t()
            assert figures["written"][layer, head] == pytest.approx(added.norm(dim=1).mean().item(), rel=1e-5)


def test_importance_is_the_rise_of_the_loss_with_the_columns_of_the_head_at_zero(tools, model, texts):
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


def test_a_trained_gate_is_0_where_a_head_is_not_worth_its_penalty(tools, texts, monkeypatch):
    gates = tools["gates"]
    monkeypatch.setattr(gates, "STEPS", 80)
    model, used = random_model("dense, tied"), np.ones((2, 8), bool)
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
    model, used, penalty = random_model("dense, tied"), np.ones((2, 8), bool), 0.3
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
    model, used = random_model("dense, tied").bfloat16(), np.ones((2, 8), bool)
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


# --- Domains ---


@pytest.fixture(scope="module")
def planted(tools):
    """Two domains of other tokens, a model whose head 3 of layer 0 is for the second, and the share of even tokens."""
    config = ModelConfig(
        num_layers=2, hidden_size=64, intermediate_size=4, num_attention_heads=4, vocab_size=64,
        heads=HeadsConfig(num_shared_heads=(1,), num_active_routed_heads=(1,)),
    )  # fmt: skip
    model = CausalLM(config)
    model.initialize(seed=4)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(64))
        for layer in model.model.layers:
            layer.self_attn.router.w_routed.zero_()
        weights = model.model.layers[0].self_attn.router.w_routed
        weights[0, 0:32:2] = weights[1, 1:32:2] = weights[2, 32:] = 5
    generator = torch.Generator().manual_seed(3)
    code = torch.randint(0, 32, (4, 64), generator=generator)
    prose = torch.randint(32, 64, (4, 64), generator=generator)
    even = (code % 2 == 0).double().mean().item()
    return [domain(tools, "code", code), domain(tools, "prose", prose)], model.eval(), even


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


def test_pairs_that_are_alike_are_found_in_their_layer_among_used_heads(tools):
    cka = np.stack([np.eye(3), np.eye(3)])
    cka[0, 0, 1] = cka[0, 1, 0] = 0.4
    cka[1, 0, 2] = cka[1, 2, 0] = 0.9
    used = np.array([[True, True, True], [True, True, False]])
    assert tools["findings"].alike(cka, used, 1) == [(0, 1, 0, 0.4)]
    near, which = tools["findings"].nearest(cka, used)
    np.testing.assert_allclose(near, [[0.4, 0.4, 0], [0, 0, np.nan]])
    assert which[0, :2].tolist() == [1, 0]


# --- Text of the domains ---


@pytest.fixture(scope="module")
def tokenizer(tools, tmp_path_factory):
    return importlib.import_module("data_prep.encoding").Tokenizer(str(train_model(tmp_path_factory.mktemp("tokens"))))


SENTENCES = [f"The quick brown fox number {number} jumps over the lazy dog.\n" for number in range(30)]


@pytest.fixture(scope="module")
def corpus(tokenizer, tmp_path_factory):
    """Text files, and a data directory of the same texts."""
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "a.jsonl").write_bytes(b"{broken\n" + json_lines(SENTENCES[:20]))
    (directory / "b.jsonl").write_bytes(json_lines(SENTENCES[20:]))
    for source, sentences in (("first", SENTENCES[:20]), ("second", SENTENCES[20:])):
        (directory / "data" / source).mkdir(parents=True)
        with ShardWriter(directory / "data" / source / "unit", tokenizer.vocab_size) as shard:
            for ids in tokenizer.encode_all(sentences):
                shard.add(ids)
            shard.commit({"tokenizer": tokenizer.description, "inputs": []})
    write_manifest(directory / "data")
    return directory


# --- Syntax ---

TREES = """# text = The dog's friend can't see.
1	The	the	DET	_	_	2	det	_	_
2	dog	dog	NOUN	_	_	4	nmod:poss	_	SpaceAfter=No
3	's	's	PART	_	_	2	case	_	_
4	friend	friend	NOUN	_	_	7	nsubj	_	_
5-6	can't	_	_	_	_	_	_	_	_
5	ca	can	AUX	_	_	7	aux	_	SpaceAfter=No
6	n't	not	PART	_	_	7	advmod	_	_
7	see	see	VERB	_	_	0	root	_	SpaceAfter=No
7.1	it	it	PRON	_	_	_	_	7:obj	_
8	.	.	PUNCT	_	_	7	punct	_	_

# text = del el
1	de	de	ADP	_	_	2	case	_	_
2	el	el	PRON	_	_	0	root	_	_

1	Dogs	dog	NOUN	_	_	2	nsubj	_	_
2	bark	bark	VERB	_	_	0	root	_	_
"""


def test_the_words_of_a_treebank_are_found_in_the_tokens_of_its_text(tools, tokenizer, tmp_path):
    path = tmp_path / "trees.conllu"
    path.write_text(TREES)
    read = tools["syntax"].read_treebank
    first, second = read(path, tokenizer, 1000, 64)  # "del" is not "de" and "el"
    decode = tokenizer.model.decode
    assert [decode(each.tokens.tolist()) for each in (first, second)] == ["The dog's friend can't see.", "Dogs bark"]
    words = "The dog 's friend ca n't see .".split()
    expected = [("det dependent", 2, 1), ("nmod dependent", 4, 2), ("case governor", 3, 2), ("nsubj dependent", 7, 4),
                ("aux dependent", 7, 5), ("advmod dependent", 7, 6), ("punct governor", 8, 7)]  # fmt: skip
    assert [pair[:2] for pair in first.pairs] == [(name, later - earlier) for name, later, earlier in expected]
    for (_, _, asks, start, end), (_, later, earlier) in zip(first.pairs, expected, strict=True):
        before = decode(first.tokens[:asks].tolist())
        assert len(before) < len("".join(words[:later])) + 5
        assert words[later - 1][-1] in decode([int(first.tokens[asks])])
        assert words[earlier - 1] in decode(first.tokens[start:end].tolist())
    assert len(read(path, tokenizer, 3, 64)) == 1  # enough tokens
    for text, words in ((b"\xff", "cannot be read"), (b"no treebank", "has no sentence of up to 64 tokens")):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=words):
            read(path, tokenizer, 1000, 64)


def test_hits_of_a_relation_are_largest_weights_on_the_other_word(tools, model):
    draw = np.random.default_rng(0)
    sentences = []
    for _ in range(12):
        tokens, pairs = torch.from_numpy(draw.integers(0, 80, 24)), []
        for _ in range(8):
            first, asks = sorted(draw.choice(24, 2, replace=False).tolist())
            end = int(draw.integers(first, asks)) + 1
            pairs.append((draw.choice(["nsubj governor", "obj dependent"]), int(draw.integers(1, 4)), asks, first, end))
        sentences.append(tools["syntax"].Sentence(tokens, pairs))
    found = tools["syntax"].measure_syntax(model, sentences)
    maps = [attended(model, sentence.tokens) for sentence in sentences]
    for relation, figures in found.items():
        pairs = [(n, pair) for n, sentence in enumerate(sentences) for pair in sentence.pairs if pair[0] == relation]
        distances = [pair[1] for _, pair in pairs]
        assert figures["pairs"] == len(pairs)
        assert figures["baseline"] == max(distances.count(each) for each in (1, 2, 3)) / len(pairs)
        for layer, head in ((0, 0), (0, 6), (1, 1), (1, 7)):
            hits = [pair[3] <= int(maps[n][layer][0][head, pair[2]].argmax()) < pair[4]
                    for n, pair in pairs if maps[n][layer][1][pair[2], head]]  # fmt: skip
            share = figures["share"][layer, head]
            assert share == pytest.approx(np.mean(hits)) if len(hits) >= 20 else math.isnan(share)
            assert figures["follows"][layer, head] == (share >= figures["baseline"] + 0.1)
    assert sum(figures["pairs"] for figures in found.values()) == 96


def read(tools, tokenizer, *entries, seq_length=40, num_tokens=200, vocab_size=None):
    size = vocab_size or tokenizer.vocab_size
    return tools["text"].read_domains(entries, tokenizer, size, seq_length, num_tokens, "text")


def test_of_files_each_gives_the_same_number_of_tokens_from_its_beginning(tools, tokenizer, corpus):
    (found,) = read(tools, tokenizer, f"all={corpus}/*.jsonl")
    beginnings = [np.concatenate(list(tokenizer.encode_all(part)))[:100] for part in (SENTENCES[:20], SENTENCES[20:])]
    assert torch.cat(found.windows).tolist() == np.concatenate(beginnings).tolist()
    assert [len(window) for window in found.windows] == [40] * 5 and found.dropped == {"broken JSON": 1}


def test_of_shards_the_windows_are_evenly_spaced_over_the_tokens(tools, tokenizer, corpus):
    tokens = np.concatenate(list(tokenizer.encode_all(SENTENCES[:20])))
    first, second = read(tools, tokenizer, str(corpus / "data"), num_tokens=130)
    assert (first.name, second.name) == ("first", "second") and len(first.windows) == 3
    for place, window in zip((0, (len(tokens) - 40) // 2, len(tokens) - 40), first.windows, strict=True):
        assert window.tolist() == tokens[place : place + 40].tolist()
    (same,) = read(tools, tokenizer, f"name={corpus / 'data' / 'first'}", num_tokens=130)
    assert same.name == "name" and torch.equal(torch.stack(same.windows), torch.stack(first.windows))
    (joined,) = read(tools, tokenizer, f"both={corpus / 'data'}", num_tokens=10**6)
    assert sum(map(len, joined.windows)) > len(tokens)


def test_what_cannot_be_read_is_said(tools, tokenizer, corpus, data_dir):
    (corpus / "short.txt").write_text("few words")
    for entry, words in [
        ("data.jsonl", "is no directory of shards; give one, or NAME=FILES"),
        (f"x={corpus}/*.none", "matches no file"),
        (f"x={corpus}/short.txt", "give at least 32"),
        (str(data_dir), "another tokenizer"),
    ]:
        with pytest.raises(ConfigError, match=words):
            read(tools, tokenizer, entry)
    with pytest.raises(ConfigError, match="a vocabulary of 300"):
        read(tools, tokenizer, f"x={corpus}/a.jsonl", vocab_size=300)


def test_test_texts_repeat_different_tokens_that_are_neither_frequent_nor_rare(tools):
    counts = torch.tensor([50, 40, 0, *range(39, 1, -1), 1])
    one = domain(tools, "one", [torch.repeat_interleave(torch.arange(len(counts)), counts)])
    ranks, found = tools["text"].frequency_ranks([one], len(counts))
    assert found.tolist() == counts.tolist() and ranks[[0, 1, 3, 2]].tolist() == [0, 1, 2, 41]
    sequences = tools["text"].repeated_sequences(ranks, found, start=1)
    assert sequences.shape == (10, 101) and (sequences[:, 0] == 1).all()
    for row in sequences[:, 1:].view(10, 4, 25).tolist():
        assert row[0] == row[1] == row[2] == row[3] and len(set(row[0])) == 25
        assert not {0, 1, 2, 3, 4, 5, 38, 39, 40, 41} & set(row[0])  # 40 present but for the start: 4 of either end


def test_the_pieces_of_an_excerpt_add_up_to_its_text(tools, tokenizer):
    text = "Ein großer Fuchs \N{GRINNING FACE} ist 文字, naïve & <b>"
    ids = tokenizer.model.encode(text)
    pieces = tools["page"].token_texts(ids, tokenizer.model.decode)
    assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.model.decode(ids)
    assert "\N{GRINNING FACE}" in pieces and "" in pieces  # of several tokens, the last one has it


# --- The program ---


@pytest.fixture(scope="module")
def run(tokenizer, tmp_path_factory):
    """A checkpoint with other budgets of heads in each layer."""
    directory = tmp_path_factory.mktemp("run")
    config = ModelConfig(**{**vars(PAPER), "vocab_size": tokenizer.vocab_size})
    path = directory / "tokenizer.model"
    path.write_bytes(tokenizer.model.serialized_model_proto())
    run_ranks(write_checkpoint, 1, directory / "run", config, path, False, 64)
    return directory / "run"


def call(tools, capsys, *arguments):
    code = head_report.main(list(map(str, arguments)))
    return code, *capsys.readouterr()


def test_the_page_stands_alone_and_shows_the_numbers_of_heads_json(tools, capsys, run, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(tools["gates"], "STEPS", 60)
    flags = ("--model", run, "--output", tmp_path / "out", "--tokens", 512, "--ablation-tokens", 64, "--l0", 1e-6, 9)
    (tmp_path / "trees").write_text("\n".join([TREES[TREES.index("1\tDogs") :]] * 31))
    flags += ("--treebank", tmp_path / "trees", "--since", run)
    code, out, _ = call(tools, capsys, *flags, "--data", f"a<b>&c={corpus}/a.jsonl", str(corpus / "data"))
    assert code == 0 and "index.html" in out
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert 'name="viewport" content="width=device-width' in page and "prefers-color-scheme: dark" in page
    assert not re.search(r"<script|<link|@import|url\(", page)
    links = re.findall(r'(?:src|srcset|href)="([^"]*)', page)
    assert links and all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    images = re.findall(r"<img [^>]*>", page)
    assert len(images) == len(list((tmp_path / "out").glob("*.png"))) == 4 + 3 + 2
    assert all(re.search(r'alt="[^"]+"', image) for image in images)
    for path in (tmp_path / "out").glob("*.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size < 60_000
    assert "a&lt;b&gt;&amp;c" in page and "a<b>" not in page and "1 broken JSON" in page

    report = json.loads((tmp_path / "out" / "heads.json").read_text())
    assert report["kind"] == [["shared", "shared", "routed", "routed"], ["routed"] * 4]
    assert report["active"] == 3 and list(report["load"]) == ["a<b>&c", "first", "second"]
    for load in report["load"].values():
        assert sum(load[0]) == pytest.approx(3, abs=1e-4) and load[0][:2] == [1, 1]
        for row in load:
            cells = "".join(f"<td>{100 * value:.1f}</td>" for value in row)
            assert cells in page
    assert report["similarity"]["first"]["first"] is not None and report["specialisation"][0][0] is None
    assert report["ablation"]["tokens"] == 64 and len(report["most"]) == 5 and len(report["least"]) == 1
    assert list(report["syntax"]) == ["nsubj dependent"] and report["syntax"]["nsubj dependent"]["pairs"] == 31
    assert "<td class=\"left\">nsubj dependent</td><td>31</td><td>100.0</td>" in page
    least, most = report["ablation"]["l0"]
    assert (least["lambda"], most["lambda"], most["kept"]) == (1e-6, 9, 0) and least["kept"] > 0
    assert f"<td>9</td><td>0.0</td><td>{most['loss']['a<b>&c']:.4f}</td>" in page
    assert report["changes"]["head"] == [[0] * 4] * 2
    assert str(report["alike"][0][0]) in page and report["most"][0]["excerpts"][0]["tokens"]


def test_a_head_has_changed_by_its_rows_of_q_and_columns_of_o(tools):
    model, earlier = random_model("paper, window"), random_model("paper, window")
    attention, before = model.model.layers[1].self_attn, earlier.model.layers[1].self_attn
    e = attention.head_dim
    with torch.no_grad():
        attention.q_proj.weight[2 * e : 3 * e] *= 1.5
        attention.o_proj.weight[:, 3 * e : 4 * e] = 0
        attention.k_proj.weight.zero_()
    changes = tools["changes"].measure_changes(model, earlier)
    q, o = before.q_proj.weight[2 * e : 3 * e].norm().item(), before.o_proj.weight[:, 2 * e : 3 * e].norm().item()
    last = before.q_proj.weight[3 * e : 4 * e].norm().item(), before.o_proj.weight[:, 3 * e : 4 * e].norm().item()
    expected = np.zeros_like(changes)
    expected[1, 2], expected[1, 3] = 0.5 * q / math.hypot(q, o), last[1] / math.hypot(*last)
    np.testing.assert_allclose(changes, expected, rtol=1e-12)
    del earlier.model.layers[1]
    with pytest.raises(ConfigError, match="--since: its heads are not those of --model"):
        tools["changes"].measure_changes(model, earlier)


def test_the_half_of_the_routed_heads_that_is_used_less_is_held_against_the_rest(tools):
    changes = np.array([[9.0, 1, 2, 3, 4], [9, 9, 9, 9, 9]])
    load = np.array([[1.0, 0.4, 0.1, 0.3, 0.2], [1, 1, 1, 1, 1]])
    routed = np.array([[False, True, True, True, True], [False] * 5])
    found = tools["changes"].rare_against_others(changes, load, routed)
    assert found == pytest.approx(((2 + 4) / (1 + 3), 0.15, 0.35))
    assert all(map(math.isnan, tools["changes"].rare_against_others(changes, load, routed & False)))


@pytest.mark.parametrize("name", ["static", "dense, tied"])
def test_models_without_a_router_are_told_by_attention_and_importance(tools, name, texts):
    arguments = head_report.parse_arguments(["--model", "m", "--data", "d=x", "--output", "o"])
    tokenizer = type("Tokenizer", (), {"eos_id": 0})
    report, pictures = tools["report"].report_of(arguments, random_model(name), tokenizer, texts)
    page = tools["page"].page(report, pictures, lambda ids: " ".join(map(str, ids)))
    assert not report["routed"] and "similarity" not in report
    assert 'id="importance"' in page and 'id="load"' not in page and 'id="special"' not in page
    off = [[kind == "off" for kind in row] for row in report["kind"]]
    assert [[found == "unused" for found in row] for row in report["class"]] == off
    assert sum(map(sum, off)) == (6 if name == "static" else 0)  # 5 of 8 heads are on
    assert report["active"] == (5 if name == "static" else 8)


def test_one_domain_has_loads_and_no_comparison(tools, planted):
    domains, model, _ = planted
    arguments = head_report.parse_arguments(["--model", "m", "--data", "d=x", "--output", "o"])
    tokenizer = type("Tokenizer", (), {"eos_id": 0})
    report, pictures = tools["report"].report_of(arguments, model, tokenizer, domains[:1])
    page = tools["page"].page(report, pictures, lambda ids: " ".join(map(str, ids)))
    assert "give a second one" in page and "NaN" not in json.dumps(tools["report"].plain(report))


def test_a_scale_ends_at_the_highest_value(tools):
    highest = tools["report"].highest
    assert highest(np.array([[np.nan, 0.2], [0.1, np.nan]])) == 0.2
    assert 0 < highest(np.zeros((2, 2))) == highest(np.full((2, 2), np.nan)) < 0.01


def test_what_has_to_be_mended_is_said(tools, capsys, run, corpus, tmp_path, monkeypatch):
    flags = ("--model", run, "--output", tmp_path, "--data", f"a={corpus}/a.jsonl")
    for more, words in [
        (("--seq-length", 999), "must be between 32 and 64"),
        (("--data", "x=/nowhere/*"), "matches no file"),
        (("--model", tmp_path / "none"), "no such directory"),
    ]:
        code, _, err = call(tools, capsys, *flags, *more)
        assert code == 2 and words in err and err.startswith("head_report: ")
    for module in ("tools.work.head_report", "tools.heads.pictures"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # so that its import fails
    code, _, err = call(tools, capsys, *flags)
    assert code == 2 and "pip install -e '.[plot]'" in err


def test_a_report_that_cannot_be_written_is_one_line(tools, capsys, run, corpus, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    flags = ("--model", run, "--tokens", 64, "--data", f"a={corpus}/a.jsonl")
    code, _, err = call(tools, capsys, *flags, "--output", tmp_path / "file")
    assert code == 2 and f"--output {tmp_path}/file: cannot be written" in err  # before anything is measured

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tools["report"], "publish", full)
    code, _, err = call(tools, capsys, *flags, "--output", tmp_path / "out")
    assert code == 1 and err.splitlines()[-1] == "head_report: no space left on device"
