"""Decides once in every step whether its gradients are applied, before any weight changes.

Every step has a ``StepCheck`` of its own. DeepSpeed's optimizer hands it the gradient norm
(moh_lm.training.deepspeed.norms) and gets infinity back if the step is to be skipped. A step that was not examined
raises an error when asked for its result, so an earlier result is never mistaken for it.
"""

import math
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from moh_lm.model.balance import MicroBatchParts
from moh_lm.training.guard import DIVERGENCE, OUT_OF_RANGE


class NotExamined(RuntimeError):
    """DeepSpeed updated the weights without asking for the gradient norm, or asked for it more than once."""


class GradientStats(NamedTuple):
    """The findings of a step, equal on every rank except for ``differences`` and ``time``.

    mean: loss per token. grad_norm: norm before clipping. code: one of guard.REASONS. differences: sentences for
    weights that this rank found to differ. time: time.perf_counter() when the gradients were complete. flags: for each
    of the flags of ``StepCheck``, whether any rank had set it.
    """

    mean: float
    grad_norm: float
    code: int
    differences: list[str]
    time: float
    flags: list[bool]


class StepCheck:
    """The check of one step; all ranks decide together.

    sums: ``StepSums`` of the step. guard: ``Guard`` of the run. largest_weight: returns the largest magnitude, [], of
    this rank's master and frozen weights. replicas: ``Replicas`` to compare; None to skip this. flags: returns bools
    that the ranks exchange with the norm.
    """

    def __init__(self, sums, guard, largest_weight, replicas=None, flags=tuple):
        self.sums = sums
        self.guard = guard
        self.largest_weight = largest_weight
        self.replicas = replicas
        self.flags = flags
        self.gradient_not_finite = MicroBatchParts()  # bool [b] for each micro-batch
        self.stats = None

    def watch_gradient(self, output):
        """Record the sequences whose gradient is not finite at ``output`` [s, b, d] of the embedding, or anywhere
        above."""
        output.register_hook(lambda grad: self.gradient_not_finite.add(~grad.sum((0, 2)).isfinite()))

    def examine(self, norm, copies):
        """Return the gradient norm of the step, or infinity if the step is to be skipped: on the host, where DeepSpeed
        reads it without waiting for the device again.

        norm: [], the norm of this step. copies: gradients that are not part of the norm, or their norms; see
        moh_lm.training.deepspeed.norms.
        """
        if self.stats:
            raise NotExamined("DeepSpeed asked twice for a step's gradient norm: its second update was not checked")
        sums = self.sums.reduce().sum(0)
        norms = [torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64) for gradient in copies]
        of_rank = [sums[0], norm, torch.stack(norms).max() if norms else norm, self.largest_weight()]
        of_rank.append(sum(self.replicas.differ() if self.replicas else (), sums.new_zeros(())))
        flags = self.flags()
        of_rank += [sums.new_full((), flag) for flag in flags]
        of_rank = torch.stack([number.to(sums) for number in of_rank])
        largest = of_rank.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=torch.inf)  # so that a maximum is reliable
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        numbers = torch.cat((sums[:2], of_rank[1:2], largest)).tolist()  # the one wait for the device in a step
        fixed = len(numbers) - len(flags)
        total, tokens, grad_norm, loss, *largest, weight, differ = numbers[:fixed]
        if math.isfinite(largest[0]):  # ranks whose groups add in another order differ in the last bit
            grad_norm = largest[0]
        if math.isfinite(loss):  # the same holds for the loss
            total = loss
        now, tokens = time.perf_counter(), max(tokens, 1)  # documents with a single token have no label
        code = max(self.guard.classify(loss / tokens, value) for value in largest)
        code = code if self.guard.is_finite_and_bounded(weight) else max(code, OUT_OF_RANGE)
        code = max(code, DIVERGENCE) if differ else code
        differences = self.replicas.differences() if differ else []
        self.stats = GradientStats(total / tokens, grad_norm, code, differences, now, list(map(bool, numbers[fixed:])))
        return torch.tensor(torch.inf if self.guard.skips(code) else grad_norm, dtype=norm.dtype)

    def result(self):
        """Return the ``GradientStats`` of the step. Raises NotExamined."""
        if not self.stats:
            raise NotExamined("DeepSpeed never asked for the gradient norm of this step: its update was not checked")
        return self.stats

    def bad_sequences(self):
        """Return the places of sequences with a non-finite loss or gradient in this rank's part of the step."""
        flags = {"loss": self.sums.not_finite.take(), "gradient": self.gradient_not_finite.take()}
        return {name: [] if bad is None else bad.nonzero()[:, 0].tolist() for name, bad in flags.items()}
