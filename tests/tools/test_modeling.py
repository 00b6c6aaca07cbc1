"""tools/hf/modeling_moh.py and its parts against Eq. 4-10 in float64 loops, and against transformers' own Llama."""

import copy
import math
import random

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache, Trainer, TrainingArguments

from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.model.transformer import CausalLM
from tools.hf.configuration_moh import MoHLlamaConfig
from tools.hf.modeling_moh import MoHLlamaForCausalLM, MoHLlamaForSequenceClassification
from tools.hf.moh_attention import ALL_ATTENTION_FUNCTIONS, eager_attention_forward, local_heads
from tools.hf.moh_own_keys import OwnKeysStaticLayer, QuantizedLayer
from tools.hf.moh_positions import rotate
from tools.hf.moh_router import MoHLlamaRouter, query_norm_routing
from tools.work.export_hf import REMOTE_CODE

SHAPE = {
    "vocab_size": 19,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "rope_theta": 100.0,
    "num_shared_heads": [1, 2],
    "num_active_routed_heads": [2, 1],
}
GROUPS = {  # two of two heads
    "num_key_value_heads": 2, "routing_unit": "key_value_group", "num_shared_heads": [0, 2],
    "num_active_routed_heads": [4, 2],
}  # fmt: skip
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def make_model(seed=0, kernels="sdpa", **changes):
    """A model whose weights are large enough that every part of it shows in the logits."""
    model = MoHLlamaForCausalLM._from_config(
        MoHLlamaConfig(**{**SHAPE, **changes}), attn_implementation=kernels
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias_steps"):
                parameter.random_(-4, 5, generator=generator)
                continue
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.normal_(float(parameter.ndim == 1), 1.5 * spread, generator=generator)
    return model


def random_tokens(batch, length, seed=0):
    return torch.randint(1, SHAPE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


# --- The model in float64, one token and one head at a time ---


def softmax(values):
    powers = [math.exp(value - max(values)) for value in values]
    return [power / sum(powers) for power in powers]


def top_k(scores, k):
    """Indices of the k largest; of equal ones the lower index."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:k]


def biased(config, weights, affinities, scores):
    """What is selected by: the scores, or with a bias the affinities and it."""
    if not config.load_balance_bias_rate or not len(scores):
        return scores
    return [a + config.load_balance_bias_rate * n for a, n in zip(affinities, weights["bias_steps"], strict=True)]


def reference_gates(config, layer, weights, x, queries):
    """Gates of one token: x [d], queries [h, head_dim] before rotary."""
    heads, shared = config.layer_heads[layer], config.num_shared_heads[layer]
    active, size = config.num_active_routed_heads[layer], 1
    if config.head_selection == "all":
        return [1.0] * heads
    if config.head_selection == "static":
        return [1.0 if head < shared + active else 0.0 for head in range(heads)]
    if config.routing_unit == "key_value_group":  # from here on heads are groups
        size = config.num_attention_heads // config.num_key_value_heads
        heads, shared, active = heads // size, shared // size, active // size
        queries = queries.reshape(heads, -1)
    if config.routing == "query_norm":
        norms = [math.sqrt(sum(value * value for value in queries[head])) for head in range(shared, heads)]
        deviation = 1.0
        if len(norms) > 1:
            mean = sum(norms) / len(norms)
            deviation = math.sqrt(sum((norm - mean) ** 2 for norm in norms) / (len(norms) - 1))
        scores = [norm / deviation for norm in norms]
        chosen = top_k(biased(config, weights, softmax(scores), scores), active)
        gates = [1.0] * shared + [1.0 if head in chosen else 0.0 for head in range(heads - shared)]
        return [gate for gate in gates for _ in range(size)]

    if config.routing == "relu":
        gates = [2 / (1 + math.exp(-row @ x)) for row in weights["w_shared"]] if shared else []
        gates += [max(0.0, row @ x) for row in weights["w_routed"]] if shared < heads else []
        return [gate for gate in gates for _ in range(size)]
    if config.routing == "sigmoid":
        gates = [2 / (1 + math.exp(-row @ x)) for row in weights["w_shared"]] if shared else []
        scores = [row @ x for row in weights["w_routed"]] if shared < heads else []
        chosen = top_k(biased(config, weights, [1 / (1 + math.exp(-score)) for score in scores], scores), active)
        gates += [2 / (1 + math.exp(-score)) if head in chosen else 0.0 for head, score in enumerate(scores)]
        return [gate for gate in gates for _ in range(size)]
    released, scaled = config.routing == "released", config.routing == "paper_scaled"
    a1 = a2 = 1.0
    if config.two_stage and 0 < shared < heads:
        a1, a2 = softmax([row @ x for row in weights["w_type"]])
        if released or scaled:
            a1, a2 = 2 * a1, 2 * a2
    gates = []
    if shared:
        scale = shared if released or scaled else 1.0
        gates += [a1 * scale * p for p in softmax([row @ x for row in weights["w_shared"]])]
    if shared < heads:
        scores = [row @ x for row in weights["w_routed"]]
        probabilities = softmax(scores)
        chosen = top_k(biased(config, weights, probabilities, scores), active)
        if config.routing_top_p is not None:
            while len(chosen) > 1 and sum(probabilities[head] for head in chosen[:-1]) >= config.routing_top_p:
                chosen.pop()
        scale = heads - shared if scaled else 1.0
        if released:
            scale = len(chosen) / sum(probabilities[head] for head in chosen)
        gates += [a2 * scale * p if head in chosen else 0.0 for head, p in enumerate(probabilities)]
    return [gate for gate in gates for _ in range(size)]


def rotated(vector, position, theta):
    """Feature i and feature i + e/2 are the two coordinates of a point that turns by position * theta^(-2i/e)."""
    half = len(vector) // 2
    turned = np.empty_like(vector)
    for i in range(half):
        point = complex(vector[i], vector[i + half])
        point *= np.exp(1j * position * theta ** (-2 * i / len(vector)))
        turned[i], turned[i + half] = point.real, point.imag
    return turned


def counted(table, query, keys):
    """What CoPE adds to the scores of ``keys``, the last of which is the query's own: positions count from there."""
    position, added = 0.0, []
    for key in reversed(keys):
        position = min(position + 1 / (1 + math.exp(-query @ key)), len(table) - 1)
        below, rest = math.floor(position), position % 1
        added.append(query @ ((1 - rest) * table[below] + rest * table[min(below + 1, len(table) - 1)]))
    return added[::-1]


def latent_heads(config, weights, inputs):
    """Queries, keys and values [heads, ...] of each token; of queries and keys what turns comes first."""
    split, heads, t = {"q": [], "k": [], "v": []}, config.num_attention_heads, config.turning_dim

    def norm(x, weight):
        return weight * x / np.sqrt(np.mean(x * x) + config.rms_norm_eps)

    for x in inputs:
        of_queries = "q_proj" if config.q_lora_rank is None else "q_b_proj"
        asks = x if config.q_lora_rank is None else norm(weights["q_a_proj"] @ x, weights["q_a_layernorm"])
        query = (weights[of_queries] @ asks).reshape(heads, -1)
        split["q"].append(np.concatenate([query[:, -t:], query[:, :-t]], axis=1))
        both = weights["kv_a_proj_with_mqa"] @ x
        made = (weights["kv_b_proj"] @ norm(both[:-t], weights["kv_a_layernorm"])).reshape(heads, -1)
        split["k"].append(np.stack([np.concatenate([both[-t:], row[: config.head_dim]]) for row in made]))
        split["v"].append(made[:, config.head_dim :])
    return split


def reference_attention(config, layer, weights, inputs):
    """inputs [s, d], normalised -> [s, d]."""
    heads, dim = config.layer_heads[layer], config.query_dim
    group, window = config.num_attention_heads // config.num_key_value_heads, config.layer_windows[layer]
    latent = config.attention == "latent"
    split = latent_heads(config, weights, inputs) if latent else {} if config.head_dims else {
        name: [(weights[f"{name}_proj"] @ x).reshape(-1, dim) for x in inputs] for name in "qkv"
    }  # fmt: skip
    if config.head_dims:
        ends = np.cumsum(config.head_dims)[:-1]
        split = {name: [np.split(weights[f"{name}_proj"] @ x, ends) for x in inputs] for name in "qkv"}
    dim += config.turning_dim
    router = {key.split(".")[1]: value for key, value in weights.items() if key.startswith("router.")}
    def placed(vector, position):
        turned = config.turning_dim or int(len(vector) * config.rope_parameters.get("partial_rotary_factor", 1))
        turned *= config.layer_positions[layer] == "rotary"
        return np.concatenate([rotated(vector[:turned], position, config.rope_theta), vector[turned:]])

    outputs = []
    routes = [reference_gates(config, layer, router, x, split["q"][t]) for t, x in enumerate(inputs)]
    own_keys = config.head_selection == "mixture" and config.routed_keys == "selected"
    for t, gates in enumerate(routes):
        weighted = []
        for head in range(heads):
            query = placed(split["q"][t][head], t)
            first = max(0, t - window + 1) if window else 0
            seen = [u for u in range(first, t + 1) if u == t or not own_keys or routes[u][head] > 0]
            keys = [placed(split["k"][u][head // group], u) for u in seen]
            more = counted(weights["cope"][head], query, keys) if "cope" in weights else [0.0] * len(keys)
            root = math.sqrt(len(query))
            attention = softmax([query @ key / root + added for key, added in zip(keys, more, strict=True)])
            output = sum(a * split["v"][u][head // group] for u, a in zip(seen, attention, strict=True))
            weighted.append(gates[head] * output)
        outputs.append(weights["o_proj"] @ np.concatenate(weighted))
    return outputs


def reference_logits(model, tokens):
    config = model.config
    state = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}

    def norm(x, weight):
        return weight * x / np.sqrt(np.mean(x * x) + config.rms_norm_eps)

    hidden = [state["model.embed_tokens.weight"][token] for token in tokens]
    if "learned" in config.layer_positions:
        hidden = [x + state["model.embed_positions.weight"][t] for t, x in enumerate(hidden)]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        own = {k.removeprefix(prefix).removesuffix(".weight"): v for k, v in state.items() if k.startswith(prefix)}
        attention = {k.removeprefix("self_attn."): v for k, v in own.items() if k.startswith("self_attn.")}
        inputs = [norm(x, own["input_layernorm"]) for x in hidden]
        attended = reference_attention(config, layer, attention, inputs)
        hidden = [x + update for x, update in zip(hidden, attended, strict=True)]
        for t, x in enumerate(hidden):
            x = norm(x, own["post_attention_layernorm"])
            gate, up = own["mlp.gate_proj"] @ x, own["mlp.up_proj"] @ x
            hidden[t] = hidden[t] + own["mlp.down_proj"] @ (gate / (1 + np.exp(-gate)) * up)
    head = state["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return np.stack([head @ norm(x, state["model.norm.weight"]) for x in hidden])


def assert_equals_reference(model, tokens):
    """In float64, but for the norms of transformers: how products are rounded in fp32 depends on the processor."""
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(tokens[None]).logits[0].numpy()
    expected = reference_logits(model, tokens.tolist())
    assert np.abs(logits - expected).max() <= 3e-6 * np.abs(expected).max()


def drawn_heads(seed):
    """A legal choice of heads, budgets and routing."""
    draw = random.Random(seed)
    heads = draw.choice([2, 4, 6])
    shared = [draw.randint(0, heads) for _ in range(3)]
    routing = draw.choice(["paper", "paper_scaled", "released", "sigmoid", "query_norm", "relu"])
    return {
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in (1, 2, 3, heads) if heads % n == 0]),
        "head_selection": draw.choice(["mixture", "mixture", "mixture", "static"]),
        "routing": routing,
        "two_stage": draw.random() < 0.7,
        "num_shared_heads": shared,
        "num_active_routed_heads": [draw.randint(min(1, heads - s), heads - s) for s in shared],
        "tie_word_embeddings": draw.random() < 0.3,
        "load_balance_bias_rate": 0.0 if routing == "relu" else draw.choice([0.0, 0.05]),
        "routed_keys": draw.choice(["all", "selected"]),
    }


@pytest.mark.parametrize("seed", range(24))
def test_logits_equal_the_equations_in_float64(seed):
    model = make_model(seed, kernels=("sdpa", "eager")[seed % 2], **drawn_heads(seed))
    assert_equals_reference(model, random_tokens(1, 9, seed)[0])


WINDOWS = {
    "in every layer": {"sliding_window": 4},
    "in the first": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "in the last, all heads": {
        "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"], "head_selection": "all",
    },
    "own keys": {"layer_windows": [0, 4], "routed_keys": "selected", "num_key_value_heads": 2},
    "of two sizes": {"layer_windows": [5, 2], "routing": "query_norm"},
    "of counted positions": {
        "layer_windows": [4, 0], "layer_positions": ["cope", "cope"], "num_key_value_heads": 2, "cope_max_position": 3,
    },
    "of positions in one layer": {"layer_windows": [0, 4], "layer_positions": ["cope", "rotary"], "routing": "relu"},
    "none, but a table": {"layer_positions": ["learned"] * 2, "learned_positions": 22},
    "none, a part turned": {
        "layer_positions": ["none", "rotary"], "rope_parameters": {"partial_rotary_factor": 0.67, "rope_theta": 50.0},
    },
    "other numbers of heads": {
        "layer_heads": [2, 4], "num_key_value_heads": 2, "num_shared_heads": [0, 2], "num_active_routed_heads": [1, 1],
    },
    "other numbers of heads, all on": {"layer_heads": [4, 3], "head_selection": "all"},
    "heads of several widths": {
        "head_dims": [6, 6, 4, 2], "layer_windows": [4, 0], "routing": "query_norm", "num_shared_heads": [0, 2],
        "num_active_routed_heads": [2, 1],
    },
    "heads of several widths, a part turned": {
        "head_dims": [4, 6, 6, 4], "rope_parameters": {"partial_rotary_factor": 0.67, "rope_theta": 50.0},
    },
    "latent": {
        "attention": "latent", "kv_lora_rank": 5, "qk_rope_head_dim": 4, "q_lora_rank": 7, "layer_windows": [4, 0],
    },
    "latent, no latent of queries": {
        "attention": "latent", "kv_lora_rank": 9, "qk_rope_head_dim": 2, "layer_positions": ["rotary", "none"],
        "routing": "query_norm",
    },
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("changes", WINDOWS.values(), ids=WINDOWS)
def test_windows_and_positions_are_those_of_the_equations_with_a_cache_and_without(changes, attention, tmp_path):
    model, tokens = make_model(kernels=attention, **changes), random_tokens(2, 14)
    assert_equals_reference(model, tokens[0])
    whole = model(tokens, use_cache=False).logits
    for cut in (1, 5, 9):
        outputs = model(tokens[:, :cut])
        logits = [outputs.logits]
        for start in range(cut, 14, 2):
            outputs = model(tokens[:, start : start + 2], past_key_values=outputs.past_key_values)
            logits.append(outputs.logits)
        torch.testing.assert_close(torch.cat(logits, 1), whole, rtol=1e-4, atol=1e-4)
    texts = model.generate(tokens, **GREEDY)
    assert model.generate(tokens, cache_implementation="static", **GREEDY).equal(texts)
    for _ in range(8):
        next_tokens = model(tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, next_tokens), dim=1)
    assert torch.equal(texts, tokens)
    model.config.save_pretrained(tmp_path)
    read = MoHLlamaConfig.from_pretrained(tmp_path)
    for key in ("layer_windows", "layer_positions", "cope_max_position", "rope_parameters", "kv_lora_rank"):
        assert getattr(read, key) == getattr(model.config, key)


@pytest.mark.parametrize("routing", ["paper", "paper_scaled", "released", "sigmoid", "query_norm", "relu"])
@pytest.mark.parametrize(
    "unit, top_p, budgets",
    [
        ("key_value_group", None, ([0, 4], [2, 2])),
        ("head", 0.7, ([0, 2], [6, 4])),
        ("key_value_group", 0.6, ([2, 0], [4, 6])),
    ],
)
@torch.no_grad()
def test_groups_of_heads_and_varying_numbers_of_heads_equal_the_equations(unit, top_p, budgets, routing):
    changes = {"num_attention_heads": 6, "num_key_value_heads": 3, "routing_unit": unit, "routing": routing}
    changes |= {"num_shared_heads": budgets[0], "num_active_routed_heads": budgets[1]}
    model = make_model(**changes, routing_top_p=None if routing in ("query_norm", "sigmoid", "relu") else top_p)
    tokens = random_tokens(1, 9)
    assert_equals_reference(model, tokens[0])
    assert_router_outputs(model(tokens, output_router_gates=True), model, tokens)


@pytest.mark.parametrize("routing", ["paper", "paper_scaled", "released", "sigmoid", "query_norm", "relu"])
@pytest.mark.parametrize("shared", [0, 1, 3, 4])
def test_layers_with_none_one_and_all_heads_shared_equal_the_equations(routing, shared):
    active = min(2, 4 - shared)
    changes = {"num_shared_heads": [shared] * 2, "num_active_routed_heads": [active] * 2, "routing": routing}
    assert_equals_reference(make_model(**changes), random_tokens(1, 9)[0])


@pytest.mark.parametrize("routing", ["paper", "paper_scaled", "released", "sigmoid", "query_norm", "relu"])
def test_of_equal_scores_the_lower_head_index_is_selected(routing):
    changes = {"num_shared_heads": [0, 0], "num_active_routed_heads": [1, 3], "routing": routing}
    model = make_model(**changes)
    with torch.no_grad():
        for layer in model.model.layers:  # heads 0 and 1 tie, and heads 2 and 3
            query = layer.self_attn.q_proj.weight.view(2, 2, -1, SHAPE["hidden_size"])
            query[:, 1] = query[:, 0]
            if routing != "query_norm":
                weight = layer.self_attn.router.w_routed.view(2, 2, -1)
                weight[:, 1] = weight[:, 0]
    assert_equals_reference(model, random_tokens(1, 9)[0])


def test_a_router_computes_in_fp32_from_bf16_inputs_and_under_autocast():
    config = MoHLlamaConfig(**SHAPE)
    router = MoHLlamaRouter(config, 0).bfloat16()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_(0, 0.5, generator=generator)
        x = torch.randn(1, 200, SHAPE["hidden_size"], generator=generator).bfloat16()
        gates, *_ = router(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert router(x)[0].equal(gates)
    weights = {name: parameter.detach().double().numpy() for name, parameter in router.named_parameters()}
    expected = [reference_gates(config, 0, weights, token, None) for token in x[0].double().numpy()]
    assert gates.dtype == torch.float32
    np.testing.assert_allclose(gates[0], expected, rtol=2e-6, atol=1e-30)


def test_gates_have_no_gradient_where_a_rank_has_a_part_of_the_heads(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    gates = torch.arange(4.0).requires_grad_()
    mine = local_heads(gates, 2)
    assert mine.tolist() == [2.0, 3.0] and local_heads(gates, 4) is gates
    with pytest.raises(NotImplementedError, match="train without it"):
        mine.sum().backward()


def test_gradients_are_asked_for_of_a_whole_router_but_its_counts():
    router = make_model(load_balance_bias_rate=0.05).model.layers[0].self_attn.router
    for wanted in (False, True):
        assert router.requires_grad_(wanted) is router
        needed = {name for name, weight in router.named_parameters() if weight.requires_grad}
        assert needed == ({"w_shared", "w_routed", "w_type"} if wanted else set())


def test_query_norm_gates_are_one_with_the_gradient_of_the_selected_softmax_scores():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, 5, 4, generator=generator, requires_grad=True)
    upstream = torch.randn(5, generator=generator)
    gates, selection, _ = query_norm_routing(query, 1, 2)
    (gates * upstream).sum().backward()
    selected = gates.detach()[0, 0].double().numpy()
    assert selected.tolist().count(1.0) == 3 and selected.tolist().count(0.0) == 2

    def softmax_scores(values):
        norms = np.sqrt((values**2).sum(-1))[1:]
        return np.array([0.0, *softmax(list(norms / norms.std(ddof=1)))])

    values, step = query.detach()[0, 0].double().numpy(), 1e-6
    for index in np.ndindex(*values.shape):
        shift = np.zeros_like(values)
        shift[index] = step
        slope = (softmax_scores(values + shift) - softmax_scores(values - shift)) / (2 * step)
        assert query.grad[0, 0][index].item() == pytest.approx((slope * selected * upstream.numpy()).sum(), abs=1e-6)


def test_a_token_whose_query_norms_are_all_equal_has_finite_gates():
    gates, *_ = query_norm_routing(torch.zeros(1, 1, 4, 6), 1, 2)
    assert gates.tolist() == [[[1.0, 1.0, 1.0, 0.0]]]


# --- Router outputs ---


def assert_router_outputs(outputs, model, tokens):
    """Gates and selections against the equations: the hidden states tell the input of each layer."""
    states = model(tokens, output_hidden_states=True).hidden_states
    config = model.config
    assert len(outputs.router_gates) == len(outputs.router_selections) == config.num_hidden_layers
    for index, layer in enumerate(model.model.layers):
        x = layer.input_layernorm(states[index])
        query = layer.self_attn.q_proj(x).unflatten(-1, (config.num_attention_heads, -1)).double().numpy()
        router = layer.self_attn.router
        weights = {name: p.detach().double().numpy() for name, p in router.named_parameters()} if router else {}
        gates, selected = outputs.router_gates[index], outputs.router_selections[index]
        assert gates.shape == selected.shape == (*tokens.shape, config.num_attention_heads)
        assert gates.dtype == torch.float32 and selected.dtype == torch.bool
        for b, t in np.ndindex(*tokens.shape):
            expected = reference_gates(config, index, weights, x[b, t].double().numpy(), query[b, t])
            np.testing.assert_allclose(gates[b, t], expected, rtol=1e-5, atol=1e-30)
            assert selected[b, t].tolist() == [gate > 0 for gate in expected]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 2, "num_shared_heads": [0, 4], "num_active_routed_heads": [2, 0]},
        {"routing": "released"},
        {"routing": "query_norm", "num_shared_heads": [1, 4], "num_active_routed_heads": [2, 0]},
        {"head_selection": "static"},
        {"head_selection": "all"},
    ],
)
@torch.no_grad()
def test_router_outputs_are_the_gates_and_the_selected_heads_of_every_layer(changes):
    model, tokens = make_model(**changes), random_tokens(2, 6)
    plain = model(tokens)
    assert plain.router_gates is None and plain.router_selections is None
    for outputs in (model(tokens, output_router_gates=True), model.model(tokens, output_router_gates=True)):
        assert_router_outputs(outputs, model, tokens)
    model.config.output_router_gates = True
    outputs = model(tokens)
    assert outputs.logits.equal(plain.logits)
    assert_router_outputs(outputs, model, tokens)


def reference_balance(model, states, tokens, mask):
    """Eq. 7 in float64, one token at a time, the mean over the sequences and the layers with routed heads."""
    config, found = model.config, []
    for index, layer in enumerate(model.model.layers):
        shared = config.num_shared_heads[index]
        if shared == config.num_attention_heads:
            continue
        x = layer.input_layernorm(states[index])
        query = layer.self_attn.q_proj(x).unflatten(-1, (config.num_attention_heads, -1)).double().numpy()
        for b in range(len(tokens)):
            share, mean = np.zeros((2, config.num_attention_heads - shared))
            for t in mask[b].nonzero().flatten().tolist():
                if config.routing == "query_norm":
                    norms = np.linalg.norm(query[b, t, shared:], axis=-1)
                    scores = norms / norms.std(ddof=1)
                else:
                    scores = layer.self_attn.router.w_routed.double().numpy() @ x[b, t].double().numpy()
                if config.routing == "relu":
                    share += scores > 0
                    mean += scores * (scores > 0) * len(scores) / config.num_active_routed_heads[index]
                    continue
                order = sorted(range(len(scores)), key=lambda i: -scores[i])
                share[order[: config.num_active_routed_heads[index]]] += 1
                sigmoids = 1 / (1 + np.exp(-scores))
                mean += sigmoids / sigmoids.sum() if config.routing == "sigmoid" else softmax(scores.tolist())
            count = mask[b].sum().item()
            found.append((share / count * mean / count).sum() * (len(scores) if config.routing == "released" else 1))
    return np.mean(found)


@pytest.mark.parametrize("routing", ["paper", "paper_scaled", "released", "sigmoid", "query_norm", "relu"])
@torch.no_grad()
def test_output_router_logits_adds_the_load_balance_loss_without_padding(routing):
    changes = {"num_hidden_layers": 3, "num_shared_heads": [1, 4, 0], "num_active_routed_heads": [2, 0, 3]}
    model, tokens = make_model(routing=routing, **changes), random_tokens(2, 9)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    plain = model(tokens, attention_mask=mask, labels=tokens, output_hidden_states=True)
    outputs = model(tokens, attention_mask=mask, labels=tokens, output_router_logits=True)
    expected = reference_balance(model, plain.hidden_states, tokens, mask)
    assert plain.aux_loss is None and plain.router_logits is None
    assert outputs.aux_loss.item() == pytest.approx(expected, rel=1e-5)
    assert [scores.shape[-1] for scores in outputs.router_logits] == [3, 4]
    assert outputs.loss.item() == pytest.approx(plain.loss.item() + 0.01 * expected, rel=1e-6)
    # Trainer sums micro-batches whose mean is over all of their tokens: each counts by its share of them.
    parts = [
        model(tokens, attention_mask=mask, labels=tokens, num_items_in_batch=64, output_router_logits=logits).loss
        for logits in (True, False)
    ]
    assert (parts[0] - parts[1]).item() == pytest.approx(0.01 * expected * 16 / 64, rel=1e-3)
    model.config.router_aux_loss_coef, model.config.output_router_logits = 0.5, True
    loss = model(tokens, attention_mask=mask, labels=tokens).loss
    assert loss.item() == pytest.approx(plain.loss.item() + 0.5 * expected, rel=1e-6)


@torch.no_grad()
def test_attention_weights_are_returned_by_eager_attention_only():
    model, tokens = make_model(kernels="eager", num_key_value_heads=2), random_tokens(2, 7)
    outputs = model(tokens, output_attentions=True)
    assert len(outputs.attentions) == 2 and outputs.logits.equal(model(tokens).logits)
    layer, x = model.model.layers[0], model(tokens, output_hidden_states=True).hidden_states[0]
    x = layer.input_layernorm(x)
    projections = layer.self_attn.q_proj, layer.self_attn.k_proj
    query, key = (projection(x).unflatten(-1, (-1, 6)).transpose(1, 2) for projection in projections)
    places = model.model.rotary_emb(x, torch.arange(7)[None])
    query, key = rotate(query, *places), rotate(key, *places)
    scores = query @ key.repeat_interleave(2, dim=1).transpose(2, 3) / math.sqrt(6)
    expected = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf).softmax(-1)
    torch.testing.assert_close(outputs.attentions[0], expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="attn_implementation='eager'"):
        make_model()(tokens, output_attentions=True)


@torch.no_grad()
def test_attention_weights_of_heads_with_their_own_keys_are_in_the_places_of_their_tokens():
    model, tokens = make_model(kernels="eager", routed_keys="selected"), random_tokens(1, 10)
    expected = model(tokens, use_cache=False, output_attentions=True).attentions
    cache = model(tokens[:, :9], output_attentions=True).past_key_values
    found = model(tokens[:, 9:], past_key_values=cache, output_attentions=True).attentions
    for mine, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, whole[:, :, -1:], rtol=0, atol=1e-5)
    cache = model(tokens[:, :9]).past_key_values
    with pytest.raises(ValueError, match="output_attentions: the cache has left out keys"):
        model(tokens[:, 9:], past_key_values=cache, output_attentions=True)


