"""Computes the scores of a router, x W^T in fp32 with x and W in bf16, without a copy of x in fp32.

A product of two bf16 numbers is exact in fp32, and tensor cores add in fp32, so only the result must be fp32. Since W
has few rows, copies of x would cost many times more than the products. In the backward pass the fp32 gradient is split
into two bf16 numbers, high + low, and multiplied as both.

Shapes: n rows of W, d hidden size.
"""

import torch
import torch.nn.functional as F


def wide_linear(x, weight):
    """Multiply x [..., d] by weight [n, d]: [..., n] in fp32, or in fp64 if one of them is fp64."""
    if x.dtype == weight.dtype == torch.bfloat16:
        return WideLinear.apply(x, weight)
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return F.linear(x.to(wide), weight.to(wide))


class WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return product(x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = gradient.flatten(0, -2)  # [tokens, n]
        high = gradient.to(x.dtype)
        parts = torch.cat((high, (gradient - high).to(x.dtype)), dim=1)  # [tokens, 2 n]
        dx = torch.mm(parts, weight.repeat(2, 1)).view(x.shape)
        dweight = product(parts.t(), x.flatten(0, -2)).unflatten(0, (2, -1)).sum(0)  # [2 n, d] -> [n, d]
        return dx, dweight.to(weight.dtype)


def product(a, b):
    """Return the matrix product in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.mm(a.float(), b.float())
