"""The liveness check finds the ranks that still answer, so that a machine that died or froze is named.

Each rank has a thread that waits for calls in the store of the process group, with a connection of its own. A rank that
fails calls all others. A rank that does not answer within seconds is dead, or stopped together with its machine; a rank
whose training merely hangs still answers. If the store itself does not answer, the machine of rank 0 is lost, because
the store is there. The result of the first check is kept, because ranks that answered may have exited before the next
one.
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


class LivenessCheck:
    """Every rank makes one. name: name of this start of the run, the same on all ranks. hosts: [machine of each
    rank]."""

    def __init__(self, name, hosts):
        self.rank, self.hosts = dist.get_rank(), hosts
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
                self.waiting.store.wait([f"{self.rank}/{number}"], NEVER)
                while (call := self.waiting.read(f"{self.rank}/{number}")) is None:  # a stranger wrote this key first
                    time.sleep(0.1)
                if not call:
                    return
                self.waiting.set(f"{call}/{self.rank}", "here")

    def unresponsive(self, seconds):
        """Return a text that names the ranks that do not answer within ``seconds``, "" if there are none or if this
        cannot be determined."""
        if self.calling is None or len(self.hosts) == 1:
            return ""
        found = []
        thread = threading.Thread(target=lambda: found.append(self.call(seconds)), daemon=True)
        thread.start()
        thread.join(seconds + 1)
        return found[0] if found else self.without_store()

    def call(self, seconds):
        """Do the same, provided that the store answers."""
        try:
            if found := self.calling.read("found"):
                return found
            call = f"call {self.calling.store.add('calls', 1)}"
            for rank in range(len(self.hosts)):
                self.summon(rank, call)
            deadline = time.monotonic() + seconds
            missing = list(range(len(self.hosts)))
            while missing and time.monotonic() < deadline:
                missing = [rank for rank in missing if self.calling.read(f"{call}/{rank}") is None]
                time.sleep(0.1)
            words = f"no answer from {describe(missing, self.hosts)}" if missing else ""
            return self.calling.set_if_absent("found", words) if words else ""
        except RuntimeError:
            return self.without_store()

    def summon(self, rank, call):
        number = self.calling.store.add(f"{rank} was called", 1)
        self.calling.set(f"{rank}/{number}", call)

    def without_store(self):
        return f"no answer from the machine of rank 0 ({self.hosts[0]})"

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


def describe(ranks, hosts):
    """Return "node2 (ranks 8, 9)" for each host of the ``ranks``."""
    by_host = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(str(rank))
    return ", ".join(f"{host} (rank{'s' * (len(here) > 1)} {', '.join(here)})" for host, here in by_host.items())
