"""Traces some steps of a run with torch.profiler, to show where the time of a step goes.

Each traced rank writes ``profile/steps-FROM-TO-rank-R.pt.trace.json.gz`` into the run directory, for Perfetto and
TensorBoard. A snapshot of a GPU's memory goes to ``...memory.pickle``, for https://pytorch.org/memory_viz. If the
profiler fails, the rank prints a message and the run continues.
"""

import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from moh_lm.supervise.processes import log_rank0

FOLDER = "profile"
ALLOCATIONS = 1_000_000  # allocations that a snapshot remembers


class StepProfile:
    """The profiler of this rank, which ``begin`` and ``end`` call around every step. run: ``RunBase``."""

    def __init__(self, run, device):
        traced = run.profile_ranks == "all" or dist.get_rank() == 0
        self.steps = run.profiled_steps if traced else range(0)
        self.directory = Path(run.checkpoint_dir) / FOLDER
        self.activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self.memory = run.profile_memory
        self.snapshots = self.memory and device.type == "cuda"
        self.profiler = self.mark = None
        self.running = ExitStack()  # stops the profiler, and the record of allocations
        self.first = self.last = 0  # steps of the trace

    def begin(self, step):
        """Start tracing step number ``step``, if it is one of the requested ones."""
        if step in self.steps:
            self.attempt(lambda: self.open(step))

    def open(self, step):
        if self.profiler is None:
            self.start(step)
        self.mark = record_function(f"ProfilerStep#{step}")  # the name that viewers look for
        self.mark.__enter__()

    def start(self, step):
        if self.snapshots:
            torch.cuda.memory._record_memory_history(max_entries=ALLOCATIONS)
            self.running.callback(torch.cuda.memory._record_memory_history, enabled=None)
        profiler = profile(activities=self.activities, record_shapes=True, profile_memory=self.memory)
        self.profiler, self.first = self.running.enter_context(profiler), step

    def end(self, step):
        """Record that this step is over, and write the files after the last requested one."""
        if self.mark is not None:
            mark, self.mark, self.last = self.mark, None, step
            self.attempt(lambda: mark.__exit__(None, None, None))
        if step + 1 not in self.steps:
            self.close()

    def close(self):
        """Write the files of the steps that were traced, if there are any."""
        if self.profiler is not None:
            profiler, self.profiler = self.profiler, None
            self.attempt(lambda: self.write(profiler))

    def write(self, profiler):
        self.directory.mkdir(parents=True, exist_ok=True)
        name = f"steps-{self.first}-{self.last}-rank-{dist.get_rank()}"
        try:
            if self.snapshots:
                torch.cuda.memory._dump_snapshot(str(self.directory / f"{name}.memory.pickle"))
        finally:
            self.running.close()
            profiler.export_chrome_trace(str(self.directory / f"{name}.pt.trace.json.gz"))
        log_rank0(f"wrote the profile of steps {self.first} to {self.last} to {self.directory}")

    def attempt(self, work):
        """Call ``work()``; if it fails, print a message and trace no further step."""
        try:
            work()
        except Exception as error:
            self.steps, self.profiler, self.mark = range(0), None, None
            with suppress(Exception):
                self.running.close()
            print(f"no profile on rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
