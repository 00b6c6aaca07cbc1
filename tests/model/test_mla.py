"""Latent attention against its equations in tests/reference.py, and against transformers' own."""

import pytest
import torch

from moh_lm.build import build_model
from moh_lm.config import ConfigError, HeadsConfig, ModelConfig
from moh_lm.cost.summary import describe_model
from tests.layers import assert_equals_equations, vivid_layer
from tools.hf.convert.trainer_model import check_triton

D, E, T, R = 24, 6, 4, 10  # width; features of a head that stay, that turn; of the latent
HEADS = {
    "paper": dict(routing="paper", num_shared_heads=(2,), num_active_routed_heads=(3,)),
    "released, no shared": dict(num_shared_heads=(0,), num_active_routed_heads=(3,), routing="released"),
    "sigmoid": dict(num_shared_heads=(4,), num_active_routed_heads=(1,), routing="sigmoid"),
    "query norm": dict(num_shared_heads=(2,), num_active_routed_heads=(4,), routing="query_norm"),
    "top-p": dict(routing="paper", num_shared_heads=(2,), num_active_routed_heads=(5,), routing_top_p=0.4),
    "all": dict(head_selection="all"),
}


def config_of(name, **sizes):
    sizes = dict(num_attention_heads=8, head_dim=E, kv_lora_rank=R, qk_rope_head_dim=T, rms_norm_eps=1e-5) | sizes
    return ModelConfig(
        num_layers=1, hidden_size=D, intermediate_size=32, vocab_size=40, attention="latent",
        heads=HeadsConfig(**HEADS[name]), **sizes,
    )  # fmt: skip


def vivid(module, seed=3):
    """float64 weights that are large enough that every part shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.double().parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double() * spread + (parameter.ndim == 1))
    return module


@pytest.mark.parametrize("backend, rank", [("dense", None), ("dense", 7), ("cpu_sparse", 7)])
@pytest.mark.parametrize("name", HEADS)
def test_output_and_every_gradient_are_those_of_the_equations(name, rank, backend):
    config = config_of(name, q_lora_rank=rank, window=(4,) if rank else ())
    assert_equals_equations(vivid_layer(config, backend), config)


@pytest.mark.parametrize("rank", [None, 20])
def test_with_all_heads_it_is_transformers_deepseek_v2(rank):
    transformers = pytest.importorskip("transformers", minversion="4.54")
    theirs = transformers.DeepseekV2ForCausalLM(
        transformers.DeepseekV2Config(
            num_hidden_layers=2, hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=4,
            head_dim=T, vocab_size=80, kv_lora_rank=12, q_lora_rank=rank, qk_rope_head_dim=T, qk_nope_head_dim=8,
            v_head_dim=8, first_k_dense_replace=2, rms_norm_eps=1e-6, attn_implementation="eager",
        )
    )  # fmt: skip
    vivid(theirs).eval()
    ours = build_model(
        ModelConfig(
            num_layers=2, hidden_size=32, intermediate_size=40, num_attention_heads=4, head_dim=8, vocab_size=80,
            attention="latent", q_lora_rank=rank, kv_lora_rank=12, qk_rope_head_dim=T, rms_norm_eps=1e-6,
            heads=HeadsConfig(head_selection="all"),
        )
    ).double().eval()  # fmt: skip
    halves, weights = [*range(0, T, 2), *range(1, T, 2)], theirs.state_dict()  # theirs turn features 2i and 2i + 1
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            weight = weights.pop(name)
            if name.endswith(("q_proj.weight", "q_b_proj.weight")):
                rows = weight.view(4, 8 + T, -1)
                weight = torch.cat((rows[:, :8], rows[:, 8:][:, halves]), 1).flatten(0, 1)
            elif "kv_a_proj" in name:
                weight = torch.cat((weight[:12], weight[12:][halves]))
            parameter.copy_(weight)
        tokens = torch.randint(0, 80, (2, 17), generator=torch.Generator().manual_seed(4))
        assert not weights
        # Their angles are in fp32.
        torch.testing.assert_close(ours(tokens).transpose(0, 1), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_its_words_and_kernels_go_by_what_a_cache_keeps():
    config = config_of("paper")
    assert "8 heads x 6, latent keys of 10 + 4 features, " in next(describe_model(config))
    with pytest.raises(ConfigError) as refused:
        check_triton("cpu", config)
    assert any("no kernels for head dimension 14," in problem for problem in refused.value.problems)
