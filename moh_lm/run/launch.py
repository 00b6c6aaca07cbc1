"""The processes of a run: how they start, what they check together, how they are asked to stop, and how they leave."""

import fcntl
import os
import signal
import socket
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger as deepspeed_logger
from torch.distributed.rendezvous import rendezvous

from moh_lm.config import ConfigError
from moh_lm.parallel.agreement import from_rank_0, of_all_ranks

LOCK_SECONDS = 10  # to wait for a run directory that is in use


def make_run_directory(path):
    """Raises ConfigError unless ``path`` is a directory that can be written, or can be made one."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        reason = None if os.access(path, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        reason = error.strerror
    if reason:
        raise ConfigError([f"--checkpoint-dir {path}: cannot be written ({reason}); give another directory"])


def lock_run_directory(path):
    """Hold the run directory until this process ends, however it ends. Raises ConfigError if another run holds it."""
    lock = open(Path(path) / ".lock", "w", encoding="utf-8")  # noqa: SIM115 - open for the life of the process
    for attempt in range(LOCK_SECONDS + 1):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            time.sleep(attempt < LOCK_SECONDS)  # the ranks of the run before this one may still be ending
        except OSError:
            return lock  # a file system without locks
    raise ConfigError([f"--checkpoint-dir {path}: another run is writing to it; end it, or give another directory"])


def refuse_foreign_launcher():
    """Raises ConfigError where mpirun or srun started several processes, each of which would be a run of its own."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        if "RANK" not in os.environ and int(os.environ.get(name, 1)) > 1:
            raise ConfigError(
                [f"{name} is {os.environ[name]} but RANK is not set: start the ranks by torchrun or deepspeed"]
            )


def start_process_group(timeout):
    """Join the other ranks, by NCCL on GPUs and gloo elsewhere; returns this rank's device. timeout: seconds."""
    if "RANK" not in os.environ:  # started without a launcher: one rank
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # Which of DeepSpeed's own ops could be built: none, or it would ask a compiler about each. The one that it would
    # build by itself, on a CPU, takes a minute and shared memory that nobody removes; training calls none of them.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed_logger.setLevel("WARNING")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device")  # it is this rank's: set below
    accelerator, local_rank = get_accelerator(), int(os.environ["LOCAL_RANK"])
    gpu = accelerator.device_name() == "cuda"
    if gpu and local_rank >= accelerator.device_count():
        gpus = accelerator.device_count()
        problem = f"LOCAL_RANK {local_rank}: GPUs that this process sees: {gpus}; start one rank for each"
        raise ConfigError([problem], local_rank=gpus)
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    backend, limit = "nccl" if gpu else "gloo", timedelta(seconds=timeout)
    if not dist.is_initialized():
        store, rank, world_size = next(rendezvous("env://", timeout=limit))
        # torchrun keeps its store over a restart: ranks must not find the addresses of those before them.
        own = dist.PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=limit)
    deepspeed.init_distributed(dist_backend=backend, timeout=limit, verbose=False)
    return device


def check_nodes(config, dataset):
    """Raise ConfigError on every rank unless all of them see one run directory, one configuration and the same data."""
    marker = Path(config.run.checkpoint_dir) / from_rank_0(f".seen-{time.time_ns()}")
    if dist.get_rank() == 0:
        marker.touch()
    mine = {"data": dataset.fingerprint(), **config.to_dict()}
    first = from_rank_0(mine)  # also waits for the marker
    here = f"rank {dist.get_rank()} on {socket.gethostname()}"
    problems = [] if marker.exists() else [f"--checkpoint-dir {marker.parent}: {here} does not see that of rank 0"]
    problems += [f"{here} has another {key} than rank 0: {mine[key]}" for key in mine if mine[key] != first[key]]
    problems = of_all_ranks(problems)
    if dist.get_rank() == 0:
        marker.unlink()
    if problems:
        raise ConfigError([f"{problem}; use paths on a file system that all nodes share" for problem in problems])


class StopRequest:
    """SIGTERM or SIGUSR1 to any one rank, or the end of ``exit_after`` seconds, asks the run to stop after its step."""

    def __init__(self, exit_after=None):
        self.deadline = time.monotonic() + exit_after if exit_after else None
        self.reason = None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self.note)

    def note(self, number, frame):
        self.reason = signal.Signals(number).name

    def due(self):
        """Whether this rank was asked to stop."""
        if self.deadline and time.monotonic() >= self.deadline:
            self.reason = "--exit-after"
        return self.reason is not None


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def leave(code, together=False):
    """Exit, ``together`` with the other ranks or alone.

    After a process group without the interpreter's own shutdown, which now and then aborts under gloo.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if not dist.is_initialized():
        sys.exit(code)
    if together:
        dist.barrier()
        dist.destroy_process_group()
    os._exit(code)
