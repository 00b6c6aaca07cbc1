"""Weights that are not trained (``--train-only``): no gradient, no optimizer state, and still part of every checkpoint.

A data-parallel rank owns a range of each frozen weight, as with an optimizer, and keeps the fp32 master of that range,
because a bf16 weight could not reproduce what a checkpoint held. The masters are in CPU memory; in fp32 they are the
weight itself.
"""

import torch
import torch.distributed as dist

from moh_lm.parallel.groups import group_rank, group_size
from moh_lm.training.deepspeed.shards import local_slice, slice_range


class FrozenWeights:
    """The frozen ones among ``parameters``, collected after DeepSpeed has wrapped the model. group: data-parallel
    ranks."""

    def __init__(self, parameters, group):
        self.group = group
        self.masters = {}
        for parameter in parameters:
            if not parameter.requires_grad:
                start, weight = self.owned(parameter)
                if (padded := local_slice(parameter)) is not None:
                    padded[len(weight) :] = 0  # ZeRO-3 pads with what the memory held
                self.masters[parameter] = start, weight if weight.dtype == torch.float32 else weight.float().cpu()

    def owned(self, parameter):
        """Return (first element, elements) of the flattened ``parameter`` that this rank owns."""
        if (padded := local_slice(parameter)) is not None:
            start, length = slice_range(parameter, group_rank(self.group))
            return start, padded[:length]
        length = -(-parameter.numel() // group_size(self.group))
        start = group_rank(self.group) * length
        return start, parameter.detach().flatten()[start : start + length]

    def fragment(self, parameter):
        """Return (start, tensors) of a ``Fragment``, or None if this rank owns nothing of ``parameter``."""
        start, master = self.masters[parameter]
        return (start, {"master": master}) if master.numel() else None

    def weights(self):
        """Return {parameter: this rank's part in the dtype of computation}, without parameters of which it owns
        nothing."""
        whole = {p: p.detach() if local_slice(p) is None else self.owned(p)[1] for p in self.masters}
        return {parameter: weight for parameter, weight in whole.items() if weight.numel()}

    def repair(self):
        """``refresh`` the weights in bf16. Those in fp32 are their own masters, and a fault of one would spread."""
        self.refresh(torch.bfloat16)

    @torch.no_grad()
    def refresh(self, dtype=None):
        """Copy the masters into the weights, or those of a ``dtype``; all ranks call it together."""
        for parameter, (_, master) in self.masters.items():
            if dtype not in (None, parameter.dtype):
                continue
            _, mine = self.owned(parameter)
            mine.copy_(master)
            size = group_size(self.group)
            if size > 1 and local_slice(parameter) is None:
                length = -(-parameter.numel() // size)
                whole = mine.new_zeros(size * length)
                part = whole.new_zeros(length)
                part[: mine.numel()] = mine
                dist.all_gather_into_tensor(whole, part, group=self.group)
                parameter.copy_(whole[: parameter.numel()].view_as(parameter))
