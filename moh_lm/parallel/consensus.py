"""What the ranks of a run decide together.

If one rank sees a different directory, different data or a damaged file, all ranks must stop before a collective in
which the others would wait forever. Whatever may differ between ranks is therefore decided by rank 0, or by all ranks
together.
"""

import socket
from itertools import chain

import torch
import torch.distributed as dist

from moh_lm.config import ConfigError, raise_any


def from_rank_zero(value):
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def from_all_ranks(value):
    """[value of each rank]"""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def problems_of_all_ranks(problems):
    """Return the problems of all ranks, without duplicates."""
    return list(dict.fromkeys(chain(*from_all_ranks(problems))))


def set_on_any_rank(flags, device):
    """For each of ``flags`` whether it is set on any rank; every rank calls this together and gets the same answer."""
    flags = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]


def all_ranks_or_raise(work):
    """What ``work()`` returns on this rank. If it fails because of a file on any rank, every rank raises the same
    ConfigError."""
    result, problems = None, []
    try:
        result = work()
    except OSError as error:
        where = f"rank {dist.get_rank()} on {socket.gethostname()}"
        reason = (error.strerror or str(error)).lower()
        file = f"{error.filename}: " if error.filename else ""  # a write to an open file names none
        problems = [f"{file}{reason} ({where}); fix this, and run the same command again"]
    except ConfigError as error:
        problems = error.problems
    raise_any(problems_of_all_ranks(problems))
    return result


def on_rank_zero(work):
    """What ``work()`` returns on rank 0, the only rank that calls it. Raises ConfigError as ``all_ranks_or_raise``
    does."""
    return from_rank_zero(all_ranks_or_raise(work if dist.get_rank() == 0 else lambda: None))
