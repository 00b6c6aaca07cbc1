"""Small models of tools/hf/remote_code/modeling_moh.py: their shapes, scalings and kinds of heads."""

import pytest

pytest.importorskip("transformers")

import torch

from tests.tools.exported_code.configuration_moh import MoHLlamaConfig
from tests.tools.exported_code.modeling_moh import MoHLlamaForCausalLM

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
    model = MoHLlamaForCausalLM._from_config(MoHLlamaConfig(**{**SHAPE, **changes}), attn_implementation=kernels).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, counts in model.named_buffers():
            if name.endswith("bias_steps"):
                counts.random_(-4, 5, generator=generator)
        for parameter in model.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2
            parameter.normal_(float(parameter.ndim == 1), 1.5 * spread, generator=generator)
    return model


def random_tokens(batch, length, seed=0):
    return torch.randint(1, SHAPE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


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


OWN_KEYS = [
    {"routed_keys": "selected"},
    {"routed_keys": "selected", "num_key_value_heads": 2, "routing": "relu"},
    GROUPS | {"routed_keys": "selected", "routing": "query_norm", "head_dim": 16, "query_dim": 6},
    GROUPS | {"routed_keys": "selected", "routed_positions": "head"},
]
CASES = [
    {"num_key_value_heads": 2, "num_shared_heads": [0, 4], "num_active_routed_heads": [2, 0]},
    {"routing": "query_norm"},
    {"head_selection": "static", "tie_word_embeddings": True},
    GROUPS | {"routing_top_p": 0.7},
    GROUPS | {"routing_unit": "head_in_group", "num_active_routed_heads": [2, 2]},
    *OWN_KEYS,
]
