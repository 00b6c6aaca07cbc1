"""Heads of several widths against their equations in tests/reference.py, on one rank and on two."""

import pytest
import torch
import torch.distributed as dist

from moh_lm.config import HeadsConfig, ModelConfig
from tests.distributed import run_ranks, whole
from tests.layers import assert_equals_equations, draw_tokens, vivid_layer
from tests.model.test_mla import HEADS
from tests.models import attend, make_layer

WIDTHS = (8, 8, 6, 4, 4, 6, 2, 8)


def config_of(name, **sizes):
    return ModelConfig(
        num_layers=1, hidden_size=24, intermediate_size=32, vocab_size=40, num_attention_heads=8, head_dims=WIDTHS,
        heads=HeadsConfig(**HEADS[name]), **sizes,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["dense", "cpu_sparse"])
@pytest.mark.parametrize("name", HEADS)
def test_output_and_every_gradient_are_those_of_the_equations(name, backend):
    config = config_of(name, window=(4,) if backend == "dense" else ())
    assert_equals_equations(vivid_layer(config, backend), config)


def compute(name):
    """Output and gradient of the input for the tokens of this rank, and {parameter: (its gradient, partition)}."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer, one = make_layer(config_of(name), group=dist.group.WORLD if size > 1 else None), vivid_layer(config_of(name))
    for mine, parameter in zip(layer.parameters(), one.parameters(), strict=True):
        partition = mine.tensor_partition
        mine.data.copy_(parameter if partition is None else partition.take(parameter.data))
    x, upstream = (part.chunk(size)[rank] for part in draw_tokens(24, 2))
    x = x.clone().requires_grad_()
    output, routing = attend(layer, x)
    ((output * upstream).sum() + routing.loss).backward()
    gradients = {key: (parameter.grad, parameter.tensor_partition) for key, parameter in layer.named_parameters()}
    return output.detach(), x.grad, gradients


@pytest.mark.parametrize("name", ["paper", "query norm"])
def test_tensor_parallel_ranks_compute_the_layer_of_one(name):
    (one,) = run_ranks(compute, 1, name)
    outputs, slopes, gradients = zip(*run_ranks(compute, 2, name), strict=True)
    torch.testing.assert_close((torch.cat(outputs), torch.cat(slopes)), one[:2], rtol=1e-9, atol=1e-12)
    for key, (expected, _) in one[2].items():
        found = whole([of_rank[key] for of_rank in gradients])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=key)
