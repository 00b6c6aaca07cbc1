"""Ranks of the real program in processes of their own, started within a second and watched while they run.

They are forked from the server of tests.distributed, which has imported everything, and call ``moh_lm.pretrain.main``.
Each writes into a shared file what it is doing, so that a kill can be placed, and counted, by what it interrupts.
"""

import gc
import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import moh_lm.run.text  # noqa: F401 - pretrain imports it after the flags
from moh_lm import pretrain
from moh_lm.checkpoint import manifest, saver
from moh_lm.run import loop
from moh_lm.training import engine
from tests.distributed import CONTEXT, free_port

SLOTS = ("main", "writer", "remover")  # one thread each
WIDTH = 16  # bytes of a slot
RECORD = WIDTH * (1 + len(SLOTS))  # of a rank; the first holds the number of steps


class Job:
    """One start of the program on ``world_size`` ranks.

    output: prefix of the files that take what each rank prints. hooks: ``(function, *arguments)``, called in every rank
    before the program.
    """

    def __init__(self, flags, world_size, output, hooks=()):
        self.output = output
        self.world_size = world_size
        self.marks = Path(f"{output}.marks")
        self.marks.write_bytes(bytes(RECORD * world_size))
        self.started = time.monotonic()
        port = free_port()
        self.ranks = [
            CONTEXT.Process(target=run_rank, args=(rank, world_size, port, flags, output, hooks))
            for rank in range(world_size)
        ]
        for process in self.ranks:
            process.start()

    def steps(self):
        """Training steps that every rank has done since the start."""
        content = self.marks.read_bytes()
        return min(int.from_bytes(content[at : at + 8], "little") for at in range(0, len(content), RECORD))

    def doing(self):
        """The names of what the ranks are in, each once."""
        content, names = self.marks.read_bytes(), []
        for at in range(0, len(content), WIDTH):
            if at % RECORD:
                names.append(content[at : at + WIDTH].rstrip(b"\0").decode())
        return sorted({name for name in names if name})

    def codes(self):
        """Exit codes; None where a rank still runs."""
        return [process.exitcode for process in self.ranks]

    def over(self):
        return all(code is not None for code in self.codes())

    def wait(self, seconds):
        """Wait for the end of all ranks; returns whether it came in time."""
        end = time.monotonic() + seconds
        while not self.over() and time.monotonic() < end:
            time.sleep(0.01)
        return self.over()

    def send(self, number, ranks=None):
        """Send a signal to ``ranks``, or to all."""
        for rank in range(self.world_size) if ranks is None else ranks:
            if self.ranks[rank].exitcode is None:
                os.kill(self.ranks[rank].pid, number)

    def end(self):
        """Kill whatever is left, with a look at where it stood."""
        self.send(signal.SIGUSR2)
        time.sleep(0.5)
        self.send(signal.SIGKILL)
        self.wait(10)

    def said(self):
        """What all ranks printed."""
        paths = [Path(f"{self.output}.{rank}") for rank in range(self.world_size)]
        return "\n".join(path.read_text(errors="replace") for path in paths if path.exists())


def run_rank(rank, world_size, port, flags, output, hooks):
    gc.freeze()  # as in tests.distributed
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu",
    )
    torch.set_num_threads(1)
    descriptor = os.open(f"{output}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    mark_phases(Path(f"{output}.marks"), rank)
    for function, *arguments in hooks:
        function(*arguments)
    sys.argv = ["moh_lm.pretrain", *flags]
    pretrain.main()


def mark_phases(path, rank):
    """Note in the file at ``path`` what this rank does."""
    with open(path, "r+b") as file:
        marks = mmap.mmap(file.fileno(), 0)
    base = rank * RECORD

    def around(owner, name, slot, label):
        function, at = getattr(owner, name), base + WIDTH * (1 + SLOTS.index(slot))

        def marked(*arguments, **named):
            before = marks[at : at + WIDTH]
            marks[at : at + WIDTH] = label.encode().ljust(WIDTH, b"\0")
            try:
                return function(*arguments, **named)
            finally:
                marks[at : at + WIDTH] = before

        setattr(owner, name, marked)

    def count(step_of_engine):
        def counted(*arguments, **named):
            result = step_of_engine(*arguments, **named)
            done = int.from_bytes(marks[base : base + 8], "little") + 1
            marks[base : base + 8] = done.to_bytes(8, "little")
            return result

        return counted

    engine.Engine.train_step = count(engine.Engine.train_step)
    around(engine.Engine, "train_step", "main", "step")
    around(engine.Engine, "__init__", "main", "engine")
    around(loop, "resume", "main", "resume")
    around(loop.Run, "evaluate", "main", "evaluation")
    around(saver.Saver, "save", "main", "save")
    around(saver.Saver, "commit", "main", "commit")
    around(saver.Writing, "run", "writer", "write")
    around(saver, "remove_entry", "remover", "removal")


def slow_files(seed):
    """Make everything that a save does to the disk take a while, so that kills fall into all its parts."""
    chance = random.Random(f"{seed} {os.environ['RANK']}")

    def slow(owner, name, seconds):
        function = getattr(owner, name)

        def slowed(*arguments, **named):
            time.sleep(chance.uniform(0, seconds))
            return function(*arguments, **named)

        setattr(owner, name, slowed)

    for name in ("fsync", "rename", "replace", "unlink", "rmdir"):
        slow(os, name, 0.02)
    slow(manifest.HashedFile, "write", 0.002)


def save_again(directory):
    """Save into ``directory`` what a resume has loaded, before the first step."""
    adopt = engine.Engine.adopt
    directory.mkdir(exist_ok=True)

    def adopt_and_save(an_engine, *arguments):
        adopt(an_engine, *arguments)
        step = an_engine.optimizer.steps  # none was skipped
        saver.Saver(directory).save(step, an_engine.fragments(), an_engine.config, {}, None)

    engine.Engine.adopt = adopt_and_save