@torch.no_grad()
def test_a_quantized_cache_is_refused_for_heads_with_their_own_keys():
    cache, made = DynamicCache(), {"_quantize": None, "_dequantize": None, "get_seq_length": lambda self: 0}
    cache.layers.append(type("Quantized", (QuantizedLayer,), made)())
    with pytest.raises(ValueError, match="a quantized cache cannot keep its marks"):
        make_model(routed_keys="selected")(random_tokens(1, 4), past_key_values=cache)


@torch.no_grad()
def test_sequence_classification_reads_the_last_token_before_or_after_padding():
    config = MoHLlamaConfig(**SHAPE, num_labels=3, pad_token_id=0)
    torch.manual_seed(0)
    model, tokens = MoHLlamaForSequenceClassification(config).eval(), random_tokens(2, 8)
    one = [model(tokens[:1]).logits, model(tokens[1:, :5]).logits]
    expected = model.score(model.model(tokens[:1]).last_hidden_state[:, -1])
    torch.testing.assert_close(one[0], expected, rtol=0, atol=1e-6)
    for pads in (slice(5, 8), slice(0, 3)):  # behind, before
        batch, mask = tokens.clone(), torch.ones_like(tokens)
        batch[1, pads], mask[1, pads] = 0, 0
        batch[1][mask[1].bool()] = tokens[1, :5]
        outputs = model(batch, attention_mask=mask, labels=torch.tensor([2, 0]))
        torch.testing.assert_close(outputs.logits, torch.cat(one), rtol=0, atol=1e-6)
        assert outputs.loss.item() == pytest.approx(F.cross_entropy(torch.cat(one), torch.tensor([2, 0])).item())
        balance = model.model(batch, attention_mask=mask, output_router_logits=True).aux_loss
        more = model(batch, attention_mask=mask, labels=torch.tensor([2, 0]), output_router_logits=True).loss
        assert (more - outputs.loss).item() == pytest.approx(0.01 * balance.item(), rel=1e-3)
    config.pad_token_id = None
    with pytest.raises(ValueError, match="attention_mask"):
        model(tokens)


