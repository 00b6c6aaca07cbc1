"""The exported model beside tests/reference.py: its layers in the equations, and the decoder around them in float64."""

import copy

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch

from tests.reference import Layer, Rotary, Routing, attention_layer, balance_loss, rms_norm, route, sigmoid

ROPE = {
    "rope_type": "kind", "factor": "factor", "low_freq_factor": "low", "high_freq_factor": "high",
    "original_max_position_embeddings": "length", "partial_rotary_factor": "share",
}  # fmt: skip


def reference_layer(config, index):
    """What the configuration of an exported model says of a layer, for tests/reference.py."""
    heads, mixture = config.layer_heads[index], config.head_selection == "mixture"
    shared_by = config.num_attention_heads // config.num_key_value_heads
    routing = Routing(
        config.routing if mixture else config.head_selection, heads, config.num_shared_heads[index],
        config.num_active_routed_heads[index], shared_by if config.routing_unit == "key_value_group" else 1,
        config.two_stage, config.routing_top_p, config.load_balance_bias_rate,
        heads // shared_by if mixture and config.routing_unit == "head_in_group" else 1,
        config.gate_width,
    )  # fmt: skip
    scaling = {ROPE[key]: value for key, value in config.rope_parameters.items() if key in ROPE}
    rotary = Rotary(config.rope_theta, width=config.turning_dim or None, **scaling)
    widths = config.head_dims or (config.query_dim + config.turning_dim,) * heads
    return Layer(
        routing, tuple(widths), rotary if config.layer_positions[index] == "rotary" else None,
        config.layer_windows[index], mixture and config.routed_keys == "selected", config.rms_norm_eps,
        config.routed_positions == "head",
    )  # fmt: skip


def named(tensors, prefix=""):
    """{name behind the prefix: float64 array}, without ``router.`` and ``.weight``."""
    return {
        name.removeprefix(prefix).removeprefix("router.").removesuffix(".weight"): tensor.detach().double().numpy()
        for name, tensor in tensors
        if name.startswith(prefix)
    }


def reference_gates(config, index, weights, x, queries):
    """Gates of one token: x [d], queries [h, head_dim] before rotary."""
    return route(reference_layer(config, index).routing, x, weights, queries).gates


def reference_logits(model, tokens):
    config, state = model.config, list(model.state_dict().items())
    whole, eps = named(state), config.rms_norm_eps
    hidden = whole["model.embed_tokens"][tokens]
    if "learned" in config.layer_positions:
        hidden = hidden + whole["model.embed_positions"][: len(tokens)]
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}."
        own, attention = named(state, prefix), named(state, f"{prefix}self_attn.")
        inputs = np.array([rms_norm(x, own["input_layernorm"], eps) for x in hidden])
        hidden = hidden + attention_layer(reference_layer(config, index), attention, inputs).output
        for t, x in enumerate(hidden):
            x = rms_norm(x, own["post_attention_layernorm"], eps)
            gate, up = own["mlp.gate_proj"] @ x, own["mlp.up_proj"] @ x
            hidden[t] += own["mlp.down_proj"] @ (gate * sigmoid(gate) * up)
    head = whole["model.embed_tokens" if config.tie_word_embeddings else "lm_head"]
    return np.array([head @ rms_norm(x, whole["model.norm"], eps) for x in hidden])


def assert_equals_reference(model, tokens):
    """In float64, but for the norms of transformers: how products are rounded in fp32 depends on the processor."""
    with torch.no_grad():
        logits = copy.deepcopy(model).double()(tokens[None]).logits[0].numpy()
    expected = reference_logits(model, tokens.tolist())
    assert np.abs(logits - expected).max() <= 3e-6 * np.abs(expected).max()


def reference_routes(model, states):
    """The ``Route``s [b][s] of each layer: the hidden states tell what it reads."""
    config = model.config
    for index, layer in enumerate(model.model.layers):
        x = layer.input_layernorm(states[index])
        queries = layer.self_attn.q_proj(x).unflatten(-1, (config.num_attention_heads, -1)).double().numpy()
        weights, routing = named(layer.self_attn.state_dict().items()), reference_layer(config, index).routing
        pairs = zip(x.double().numpy(), queries, strict=True)
        yield [[route(routing, x, weights, asked) for x, asked in zip(*pair, strict=True)] for pair in pairs]


def reference_balance(model, states, mask):
    """Eq. 7 over the tokens of each sequence that ``mask`` leaves, the mean over sequences and layers with it."""
    found = []
    for index, sequences in enumerate(reference_routes(model, states)):
        routing = reference_layer(model.config, index).routing
        kept = [[one for one, seen in zip(*pair, strict=True) if seen] for pair in zip(sequences, mask, strict=True)]
        found += [balance_loss(routing, routes) for routes in kept if routing.shared < routing.heads]
    return np.mean(found)


def assert_router_outputs(outputs, model, tokens):
    """Gates and selections against the equations."""
    states = model(tokens, output_hidden_states=True).hidden_states
    config = model.config
    assert len(outputs.router_gates) == len(outputs.router_selections) == config.num_hidden_layers
    for index, sequences in enumerate(reference_routes(model, states)):
        gates, selected = outputs.router_gates[index], outputs.router_selections[index]
        assert gates.shape == selected.shape == (*tokens.shape, config.num_attention_heads)
        assert gates.dtype == torch.float32 and selected.dtype == torch.bool
        for b, t in np.ndindex(*tokens.shape):
            expected = sequences[b][t]
            np.testing.assert_allclose(gates[b, t], expected.gates, rtol=1e-5, atol=1e-30)
            assert selected[b, t].tolist() == expected.used.tolist()
