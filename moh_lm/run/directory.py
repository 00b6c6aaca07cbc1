"""The run directory: that it can be written, that one run writes to it, and that all nodes see the same one."""

import fcntl
import os
import socket
import time
from pathlib import Path

import torch.distributed as dist

from moh_lm.config import ConfigError
from moh_lm.parallel.agreement import by_rank_0, from_rank_0, problems_of_all_ranks

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


def check_nodes(config, dataset):
    """Raise ConfigError on every rank unless all of them see one run directory, one configuration and the same data."""
    marker = Path(config.run.checkpoint_dir) / from_rank_0(f".seen-{time.time_ns()}")
    by_rank_0(marker.touch)
    mine = {"data": dataset.fingerprint(), **config.to_dict()}
    first = from_rank_0(mine)  # also waits for the marker
    here = f"rank {dist.get_rank()} on {socket.gethostname()}"
    problems = [] if marker.exists() else [f"--checkpoint-dir {marker.parent}: {here} does not see that of rank 0"]
    problems += [f"{here} has another {key} than rank 0: {mine[key]}" for key in mine if mine[key] != first[key]]
    problems = problems_of_all_ranks(problems)
    by_rank_0(marker.unlink)
    if problems:
        raise ConfigError([f"{problem}; use paths on a file system that all nodes share" for problem in problems])
