"""A check that the nodes of a run share one run directory, one configuration and the same data."""

import socket
import time
from pathlib import Path

import torch.distributed as dist

from moh_lm.config import raise_any
from moh_lm.parallel.consensus import from_rank_zero, on_rank_zero, problems_of_all_ranks


def check_nodes(config, dataset):
    """Raise ConfigError on every rank unless all ranks have the same values. All ranks call it together."""
    marker = Path(config.run.checkpoint_dir) / from_rank_zero(f".seen-{time.time_ns()}")
    on_rank_zero(marker.touch)
    last = config.run.samples_after(config.run.train_iters)
    mine = {"data": dataset.state(last)["segments"], **config.to_dict()}
    first = from_rank_zero(mine)  # also waits for the marker
    here = f"rank {dist.get_rank()} on {socket.gethostname()}"
    problems = [] if marker.exists() else [f"--checkpoint-dir {marker.parent}: {here} does not see rank 0's directory"]
    problems += [f"{here} has another {key} than rank 0: {mine[key]}" for key in mine if mine[key] != first[key]]
    problems = problems_of_all_ranks(problems)
    on_rank_zero(marker.unlink)
    raise_any([f"{problem}; use paths on a file system that all nodes share" for problem in problems])
