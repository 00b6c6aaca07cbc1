"""Heads that are chosen inside their key/value groups, by ordinary attention: against the equations and dense heads."""

import pytest
import torch

from moh_lm.kernels.core_attention import CoreAttention
from moh_lm.kernels.heads_in_groups import HeadsInGroups
from moh_lm.kernels.masks import document_bounds
from moh_lm.model.batch_context import RouterInputs
from tests.layers import BATCH, LENGTH, assert_equals_equations, draw_tokens, vivid_layer
from tests.model.test_router import CASES, D, make_config

IN_GROUPS = {name: case for name, case in CASES.items() if case.get("unit") == "head_in_group"}


@pytest.mark.parametrize("case", IN_GROUPS.values(), ids=IN_GROUPS)
def test_ordinary_attention_computes_the_equations_with_every_gradient(case):
    config = make_config(**case)
    layer = vivid_layer(config, "groups")
    if case.get("bias"):
        layer.router.bias_steps.copy_(torch.tensor(case["bias"]))
    assert_equals_equations(layer, config)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("warming_up", [False, True])
def test_documents_windows_and_a_warm_up_are_those_of_dense_heads(window, warming_up):
    (x, upstream), results = draw_tokens(D, 2), []
    positions = torch.tensor([[0, 1, 2, 3, 0, 1], [3, 4, 0, 1, 2, 3]])
    assert positions.shape == (BATCH, LENGTH)
    for backend in ("dense", "groups"):
        layer = vivid_layer(make_config(**IN_GROUPS["in groups"] | {"window": window}), backend)
        leaf = x.clone().requires_grad_()
        output, _ = layer(leaf, RouterInputs(dense_warmup=warming_up), document_bounds(positions, torch.double))
        (output * upstream).sum().backward()
        results.append([output, leaf.grad, *(parameter.grad for parameter in layer.parameters())])
    for dense, grouped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, dense, rtol=0, atol=1e-11)


@pytest.mark.parametrize("per_group", [1, 2])
def test_chosen_heads_are_taken_out_and_put_back_in_their_order(per_group):
    chosen = {1: ([3, 5], [1, 7]), 2: ([0, 3, 5, 6], [1, 2, 4, 7])}[per_group]
    selected = torch.zeros(2, 1, 8)
    for token, heads in enumerate(chosen):
        selected[token, 0, heads] = 1
    core, query = HeadsInGroups(per_group), torch.arange(8.0).view(1, 1, 8, 1).expand(2, 1, 8, 3)
    asked, rank = core.chosen(query, selected, 2)
    assert asked[:, 0, :, 0].tolist() == [*map(list, chosen)]
    assert torch.equal(core.in_place(asked, rank, 3 * selected), 3 * query * selected.unsqueeze(-1))


def test_without_gates_the_chosen_heads_have_the_gate_1():
    parts = [torch.randn(5, 2, heads, 3, generator=torch.Generator().manual_seed(3)) for heads in (8, 2, 2)]
    selected = torch.tensor([0.0, 1, 1, 0, 1, 0, 0, 1]).expand(5, 2, 8)
    found = HeadsInGroups(2)(*parts, selected=selected)
    torch.testing.assert_close(found, CoreAttention()(*parts, selected=selected), rtol=0, atol=1e-6)
