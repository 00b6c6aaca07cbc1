"""What a head looks at and writes: every measure is what its formula says."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from tests.models import attend
from tests.tools.exporting import PAPER, make_weights
from tests.tools.heads.models import attended, domain, nothing, random_model


def test_the_pruning_curve_begins_with_the_loss_of_the_model(tools):
    model = make_weights(replace(PAPER, position=("learned",), learned_positions=16)).double()
    texts = [domain(tools, "one", torch.arange(32).view(2, 16) % model.model.embed_tokens.weight.shape[0])]
    losses, rises = tools["ablation"].measure_ablation(model, texts, 32, nothing)
    curve = tools["ablation"].measure_pruning(model, texts, 32, rises, np.ones((2, 4), bool))
    assert curve["loss"]["one"][0] == pytest.approx(losses["one"], rel=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("position", [("cope", "none"), ("learned",)])
def test_the_measured_attention_makes_the_output_of_the_model(tools, position):
    model = make_weights(replace(PAPER, position=position, learned_positions=16, window=(0, 5))).double()
    tokens, measures = torch.arange(16)[None], tools["measures"]
    x = model.model.embed(tokens)
    for layer in model.model.layers:
        heads, given = measures.read_heads(layer, x), layer.input_layernorm(x)
        *_, value = layer.self_attn.project(given, layer.self_attn.positions.table(given))
        for head in range(4):
            output = torch.einsum("bqk,kbe->qbe", heads.attention(head), value[:, :, head // 2])
            torch.testing.assert_close(heads.output[:, :, head], output)
        x = measures.finish(layer, x, heads.weighted())
    torch.testing.assert_close(model.model.norm(x), model.model(tokens))


def test_offsets_and_loads_are_counts_over_the_attention(tools, model, texts):
    figures = tools["measures"].measure_text(model, texts, nothing)
    layers = list(zip(*(attended(model, window) for d in texts for window in d.windows), strict=True))
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
    for text in texts:
        for layer, maps in enumerate(layers):
            of_domain = maps[place : place + len(text.windows)]
            rests = [w[head, t, 0] for w, used in of_domain for t in range(1, 40) for head in range(8) if used[t, head]]
            assert figures["sink"][text.name][layer] == pytest.approx(torch.stack(rests).mean().item(), abs=1e-6)
            gates = figures["gates"][text.name][:, :, layer]
            used = figures["load"][text.name][layer].sum() * 40 * len(text.windows)
            rms = math.sqrt(np.square(gates, dtype=np.float64).sum() / used)
            assert figures["gate_rms"][text.name][layer] == pytest.approx(rms, rel=1e-3)  # gates are float16
        place += len(text.windows)


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
    maps = [[attended(model, tokens) for tokens in of] for of in (sequences, pieces)]
    for layer in (0, 1):
        for head in range(8):
            sums, hits, chances = [], [], []
            for tokens, (weights, used) in zip(sequences, [of[layer] for of in maps[0]], strict=True):
                for t in range(26, 101):
                    after = [u for u in range(1, t) if tokens[u - 1] == tokens[t]]
                    assert len(after) == (t - 1) // 25
                    if used[t, head]:
                        sums.append(sum(weights[head, t, u].item() for u in after))
            for piece, (weights, used) in zip(pieces, [of[layer] for of in maps[1]], strict=True):
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
            value = attention.v_proj(x).unflatten(-1, (-1, attention.head_dim))[:, 0].repeat_interleave(shared_by, 1)
            own_keys = attention.core_attention.own_keys
            compared = heads.used[:, 0] if own_keys else ...  # what an unused head sees then means nothing
            mine = torch.einsum("hqk,khe->qhe", weights, value)
            torch.testing.assert_close(mine[compared], heads.output[:, 0][compared])
            torch.testing.assert_close(attention.output(heads.weighted(), x), attend(attention, x)[0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["paper, window", "element gates, tied"])
def test_redundancy_is_linear_cka_and_written_the_added_norm(tools, texts, name):
    model, windows = random_model(name), [window[None] for domain in texts for window in domain.windows]
    figures = tools["measures"].measure_text(model, texts, nothing)
    outputs, written = [[], []], [[], []]
    for layer, _, heads in tools["measures"].sweep(model, windows):
        outputs[layer].append(heads.output[:, 0].double())
    for layer, inputs in zip(model.model.layers, written, strict=True):
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given, kept=inputs: kept.append(given[0][:, 0]))
    for window in windows:
        model(window)
    for layer in (0, 1):
        output, n = torch.cat(outputs[layer]), sum(map(len, outputs[layer]))
        centring = torch.eye(n).double() - 1 / n
        kernels = [centring @ (output[:, head] @ output[:, head].t()) @ centring for head in range(8)]
        hsic = torch.tensor([[(a * b).sum() for b in kernels] for a in kernels])  # trace of K H L H
        expected = hsic / torch.outer(hsic.diag(), hsic.diag()).sqrt()
        np.testing.assert_allclose(figures["cka"][layer], expected, rtol=1e-6)
        weight = model.model.layers[layer].self_attn.o_proj.weight.double()
        for head in range(8):
            own = slice(head * 8, head * 8 + 8)
            added = torch.cat(written[layer]).double()[:, own] @ weight[:, own].t()
            assert figures["written"][layer, head] == pytest.approx(added.norm(dim=1).mean().item(), rel=1e-5)
