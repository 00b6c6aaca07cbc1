"""How the ranks of a run find each other, and hear that one of them cannot begin.

They meet in the store of rank 0, or in that of torchrun. A launcher ends the ranks of its own machine when one of them
ends. It knows nothing of other machines, whose ranks would wait here for the one that does not come.
"""

import contextlib
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from moh_lm.config import ConfigError

RENDEZVOUS_TIMEOUT_S = 600  # for all ranks to come
REFUSAL_TIMEOUT_S = 30  # how long a rank that cannot begin stays, so that the others hear it
ASK = "what the nodes said may tell why; check that each of them was started and reaches that address"
PORT_REMEDY = "give another by MASTER_PORT with bash, --master_port of deepspeed, --master-port of torchrun"


class RendezvousError(ConfigError):
    """The ranks have not met; the others know, or cannot be told."""


def rendezvous_store():
    """The store of this start, in which all ranks have come. Raises RendezvousError."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = f"MASTER_ADDR {os.environ['MASTER_ADDR']}, MASTER_PORT {os.environ['MASTER_PORT']}"
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    store = open_store(RENDEZVOUS_TIMEOUT_S)
    if store.add(f"rank {rank}", 1) > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:  # it starts ranks again
        raise RendezvousError([f"{place}: the ranks of another run meet there; {PORT_REMEDY}"])
    store.add("ranks", 1)
    while store.add("ranks", 0) < world_size:
        if store.check(["refused"]):
            problem = f"{store.get('refused').decode()} cannot begin, and says why; the other ranks end"
            wait_for_listeners(store)
            raise RendezvousError([problem])
        if time.monotonic() > deadline:
            absent = [str(number) for number in range(world_size) if not store.add(f"rank {number}", 0)]
            who = f"rank{'s' * (len(absent) > 1)} {', '.join(absent[:8])}{', ...' * (len(absent) > 8)}"
            missing = f"{len(absent)} of {world_size} ranks ({who}) have not come in {RENDEZVOUS_TIMEOUT_S} s"
            raise RendezvousError([f"{place}: {missing}; {ASK}"])
        time.sleep(0.1)
    return store


def open_store(seconds):
    """The part of the store that belongs to this start. seconds: to wait for it. Raises RendezvousError."""
    address, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(
            address, port, is_master=is_master, wait_for_workers=False, multi_tenant=True,
            timeout=timedelta(seconds=seconds),
        )  # fmt: skip
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            problem = f"MASTER_PORT {port}: is taken by another program on this machine; {PORT_REMEDY}"
            raise RendezvousError([problem]) from error
        problem = f"MASTER_ADDR {address}, MASTER_PORT {port}: rank {rank} finds no rank 0 there in {seconds} s"
        raise RendezvousError([f"{problem}; {ASK}"]) from error
    # torchrun keeps its store over a restart: ranks must not find the addresses of those before them.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return dist.PrefixStore(f"{os.environ['WORLD_SIZE']} ranks, restart {start}", store)


def refuse():
    """Tell the ranks on other machines that this one cannot begin."""
    is_given = all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))  # by a launcher
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", 1)))
    if is_given and int(os.environ.get("WORLD_SIZE", 1)) > here:
        with contextlib.suppress(ConfigError, RuntimeError):  # nobody is there
            store = open_store(REFUSAL_TIMEOUT_S)
            store.set("refused", f"rank {os.environ['RANK']} on {socket.gethostname()}")
            wait_for_listeners(store)


def wait_for_listeners(store):
    """Stay until every rank does: launchers end the others of a machine, also rank 0, when one leaves."""
    with contextlib.suppress(RuntimeError):  # rank 0 has left
        store.add("heard", 1)
        deadline = time.monotonic() + REFUSAL_TIMEOUT_S
        while store.add("heard", 0) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < deadline:
            time.sleep(0.1)
        if os.environ["RANK"] == "0":  # whose store the others still read
            time.sleep(1)
