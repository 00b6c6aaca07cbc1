"""Groups of ranks that work together.

The ranks form a grid [pipeline, data, context, tensor] whose last axis runs fastest, so that tensor-parallel
neighbours, which talk most, are neighbours in a node. Everything below takes a group as an argument; ``None`` stands
for a group of one rank.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from moh_lm.parallel.ulysses import ContextGroups


def group_size(group):
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group):
    return 0 if group is None else dist.get_rank(group)


def sum_over_ranks(tensor, *groups):
    """Sum ``tensor`` over the ranks of each of ``groups``, in place, and return it."""
    for group in groups:
        if group is not None:
            dist.all_reduce(tensor, group=group)
    return tensor


@dataclass(frozen=True)
class ParallelGroups:
    """The groups that this rank belongs to.

    tensor: ranks that hold the shards of the same layers and read the same samples. data: ranks that hold the same
    shards and read different samples, or different parts of them: [data, context]. context: the ranks that share
    sequences, or None. pipeline: ranks that hold consecutive layers of the same shards and pass on the same samples.
    """

    tensor: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    context: ContextGroups | None = None

    @classmethod
    def create(cls, tensor_parallel_size, pipeline_parallel_size, context_parallel_size=1):
        """Make the groups of this grid; every rank of the initialised world calls this together."""
        tp, pp, cp = tensor_parallel_size, pipeline_parallel_size, context_parallel_size
        grid = torch.arange(dist.get_world_size()).view(pp, -1, tp)  # [pipeline, data and context, tensor]
        context = None
        if cp > 1:
            blocks = grid.reshape(-1, cp, tp)
            context = ContextGroups(own_group(blocks.movedim(1, 2).reshape(-1, cp)), own_group(blocks.flatten(1)))
        return cls(
            tensor=own_group(grid.reshape(-1, tp)) if tp > 1 else None,
            data=own_group(grid.movedim(1, 2).reshape(-1, grid.shape[1])),
            pipeline=own_group(grid.movedim(0, 2).reshape(-1, pp)) if pp > 1 else None,
            context=context,
        )


def own_group(members):
    """Open a process group for each row of ranks and return the one with this rank in it."""
    return dist.new_subgroups_by_enumeration(members.tolist())[0]
