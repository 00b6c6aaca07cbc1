"""Distributed tests as ordinary functions: ``run_ranks(function, world_size, *arguments)``.

Every rank is a process with one thread and a gloo group; the function gets the arguments and may return a value. The
first exception of any rank is raised in the test, with its traceback.
"""

import contextlib
import gc
import os
import socket
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from tests.ready_python import IMPORTS

TIMEOUT = timedelta(seconds=900)  # only a test that hangs takes so long, also on a busy machine

# The ranks are forked from a process that has imported what takes seconds to import.
CONTEXT = multiprocessing.get_context("forkserver")
OF_TESTS = ("pytest", "tensorboard.backend.event_processing.event_accumulator")
CONTEXT.set_forkserver_preload(["moh_lm.run.program", "moh_lm.run.text", *IMPORTS, *OF_TESTS])


def run_ranks(function, world_size, *arguments):
    """What ``function(*arguments)`` returns on each of ``world_size`` gloo ranks, as a list."""
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        ranks = [
            CONTEXT.Process(target=run_rank, args=(rank, world_size, port, folder, function, arguments))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        wait_for(ranks, lambda: any(Path(folder).glob("*.error")))
        for process in ranks:
            process.kill()
            process.join()
        for rank in range(world_size):
            failure = Path(folder, f"{rank}.error")
            if failure.exists():
                raise AssertionError(f"rank {rank}:\n{failure.read_text()}")
        left = [process.exitcode for process in ranks]
        if any(left):
            raise AssertionError(f"the ranks left with exit codes {left}")
        return [torch.load(Path(folder, f"{rank}.result"), weights_only=False) for rank in range(world_size)]


def wait_for(ranks, failed):
    """Return when all ``ranks`` have left, or a minute after one has ``failed``: others may wait for it in vain."""
    running, until = ranks, monotonic() + TIMEOUT.total_seconds()
    while running and monotonic() < until:
        wait([process.sentinel for process in running], until - monotonic())
        running = [process for process in ranks if process.exitcode is None]
        until = min(until, monotonic() + 60) if failed() else until


def run_rank(rank, world_size, port, folder, function, arguments):
    gc.freeze()  # looking through all that was imported would copy the memory that the ranks share, in half a second
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu",
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=TIMEOUT)
        dist.barrier()  # a function may end the group, and with it the store that another rank still needs to join
        torch.save(function(*arguments), Path(folder, f"{rank}.result"))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort the interpreter's own shutdown


def whole(shards):
    """One tensor from every rank's (shard, ``Partition`` or None); copies must agree."""
    tensor, partition = shards[0]
    if partition is None:
        for copy, _ in shards[1:]:
            torch.testing.assert_close(copy, tensor, rtol=0, atol=1e-12)
        return tensor
    shape = list(tensor.shape)
    shape[partition.dim] = partition.size
    joined = torch.full(shape, torch.nan, dtype=tensor.dtype)
    for shard, partition in shards:
        here = torch.cat([torch.arange(start, stop) for start, stop in partition.ranges])
        joined.index_copy_(partition.dim, here, shard.narrow(partition.dim, 0, len(here)))
    return joined


@contextlib.contextmanager
def reserved_port():
    """A port at which the first rank can listen, and which no other program is given as long as it is held."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # others that set it can bind the number
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
