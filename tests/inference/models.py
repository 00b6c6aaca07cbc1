"""Models of every kind that writes text, and texts: what the tests of generation share."""

import torch

from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.inference.generate import read_prompt
from moh_lm.inference.kv_cache import Cache
from tests import models

SIZES = dict(num_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=8, head_dim=4, vocab_size=37)
MODELS = {
    "paper": (dict(routing="paper", num_shared_heads=(2,), num_active_routed_heads=(3,)), {}),
    "released, budgets per layer": (
        dict(num_shared_heads=(8, 0), num_active_routed_heads=(0, 5), routing="released"), dict(rope_theta=100.0),
    ),
    "query norm, grouped": (dict(routing="query_norm", num_shared_heads=(3,)), dict(num_key_value_heads=2)),
    "groups": (
        dict(num_shared_heads=(2, 0), num_active_routed_heads=(2,), routing_unit="key_value_group"),
        dict(num_key_value_heads=4),
    ),
    "in groups": (
        dict(num_shared_heads=(2, 0), num_active_routed_heads=(2, 4), routing="released", routing_unit="head_in_group"),
        dict(num_key_value_heads=2, window=(5, 0)),
    ),
    "in groups, query norm": (
        dict(num_shared_heads=(0,), num_active_routed_heads=(4,), routing="query_norm", routing_unit="head_in_group"),
        dict(num_key_value_heads=4),
    ),
    "query norm, groups": (
        dict(routing="query_norm", num_shared_heads=(4,), num_active_routed_heads=(2,), routing_unit="key_value_group"),
        dict(num_key_value_heads=4),
    ),
    "top-p": (
        dict(routing="paper", num_shared_heads=(1, 0), num_active_routed_heads=(6,), routing_top_p=0.8),
        dict(num_key_value_heads=4),
    ),
    "windows": (dict(num_shared_heads=(2,), num_active_routed_heads=(3,)), dict(window=(5, 0))),
    "windows, groups": (
        dict(num_shared_heads=(2, 0), num_active_routed_heads=(2,), routing_unit="key_value_group"),
        dict(num_key_value_heads=4, window=(3, 4)),
    ),
    "own keys": (dict(num_shared_heads=(2, 0), num_active_routed_heads=(3,), routed_keys="selected"), {}),
    "own keys, grouped, a window, released": (
        dict(num_shared_heads=(2,), num_active_routed_heads=(3,), routed_keys="selected", routing="released"),
        dict(num_key_value_heads=2, window=(0, 4)),
    ),
    "own keys, query norm, groups": (
        dict(num_shared_heads=(0,), num_active_routed_heads=(2,), routed_keys="selected", routing="query_norm",
             routing_unit="key_value_group"), dict(num_key_value_heads=4),
    ),
    "own keys, own positions, groups, a window": (
        dict(num_shared_heads=(2, 0), num_active_routed_heads=(2,), routed_keys="selected", routed_positions="head",
             routing_unit="key_value_group"), dict(num_key_value_heads=4, window=(0, 4), rotary_fraction=0.5),
    ),
    "12.5%": (dict(num_shared_heads=(0,), num_active_routed_heads=(1,)), dict(num_key_value_heads=2)),
    "all, tied, more norms": (dict(head_selection="all"), dict(tie_embeddings=True, qk_norm=True, post_norm=True)),
    "all, gates of features": (
        dict(head_selection="all"), dict(element_gates=True, num_key_value_heads=2, window=(4, 0)),
    ),
    "static": (dict(head_selection="static", num_shared_heads=(2,), num_active_routed_heads=(3,)), {}),
    "CoPE in a window, a part turned": (
        dict(num_shared_heads=(2,)),
        dict(position=("cope", "rotary"), window=(5, 0), num_key_value_heads=4, rotary_fraction=0.5),
    ),
    "CoPE": (dict(routing="query_norm"), dict(position=("none", "cope"), cope_max_position=3)),
    "other numbers of heads": (
        dict(num_shared_heads=(2, 0), num_active_routed_heads=(2, 3), routing="released"),
        dict(num_attention_heads=(4, 8), num_key_value_heads=(2, 4), head_dim=8),
    ),
    "heads of several widths": (
        dict(num_shared_heads=(2,), num_active_routed_heads=(3,)),
        dict(head_dims=(8, 8, 8, 4, 4, 2, 2, 8), head_dim=8, window=(5, 0)),
    ),
    "latent": (
        dict(num_shared_heads=(2, 0), num_active_routed_heads=(3,)),
        dict(attention="latent", kv_lora_rank=28, q_lora_rank=9, qk_rope_head_dim=4, window=(5, 0)),
    ),
    "latent, no latent of queries": (
        dict(routing="query_norm"), dict(attention="latent", kv_lora_rank=40, position=("none", "rotary")),
    ),
    "a table": (dict(routing="sigmoid"), dict(position=("learned",), learned_positions=13)),
}  # fmt: skip


TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2], [36, 0, 36, 0, 0, 0, 1, 1, 35]]
PROMPTS = [4, 1, 6]  # tokens of each that are read at once


def config_of(name, **sizes):
    heads, own = MODELS[name]
    return ModelConfig(**(SIZES | own | sizes), heads=HeadsConfig(**heads))


def make_model(name, **sizes):
    config = config_of(name, **sizes)
    backend = "groups" if config.chooses_in_groups else "dense"
    return models.draw_zeros(models.make_model(config, scale=10, seed=5, backends=backend)).eval()


def whole(model, tokens):
    """Logits [s, vocab] after every token of a text, without a cache."""
    with torch.no_grad():
        return model(torch.tensor([tokens]))[:, 0]


def read(model, backend="auto"):
    """Cache and logits after the first ``PROMPTS`` tokens of ``TEXTS``."""
    cache = Cache(model, len(TEXTS), 12, backend)
    prompts = [torch.tensor(text[:length]) for text, length in zip(TEXTS, PROMPTS, strict=True)]
    return cache, [read_prompt(model, cache, row, prompt) for row, prompt in enumerate(prompts)]