def test_trainer_takes_the_mean_loss_of_sequence_classification_over_micro_batches(tmp_path):
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row, "labels": torch.tensor(n % 3)} for n, row in enumerate(random_tokens(4, 8))]
    losses = []
    for parts in (1, 4):
        torch.manual_seed(0)
        model = MoHLlamaForSequenceClassification(MoHLlamaConfig(**SHAPE, num_labels=3, pad_token_id=0))
        batch = {"per_device_train_batch_size": 4 // parts, "gradient_accumulation_steps": parts, "max_steps": 1}
        quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        losses.append(Trainer(model, TrainingArguments(tmp_path, **batch, **quiet), train_dataset=rows).train())
    assert losses[1].training_loss == pytest.approx(losses[0].training_loss, rel=1e-5)


@torch.no_grad()
def test_trainers_label_smoothing_asks_for_the_next_token(tmp_path):
    pytest.importorskip("accelerate")
    model, ids = make_model(), random_tokens(2, 9)
    quiet = {"report_to": [], "use_cpu": True}
    trainer = Trainer(model, TrainingArguments(tmp_path, label_smoothing_factor=0.1, **quiet), train_dataset=[])
    loss = trainer.compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    assert loss.item() == pytest.approx(F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1).item())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_selection": "all"}, "head_selection all: num_shared_heads must be"),
        ({"sliding_window": 3}, "sliding_window 3: give layer_windows"),
        ({"hidden_act": "gelu"}, "moh_llama has SiLU"),
        ({"num_active_routed_heads": [0, 0]}, "layer 0 with"),
    ],
)
def test_what_the_model_cannot_compute_is_refused_where_it_is_given_to_from_pretrained(changes, message, tmp_path):
    make_model(layer_windows=[5, 5]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        MoHLlamaForCausalLM.from_pretrained(tmp_path, **changes)


@pytest.mark.parametrize("routing", ["paper", "paper_scaled", "released", "sigmoid", "query_norm", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_selected_heads_are_those_of_the_trainers_router_token_by_token(routing, dtype):
    shape = {"num_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "vocab_size": 19}
    heads = HeadsConfig(num_shared_heads=(2, 0), num_active_routed_heads=(2, 3), routing=routing)
    trainer = CausalLM(ModelConfig(hidden_size=16, intermediate_size=24, rope_theta=100.0, heads=heads, **shape))
    trainer.initialize(seed=1)
    changes = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_shared_heads": [2, 0], "routing": routing}
    model = make_model(num_active_routed_heads=[2, 3], **changes)
    for name, parameter in trainer.named_parameters():
        parameter.mul_(1 if parameter.ndim == 1 else 8)
        model.get_parameter(name).copy_(parameter)
    trainer, model, tokens = trainer.to(dtype), model.to(dtype), random_tokens(1, 200)
    taken = []
    for layer in trainer.model.layers:
        router, select = layer.self_attn.router, layer.self_attn.router.select
        router.select = lambda *arguments, select=select: taken.append(select(*arguments)) or taken[-1]
    trainer(tokens)
    for selected, trained, shared in zip(
        model(tokens, output_router_gates=True).router_selections, taken, (2, 0), strict=True
    ):
        assert selected[0, :, :shared].all()
        assert selected[0, :, shared:].equal(trained[:, 0].bool())


@pytest.mark.parametrize("changes", [{}, {"routing": "query_norm"}])
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(changes):
    tokens, seen = random_tokens(2, 10), []
    for checkpointing in (False, True):
        model = make_model(**changes).train()
        calls = []
        model.model.layers[0].input_layernorm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        outputs = model(tokens, labels=tokens, output_router_gates=True)
        (outputs.loss + sum(gates.square().sum() for gates in outputs.router_gates)).backward()
        assert len(calls) == 1 + checkpointing
        assert outputs.past_key_values is None or not checkpointing
        seen.append((outputs.loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    assert seen[0][0] == seen[1][0]
    for name, gradient in seen[0][1].items():
        assert gradient.abs().max() > 0 or "w_" in name
        assert seen[1][1][name].equal(gradient)


# --- transformers ---


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 20}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tied, rope", [(False, None), (True, None), (False, LLAMA3), (True, LINEAR), (False, YARN)])
def test_with_all_heads_the_model_is_llama_to_the_bit(attention, tied, rope):
    changes = {"head_selection": "all", "num_key_value_heads": 2, "tie_word_embeddings": tied, "head_dim": 12}
    model = make_model(kernels=attention, rope_parameters=rope, **changes)
    own = {"head_selection", "routing", "two_stage", "num_shared_heads", "num_active_routed_heads", "model_type"}
    own |= {"output_router_gates", "output_router_logits", "router_aux_loss_coef", "rope_parameters"}
    shape = {k: v for k, v in model.config.to_dict().items() if k not in own | {"architectures", "auto_map"}}
    llama = LlamaForCausalLM._from_config(LlamaConfig(**shape, rope_scaling=rope), attn_implementation=attention).eval()
    llama.load_state_dict(model.state_dict())
    tokens = random_tokens(2, 30)
    with torch.no_grad():
        assert model(tokens).logits.equal(llama(tokens).logits)


OWN_KEYS = [
    {"routed_keys": "selected"},
    {"routed_keys": "selected", "num_key_value_heads": 2, "routing": "relu"},
    GROUPS | {"routed_keys": "selected", "routing": "query_norm", "head_dim": 16, "query_dim": 6},
]
CASES = [
    {"num_key_value_heads": 2, "num_shared_heads": [0, 4], "num_active_routed_heads": [2, 0]},
    {"routing": "query_norm"},
    {"head_selection": "static", "tie_word_embeddings": True},
    GROUPS | {"routing_top_p": 0.7},
    *OWN_KEYS,
]


COUNTED = {"num_key_value_heads": 2, "layer_positions": ["cope", "none"], "cope_max_position": 5}


def test_positions_are_counted_only_where_all_scores_are_made():
    with pytest.raises(ValueError, match="attn_implementation flex_attention: .* choose sdpa or eager"):
        make_model(kernels="flex_attention", **COUNTED)
    model = make_model(**COUNTED)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="attn_implementation flex_attention: .* choose sdpa or eager"):
        model(random_tokens(1, 4))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("changes", [*CASES, COUNTED])
@torch.no_grad()
def test_a_cache_chunks_and_left_padding_do_not_change_logits(changes, attention):
    model, tokens = make_model(kernels=attention, **changes), random_tokens(2, 12)
    whole = model(tokens, use_cache=False).logits
    tolerance = 3e-6 * whole.abs().max().item()

    for stops in ([12], [5, 12], [5, *range(6, 13)]):
        cache, start, pieces = None, 0, []
        for stop in stops:
            outputs = model(tokens[:, start:stop], past_key_values=cache, use_cache=True)
            cache, start = outputs.past_key_values, stop
            pieces.append(outputs.logits)
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=tolerance)

    padded, mask = torch.zeros(2, 15, dtype=torch.long), torch.zeros(2, 15, dtype=torch.long)
    for row, length in enumerate((12, 9)):
        padded[row, -length:], mask[row, -length:] = tokens[row, :length], 1
    logits = model(padded, attention_mask=mask).logits
    for row, length in enumerate((12, 9)):
        torch.testing.assert_close(logits[row, -length:], whole[row, :length], rtol=0, atol=tolerance)


@pytest.mark.parametrize("changes", [*CASES, COUNTED])
@torch.no_grad()
def test_greedy_generation_is_the_same_for_every_cache_and_for_a_padded_batch(changes):
    model, tokens = make_model(**changes), random_tokens(2, 7)
    expected = tokens
    for _ in range(GREEDY["max_new_tokens"]):  # generation without generate()
        following = model(expected, use_cache=False).logits[:, -1].argmax(-1)
        expected = torch.cat((expected, following[:, None]), dim=1)
    assert model.generate(tokens, use_cache=False, **GREEDY).equal(expected)
    assert model.generate(tokens, **GREEDY).equal(expected)
    assert model.generate(tokens, cache_implementation="static", **GREEDY).equal(expected)
    short = model.generate(tokens[:1, :4], **GREEDY)[0, 4:]
    padded, mask = tokens.clone(), torch.ones_like(tokens)
    padded[0], mask[0, :3] = torch.cat((torch.zeros(3, dtype=torch.long), tokens[0, :4])), 0
    generated = model.generate(padded, attention_mask=mask, **GREEDY)[:, 7:]
    assert generated[0].equal(short) and generated[1].equal(expected[1, 7:])


@pytest.mark.parametrize("changes", OWN_KEYS)
@torch.no_grad()
def test_heads_that_keep_their_own_tokens_equal_the_equations_in_beams_too(changes):
    model, tokens = make_model(**changes), random_tokens(2, 7)
    assert_equals_reference(model, random_tokens(1, 14)[0])
    beams = GREEDY | {"num_beams": 3}
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    expected = model.generate(tokens, attention_mask=mask, use_cache=False, **beams)
    assert model.generate(tokens, attention_mask=mask, **beams).equal(expected)
    assert model.generate(tokens, attention_mask=mask, cache_implementation="static", **beams).equal(expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_a_mask_that_later_tokens_bring_holds_for_heads_with_their_own_keys(attention):
    model, tokens = make_model(kernels=attention, routed_keys="selected"), random_tokens(1, 10)
    visible = torch.ones(10, 10, dtype=torch.bool).tril()
    visible[6:, 1:3] = False
    lowest = torch.finfo(torch.float32).min
    mask = visible[None, None] if attention == "sdpa" else torch.zeros(1, 1, 10, 10).masked_fill(~visible, lowest)
    whole = model(tokens, attention_mask=mask, use_cache=False).logits[:, 6:]
    hidden = torch.ones(1, 10, dtype=torch.long)
    hidden[:, 1:3] = 0
    for later in (mask[..., 6:, :], hidden):
        cache = model(tokens[:, :6]).past_key_values
        places = torch.arange(6, 10)[None]
        logits = model(tokens[:, 6:], past_key_values=cache, attention_mask=later, position_ids=places).logits
        torch.testing.assert_close(logits, whole, rtol=0, atol=3e-6 * whole.abs().max().item())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_heads_with_their_own_keys_are_computed_in_fp16_by_autocast(attention):
    model, tokens = make_model(kernels=attention, routed_keys="selected", num_key_value_heads=2), random_tokens(2, 9)
    expected = model(tokens, use_cache=False).logits
    with torch.autocast("cpu", dtype=torch.float16):
        begun = model(tokens[:, :6])
        after = model(tokens[:, 6:], past_key_values=begun.past_key_values)
    found = torch.cat((begun.logits, after.logits), 1).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * expected.abs().max().item())


@torch.no_grad()
def test_a_cache_is_taken_by_its_name_before_transformers_5_24_and_by_the_one_since():
    model, tokens = make_model(), random_tokens(2, 9)
    expected = model(tokens, use_cache=False).logits[:, 6:]
    for name in ("past_key_values", "cache"):
        after = model(tokens[:, 6:], **{name: model(tokens[:, :6]).past_key_values})
        torch.testing.assert_close(after.logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="either past_key_values or cache"):
        model(tokens, past_key_values=DynamicCache(), cache=DynamicCache())


@torch.no_grad()
def test_a_dynamic_cache_keeps_the_heads_only_that_tokens_use():
    model, tokens = make_model(routed_keys="selected", num_shared_heads=[0, 0]), random_tokens(2, 12)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    cache = model(tokens, attention_mask=mask, output_router_gates=True).past_key_values
    assert [layer.keys.shape for layer in cache.layers] == [(20 * 2, 6), (20 * 1, 6)]
    expected = model(tokens[:, :10], attention_mask=mask[:, :10]).past_key_values
    cache.crop(-2)
    for mine, theirs in zip(cache.layers, expected.layers, strict=True):
        assert mine.get_seq_length() == 10
        assert all(map(torch.equal, mine.parts()[2:], theirs.parts()[2:]))
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=0, atol=1e-5)
    before = [layer.keys for layer in cache.layers]
    cache.batch_repeat_interleave(2)
    assert [layer.keys.shape[0] for layer in cache.layers] == [2 * len(keys) for keys in before]
    cache.batch_select_indices(torch.tensor([0, 3]))
    assert all(layer.keys.equal(keys) for layer, keys in zip(cache.layers, before, strict=True))


MANY = GROUPS | {"num_attention_heads": 8, "num_key_value_heads": 4, "num_shared_heads": [0, 2], "routing_top_p": 0.8}


@pytest.mark.parametrize(
    "changes, kept",
    [
        ({"num_shared_heads": [0, 0]}, [2, 1]),
        ({"num_shared_heads": [0, 0], "num_key_value_heads": 2}, [2, 1]),
        ({"num_shared_heads": [0, 0], "routing": "relu"}, [4, 4]),
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "num_shared_heads": [2, 3]}, [3, 3]),
        ({"num_shared_heads": [0, 0], "num_active_routed_heads": [1, 1]}, [1, 1]),
        (MANY, [2, 2]),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_a_static_cache_keeps_as_many_heads_of_a_token_as_it_can_use(changes, kept, attention):
    model = make_model(kernels=attention, routed_keys="selected", **changes)
    tokens, empty = random_tokens(3, 12), StaticCache(model.config, max_cache_len=16)
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    places = (mask.cumsum(1) - 1).clamp_min(0)
    whole = model(tokens, attention_mask=mask, position_ids=places, use_cache=False).logits
    for order in ([0, 1, 2], [1, 1, 0]):  # of beams, after 8 tokens
        cache, pieces = copy.deepcopy(empty), []
        for start, stop in ((0, 5), (5, 8), *((t, t + 1) for t in range(8, 12))):
            rows = order if start >= 8 else [0, 1, 2]
            if start == 8:
                cache.reorder_cache(torch.tensor(order))
            asked = {"attention_mask": mask[rows, :stop], "position_ids": places[rows, start:stop]}
            logits = model(tokens[rows, start:stop], past_key_values=cache, **asked).logits
            pieces.append(logits if start >= 8 else logits[order])
        found = torch.cat(pieces, 1)
        seen = mask[order].bool()
        torch.testing.assert_close(found[seen], whole[order][seen], rtol=0, atol=3e-6 * whole.abs().max().item())
        assert [layer.keys.shape for layer in cache.layers] == [(3, heads, 16, 6) for heads in kept]
        assert [layer.members.nbytes for layer in cache.layers] == [3 * model.config.num_attention_heads * 16] * 2
    cache.reset()
    assert not any(layer.members.any() for layer in cache.layers)
    again = model(tokens, attention_mask=mask, position_ids=places, past_key_values=cache).logits
    torch.testing.assert_close(again[mask.bool()], whole[mask.bool()], rtol=0, atol=3e-6 * whole.abs().max().item())


@torch.no_grad()
def test_a_step_with_a_static_cache_of_own_keys_is_one_graph():
    model, tokens = make_model(routed_keys="selected", num_shared_heads=[0, 0]), random_tokens(2, 12)
    cache = StaticCache(model.config, max_cache_len=16)
    model(tokens[:, :10], past_key_values=cache)
    assert all(type(layer) is OwnKeysStaticLayer for layer in cache.layers)
    step = torch.compile(model.forward, backend="eager", fullgraph=True)
    for t in (10, 11):
        place = torch.tensor([t])
        logits = step(tokens[:, t : t + 1], past_key_values=cache, cache_position=place).logits
        expected = model(tokens[:, : t + 1], use_cache=False).logits[:, -1:]
        torch.testing.assert_close(logits, expected, rtol=0, atol=3e-6 * expected.abs().max().item())


@pytest.mark.parametrize("changes", OWN_KEYS)
@torch.no_grad()
def test_a_prefill_in_chunks_fills_a_static_cache_that_transformers_made_before(changes):
    model, tokens = make_model(**changes), random_tokens(2, 7)
    chunks = GREEDY | {"prefill_chunk_size": 2, "return_dict_in_generate": True}
    found = model.generate(tokens, cache_implementation="static", **chunks)
    assert found.sequences.equal(model.generate(tokens, use_cache=False, **GREEDY))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_a_number_that_is_none_stays_one_in_a_static_cache(attention):
    model = make_model(kernels=attention, routed_keys="selected", num_shared_heads=[0, 0])
    cache, inputs = StaticCache(model.config, max_cache_len=8), torch.ones(1, 4, 16)
    inputs[0, 2] = math.nan
    assert model(inputs_embeds=inputs, past_key_values=cache).logits[0, 2:].isnan().all()
    assert model(random_tokens(1, 1), past_key_values=cache).logits.isnan().any()


@torch.no_grad()
def test_labels_give_the_mean_cross_entropy_and_logits_to_keep_the_last_logits():
    model, tokens = make_model(), random_tokens(2, 10)
    outputs = model(tokens, labels=tokens, output_hidden_states=True)
    rows = outputs.logits.double().log_softmax(-1)
    losses = [-rows[b, t, tokens[b, t + 1]].item() for b in range(2) for t in range(9)]
    assert outputs.loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    summed = model(tokens, labels=tokens, num_items_in_batch=100).loss  # as Trainer asks with gradient accumulation
    assert summed.item() == pytest.approx(sum(losses) / 100, rel=1e-6)
    for keep in (3, torch.tensor([7, 8, 9])):
        kept = model(tokens, logits_to_keep=keep).logits
        torch.testing.assert_close(kept, outputs.logits[:, -3:], rtol=0, atol=1e-5)
    assert len(outputs.hidden_states) == 3
    assert model.lm_head(outputs.hidden_states[-1]).equal(outputs.logits)
    assert model(tokens, return_dict=False)[0].equal(outputs.logits)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "routing": "query_norm"}])
