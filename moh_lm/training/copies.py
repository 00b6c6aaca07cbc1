"""Keeps copies of a weight equal on tensor-parallel ranks and on the two stages of a tied embedding.

Each of these ranks has its own fp32 master of the copy, and sums the gradient with its own data-parallel group. NCCL
promises no order of additions that is the same in two groups, so from three ranks on the sums may differ in the last
bit. Every copy is therefore updated with the gradient of the rank that counts it: the first tensor-parallel rank, or
the first stage. The gradients have been clipped by then, and the gradients of copies enter no norm.
"""

import torch
import torch.distributed as dist

from moh_lm.parallel.groups import group_rank, group_size


class SharedGradients:
    """A hook before an optimizer's step on flat ``masters``, which shares the gradients of copies in them.

    replicated: parameters that tensor-parallel ranks hold whole. tied: pairs (parameter, group of the stages that hold
    it). place: returns this rank's ``Place`` in a parameter, or None.
    """

    def __init__(self, masters, replicated, tied, place, groups, device):
        self.group, self.device = groups.tensor, device
        self.pieces = {}  # tensor-parallel ranks have the same ones, because their parameters have the same shapes
        for found in filter(None, map(place, replicated if groups.tensor else ())):
            self.pieces.setdefault(masters[found.number], []).append(found.piece)
        self.tied = {}
        for parameter, stages in tied:
            gradient = TiedGradient(place(parameter), stages, groups.data, device)
            self.tied[masters[gradient.number]] = gradient

    def __call__(self, optimizer, *_):
        for master in (master for group in optimizer.param_groups for master in group["params"]):
            if master in self.pieces:
                self.share(master.grad, self.pieces[master])
            if master in self.tied:
                self.tied[master].share(master.grad)

    def share(self, gradient, pieces):
        flat = torch.cat([gradient[piece] for piece in pieces]).to(self.device)
        dist.broadcast(flat, group=self.group, group_src=0)
        for piece, part in zip(pieces, flat.split([piece.stop - piece.start for piece in pieces]), strict=True):
            gradient[piece].copy_(part)


class TiedGradient:
    """The gradient of a weight that two pipeline stages hold.

    The data-parallel ranks of a stage own consecutive ranges of the flattened weight, other ranges in each stage. A
    rank of the first stage sends its range to its partner in the other, where the ranks exchange what they need.

    place: this rank's ``Place``, or None. stages: group of the partners. number: index of the flat master.
    """

    def __init__(self, place, stages, data, device):
        self.stages, self.data, self.device = stages, data, device
        self.piece = place.piece if place else slice(0)
        own = [place.start, place.start + place.length] if place else [0, 0]
        ranges = [own] * group_size(stages)
        dist.all_gather_object(ranges, own, group=stages)
        table = [None] * group_size(data)
        dist.all_gather_object(table, (ranges[0], own, place and place.number), group=data)
        first, here, numbers = zip(*table, strict=True)
        self.number = next(number for number in numbers if number is not None)
        self.length = ranges[0][1] - ranges[0][0]
        self.sent = [overlap(ranges[0], other) for other in here]
        self.received = [overlap(other, own) for other in first]

    def share(self, gradient):
        if group_rank(self.stages) == 0:
            flat = gradient[self.piece].to(self.device)
        else:
            flat = torch.empty(self.length, dtype=gradient.dtype, device=self.device)
        if self.length:
            dist.broadcast(flat, group=self.stages, group_src=0)
        if group_rank(self.stages) > 0:
            result = flat.new_empty(sum(self.received))
            dist.all_to_all_single(result, flat, self.received, self.sent, group=self.data)
            gradient[self.piece].copy_(result)


def overlap(one, other):
    """Return the number of elements that two ranges share."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
