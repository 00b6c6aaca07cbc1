"""A micro-batch as one CUDA graph (``--cuda-graph``): forward pass, loss and backward pass are a single launch.

    record    run the micro-batch for warm-up, capture it, and compare a replay with a run that is not captured
    replay    copy tokens, labels, positions and sample numbers into the tensors that the graph reads, and launch it

DeepSpeed sees an ordinary model. The whole graph is the forward pass of one autograd function of all weights, whose
backward pass returns the gradients that the graph has written. DeepSpeed's hooks therefore fire outside of the graph,
and its buckets, sums over micro-batches and reductions are those of an uncaptured run.

A graph repeats kernels and no Python. The shares and the coefficient that routers follow are tensors that change in
place (``BatchContext``). All other decisions of Python about a micro-batch form its kind, and a micro-batch of another
kind, such as the first after a dense warm-up, is recorded again. Tensors that a pass adds to lists, such as rows of
routers, are taken from them during the capture, and every replay adds copies of them.
"""

from typing import NamedTuple

import torch

from moh_lm.compared import TOLERANCE, Differs, distance, rounding
from moh_lm.kernels.capture import capture_on_gpu
from moh_lm.parallel.consensus import problems_of_all_ranks


class Outputs(NamedTuple):
    """Tensors that a graph writes.

    mean, losses: see ``linear_cross_entropy``. gradients: those of mean / micro_batches by the weights. parts: what was
    added to each of the ``recorders``, or None.
    """

    mean: torch.Tensor
    losses: torch.Tensor
    gradients: tuple
    parts: list


class CapturedMicroBatch:
    """Called with tokens and labels, [b, s], in place of ``CausalLM.losses`` in training.

    model: ``CausalLM``. recorders: returns the ``MicroBatchParts`` that a pass adds to. differences: (loss, gradient)
    of the newest graph from an uncaptured run, see ``distance``; None before the first. pool: see ``capture_on_gpu``.
    together: returns the problems of all ranks, which record together.
    """

    def __init__(self, model, recorders, device, pool=None, together=problems_of_all_ranks):
        self.model, self.recorders, self.device, self.pool = model, recorders, device, pool
        self.together = together
        self.weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.kind = self.inputs = self.graph = self.outputs = self.differences = None

    def close(self):
        """Destroy the graph: NCCL waits for every graph with its collectives before it closes a process group."""
        if self.graph:
            torch.get_device_module(self.device).synchronize()
            self.graph.reset()
        self.kind = self.inputs = self.graph = self.outputs = None

    def __call__(self, tokens, labels):
        given = tokens, labels, *self.model.batch.following()
        kind = self.model.batch.kind(), [None if tensor is None else tensor.shape for tensor in given]
        if kind != self.kind:
            self.record(given)
            self.kind = kind
        for kept, tensor in zip(self.inputs, given, strict=True):
            if kept is not None:
                kept.copy_(tensor, non_blocking=True)
        return Replay.apply(self, *self.weights)

    def record(self, given):
        """Capture a micro-batch like the ``given`` tensors. Raises ``Differs`` on all ranks if a replay is wrong."""
        self.close()  # the memory of an older graph is free for the next one
        self.inputs = [None if tensor is None else tensor.to(self.device, copy=True) for tensor in given]
        tokens, others = self.inputs[0], self.inputs[0].roll(1, 1)  # a graph that kept its first tokens would differ
        kept = tokens.clone()
        tokens.copy_(others)
        exact = self.compute()  # before the graph holds the memory of its activations
        tokens.copy_(kept)
        self.graph, self.outputs = capture_on_gpu(self.compute, pool=self.pool)
        tokens.copy_(others)
        self.graph.replay()
        self.differences = loss, gradient = largest_distances(self.outputs, exact)
        problems = []
        if not (loss <= TOLERANCE and gradient <= rounding(self.weights[0].dtype)):
            what = "a captured micro-batch differs from one without a graph"
            found = f"losses differ by {loss:.1e}, gradients by {gradient:.1e}"
            problems.append(str(Differs.of("--cuda-graph", what, found)))
        if problems := self.together(problems):
            raise Differs("\n".join(problems))

    def compute(self):
        """Run the micro-batch of ``inputs`` and return its ``Outputs``; ``recorders`` are left empty."""
        tokens, labels, positions, samples = self.inputs
        batch = self.model.batch
        batch.feed([positions], [samples])
        with torch.enable_grad():
            mean, losses = self.model.losses(tokens, labels)
            scale = torch.ones_like(mean) / batch.micro_batches  # by which DeepSpeed multiplies the mean
            gradients = torch.autograd.grad(mean, self.weights, scale, allow_unused=True)
        return Outputs(mean.detach(), losses.detach(), gradients, [parts.newest() for parts in self.recorders()])


class Replay(torch.autograd.Function):
    """Returns the mean loss and the losses of the micro-batch whose data are in the inputs of a graph."""

    @staticmethod
    def forward(ctx, captured, *weights):
        captured.graph.replay()
        ctx.captured = captured
        mean, losses = captured.outputs.mean.clone(), captured.outputs.losses.clone()
        ctx.mark_non_differentiable(losses)
        return mean, losses

    @staticmethod
    def backward(ctx, gradient, _):
        outputs = ctx.captured.outputs
        for parts, part in zip(ctx.captured.recorders(), outputs.parts, strict=True):
            if part is not None:
                parts.add(part.clone())
        return None, *outputs.gradients  # autograd copies tensors that others hold


def largest_distances(found, exact):
    """Return the ``distance`` of the mean losses, and the largest of any gradient."""
    pairs = zip(found.gradients, exact.gradients, strict=True)
    return distance(found.mean, exact.mean), max(distance(*pair) for pair in pairs if pair[1] is not None)
