"""Checks that copies of a weight on several ranks agree bit for bit, since memory and links sometimes flip a bit.

The bits of each weight are summed as integers, so the order does not matter and every single flip shows. Copies exist
of all weights on data-parallel ranks (not under ZeRO-3), of norms and routers on tensor-parallel ranks, of a tied
embedding on the first and last pipeline stage, and of router biases on all ranks of a stage. Rounding never makes them
differ; see moh_lm/training/copies.py. ZeRO rewrites the weights from their masters in every step, so a flip lasts one
step and spoils one gradient unless it is found before. By default weights are therefore compared in every step, which
takes about a thousandth of its time on a CPU. A bias has no master: if ranks differ in one, the run ends.
"""

import torch
import torch.distributed as dist

from moh_lm.parallel.groups import group_size
from moh_lm.training.deepspeed.shards import local_slice


class Replicas:
    """The weights of this rank that others also hold; all ranks call its methods together.

    tied: (name, parameter, group of stages) of weights with a copy in another stage. biases: (name, counts) of routers.
    """

    def __init__(self, named_parameters, tied, biases, parallel, groups):
        replicated = [(name, parameter) for name, parameter in named_parameters if parameter.tensor_partition is None]
        # under ZeRO-3 a rank keeps a slice of each weight, the same slice as all tensor-parallel ranks
        by_data = biases if parallel.zero_stage == 3 else [*named_parameters, *biases]
        shared = [(by_data, groups.data), ([*replicated, *biases], groups.tensor)]
        shared += [([(name, parameter)], group) for name, parameter, group in tied]
        self.shared = [(named, group) for named, group in shared if named and group_size(group) > 1]

    def differ(self):
        """Return for each group whether any copy differs, bool [], without waiting for the device."""
        found = []
        for named, group in self.shared:
            sums = bit_sums(named)
            extremes = torch.stack((sums, ~sums))  # the largest complement is that of the smallest sum
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
            found.append((extremes[0] != ~extremes[1]).any())
        return found

    def differences(self):
        """Return sentences for the weights that differ from what most ranks of a group hold."""
        return [sentence for named, group in self.shared for sentence in differences(named, group)]


def differences(named, group):
    """Return sentences for the parameters in ``named`` that differ from what most ranks of ``group`` hold."""
    mine = bit_sums(named)
    sums = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sums, mine, group=group)
    table = torch.stack(sums)  # [ranks, parameters]
    odd = table != table.mode(dim=0).values
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 2:  # there is no majority
        return [f"ranks {ranks[0]} and {ranks[1]} differ in {named[column][0]}" for _, column in odd.nonzero().tolist()]
    return [
        f"rank {ranks[row]} holds another {named[column][0]} than rank {ranks[int(odd[:, column].int().argmin())]}"
        for row, column in odd.nonzero().tolist()
    ]


def bit_sums(named):
    """Return the ``bit_sum`` of what this rank holds of each parameter in ``named``, int64 [parameters]."""
    held = [(local_slice(parameter), parameter.detach()) for _, parameter in named]
    return torch.stack([bit_sum(whole if part is None else part) for part, whole in held])


def bit_sum(tensor):
    """Sum the bits of ``tensor`` as the widest integers that its layout allows, modulo 2^64; int64 []."""
    flat = tensor.flatten()
    for dtype in (torch.int64, torch.int32, torch.int16):
        ratio = dtype.itemsize // flat.element_size()
        if ratio and flat.numel() % ratio == 0 and flat.storage_offset() % ratio == 0:
            return flat.view(dtype).sum(dtype=torch.int64)
    raise TypeError(f"elements of {flat.element_size()} bytes: weights have 2 or 4")
