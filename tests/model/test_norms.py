"""Norms of queries and keys, and norms after attention and MLP: the models of transformers that have them."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from moh_lm.build import build_model
from moh_lm.config import HeadsConfig, ModelConfig

SHAPE = dict(hidden_size=24, intermediate_size=40, vocab_size=37, rms_norm_eps=1e-4)


def logits_of_both(peer, **ours):
    """Logits [s, b, vocab] of the trainer's model and of ``peer`` with its weights, which have the same names."""
    config = ModelConfig(num_layers=2, rope_theta=100.0, **SHAPE, **ours, heads=HeadsConfig(head_selection="all"))
    model = build_model(config)
    model.initialize(seed=1)
    with torch.no_grad():
        for parameter in model.double().parameters():
            spread = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter)))
            parameter += 0.3 * spread  # so that every weight of a norm shows
        assert peer.double().load_state_dict(model.state_dict()) == ([], [])
        tokens = torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(0))
        return model(tokens), peer(tokens).logits.transpose(0, 1)


def assert_close(mine, theirs):
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)  # transformers computes norms in fp32


def test_norms_of_queries_and_keys_are_qwen3s():
    shape = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=6)
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config = transformers.Qwen3Config(**SHAPE, **shape, num_hidden_layers=2, rope_parameters=rope)
    assert_close(*logits_of_both(transformers.Qwen3ForCausalLM(config), **shape, qk_norm=True))


def test_norms_behind_attention_and_mlp_are_olmo2s():
    # Its norm of queries runs over all heads: with one head it is ours.
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config = transformers.Olmo2Config(**SHAPE, num_attention_heads=1, num_hidden_layers=2, rope_parameters=rope)
    norms = dict(qk_norm=True, post_norm=True)
    assert_close(*logits_of_both(transformers.Olmo2ForCausalLM(config), num_attention_heads=1, **norms))
