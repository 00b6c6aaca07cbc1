"""A router computed by Triton kernels: the results of ``HeadRouter`` and ``GatedHeads`` in fewer launches.

A layer does not know which router it has, and ranks with slices of a sequence add up their selections as they do in
balance.py. moh_lm/kernels/triton_router.py has the kernels.
"""

import torch
import torch.distributed as dist

from moh_lm.compared import Compared, differences, leaves, results
from moh_lm.kernels.triton_router import differentiate, finish, route
from moh_lm.model.router import HeadRouter, RouterOutput
from moh_lm.model.selection import SelectionReplay
from moh_lm.parallel.groups import group_size
from moh_lm.parallel.mappings import replicate


class FusedRouter(HeadRouter, Compared):
    """A ``HeadRouter``, or ``GatedHeads`` where no expert is routed. See moh_lm/checks/run.py for the forms."""

    flag = "--fused-router"

    def __init__(self, config, *arguments, **named):
        super().__init__(config, *arguments, **named)
        layer, one = self.layer, self.layer.of_group()
        numbers = (layer.groups, one.num_shared, one.num_routed, layer.heads_per_expert, int(self.form.two_stage))
        self.routed = config.heads.routing, numbers, one.num_active, self.bias_rate
        scale = self.balance_coefficient / self.loss_terms
        self.balanced = scale, self.form.balance_factor, self.scope == "micro_batch"

    def forward(self, x, inputs, replay=None):
        """See ``HeadRouter``."""
        if inputs.dense_warmup:
            return self.dense_warmup_output(x)
        says_selected = bool(self.layer.num_routed and (self.says_selected or not self.training))
        x = x[..., : self.width]
        x = x if x.stride(-1) == 1 else x.contiguous()
        given = x, *self.whole_weights(), self.bias_steps, *(replay or (None, None))
        routed, loss, rows = (*self.routed, says_selected), None, None
        if torch.is_grad_enabled():
            balanced = self.previous_share(inputs), routed, (inputs.micro_batches, *self.balanced), self.slices
            gates, selected, selection, loss, rows = FusedRouting.apply(*given, *balanced)
        else:
            gates, selected, selection, *_ = route(*given, *routed)
        if not self.layer.num_routed:
            return RouterOutput(self.local(gates), None, loss, rows)
        return RouterOutput(self.local(gates), self.local(selected) if says_selected else None, loss, rows, selection)

    def compare(self, x, inputs, replay=None):
        """See ``Compared``. Both forms compute the gates of the experts that the kernels select."""
        (x,) = leaves(x)
        others, both = 0.0, []
        fused, exact = self.forward(x, inputs, replay), HeadRouter.forward(self, x, inputs, replay)
        if fused.selection is not None:
            others = (exact.selection != fused.selection).any(-1).double().mean().item()
            exact = HeadRouter.forward(self, x, inputs, SelectionReplay.of(fused.selection))
        for form in fused, exact:
            outputs, (dx, *of_weights) = results([form.gates, form.loss], [x, *self.parameters()])
            both.append((outputs, [dx, torch.cat(of_weights)]))  # together, as one of them may be nothing but rounding
        return differences(*both, others, x[..., 0].numel())

    def whole_weights(self):
        """Return W_s, W_r and W_h, each None where there is none; their gradients are summed over the ranks."""
        weights = [self.w_shared, self.w_routed, self.w_type]
        if self.group is None:
            return weights
        joined = replicate(torch.cat([weight for weight in weights if weight is not None]), self.group)
        return split_like(joined, weights)


class FusedRouting(torch.autograd.Function):
    """Gates, heads in use, selection, loss and rows of ``RouterOutput``, of all heads and of this rank's tokens.

    routed: the last arguments of ``route``. balanced: those of ``finish``. slices: the ranks that have a slice of each
    sequence, or None.
    """

    @staticmethod
    def forward(ctx, x, w_shared, w_routed, w_type, bias, use, replayed, share, routed, balanced, slices):
        gates, selected, selection, scores, parts = route(x, w_shared, w_routed, w_type, bias, use, replayed, *routed)
        whole = None
        if slices is not None and share is None:
            whole = parts[..., selection.shape[-1] : -3].sum(0)
            dist.all_reduce(whole, group=slices)
        loss, rows, slope = finish(parts, share, whole, x.shape[0] * group_size(slices), *balanced)
        ctx.save_for_backward(x, w_shared, w_routed, w_type, selection, scores, slope)
        ctx.routed, ctx.shape = routed, gates.shape
        ctx.mark_non_differentiable(selected, selection, rows)
        ctx.set_materialize_grads(False)
        return gates, selected, selection, loss, rows

    @staticmethod
    def backward(ctx, dgates, _, __, dloss, ___):
        x, *weights, selection, scores, slope = ctx.saved_tensors
        dgates = selection.new_zeros(()).expand(ctx.shape) if dgates is None else dgates
        dloss = selection.new_zeros(()) if dloss is None else dloss
        dx, dweights = differentiate(x, *weights, selection, scores, slope, dgates, dloss, *ctx.routed[:2])
        return dx, *split_like(dweights, weights), *[None] * 7


def split_like(joined, weights):
    """Return the rows of ``joined`` that belong to each of the joined ``weights``; None for a missing one."""
    rows = [0 if weight is None else weight.shape[0] for weight in weights]
    return [part if count else None for part, count in zip(joined.split(rows), rows, strict=True)]
