"""tools/hf/remote_code/modeling_moh.py and its parts against Eq. 4-10 in float64 loops."""

import random

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch

from tests.reference import softmax
from tests.tools.exported_code.configuration_moh import MoHLlamaConfig
from tests.tools.exported_code.moh_attention import local_heads
from tests.tools.exported_code.moh_gates import FORMS
from tests.tools.exported_code.moh_router import layer_router
from tests.tools.modeling_cases import GREEDY, SHAPE, make_model, random_tokens
from tests.tools.modeling_reference import (
    assert_equals_reference,
    assert_router_outputs,
    reference_balance,
    reference_gates,
)


def drawn_heads(seed):
    """A legal choice of heads, budgets and routing."""
    draw = random.Random(seed)
    heads = draw.choice([2, 4, 6])
    shared = [draw.randint(0, heads) for _ in range(3)]
    routing = draw.choice(["paper", "paper_scaled", "released", "sigmoid", "query_norm", "relu", "softplus"])
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
    "static heads of either kind": {
        "head_selection": "static", "num_shared_heads": [3, 0], "num_active_routed_heads": [0, 2],
    },
    "narrow gates": {
        "gate_width": 5, "routing": "softplus", "num_shared_heads": [4, 1], "num_active_routed_heads": [0, 2],
    },
    "gates of features": {
        "head_selection": "all", "element_gates": True, "num_key_value_heads": 2, "layer_windows": [4, 0],
    },
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
def test_windows_and_positions_equal_the_equations(changes, attention, tmp_path):
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


@pytest.mark.parametrize("routing", ["paper", "paper_scaled", "released", "sigmoid", "query_norm", "relu", "softplus"])
@pytest.mark.parametrize(
    "unit, top_p, budgets",
    [
        ("key_value_group", None, ([0, 4], [2, 2])),
        ("head", 0.7, ([0, 2], [6, 4])),
        ("key_value_group", 0.6, ([2, 0], [4, 6])),
    ],
)
@torch.no_grad()
def test_groups_and_varying_numbers_of_heads_equal_the_equations(unit, top_p, budgets, routing):
    changes = {"num_attention_heads": 6, "num_key_value_heads": 3, "routing_unit": unit, "routing": routing}
    changes |= {"num_shared_heads": budgets[0], "num_active_routed_heads": budgets[1]}
    model = make_model(**changes, routing_top_p=top_p if FORMS[routing].has_types else None)
    tokens = random_tokens(1, 9)
    assert_equals_reference(model, tokens[0])
    assert_router_outputs(model(tokens, output_router_gates=True), model, tokens)


@pytest.mark.parametrize("bias", [0.0, 0.05])
@pytest.mark.parametrize("routing", ["paper", "paper_scaled", "released", "sigmoid", "query_norm", "softplus"])
@torch.no_grad()
def test_heads_that_are_chosen_in_their_groups_equal_the_equations(routing, bias):
    changes = {"num_attention_heads": 6, "num_key_value_heads": 2, "routing_unit": "head_in_group", "routing": routing}
    budgets = {"num_shared_heads": [2, 0], "num_active_routed_heads": [2, 4], "load_balance_bias_rate": bias}
    model, tokens = make_model(**changes, **budgets), random_tokens(2, 9)
    assert_equals_reference(model, tokens[0])
    outputs = model(tokens, output_router_gates=True, output_router_logits=True, output_hidden_states=True)
    assert_router_outputs(outputs, model, tokens)
    expected = reference_balance(model, outputs.hidden_states, torch.ones_like(tokens))
    assert outputs.aux_loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("routing", ["paper", "paper_scaled", "released", "sigmoid", "query_norm", "relu", "softplus"])
@pytest.mark.parametrize("shared", [0, 1, 3, 4])
def test_layers_with_none_one_and_all_shared_equal_the_equations(routing, shared):
    active = min(2, 4 - shared)
    changes = {"num_shared_heads": [shared] * 2, "num_active_routed_heads": [active] * 2, "routing": routing}
    assert_equals_reference(make_model(**changes), random_tokens(1, 9)[0])


@pytest.mark.parametrize("routing", ["paper", "paper_scaled", "released", "sigmoid", "query_norm", "relu", "softplus"])
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


def test_a_router_computes_in_fp32_from_bf16_and_in_autocast():
    config = MoHLlamaConfig(**SHAPE)
    router = layer_router(config, 0).bfloat16()
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


def test_gates_have_no_gradient_where_heads_are_split(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    gates = torch.arange(4.0).requires_grad_()
    mine = local_heads(gates, 2)
    assert mine.tolist() == [2.0, 3.0] and local_heads(gates, 4) is gates
    with pytest.raises(NotImplementedError, match="train without it"):
        mine.sum().backward()


def test_peft_trains_the_weights_of_a_router_and_leaves_its_counts():
    peft = pytest.importorskip("peft")
    model = make_model(load_balance_bias_rate=0.05)
    before = model.model.layers[0].self_attn.router.bias_steps.clone()
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", modules_to_save=["router"])
    model = peft.get_peft_model(model, config)
    tokens = random_tokens(2, 6)
    model(input_ids=tokens, labels=tokens).loss.backward()
    router = model.base_model.model.model.layers[0].self_attn.router.modules_to_save["default"]
    assert {name for name, weight in router.named_parameters() if weight.grad is not None} == {
        "w_shared", "w_routed", "w_type"
    }  # fmt: skip
    assert router.bias_steps.any() and torch.equal(router.bias_steps, before)


def test_counts_of_a_router_are_a_parameter_for_vllm():
    config = make_model(load_balance_bias_rate=0.05).config
    config._attn_implementation = "vllm"
    router = layer_router(config, 0)
    assert {*dict(router.named_parameters())} == {"w_shared", "w_routed", "w_type", "bias_steps"}
    assert router.bias_steps.dtype == torch.int32 and not router.bias_steps.requires_grad


def query_norm_router(heads):
    """One shared head, two active ones of the others."""
    shape = {"num_hidden_layers": 1, "num_attention_heads": heads, "head_dim": 4, "routing": "query_norm"}
    return layer_router(MoHLlamaConfig(**shape, num_shared_heads=[1], num_active_routed_heads=[2]), 0)


def test_query_norm_gates_are_one_with_the_gradient_of_scores():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, 5, 4, generator=generator, requires_grad=True)
    upstream = torch.randn(5, generator=generator)
    gates, *_ = query_norm_router(5)(query)
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
    gates, *_ = query_norm_router(4)(torch.zeros(1, 1, 4, 6))
    assert gates.tolist() == [[[1.0, 1.0, 1.0, 0.0]]]
