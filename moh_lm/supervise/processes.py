"""One process of a run, a rank: how it joins the others, what it prints, and how it exits."""

import contextlib
import glob
import os
import re
import resource
import socket
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moh_lm.config import ConfigError
from moh_lm.supervise.malloc import keep_freed_memory
from moh_lm.supervise.rendezvous import (
    RENDEZVOUS_TIMEOUT_S,
    RendezvousError,
    Unreachable,
    rendezvous_store,
    stay_on_loopback,
)
from moh_lm.supervise.secret import SECRET, refuse_strangers
from moh_lm.training.deepspeed import start
from moh_lm.training.deepspeed.process_groups import set_timeout

DRIVER = Path("/proc/driver/nvidia/version")  # of NVIDIA, where it is loaded
FILES = 4096  # that a rank may have open, besides connections to other ranks
GPUS = "/dev/nvidia[0-9]*"  # those that this process may use: a container can be without


def refuse_foreign_launcher():
    """Raise ConfigError if mpirun or srun started several processes, each of which would be a run of its own.

    The same holds if a launcher does not say which device of the machine a rank uses, or where the ranks meet.
    """
    remedy = "start the ranks with torchrun or deepspeed"
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if "RANK" in os.environ and name not in os.environ:
            raise ConfigError([f"RANK is {os.environ['RANK']} but {name} is not set: {remedy}"])
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        if "RANK" not in os.environ and int(os.environ.get(name, 1)) > 1:
            raise ConfigError([f"{name} is {os.environ[name]} but RANK is not set: {remedy}"])


def start_process_group(timeout):
    """Join the other ranks, with NCCL on GPUs or gloo elsewhere, and return this rank's device. timeout: seconds.

    Raises ConfigError if there is no GPU for this rank, or RendezvousError if it does not reach the others, or if only
    some of them have a GPU.
    """
    if "RANK" not in os.environ:  # started without a launcher: one rank
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    raise_file_limit()
    start.quiet()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device")  # the device is set below
    device = own_device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        stay_on_loopback()
        join(device, backend, min(timeout, RENDEZVOUS_TIMEOUT_S))
        set_timeout(dist.group.WORLD, timeout)
    start.init_distributed(backend, timeout)
    return device


def raise_file_limit():
    """Let this process open enough files: rank 0 keeps three connections of every rank, besides its own files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = FILES + 8 * int(os.environ["WORLD_SIZE"])
    need = need if hard == resource.RLIM_INFINITY else min(need, hard)
    if soft != resource.RLIM_INFINITY and soft < need:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def own_device():
    """Return this rank's device, after making it the current one. Raises ConfigError if there is no GPU for it."""
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), start.visible_gpus()
    if gpus is None:
        refuse_useless_gpu()
        keep_freed_memory()
        return torch.device("cpu")
    if local_rank >= gpus:
        shared = "make all GPUs of the node visible to each task (Slurm's --gpus-per-node), or " if gpus == 1 else ""
        problem = f"LOCAL_RANK {local_rank}: GPUs that this process sees: {gpus}; {shared}start one rank for each"
        raise ConfigError([problem], local_rank=gpus)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def refuse_useless_gpu():
    """Raise ConfigError if torch finds no GPU beside NVIDIA's driver, unless the environment asks for CPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.split(",")[0].strip().lower() in ("", "-1", "none", "void", "nodevfiles")
    given = DRIVER.exists() and any(map(opens, glob.glob(GPUS)))
    if hidden or os.environ.get("DS_ACCELERATOR") == "cpu" or not given:
        return
    version = re.search(r"\d+\.[\d.]*\d|$", DRIVER.read_text())[0]
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    remedy = "update the driver, install the torch build for it, or set DS_ACCELERATOR=cpu to train on the CPU"
    problem = f"this machine has NVIDIA's driver {version}, but torch {torch.__version__}, built {built}, finds no GPU"
    problem += f" with CUDA_VISIBLE_DEVICES {visible}" if visible else ""
    raise ConfigError([f"{problem}; {remedy}"])


def opens(path):
    """Return whether this process may use a device."""
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def join(device, backend, seconds):
    """Open the process group of all ranks, which may take up to ``seconds``. Raises RendezvousError."""
    store, rank, world_size = rendezvous_store(backend), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=seconds)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    except RuntimeError as error:
        problem = f"rank {rank} cannot reach the others ({str(error).splitlines()[0]})"
        remedy = f"{backend.upper()}_SOCKET_IFNAME names the interface of their network (docs/parallelism.md)"
        raise Unreachable([f"{problem}; {remedy}"]) from error
    if strangers := refuse_strangers(device):
        shown = ", ".join(map(str, strangers))
        problem = f"these ranks have another one, or do not belong to the run: {shown}; give all ranks the same"
        raise RendezvousError([f"{SECRET}: {problem}"])


def log_rank0(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def exit_process(code, together=False):
    """Exit, ``together`` with the other ranks or alone.

    If a process group was open, the interpreter's own shutdown is skipped, because it sometimes aborts under gloo.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if not dist.is_initialized():
        sys.exit(code)
    if together:
        dist.barrier()
        dist.destroy_process_group()
    os._exit(code)
