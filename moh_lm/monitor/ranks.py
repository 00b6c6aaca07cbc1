"""Measures each rank in a log interval: its waits for data, its memory, and the time of its own work.

All ranks end a step together, so the time of a step never shows which of them is slow. A rank's own work is its wait
for data and its forward passes, in which ranks with other samples do not wait for one another. Forward passes include
waits within a tensor-parallel or context-parallel group, and with ZeRO stage 3 for all ranks.
"""

import resource
import statistics
import time
from typing import NamedTuple

import torch

from moh_lm.parallel.consensus import from_all_ranks
from moh_lm.parallel.groups import group_rank


class RankFigures(NamedTuple):
    """data: seconds per step that the rank waited for its batches. own: these and its forward passes. memory: bytes,
    see ``peak_memory``. stage: pipeline stage; only ranks of the same stage have the same work."""

    data: float
    own: float
    memory: int
    stage: int


class SlowestRank(NamedTuple):
    """The rank whose own work takes longest relative to its stage. seconds: its time per step. median: the stage's
    median."""

    rank: int
    seconds: float
    median: float


class ForwardTimer:
    """Measures the time that forward passes of ``model`` in training take on the device.

    On a GPU, events mark their beginning and end; ``take`` reads them after the step has waited for the device anyway.
    """

    def __init__(self, model, device):
        self.device = device
        self.marks = []  # beginning and end of each pass in turn
        model.register_forward_pre_hook(lambda module, *_: self.mark(module))
        model.register_forward_hook(lambda module, *_: self.mark(module))

    def mark(self, module):
        if module.training:
            self.marks.append(self.now())

    def now(self):
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        return event

    def take(self):
        """Return the seconds of the passes since the last call. The device must have completed their work."""
        pairs, self.marks = list(zip(self.marks[::2], self.marks[1::2], strict=True)), []
        if self.device.type == "cpu":
            return sum(end - begin for begin, end in pairs)
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000


def rank_figures(accumulator, groups, device):
    """Return [``RankFigures`` of each rank] for the interval that ends. All ranks call it together."""
    data, own = accumulator.seconds_per_step()["data"], accumulator.own_seconds_per_step()
    return from_all_ranks(RankFigures(data, own, peak_memory(device), group_rank(groups.pipeline)))


def slowest_rank(ranks):
    """Return the ``SlowestRank`` of [``RankFigures``]."""
    medians = stage_medians(ranks)
    beside = [figures.own - medians[figures.stage] for figures in ranks]
    rank = beside.index(max(beside))
    return SlowestRank(rank, ranks[rank].own, medians[ranks[rank].stage])


def stage_medians(ranks):
    """Return {stage: the median of its ranks' own work}. With the lower median, one of two ranks can be slow."""
    own = {}
    for figures in ranks:
        own.setdefault(figures.stage, []).append(figures.own)
    return {stage: statistics.median_low(seconds) for stage, seconds in own.items()}


def peak_memory(device):
    """Return the peak bytes of the device's allocator, or on a CPU the peak memory of the process."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.get_device_module(device).max_memory_allocated(device)
