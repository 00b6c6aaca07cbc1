"""A layer whose attention routes heads. It runs, recomputes where that is asked for, and joins the loss of its router
to that of the task (Eq. 8)."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moh_lm.model.balance import attach_loss
from moh_lm.model.router import SelectionReplay


class RoutedBlock(nn.Module):
    """Subclasses have ``router()``, a ``HeadRouter`` or None, and ``block``(x, *arguments, replay) on x [s, b, d]. It
    gives the output and a ``RouterOutput`` or None. replay: a ``SelectionReplay``, or None.

    ``recompute`` keeps the input of the layer only and computes the rest again in the backward pass, except for the
    selection of heads: it is kept, so that rounding can never select others the second time.
    """

    def __init__(self, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.run = type(self).block  # or what torch.compile made of it

    def forward(self, x, *arguments):
        if self.recompute and self.training and torch.is_grad_enabled():
            x, routed = self.recomputed(x, arguments)
        else:
            x, routed = self.run(self, x, *arguments, None)
        return x if routed is None else attach_loss(x, routed.loss, routed.rows, self.router().statistics)

    def recomputed(self, x, arguments):
        """``run`` under a checkpoint: its second pass uses the selection of the first."""
        router = self.router()
        replay = None if router is None else router.no_replay(x)

        def run_and_remember(x):
            nonlocal replay
            x, routed = self.run(self, x, *arguments, replay)
            if routed is not None:
                replay = SelectionReplay(routed.selection.new_ones((), dtype=torch.bool), routed.selection)
            return x, routed

        return checkpoint(run_and_remember, x, use_reentrant=False, preserve_rng_state=False)
