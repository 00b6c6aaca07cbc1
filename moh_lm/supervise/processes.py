"""The processes of a run: how they start, and how they leave."""

import os
import socket
import sys
import warnings
from datetime import timedelta

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger as deepspeed_logger
from torch.distributed import distributed_c10d

from moh_lm.config import ConfigError
from moh_lm.supervise.malloc import keep_freed_memory
from moh_lm.supervise.rendezvous import RENDEZVOUS_TIMEOUT_S, RendezvousError, rendezvous_store


def refuse_foreign_launcher():
    """Raises ConfigError where mpirun or srun started several processes, each of which would be a run of its own.

    And where a launcher does not say which device of the machine is a rank's, or where the ranks meet.
    """
    remedy = "start the ranks by torchrun or deepspeed"
    for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if "RANK" in os.environ and name not in os.environ:
            raise ConfigError([f"RANK is {os.environ['RANK']} but {name} is not set: {remedy}"])
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        if "RANK" not in os.environ and int(os.environ.get(name, 1)) > 1:
            raise ConfigError([f"{name} is {os.environ[name]} but RANK is not set: {remedy}"])


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
    deepspeed_logger.setLevel("ERROR")  # a skipped step is told by moh_lm/training/incidents.py
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
    else:
        keep_freed_memory()
    backend, limit = "nccl" if gpu else "gloo", timedelta(seconds=timeout)
    if not dist.is_initialized():
        store, rank, world_size = rendezvous_store(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        at_most = min(limit, timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=at_most)
        except RuntimeError as error:
            problem = f"rank {rank} does not reach the others ({str(error).splitlines()[0]})"
            remedy = f"{backend.upper()}_SOCKET_IFNAME names the interface of their network (docs/multi_node.md)"
            raise RendezvousError([f"{problem}; {remedy}"]) from error
        distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
    deepspeed.init_distributed(dist_backend=backend, timeout=limit, verbose=False)
    return device


def log_rank0(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


def exit_process(code, together=False):
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
