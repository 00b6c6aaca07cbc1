"""A layer whose attention routes heads. It runs, recomputes where that is asked for, and joins the loss of its router
to that of the task (Eq. 8)."""

import contextlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moh_lm.model.balance import RouterRows, attach_loss
from moh_lm.model.router import SelectionReplay


class RoutedBlock(nn.Module):
    """Subclasses have ``router()`` and ``block``(x, *arguments, inputs, replay) on x [s, b, d], which gives the output
    and a ``RouterOutput``.

    index: of the layer in the model. batch: ``BatchContext``. ``recompute`` keeps only the input of the layer and
    computes the rest again in the backward pass, except for the selection of heads: it is kept, so that rounding can
    never select others the second time. ``rows``: what the router says of each sequence, since it was last asked.
    """

    def __init__(self, index, batch, recompute=False):
        super().__init__()
        self.index, self.batch, self.recompute = index, batch, recompute
        self.rows = RouterRows()
        self.run = type(self).block  # or what torch.compile made of it

    def forward(self, x, *arguments):
        arguments = *arguments, self.batch.router_inputs(self.index)
        if self.recompute and self.training and torch.is_grad_enabled():
            x, routing = self.recomputed(x, arguments)
        else:
            x, routing = self.run(self, x, *arguments, None)
        return x if routing.loss is None else attach_loss(x, routing.loss, routing.rows, self.rows)

    def recomputed(self, x, arguments):
        """``run`` under a checkpoint: its second pass uses the selection of the first."""
        replay = self.router().no_replay(x)

        def run_and_remember(x):
            nonlocal replay
            x, routing = self.run(self, x, *arguments, replay)
            if routing.selection is not None:
                replay = SelectionReplay(routing.selection.new_ones((), dtype=torch.bool), routing.selection)
            return x, routing

        return checkpoint(run_and_remember, x, use_reentrant=False, preserve_rng_state=False)

    def use_compiled(self, block):
        """Run ``block``, what torch.compile made of the ``block`` of this class, from now on."""
        self.run = block

    @contextlib.contextmanager
    def uncompiled(self):
        """Run as it is written for a while, so that hooks of its modules are called."""
        compiled, self.run = self.run, type(self).block
        try:
            yield
        finally:
            self.run = compiled


def modules_of(model, kind=RoutedBlock):
    """The modules of a ``kind`` in a model, or in its stage of a pipeline, in the order of layers."""
    return [module for module in model.modules() if isinstance(module, kind)]
