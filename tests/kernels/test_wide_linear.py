"""The router's products in fp32 of inputs in bf16, against float64."""

import pytest
import torch

from moh_lm.kernels import wide_linear as module
from moh_lm.kernels.wide_linear import wide_linear


def on_a_gpu(monkeypatch):
    """As a GPU computes: ``torch.mm`` of a lower precision with a result in fp32, rounded once otherwise."""
    plain = torch.mm

    def mm(a, b, out_dtype=None):
        return plain(a.double(), b.double()).to(out_dtype or a.dtype)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(module, "product", lambda a, b: torch.mm(a, b, out_dtype=torch.float32))


def compute(dtype, function=wide_linear, seed=0):
    """[result, gradient of x, gradient of the weight] of inputs that ``dtype`` does not round."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((40, 3, 96), (18, 96)))
    upstream = torch.randn(40, 3, 18, generator=generator)
    if function is not wide_linear:
        x, weight, upstream = x.double(), weight.double(), upstream.double()
    x.requires_grad_(), weight.requires_grad_()
    result = function(x, weight)
    return [result, *torch.autograd.grad(result, (x, weight), upstream)]


@pytest.mark.parametrize("dtype, gpu", [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)])
def test_scores_are_as_in_fp32_and_gradients_are_rounded_once(dtype, gpu, monkeypatch):
    exact = compute(dtype, torch.nn.functional.linear)
    if gpu:
        on_a_gpu(monkeypatch)
    scores, dx, dweight = compute(dtype)
    assert scores.dtype == torch.float32 and dx.dtype == dweight.dtype == dtype
    largest = exact[0].abs().max()
    assert (scores - exact[0]).abs().max() < 1e-6 * largest
    for got, right in ((dx, exact[1]), (dweight, exact[2])):
        # Half a unit in the last place of the largest, and the 16 bits or more of the split gradient.
        assert (got.double() - right).abs().max() <= 0.5005 * torch.finfo(dtype).eps * right.abs().max()


def test_small_differences_of_large_gradients_are_kept():
    x, weight = torch.ones(2, 16).bfloat16().requires_grad_(), torch.ones(2, 16).bfloat16().requires_grad_()
    upstream = torch.tensor([[1 + 2**-12, -1.0], [-1.0, 1.0]])
    dx, dweight = torch.autograd.grad(wide_linear(x, weight), (x, weight), upstream)
    assert torch.equal(dx, torch.tensor([[2**-12], [0]]).bfloat16().expand(2, 16))
    assert torch.equal(dweight, torch.tensor([[2**-12], [0]]).bfloat16().expand(2, 16))


def test_a_wider_input_is_the_linear_map_of_torch():
    x, weight = torch.randn(4, 8, dtype=torch.float64), torch.randn(3, 8)
    exact = torch.nn.functional.linear(x, weight.double())
    assert torch.equal(wide_linear(x, weight), exact)
    assert torch.equal(wide_linear(x.bfloat16(), weight), torch.nn.functional.linear(x.bfloat16().float(), weight))


def test_nothing_but_input_and_weight_is_kept_for_backward():
    kept = []
    x, weight = torch.randn(4, 8).bfloat16().requires_grad_(), torch.randn(3, 8).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        wide_linear(x, weight)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), weight.data_ptr()}
