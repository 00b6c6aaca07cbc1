"""Forms of computing that stand in for torch's plain one, and how far their results may differ from it.

A ``Compared`` module computes by kernels, or by fewer and larger products. ``compare`` gives the inputs of a forward
pass to both forms; moh_lm/training/kernel_check.py calls it before a run's first step.
"""

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.linalg import vector_norm

TOLERANCE = 1e-4  # largest ``distance`` from the plain form, besides rounding
NEAR_TIES = 1e-3  # share of the tokens that may select other heads, besides four tokens
COMPARED_TOKENS = 4096  # the most that are compared, of a sequence or of all


class Differs(RuntimeError):
    """A form does not compute what the plain one does."""

    @classmethod
    def of(cls, flag, what, found):
        """Return the error about the form requested by ``flag``. what, found: in words."""
        remedy = "choose --attention-backend dense" if "backend" in flag else "leave the flag out"
        report = "report the device and the versions of torch and triton"
        return cls(f"{flag}: {what}: {found}; {remedy}, and {report}")


class Differences(NamedTuple):
    """outputs, gradients: the largest ``distance`` of a tensor. others: share of the tokens for which other heads are
    selected. excess: the largest of these over what is allowed."""

    outputs: float
    gradients: float
    others: float
    excess: float

    def checked(self, flag, who):
        """Return these differences, or raise ``Differs`` if they exceed rounding. who: what computed, in words."""
        if not self.excess <= 1:
            raise Differs.of(flag, f"{who} does not compute what torch does", self)
        return self

    def __str__(self):
        found = f"outputs differ by {self.outputs:.1e}, gradients by {self.gradients:.1e}"
        return f"{found}; {self.others:.2%} of the tokens select other heads" if self.others else found


class Compared(nn.Module):
    """A module whose results can be compared with torch's. flag: the one that requests this form, or None if the module
    computes by torch."""

    flag = None

    def compare(self, *inputs):
        """Return the ``Differences`` for the arguments of ``forward``, or None if torch computes these as well. Ranks
        that share the module call it together."""
        raise NotImplementedError


def differences(found, exact, others=0.0, tokens=1, plain=None, dtype=None):
    """Return the ``Differences`` of two (outputs, gradients), each a sequence of tensors.

    others: see there, of so many ``tokens``. plain: the same by torch, if ``exact`` is more precise; twice its distance
    is allowed. dtype: in which a form computes; by default that of each tensor.
    """
    far, excess = [], others / (NEAR_TIES + 4 / tokens)
    for some, exactly, plainly in zip(found, exact, plain or exact, strict=True):
        far.append(0.0)
        for one, other, reference in zip(some, exactly, plainly, strict=True):
            size, allowed = distance(one, other), max(rounding(dtype or one.dtype), 2 * distance(reference, other))
            far[-1], excess = max(far[-1], size), max(excess, size / allowed)
    return Differences(*far, others, excess)


def results(outputs, inputs):
    """Return (outputs, their gradients by those of the ``inputs`` that have any). Upstream gradients depend on the
    outputs' shapes only."""
    generator = torch.Generator(outputs[0].device).manual_seed(0)
    upstream = [torch.randn(o.shape, generator=generator, device=o.device).to(o.dtype) for o in outputs]
    return outputs, torch.autograd.grad(outputs, [tensor for tensor in inputs if tensor.requires_grad], upstream)


def leaves(*tensors):
    """Return tensors, or None, by which a gradient can be taken. They share their memory with the given ones."""
    return [None if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]


def rounding(dtype):
    """Return the ``distance`` that rounding to ``dtype`` explains."""
    return 2 * torch.finfo(dtype).eps + TOLERANCE


@torch.no_grad()
def distance(found, exact):
    """Return the norm of the difference over that of ``exact``, or a quarter of the largest difference over the largest
    number if that is more: what is wrong in many places counts, and what is far off in few. It is infinite if other
    values are finite in one than in the other."""
    if not torch.equal(found.isfinite(), exact.isfinite()):
        return math.inf
    found, exact = (tensor.nan_to_num(0.0, 0.0, 0.0).float() for tensor in (found, exact))
    difference = found - exact
    whole, largest = (vector_norm(difference, p) / vector_norm(exact, p).clamp_min(1e-30) for p in (2, math.inf))
    return torch.maximum(whole, largest / 4).item()
