"""Ends a run that cannot continue with a message, the stacks of its ranks, and exit code 69.

Each rank has a thread that looks every second whether another rank of its machine has died, and whether its own rank
still makes progress. A process that was stopped by a signal is woken, so that it can report where it stands. Between
machines a lost rank is noticed by the communication library, by the launcher, or by the limit on progress, and a
liveness check names it.

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

import torch.distributed as dist

from moh_lm.supervise.liveness import UNKNOWN, LivenessCheck
from moh_lm.supervise.local_ranks import introduce, local_ranks, process_state, was_aborted
from moh_lm.supervise.stuck_launcher import end_stuck_launcher
from moh_lm.training.deepspeed.process_groups import open_groups, set_timeout

UNAVAILABLE = 69  # EX_UNAVAILABLE of sysexits.h
GRACE_S = 3  # seconds in which the ranks may end one after the other, and in which all of them print their stacks
MARGIN_S = 60  # seconds by which time-outs of groups are longer, since the watchdog reports more


class Watchdog:
    """Watches this process from now until ``stop``; all ranks make one together.

    timeout: seconds without a call of ``progress`` after which the run is ended. program: its name for messages.
    """

    def __init__(self, timeout, program="moh_lm.pretrain"):
        self.timeout = timeout
        self.program = program
        self.rank = dist.get_rank()
        self.last = time.monotonic()
        self.done = threading.Event()
        faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True)
        ranks = introduce()
        self.local_ranks = local_ranks(ranks)
        self.aborted = set()  # local ranks that were seen to have ended by SIGABRT
        self.liveness = LivenessCheck(ranks[0].started, [rank.host for rank in ranks])
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def progress(self, seconds=0):
        """Report progress; long operations do so after each part. ``seconds`` are allowed in addition to the limit."""
        self.last = time.monotonic() + seconds

    def limit_groups(self, seconds=0):
        """Give every open process group the time-out, and ``seconds`` more; groups that are made later have their
        own."""
        for group in open_groups():
            set_timeout(group, self.timeout + MARGIN_S + seconds)

    def stop(self):
        self.liveness.end()
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
            if missed and now - missed > GRACE_S:
                self.abort(self.lost(dead), wait=0)
            if now - self.last > self.timeout:
                idle = f"no progress for {now - self.last:.0f} s (--hang-timeout {self.timeout})"
                found = self.stopped() or self.liveness.unresponsive(GRACE_S)
                self.abort(f"{idle}; {found}" if found else idle, wait=GRACE_S)
        faulthandler.cancel_dump_traceback_later()

    def arm(self):
        """Set a timer that fires without the interpreter, where even this thread cannot run; exit code 1."""
        faulthandler.dump_traceback_later(self.timeout + 2 * GRACE_S, exit=True, file=sys.__stderr__)

    def dead(self):
        """Return {rank: process id} of local ranks whose processes are dead."""
        dead = {rank: pid for rank, pid in self.local_ranks.items() if process_state(pid) in "ZX"}
        self.aborted.update(rank for rank, pid in dead.items() if was_aborted(pid))
        return dead

    def lost(self, dead):
        """Return a text that names the ranks that do not answer, and then the ``dead`` local ones, because a lost
        machine makes NCCL abort the ranks of others. It is "" if none are known."""
        found = ""
        if not dead or len(self.local_ranks) + 1 < len(self.liveness.hosts):
            found = self.liveness.unresponsive(GRACE_S, known=dead)
        fates = dict.fromkeys(self.aborted, "aborted, as by NCCL when communication fails")
        ended = [f"rank {rank} (process {pid}) {fates.get(rank, 'died')}" for rank, pid in dead.items()]
        return "; ".join(filter(None, [found, *ended]))

    def report_unresponsive(self):
        """After an error: print which ranks died or do not answer; returns whether any are known.

        An error may arrive before the process that caused it is gone, so this looks for dead local ranks for a while.
        """
        for _ in range(GRACE_S):
            dead = self.dead()
            if dead:
                break
            time.sleep(0.5)
        found = self.lost(dead)
        if found:
            print(f"{self.program}: {found}; rank {self.rank} cannot continue", file=sys.stderr, flush=True)
            end_stuck_launcher()
        return found not in ("", UNKNOWN)

    def stopped(self):
        """Wake the local ranks that were stopped by a signal; returns a text that names them."""
        stopped = {rank: pid for rank, pid in self.local_ranks.items() if process_state(pid) in "Tt"}
        for pid in stopped.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGUSR2)
                os.kill(pid, signal.SIGCONT)
        return "; ".join(f"rank {rank} (process {pid}) had been stopped" for rank, pid in stopped.items())

    def abort(self, reason, wait):
        """Print ``reason`` and the stacks of all threads, ``wait`` seconds for other ranks to do the same, and exit."""
        stacks = ""
        with contextlib.suppress(OSError), tempfile.TemporaryFile() as file:  # the disk may be full
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read().decode(errors="replace")
        title = f"[rank {self.rank} on {socket.gethostname()}, process {os.getpid()}]"
        lines = [f"{title} {reason}; the run ends", *(f"{title} {line}" for line in stacks.splitlines())]
        with contextlib.suppress(OSError):  # nobody reads it
            os.write(2, ("\n".join(lines) + "\n").encode())
        time.sleep(wait)
        end_stuck_launcher()
        os._exit(UNAVAILABLE)
