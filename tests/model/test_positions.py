"""A learned table, layers without positions and heads that turn in part: loops in float64, and models of transformers.

CoPE, and the gradients of all but the table, are in test_router.py, and angles in test_rotary.py.
"""

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from moh_lm.config import HeadsConfig, ModelConfig
from tests.models import make_model

SHAPE = dict(hidden_size=24, intermediate_size=40, vocab_size=37, num_attention_heads=4, num_key_value_heads=2)
TOKENS = torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(0))


def model_with(**positions):
    config = ModelConfig(num_layers=2, **SHAPE, **positions, heads=HeadsConfig(head_selection="all"))
    return make_model(config, scale=10, seed=1)


@pytest.mark.parametrize("documents", [None, [[4, 5], [9]]])
def test_a_table_adds_its_row_to_each_token_at_its_place(documents):
    """The model without a table, of the same weights and an embedding for each token and place, gives the gradients."""
    table, plain = model_with(position=("learned",), learned_positions=11), model_with(position=("none",))
    places = [[place for length in row for place in range(length)] for row in documents or [[9], [9]]]
    positions = documents and torch.tensor(places)
    weights = dict(table.named_parameters())
    rows = weights.pop("model.embed_positions.weight")
    assert not plain.load_state_dict(weights).missing_keys
    summed = torch.zeros(9, 2, 24, dtype=torch.double)
    for row in range(2):
        for token in range(9):
            embedding = plain.model.embed_tokens.weight[TOKENS[row, token]]
            summed[token, row] = (embedding + rows[places[row][token]]).detach()
    summed.requires_grad_()
    plain.model.embed_tokens.forward = lambda tokens: summed
    for model in (table, plain):
        model.batch.feed([positions])
        loss, _ = model(TOKENS, TOKENS.roll(-1, 1))
        loss.backward()
    expected = torch.zeros_like(rows)
    for row in range(2):
        for token in range(9):
            expected[places[row][token]] += summed.grad[token, row]
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(rows.grad, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(weights["lm_head.weight"].grad, plain.lm_head.weight.grad, rtol=0, atol=1e-9)


def assert_same_logits(model, peer):
    expected = peer(TOKENS).logits.transpose(0, 1)
    error = (model(TOKENS) - expected).abs().max()
    assert error <= 3e-6 * expected.abs().max()  # transformers computes norms in fp32


@torch.no_grad()
def test_layers_without_positions_are_smollm3s():
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    config = transformers.SmolLM3Config(
        **SHAPE, num_hidden_layers=2, no_rope_layers=[0, 1], rope_parameters=rope, rms_norm_eps=1e-5, pad_token_id=0,
        tie_word_embeddings=False,
    )  # fmt: skip
    model, peer = model_with(position=("none", "rotary")), transformers.SmolLM3ForCausalLM(config).double()
    peer.load_state_dict(model.state_dict())
    assert_same_logits(model, peer)


@torch.no_grad()
def test_heads_that_turn_in_part_are_phi3s():
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.67}
    config = transformers.Phi3Config(
        **SHAPE, num_hidden_layers=2, rope_parameters=rope, rms_norm_eps=1e-5, pad_token_id=0, tie_word_embeddings=False
    )
    model, peer = model_with(rotary_fraction=0.67), transformers.Phi3ForCausalLM(config).double()
    weights = model.state_dict()
    for layer in range(2):
        for name, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            prefix = f"model.layers.{layer}.{name.split('.')[0]}."
            joined = torch.cat([weights.pop(f"{prefix}{part}_proj.weight") for part in parts])
            weights[f"model.layers.{layer}.{name}_proj.weight"] = joined
    peer.load_state_dict(weights)
    assert_same_logits(model, peer)
