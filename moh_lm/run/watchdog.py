"""A run that cannot go on ends: with a message, the stacks of its ranks, and exit code 69.

Each rank has a thread that looks every second whether another rank of its machine has died, and whether its own rank
still makes progress. A process that stands still cannot say where, so one that was stopped is woken to tell. Between
machines a lost rank is noticed by the communication library, by the launcher, or by the limit on progress.

``kill -USR2 PID`` prints the stacks of a rank at any time.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

UNAVAILABLE = 69  # EX_UNAVAILABLE of sysexits.h
GRACE = 3  # seconds in which the ranks may end one after the other, and in which all of them print their stacks
MARGIN = 60  # seconds by which the time-outs of the groups are longer: the watchdog comes first, and says more


class Watchdog:
    """Watches this process from its making until ``stop``; every rank makes one together.

    timeout: seconds without a call of ``progress`` after which the run is ended.
    """

    def __init__(self, timeout):
        self.timeout = timeout
        self.rank = dist.get_rank()
        self.last = time.monotonic()
        self.done = threading.Event()
        faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True)
        self.neighbours = neighbours()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def progress(self, seconds=0):
        """To be called by whatever may take long, whenever a part of it is done; ``seconds`` are allowed on top."""
        self.last = time.monotonic() + seconds

    def limit_groups(self):
        """Give every process group the time-out; those that are made later have their own."""
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout + MARGIN), group)

    def stop(self):
        self.done.set()
        self.thread.join()

    def watch(self):
        missed = None
        self.arm()
        while not self.done.wait(1):
            self.arm()
            now = time.monotonic()
            dead = self.dead()
            missed = (missed or now) if dead else None
            if missed and now - missed > GRACE:
                self.abort(f"{dead} died", wait=0)
            if now - self.last > self.timeout:
                idle = f"no progress for {now - self.last:.0f} s (--hang-timeout {self.timeout})"
                self.abort(idle + self.stopped(), wait=GRACE)
        faulthandler.cancel_dump_traceback_later()

    def arm(self):
        """Set a timer that fires without the interpreter, where even this thread cannot run; exit code 1."""
        faulthandler.dump_traceback_later(self.timeout + GRACE, exit=True, file=sys.__stderr__)

    def dead(self):
        """Names of the neighbours that are no more."""
        return ", ".join(f"rank {rank} (process {pid})" for rank, pid in self.neighbours.items() if state(pid) in "ZX")

    def blame(self):
        """After an error: print which neighbours died, if any did in these seconds; returns whether."""
        for _ in range(GRACE):
            dead = self.dead()
            if dead:
                print(f"moh_lm.pretrain: {dead} died; rank {self.rank} cannot go on", file=sys.stderr, flush=True)
                return True
            time.sleep(0.5)
        return False

    def stopped(self):
        """Wake the neighbours that were stopped by a signal; returns the words for them."""
        stopped = {rank: pid for rank, pid in self.neighbours.items() if state(pid) in "Tt"}
        for pid in stopped.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGUSR2)
                os.kill(pid, signal.SIGCONT)
        return "".join(f"; rank {rank} (process {pid}) had been stopped" for rank, pid in stopped.items())

    def abort(self, reason, wait):
        """Print ``reason`` and the stacks of all threads, ``wait`` seconds for other ranks to do the same, and exit."""
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read().decode(errors="replace")
        title = f"[rank {self.rank} on {socket.gethostname()}, process {os.getpid()}]"
        lines = [f"{title} {reason}; the run ends", *(f"{title} {line}" for line in stacks.splitlines())]
        os.write(2, ("\n".join(lines) + "\n").encode())
        time.sleep(wait)
        os._exit(UNAVAILABLE)


def neighbours():
    """{rank: process id} of the other ranks on this machine; none where there is no /proc to look them up in."""
    try:
        here = (socket.gethostname(), os.readlink("/proc/self/ns/pid"))  # two containers may share a host name
    except OSError:
        here = None
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (here, os.getpid()))
    others = {rank: pid for rank, (place, pid) in enumerate(ranks) if here and place == here}
    others.pop(dist.get_rank(), None)
    return others


def state(pid):
    """The letter of /proc/PID/stat: R running, S sleeping, T stopped, Z dead but not yet collected; X: gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