def test_a_saved_model_is_loaded_with_an_empty_report_and_equal_logits(changes, tmp_path):
    model, tokens = make_model(**changes), random_tokens(2, 10)
    model.save_pretrained(tmp_path)
    assert set(REMOTE_CODE) <= {path.name for path in tmp_path.iterdir()}
    loaded, report = MoHLlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    tied = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert tied == bool(changes.get("tie_word_embeddings"))
    with torch.no_grad():
        assert loaded(tokens).logits.equal(model(tokens).logits)


@pytest.mark.parametrize(
    "changes",
    [
        GROUPS | {"routing": "released", "routing_top_p": 0.7, "routed_keys": "selected"},
        {"routing": "query_norm", "rope_parameters": LLAMA3},
    ],
)
@torch.no_grad()
def test_the_exported_graph_computes_sequences_of_other_lengths(changes):
    model, dynamic = make_model(**changes), {1: torch.export.Dim("length", min=2, max=60)}
    plain = {"use_cache": False, "return_dict": False}
    shapes = {"input_ids": dynamic, "use_cache": None, "return_dict": None}
    program = torch.export.export(model, (random_tokens(2, 9),), kwargs=plain, dynamic_shapes=shapes, strict=False)
    for length in (5, 40):
        tokens = random_tokens(2, length)
        logits = program.module()(tokens, **plain)[0]
        torch.testing.assert_close(logits, model(tokens).logits, rtol=0, atol=1e-5)


