"""What moh_lm/build.py tells a layer of the whole model."""

import pytest

from moh_lm.build import build_model
from moh_lm.config import HeadsConfig, ModelConfig


def test_the_balance_loss_is_a_mean_over_layers_and_micro_batches():
    heads = HeadsConfig(num_shared_heads=(8, 4, 8), num_active_routed_heads=(4, 2, 0), load_balance_coefficient=0.5)
    sizes = dict(num_layers=3, hidden_size=32, intermediate_size=32, head_dim=4, vocab_size=16)
    model = build_model(ModelConfig(**sizes, num_attention_heads=(16, 8, 8), heads=heads), micro_batches=3)
    scales = [layer.self_attn.router.balance_scale for layer in model.model.layers[:2]]
    assert scales == pytest.approx([0.5 / (2 * 3)] * 2)
