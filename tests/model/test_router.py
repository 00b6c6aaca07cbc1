"""The router and the attention layer against Eq. 4-10 of tests/reference.py, with every gradient."""

import pytest
import torch

from moh_lm.config import HeadsConfig, ModelConfig
from tests.layers import assert_equals_equations, vivid_layer

D, HEADS, HEAD_DIM = 24, 8, 6

CASES = {
    "shared and routed": dict(shared=3, active=2),
    "released": dict(shared=3, active=2, routing="released"),
    "query norm": dict(shared=3, active=2, routing="query_norm"),
    "released, no shared head": dict(shared=0, active=3, routing="released"),
    "one shared head": dict(shared=1, active=4),
    "all routed heads": dict(shared=2, active=6),
    "one routed head": dict(shared=7, active=1),
    "query norm, one routed head": dict(shared=7, active=1, routing="query_norm"),
    "query norm, two routed heads": dict(shared=6, active=1, routing="query_norm"),
    "no routed head": dict(shared=8, active=0),
    "one stage": dict(shared=3, active=2, two_stage=False),
    "released, one stage": dict(shared=3, active=2, two_stage=False, routing="released"),
    "grouped queries": dict(shared=4, active=2, key_value_heads=4),
    "query norm, grouped queries": dict(shared=4, active=2, key_value_heads=2, routing="query_norm"),
    "all heads": dict(shared=3, active=2, selection="all"),
    "all heads, element gates, grouped queries": dict(
        shared=3, active=2, selection="all", element_gates=True, key_value_heads=2, window=4
    ),
    "static": dict(shared=3, active=2, selection="static"),
    "previous step's shares": dict(shared=3, active=2, scope="global_batch"),
    "micro-batch, released": dict(shared=3, active=2, scope="micro_batch", routing="released"),
    "12.5%": dict(shared=0, active=1),
    "12.5%, released": dict(shared=0, active=1, routing="released"),
    "25%, grouped queries": dict(shared=1, active=1, key_value_heads=2),
    "groups": dict(shared=2, active=2, key_value_heads=4, unit="key_value_group"),
    "groups, released": dict(shared=4, active=2, key_value_heads=4, unit="key_value_group", routing="released"),
    "groups, query norm": dict(shared=2, active=4, key_value_heads=4, unit="key_value_group", routing="query_norm"),
    "groups, no shared head": dict(shared=0, active=4, key_value_heads=2, unit="key_value_group"),
    "groups of one head": dict(shared=3, active=2, unit="key_value_group"),
    "in groups": dict(shared=2, active=2, key_value_heads=2, unit="head_in_group"),
    "in groups, scaled": dict(shared=2, active=4, key_value_heads=2, unit="head_in_group", routing="paper_scaled"),
    "in groups, released": dict(shared=4, active=2, key_value_heads=2, unit="head_in_group", routing="released"),
    "in groups, query norm": dict(shared=2, active=2, key_value_heads=2, unit="head_in_group", routing="query_norm"),
    "in groups, query norm, one of two": dict(
        shared=0, active=4, key_value_heads=4, unit="head_in_group", routing="query_norm"
    ),
    "in groups, no routed head": dict(shared=8, active=0, key_value_heads=2, unit="head_in_group", routing="sigmoid"),
    "in groups, one key": dict(shared=3, active=2, key_value_heads=1, unit="head_in_group"),
    "in groups, previous step's shares": dict(
        shared=0, active=2, key_value_heads=2, unit="head_in_group", scope="global_batch", routing="released"
    ),
    "in groups, bias": dict(
        shared=2, active=2, bias=(-2, 1, 0, 3, -1, 0), key_value_heads=2, unit="head_in_group", routing="sigmoid"
    ),
    "in groups, window": dict(shared=2, active=2, key_value_heads=2, unit="head_in_group", window=3),
    "in groups, CoPE": dict(
        shared=2, active=2, key_value_heads=2, unit="head_in_group", position="cope", cope_max_position=2
    ),
    "scaled": dict(shared=3, active=2, routing="paper_scaled"),
    "sigmoid": dict(shared=3, active=2, routing="sigmoid"),
    "sigmoid, groups": dict(shared=2, active=2, key_value_heads=4, unit="key_value_group", routing="sigmoid"),
    "gated": dict(shared=0, active=1, selection="gated"),
    "gated, narrow": dict(shared=0, active=1, selection="gated", gate_width=1),
    "narrow": dict(shared=3, active=2, gate_width=3),
    "narrow, in groups": dict(shared=2, active=4, key_value_heads=2, unit="head_in_group", gate_width=5),
    "softplus": dict(shared=3, active=2, routing="softplus"),
    "softplus, no shared head": dict(shared=0, active=3, routing="softplus", gate_width=4),
    "relu": dict(shared=3, active=2, routing="relu"),
    "relu, no shared head": dict(shared=0, active=3, routing="relu", scope="global_batch"),
    "relu, groups": dict(shared=2, active=2, key_value_heads=4, unit="key_value_group", routing="relu"),
    "bias": dict(shared=2, active=3, bias=(-1, 4, 0, 2, -3, 1)),
    "bias, released": dict(shared=3, active=2, bias=(1, 0, -4, 3, 0), routing="released"),
    "bias, scaled": dict(shared=0, active=3, bias=(1, 0, -4, 3, 0, 2, -1, 5), routing="paper_scaled"),
    "bias, query norm": dict(shared=3, active=2, bias=(1, 0, -4, 3, 0), routing="query_norm"),
    "top-p": dict(shared=3, active=4, top_p=0.7),
    "top-p, released": dict(shared=2, active=5, top_p=0.7, routing="released"),
    "top-p, no shared head": dict(shared=0, active=8, top_p=0.9),
    "top-p, previous step's shares": dict(shared=3, active=3, top_p=0.5, scope="global_batch"),
    "window": dict(shared=3, active=2, window=3),
    "window, released, groups": dict(
        shared=2, active=4, key_value_heads=4, unit="key_value_group", routing="released", window=2
    ),
    "window, top-p": dict(shared=3, active=4, top_p=0.7, window=4),
    "top-p, groups": dict(shared=2, active=6, top_p=0.7, key_value_heads=4, unit="key_value_group"),
    "no positions, query norm, grouped queries": dict(
        shared=4, active=2, key_value_heads=2, routing="query_norm", position="none"
    ),
    "a third of the features": dict(shared=3, active=2, rotary_fraction=0.4),
    "CoPE, all positions": dict(shared=3, active=2, position="cope", cope_max_position=9, routing="released"),
    "CoPE, one position": dict(shared=0, active=3, position="cope", cope_max_position=1, routing="sigmoid"),
    "CoPE, query norm, one key": dict(shared=3, active=2, position="cope", key_value_heads=1, routing="query_norm"),
    "CoPE, top-p, window": dict(shared=3, active=4, position="cope", top_p=0.7, window=3),
    "CoPE, groups, window": dict(
        shared=2, active=2, position="cope", cope_max_position=1, key_value_heads=4, unit="key_value_group", window=5
    ),
    "CoPE, all heads": dict(shared=3, active=2, position="cope", cope_max_position=3, selection="all"),
}