def test_a_foreign_attention_implementation_gets_the_layer_and_the_arguments_of_the_call():
    """The contract of vLLM's Transformers backend, which replaces attention and passes its own objects through."""
    seen = []

    def recorder(module, query, key, value, attention_mask, scaling, marker=None, **kwargs):
        seen.append((module.layer_idx, scaling, marker))
        causal = torch.full((query.shape[2], key.shape[2]), -torch.inf).triu(1)
        return eager_attention_forward(module, query, key, value, causal, scaling)

    ALL_ATTENTION_FUNCTIONS["recorder"] = recorder
    try:
        tokens = random_tokens(1, 8)
        with torch.no_grad():
            expected = make_model()(tokens).logits
            logits = make_model(kernels="recorder")(tokens, use_cache=False, marker="mine").logits
    finally:
        del ALL_ATTENTION_FUNCTIONS["recorder"]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert seen == [(0, 6**-0.5, "mine"), (1, 6**-0.5, "mine")]


# --- The configuration ---


def test_scalings_of_the_rotary_embedding_change_the_logits_and_are_read_in_both_spellings():
    tokens = random_tokens(1, 30)
    with torch.no_grad():
        plain = make_model()(tokens).logits
        for rope in (LLAMA3, LINEAR, YARN):
            scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
            logits = make_model(rope_parameters=rope)(tokens).logits
            assert (logits - plain).abs().max() > 0.1
            assert make_model(rope_scaling=scaling)(tokens).logits.equal(logits)
            scaling["type"] = scaling["rope_type"]  # as transformers 4 writes it
            assert make_model(rope_scaling=scaling)(tokens).logits.equal(logits)


