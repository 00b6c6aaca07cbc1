"""The liveness check finds the ranks that still answer, so that a machine that died or froze is named.

Each rank has a thread that waits for calls in the store of the process group, with a connection of its own. A rank that
does not answer a call within seconds is dead, or stopped together with its machine; a rank whose training merely hangs
still answers. If the store itself does not answer, the machine of rank 0 is lost, because the store is there.

In a hang all ranks ask at once. The first one calls all others, and those that ask meanwhile wait for what it finds, so
that the store serves a number of requests in proportion to the ranks. A finding that names ranks is kept, because ranks
that answered may have exited before the next call.
"""

import contextlib
import os
import threading
import time
from datetime import timedelta
from itertools import count

import torch.distributed as dist

from moh_lm.supervise.secret import SignedStore

NEVER = timedelta(days=365)
CONNECT_TIMEOUT = timedelta(seconds=30)
UNKNOWN = "it could not be determined which ranks still answer"


class LivenessCheck:
    """Every rank makes one. name: name of this start of the run, the same on all ranks. hosts: [machine of each
    rank]."""

    def __init__(self, name, hosts):
        self.name, self.rank, self.hosts = name, dist.get_rank(), hosts
        self.slack = 1 + len(hosts) / 500  # seconds for the store's requests, four for each rank
        try:
            self.waiting, self.calling = connect(name), connect(name)  # the first one blocks while it waits
        except (KeyError, RuntimeError):  # another kind of rendezvous: nothing can be checked
            self.calling = None
            return
        threading.Thread(target=self.answer, daemon=True).start()

    def answer(self):
        """Wait for a call from another rank or from ``end``, and answer that this rank is alive."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            for number in count(1):
                call = self.waiting.wait_for(f"{self.rank}/{number}", NEVER)
                if not call:
                    return
                self.waiting.set(f"{call}/{self.rank}", "here")

    def unresponsive(self, seconds, known=()):
        """Return a text that names the ranks that do not answer within ``seconds``, "" if there are none or if this
        kind of rendezvous cannot tell, or UNKNOWN if the store answers, but not in time. known: ranks not to name."""
        if self.calling is None or len(self.hosts) == 1:
            return ""
        found = within(seconds + self.slack, lambda: self.find(seconds))
        if found is not None:
            missing = [rank for rank in found if rank not in known]
            return f"no answer from {describe(missing, self.hosts)}" if missing else ""
        if within(seconds, lambda: connect(self.name).store.num_keys()) is not None:
            return UNKNOWN
        return "" if 0 in known else f"no answer from the machine of rank 0 ({self.hosts[0]})"

    def find(self, seconds):
        """Call all ranks, or wait for what the rank that is already calling them finds. Returns the missing ones."""
        call, me = self.calling.read("ended") or "0", str(self.rank)
        if self.calling.set_if_absent(f"caller {call}", me) == me:
            found = self.call(f"call {call}", seconds)
            self.calling.set(f"found {call}", " ".join(map(str, found)))
            if not found:
                self.calling.set("ended", str(int(call) + 1))
            return found
        found = self.calling.wait_for(f"found {call}", timedelta(seconds=seconds + self.slack))
        return list(map(int, found.split()))

    def call(self, call, seconds):
        """Call all ranks, and return those that do not answer."""
        for rank in range(len(self.hosts)):
            self.summon(rank, call)
        deadline = time.monotonic() + seconds
        missing = list(range(len(self.hosts)))
        while missing and time.monotonic() < deadline:
            time.sleep(0.5)  # the other ranks of a hang ask meanwhile
            missing = [rank for rank in missing if self.calling.read(f"{call}/{rank}") is None]
        return missing

    def summon(self, rank, call):
        number = self.calling.store.add(f"{rank} was called", 1)
        self.calling.set(f"{rank}/{number}", call)

    def end(self):
        """End this rank's thread."""
        if self.calling is not None:
            threading.Thread(target=self.dismiss, daemon=True).start()

    def dismiss(self):
        with contextlib.suppress(RuntimeError):
            self.summon(self.rank, "")


def connect(name):
    """Return a separate connection to the store of this job."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=CONNECT_TIMEOUT)
    return SignedStore(f"liveness/{name}", store)


def within(seconds, work):
    """Return what ``work()`` returns, or None if it takes longer than ``seconds`` or the store is gone."""
    found = []

    def run():
        with contextlib.suppress(RuntimeError):
            found.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def describe(ranks, hosts):
    """Return "node2 (ranks 8, 9)" for each host of the ``ranks``."""
    by_host = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(str(rank))
    return ", ".join(f"{host} (rank{'s' * (len(here) > 1)} {', '.join(here)})" for host, here in by_host.items())
