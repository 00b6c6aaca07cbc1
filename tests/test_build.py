"""What moh_lm/build.py tells a layer of the whole model."""

from moh_lm.build import build_model
from moh_lm.config import HeadsConfig, ModelConfig


def test_the_balance_loss_is_a_mean_over_the_layers():
    heads = HeadsConfig(num_shared_heads=(8, 4, 8), num_active_routed_heads=(4, 2, 0), load_balance_coefficient=0.5)
    sizes = dict(num_layers=3, hidden_size=32, intermediate_size=32, head_dim=4, vocab_size=16)
    model = build_model(ModelConfig(**sizes, num_attention_heads=(16, 8, 8), heads=heads))
    assert [layer.self_attn.router.loss_terms for layer in model.model.layers[:2]] == [2, 2]
