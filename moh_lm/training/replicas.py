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

from moh_lm.training.deepspeed.shards import local_slice


def replica_differences(named_parameters, tied, biases, parallel, groups):
    """Return sentences for the weights that differ between ranks of this rank's groups.

    tied: (name, parameter, group of stages) of weights with a copy in another stage. biases: (name, counts) of routers.
    """
    named = list(named_parameters)
    replicated = [(name, parameter) for name, parameter in named if parameter.tensor_partition is None]
    if parallel.zero_stage == 3:  # this rank keeps a slice of each weight, the same slice as all tensor-parallel ranks
        slices = [(name, local_slice(parameter)) for name, parameter in replicated]
        return [*differences(biases, groups.data), *differences([*slices, *biases], groups.tensor)]
    found = [*differences([*named, *biases], groups.data), *differences([*replicated, *biases], groups.tensor)]
    for name, parameter, group in tied:
        found += differences([(name, parameter)], group)
    return found


def differences(named, group):
    """Return sentences for the parameters in ``named`` that differ from what most ranks of ``group`` hold."""
    if group is None or dist.get_world_size(group) == 1 or not named:
        return []
    mine = torch.stack([bit_sum(parameter.detach()) for _, parameter in named])  # [parameters] int64
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


def bit_sum(tensor):
    """Sum the bits of ``tensor`` as the widest integers that its layout allows, modulo 2^64; int64 []."""
    flat = tensor.flatten()
    for dtype in (torch.int64, torch.int32, torch.int16):
        ratio = dtype.itemsize // flat.element_size()
        if ratio and flat.numel() % ratio == 0 and flat.storage_offset() % ratio == 0:
            return flat.view(dtype).sum(dtype=torch.int64)
    raise TypeError(f"elements of {flat.element_size()} bytes: weights have 2 or 4")
