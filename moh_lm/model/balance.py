"""The load balance loss (Eq. 7), how it is added to the loss of the task (Eq. 8), and the row that a router keeps.

    L_b = sum over routed i of f_i P_i                                                            (Eq. 7)
    L = L_task + beta (mean of L_b over layers with routed heads and micro-batches)               (Eq. 8)

f_i is the share of the tokens that select expert i, P_i the mean of its probability. The mean over layers is not in the
paper's Eq. 8 but in the authors' released code. Each loss is already multiplied by beta over the number of losses
(``HeadRouter``). ``attach_loss`` does the addition: the backward pass of a router's loss starts where it was computed.

Shapes: s sequence, b batch, tp tensor-parallel ranks, E routed experts.
"""

import torch
import torch.distributed as dist

from moh_lm.parallel.groups import group_size

# The row of a sequence, float [4 + E]: L_b, the sum of a1 (0 without the second stage), the sums of gates and of their
# squares, and how often each routed expert was selected. It covers this rank's tokens; rows of tp ranks add up.
BALANCE, A1, GATES, SQUARES, COUNTS = 0, 1, 2, 3, slice(4, None)


def row_width(layer):
    """Return the length of a sequence's row. layer: ``RoutedLayer``."""
    return COUNTS.start + layer.num_routed


def balance_loss(probability, selected, group, previous_share=None, together=False):
    """Return L_b of Eq. 7 for every sequence, [b], and how often this rank's tokens selected each expert, [b, E].

    The losses of all tensor-parallel ranks add up to that of the whole sequence. probability, selected: [s/tp, b, E].
    previous_share: [E], the f to use for all sequences instead of their own. together: compute f and P over all
    sequences of the micro-batch, so that all have the same loss.
    """
    tokens = probability.shape[0] * group_size(group)  # of one sequence
    selections, probabilities = selected.sum(0), probability.sum(0)  # [b, E]
    share = previous_share
    if share is None:
        whole = selections
        if group is not None:
            whole = selections.clone()
            dist.all_reduce(whole, group=group)
        share = whole / tokens  # [b, E]
    if together:
        share, probabilities = (part.mean(0, keepdim=True).expand_as(part) for part in (share, probabilities))
    return (share * probabilities).sum(-1) / tokens, selections


def make_rows(losses, a1, gates, selections, copies):
    """Return the rows, [b, 4 + E]. losses: [b]. a1: [s/tp, b, 1], or None without a second stage. gates: [s/tp, b, n].
    selections: [b, E]. copies: number of ranks that process the same tokens."""
    losses, gates = losses.detach()[:, None], gates.detach()
    weights = torch.zeros_like(losses) if a1 is None else a1.detach().sum(0)  # [b, 1]
    counted = [weights, *(part.sum((0, 2))[:, None] for part in (gates, gates.square())), selections]
    if copies > 1:
        counted = [part / copies for part in counted]
    return torch.cat([losses, *counted], dim=1)


class MicroBatchParts:
    """Per-sequence tensors [b, ...] that the micro-batches of a step add, kept until they are taken.

    Backward passes add them, since they run once per micro-batch, in order, even if activations are recomputed.
    """

    def __init__(self):
        self.parts = []

    def add(self, part):
        self.parts.append(part)

    def take(self):
        """Return the parts since the last call as one tensor, or None if there is none."""
        parts, self.parts = self.parts, []
        return torch.cat(parts) if parts else None

    def newest(self):
        """Return the newest part, or None, and forget the others too."""
        parts, self.parts = self.parts, []
        return parts[-1] if parts else None


class RouterRows(MicroBatchParts):
    """The rows of one layer."""

    def take(self):
        """Return a row for each sequence of this rank since the last call, float64 [n, 4 + E]; None if there is none,
        as in a dense warm-up."""
        rows = super().take()
        return None if rows is None else rows.double()


def attach_loss(hidden, loss, rows, kept):
    """Return ``hidden`` unchanged; its backward pass also starts that of ``loss``, as if added to L_task (Eq. 8).

    The loss need not be passed through later layers and pipeline stages. That backward pass also adds ``rows`` to the
    ``RouterRows`` ``kept``.
    """
    return AttachLoss.apply(hidden, loss, rows, kept)


class AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, loss, rows, kept):
        ctx.save_for_backward(loss, rows)
        ctx.kept = kept
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        loss, rows = ctx.saved_tensors
        ctx.kept.add(rows)
        return gradient, torch.ones_like(loss), None, None
