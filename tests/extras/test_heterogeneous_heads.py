"""Heads of several widths against their equations in tests/reference.py."""

import pytest

from moh_lm.config import HeadsConfig, ModelConfig
from tests.layers import assert_equals_equations, vivid_layer
from tests.model.test_mla import HEADS

WIDTHS = (8, 8, 6, 4, 4, 6, 2, 8)


@pytest.mark.parametrize("backend", ["dense", "cpu_sparse"])
@pytest.mark.parametrize("name", HEADS)
def test_output_and_every_gradient_are_those_of_the_equations(name, backend):
    config = ModelConfig(
        num_layers=1, hidden_size=24, intermediate_size=32, vocab_size=40, num_attention_heads=8, head_dims=WIDTHS,
        window=(4,) if backend == "dense" else (), heads=HeadsConfig(**HEADS[name]),
    )  # fmt: skip
    assert_equals_equations(vivid_layer(config, backend), config)
