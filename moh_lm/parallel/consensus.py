"""Decisions that all ranks of a run take together.

If one rank sees a different directory, different data or a damaged file, all ranks must stop before a collective in
which the others would wait forever. Whatever may differ between ranks is therefore decided by rank 0, or by all ranks
together.
"""

import socket
import threading
from itertools import chain

import torch
import torch.distributed as dist

from moh_lm.config import ConfigError, raise_any

ROUND_S = 1  # seconds after which ranks that wait for the files of others tell each other how far they are


def from_rank_zero(value):
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def from_all_ranks(value):
    """Return the list of every rank's ``value``, in the order of ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def problems_of_all_ranks(problems):
    """Return the problems of all ranks, without duplicates."""
    return list(dict.fromkeys(chain(*from_all_ranks(problems))))


def set_on_any_rank(flags, device):
    """Return for each of ``flags`` whether any rank has set it. All ranks call this together."""
    flags = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]


class Work(threading.Thread):
    """Calls ``work(advance)`` beside this thread; afterwards it has its ``result``, or the ``error`` that it raised.

    blocks: how often ``advance`` was called.
    """

    def __init__(self, work):
        super().__init__(daemon=True)  # a dying run does not wait for it
        self.device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # each thread has its own
        self.work, self.result, self.error, self.blocks = work, None, None, 0
        self.start()

    def advance(self):
        self.blocks += 1

    def run(self):
        if self.device is not None:
            torch.cuda.set_device(self.device)
        try:
            self.result = self.work(self.advance)
        except BaseException as error:  # noqa: BLE001 - raised again by ``together``
            self.error = error


def wait_for_all(thread, progress):
    """Wait until the ``thread`` of every rank has ended. Calls ``progress`` as long as the ``blocks`` of any rank grow,
    so that ranks with less to do are not taken for stuck."""
    before, ranks = None, [(True, 0)]
    while any(alive for alive, _ in ranks):
        thread.join(ROUND_S)
        ranks = from_all_ranks((thread.is_alive(), thread.blocks))
        if ranks != before:
            progress()
        before = ranks


def together(work, progress):
    """Return this rank's ``work(advance)`` when every rank has done its own; see ``wait_for_all``."""
    thread = Work(work)
    wait_for_all(thread, progress)
    if thread.error:
        raise thread.error
    return thread.result


def all_ranks_or_raise(work):
    """Return what ``work()`` returns on this rank. If it fails because of a file on any rank, every rank raises the
    same ConfigError."""
    result, problems = None, []
    try:
        result = work()
    except OSError as error:
        where = f"rank {dist.get_rank()} on {socket.gethostname()}"
        reason = (error.strerror or str(error)).lower()
        file = f"{error.filename}: " if error.filename else ""  # errors of writes to an open file name no file
        problems = [f"{file}{reason} ({where}); fix this, and run the same command again"]
    except ConfigError as error:
        problems = error.problems
    raise_any(problems_of_all_ranks(problems))
    return result


def on_rank_zero(work):
    """Return the result of ``work()``, which only rank 0 calls. Raises ConfigError as ``all_ranks_or_raise`` does."""
    return from_rank_zero(all_ranks_or_raise(work if dist.get_rank() == 0 else lambda: None))
