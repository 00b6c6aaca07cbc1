"""The ranks on this machine: their processes, and whether these are alive."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from moh_lm.parallel.consensus import from_all_ranks


class Introduction(NamedTuple):
    """What a rank tells the others about itself. space: namespace of process ids, since two containers may share a host
    name; None without /proc. started: start time in ns."""

    host: str
    space: str | None
    process: int
    started: int


def introduce():
    """Return the ``Introduction`` of every rank. All ranks call it together."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = None
    return from_all_ranks(Introduction(socket.gethostname(), space, os.getpid(), time.time_ns()))


def local_ranks(ranks):
    """Return {rank: process id} of the other ranks on this machine, empty without /proc to look them up."""
    mine = ranks[dist.get_rank()]
    return {
        number: rank.process
        for number, rank in enumerate(ranks)
        if rank is not mine and mine.space and (rank.host, rank.space) == (mine.host, mine.space)
    }


def process_state(pid):
    """Return the letter in /proc/PID/stat: R running, S sleeping, T stopped, Z dead but not collected; X if gone."""
    return process_fields(pid)[0]


def was_aborted(pid):
    """Return whether SIGABRT ended the process; that cannot be known once its launcher has collected it."""
    state, *_, code = process_fields(pid)
    return state == "Z" and int(code) & 0x7F == signal.SIGABRT


def process_fields(pid):
    """Return the fields of /proc/PID/stat from its state to its exit code, or ["X", 0] if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ["X", 0]
