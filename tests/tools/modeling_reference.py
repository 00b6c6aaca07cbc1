"""The exported model in float64, Eq. 4-10 one token and one head at a time."""

import copy
import math

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch


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
