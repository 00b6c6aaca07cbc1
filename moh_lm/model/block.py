"""A layer that routes heads: it runs, recomputes if asked to, and attaches its router's loss (Eq. 8)."""

import contextlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moh_lm.model.balance import RouterRows, attach_loss
from moh_lm.model.selection import SelectionReplay


class RoutedBlock(nn.Module):
    """A layer of a model. Subclasses define ``router()`` and ``block(x, *arguments, inputs, replay)``, which maps x [s,
    b, d] to the output and a ``RouterOutput``.

    index: number of the layer in the model. batch: ``BatchContext``. recompute: keep only the input of the layer and
    compute the rest again in the backward pass. The selection of heads is kept, so that rounding cannot change it.
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
        """Run under a checkpoint whose second pass uses the selection of the first."""
        replay = self.router().no_replay(x)

        def run_and_remember(x):
            nonlocal replay
            x, routing = self.run(self, x, *arguments, replay)
            if routing.selection is not None:
                replay = SelectionReplay.of(routing.selection)
            return x, routing

        return checkpoint(run_and_remember, x, use_reentrant=False, preserve_rng_state=False)

    def use_compiled(self, block):
        """Use ``block``, a compiled version of this class's ``block``, from now on."""
        self.run = block

    @contextlib.contextmanager
    def uncompiled(self):
        """Use the uncompiled ``block`` within this context, so that hooks of modules are called."""
        compiled, self.run = self.run, type(self).block
        try:
            yield
        finally:
            self.run = compiled


def modules_of(model, kind=RoutedBlock):
    """Return the modules of a ``kind`` in a model, or in its pipeline stage, in the order of layers."""
    return [module for module in model.modules() if isinstance(module, kind)]
