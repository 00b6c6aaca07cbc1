"""Forms of computing that stand in for torch's plain one, and how far their results may differ from it.

A ``Compared`` module computes by kernels, or by fewer and larger products. ``compare`` gives the inputs of a forward
pass to both forms; moh_lm/training/kernel_check.py calls it before a run's first step.
"""

from typing import NamedTuple

import torch
from torch import nn

TOLERANCE = 1e-4  # largest difference from the plain form, besides rounding
NEAR_TIES = 1e-3  # share of the tokens that may select other heads


class Differs(RuntimeError):
    """The form requested by ``flag`` differs from the plain one. what, found: in words."""

    def __init__(self, flag, what, found):
        remedy = "choose --attention-backend dense" if "backend" in flag else "leave the flag out"
        report = "report the device and the versions of torch and triton"
        super().__init__(f"{flag}: {what}, by {found}; {remedy}, and {report}")


class Differences(NamedTuple):
    """outputs, gradients: the largest differences over the largest exact number of their tensor. others: share of the
    tokens for which other heads are selected. excess: the largest of these over what is allowed."""

    outputs: float
    gradients: float
    others: float
    excess: float

    def allowed(self, flag):
        """Return these differences, or raise ``Differs`` if they exceed rounding."""
        if not self.excess <= 1:
            raise Differs(flag, "its results differ from torch's on this device", self)
        return self

    def __str__(self):
        found = f"outputs differ by at most {self.outputs:.1e}, gradients by {self.gradients:.1e} of the largest"
        return f"{found}; {self.others:.2%} of the tokens select other heads" if self.others else found


class Compared(nn.Module):
    """A module whose results can be compared with torch's. flag: the one that requests this form, or None if the module
    computes by torch."""

    flag = None

    def compare(self, *inputs):
        """Return the ``Differences`` for the arguments of ``forward``. Ranks that share the module call it together."""
        raise NotImplementedError


def differences(found, exact, others=0.0, dtype=None):
    """Return the ``Differences`` of two (outputs, gradients), each a sequence of tensors. dtype: in which both compute,
    by default that of each tensor."""
    pairs = [list(zip(*both, strict=True)) for both in zip(found, exact, strict=True)]
    far = [[(distance(*pair), rounding(dtype or pair[0].dtype)) for pair in some] for some in pairs]
    outputs, gradients = (max((size for size, _ in some), default=0.0) for some in far)
    excess = max((size / allowed for some in far for size, allowed in some), default=0.0)
    return Differences(outputs, gradients, others, max(excess, others / NEAR_TIES))


def results(outputs, inputs):
    """Return (outputs, their gradients by the ``inputs``). Upstream gradients depend on the outputs' shapes only."""
    generator = torch.Generator(outputs[0].device).manual_seed(0)
    upstream = [torch.randn(o.shape, generator=generator, device=o.device).to(o.dtype) for o in outputs]
    return outputs, torch.autograd.grad(outputs, inputs, upstream)


def leaves(*tensors):
    """Return copies of tensors, or None, by which a gradient can be taken."""
    return [None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in tensors]


def rounding(dtype):
    """Return the difference that rounding to ``dtype`` explains, relative to the largest number."""
    return 2 * torch.finfo(dtype).eps + TOLERANCE


def distance(found, exact):
    """Return the largest difference over the largest exact number. Values not finite in both count as equal."""
    found, exact = (tensor.nan_to_num().float() for tensor in (found, exact))
    return ((found - exact).abs().max() / exact.abs().max().clamp_min(1e-30)).item()