def make_config(
    shared, active, routing=None, two_stage=True, key_value_heads=HEADS, selection="mixture", scope="sequence",
    unit="head", top_p=None, window=0, bias=None, keys="all", position="rotary", gate_width=0,
    counts="text", **positions,
):  # fmt: skip
    heads = HeadsConfig(
        head_selection=selection,
        num_shared_heads=(shared,),
        num_active_routed_heads=(active,),
        routing=routing or ("sigmoid" if selection == "gated" else "paper"),
        two_stage=two_stage,
        load_balance_coefficient=0.37,
        load_balance_scope=scope,
        gate_width=gate_width,
        routing_unit=unit,
        routing_top_p=top_p,
        routed_keys=keys,
        routed_positions=counts,
        load_balance_bias_rate=0.05 if bias else 0.0,
        routing_entropy_coefficient=0.53,
        router_z_loss=0.29,
    )
    return ModelConfig(
        num_layers=1,
        hidden_size=D,
        num_attention_heads=HEADS,
        num_key_value_heads=key_value_heads,
        head_dim=HEAD_DIM,
        window=(window,),
        position=(position,),
        **positions,
        heads=heads,
    )


OWN_KEYS = (
    "shared and routed", "query norm", "12.5%", "25%, grouped queries", "groups", "gated", "top-p", "window",
    "window, released, groups",
)  # fmt: skip
OF_OWN = {f"{name}, own keys": CASES[name] | {"keys": "selected"} for name in OWN_KEYS}
OF_OWN |= {
    f"{name}, own positions": CASES[name] | {"keys": "selected", "counts": "head"}
    for name in ("shared and routed", "groups, query norm", "window, released, groups")
}


@pytest.mark.parametrize("case", [*CASES.values(), *OF_OWN.values()], ids=[*CASES, *OF_OWN])
def test_attention_computes_the_equations_with_every_gradient(case):
    config = make_config(**case)
    layer = vivid_layer(config)
    if case.get("bias"):
        layer.router.bias_steps.copy_(torch.tensor(case["bias"]))
    assert_equals_equations(layer, config)