def test_every_spelling_of_the_rotary_base_is_read_and_both_are_kept():
    spellings = (
        {"rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
    )
    for spelling in spellings:
        config = MoHLlamaConfig(**spelling)
        assert config.rope_theta == 500.0
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ],
)
def test_rotary_settings_given_to_from_pretrained_are_used_and_saved(changes, tmp_path):
    ids = random_tokens(2, 9)
    make_model().save_pretrained(tmp_path / "first")
    expected = make_model(**{"rope_theta": 100.0, **changes})(ids).logits
    model = MoHLlamaForCausalLM.from_pretrained(tmp_path / "first", **changes)
    model.save_pretrained(tmp_path / "second")
    for changed in (model, MoHLlamaForCausalLM.from_pretrained(tmp_path / "second")):
        assert torch.equal(changed(ids).logits, expected)
    with pytest.raises(ValueError, match="'linear': needs factor"):
        model.config.rope_parameters = {"rope_type": "linear"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_shared_heads": [1]}, "must have 2 numbers"),
        ({"num_shared_heads": [1, 5]}, "layer 1 with 5 shared"),
        ({"num_active_routed_heads": [0, 1]}, "layer 0 with 1 shared and 0 active"),
        ({"num_active_routed_heads": [1, 3]}, "layer 1 with 2 shared and 3 active"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"routing": "other"}, "routing 'other'"),
        ({"head_selection": "other"}, "head_selection 'other'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3': needs low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 9.0}}, "'linear': needs factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_parameters": YARN | {"beta_fast": 16.0}}, "beta_fast 16.0 of rope_type 'yarn'"),
        ({"rope_parameters": YARN | {"attention_factor": 1.0}}, "attention_factor 1.0 of rope_type 'yarn'"),
        ({"attention_bias": True}, "no biases"),
        ({"query_dim": 6, "head_dim": 7, "num_key_value_heads": 2}, "query_dim 6: head_dim 7 must be 2 above it at"),
        ({"routed_keys": "own"}, "routed_keys 'own': must be one of all, selected"),
    ],
)
def test_a_configuration_that_the_model_cannot_compute_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        MoHLlamaConfig(**{**SHAPE, **changes})


class Elsewhere(torch.nn.Identity):
    """What vLLM has in place of a layer of another stage of the pipeline."""

    def forward(self, x, *_, **__):
        return x


@torch.no_grad()
def test_a_table_of_positions_is_added_on_the_first_stage_only():
    model, tokens = make_model(layer_positions=["learned"] * 2, learned_positions=12), random_tokens(2, 9)
    states = model.model(tokens, use_cache=False, output_hidden_states=True).hidden_states
    model.model.layers[0] = Elsewhere()
    second = model.model(inputs_embeds=states[1], use_cache=False).last_hidden_state
    torch.testing.assert_close(second, states[2], rtol=0, atol=0)
