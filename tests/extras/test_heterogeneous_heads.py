"""Heads of several widths against their formulas in float64, token by token and head by head."""

import math

import pytest
import torch

from moh_lm.config import ModelConfig
from moh_lm.extras.heterogeneous_heads import UnevenAttention
from tests.distributed import run_ranks
from tests.model.test_mla import HEADS, HeadsConfig, assert_equals_formulas, gradients_of_ranks, turned, vivid

D, WIDTHS = 24, (8, 8, 6, 4, 4, 6, 2, 8)


def config_of(name, **sizes):
    return ModelConfig(
        num_layers=1, hidden_size=D, intermediate_size=32, vocab_size=40, num_attention_heads=8, head_dims=WIDTHS,
        heads=HeadsConfig(**HEADS[name]), **sizes,
    )  # fmt: skip


def heads_of(weights, x, gates, config):
    """g_i H_i W_O_i summed over the heads, of x [s, d]."""
    window, rows = config.window[0], []
    q, k, v, o = (weights[f"{name}_proj.weight"] for name in "qkvo")
    ends = [sum(WIDTHS[:head]) for head in range(len(WIDTHS) + 1)]

    def placed(vector, t):
        turns = int(len(vector) * config.rotary_fraction)
        return torch.cat((turned(vector[:turns], t, config.rope_theta), vector[turns:]))

    for t in range(len(x)):
        seen, row = range(max(0, t - window + 1) if window else 0, t + 1), 0
        for head, width in enumerate(WIDTHS):
            own = slice(ends[head], ends[head + 1])
            query, keys = placed(q[own] @ x[t], t), [placed(k[own] @ x[u], u) for u in seen]
            attention = (torch.stack([query @ key for key in keys]) / math.sqrt(width)).softmax(0)
            output = sum(a * (v[own] @ x[u]) for a, u in zip(attention, seen, strict=True))
            row = row + gates[t, head] * (o[:, own] @ output)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("backend", ["dense", "cpu_sparse"])
@pytest.mark.parametrize("name", HEADS)
def test_output_and_every_gradient_are_those_of_the_formulas(name, backend):
    config = config_of(name, window=(4,) if backend == "dense" else ())
    layer = vivid(UnevenAttention(config, 0, 0.02, 0.02, 1, None, backend)).train()
    assert_equals_formulas(layer, heads_of, config)


def layer_of(name, group):
    return UnevenAttention(config_of(name), 0, 0.02, 0.02, 1, group)


@pytest.mark.parametrize("name", ["paper", "query norm"])
def test_tensor_parallel_ranks_compute_the_layer_of_one(name):
    (one,) = run_ranks(gradients_of_ranks, 1, layer_of, name)
    for output, x_grad, gradients in run_ranks(gradients_of_ranks, 2, layer_of, name):
        torch.testing.assert_close((output, x_grad), one[:2], rtol=1e-9, atol=1e-12)
        for key, (partition, gradient) in gradients.items():
            whole = one[2][key][1]
            wanted = whole if partition is None else partition.take(whole)
            torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-11, msg=key)
