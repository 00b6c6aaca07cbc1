"""What the ranks of a run decide together.

One rank that sees another directory, other data or a damaged file must stop all of them, before a collective that the
others would wait in for ever. So whatever may differ between ranks is decided by rank 0 or by all of them together.
"""

import torch
import torch.distributed as dist


def from_rank_0(value):
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def problems_of_all_ranks(problems):
    """The problems of every rank, each once."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, problems)
    return list(dict.fromkeys(problem for part in parts for problem in part))


def set_on_any_rank(flags, device):
    """For each of ``flags`` whether it is set on any rank; every rank calls this together and gets the same answer."""
    flags = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]
