"""How the ranks of a run find each other, and learn that one of them cannot start.

They meet in the store of rank 0, or in that of torchrun. A launcher ends the ranks of its own machine when one of them
ends. It knows nothing about other machines, whose ranks would wait here for the missing one.
"""

import contextlib
import errno
import os
import re
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from moh_lm.config import ConfigError
from moh_lm.supervise.errors import on_several_machines
from moh_lm.supervise.liveness import describe
from moh_lm.supervise.secret import SECRET, SignedStore

RENDEZVOUS_TIMEOUT_S = 600  # for all ranks to arrive
REFUSAL_TIMEOUT_S = 30  # how long a rank that cannot start stays, so that the others learn of it
ASK = "the output of the nodes may say why; check that each was started and can reach that address"
PORT_REMEDY = "give another by MASTER_PORT with bash, --master_port with deepspeed, --master-port with torchrun"


class RendezvousError(ConfigError):
    """Not all ranks have met. The others know this already, or cannot be told."""


class Unreachable(RendezvousError):
    """Ranks are missing, unreachable or without a GPU, or see other files than the rest. The same start may succeed
    later, or on other machines, unless the network's settings or the secret are to blame."""


def rendezvous_store(backend):
    """Return the store of this start, once all ranks have arrived in it. backend: this rank's, "nccl" or "gloo".

    Raises RendezvousError; Unreachable if ranks are missing or, on all ranks, if only some of them have a GPU.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = f"MASTER_ADDR {os.environ['MASTER_ADDR']}, MASTER_PORT {os.environ['MASTER_PORT']}"
    deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
    meeting = open_store(RENDEZVOUS_TIMEOUT_S)
    store, here = meeting.store, f"{socket.gethostname()}, {backend}, start {os.urandom(8).hex()}"
    if meeting.set_if_absent(f"rank {rank}", here) != here:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise RendezvousError([f"{place}: the ranks of another run meet there; {PORT_REMEDY}"])
        meeting.set(f"rank {rank}", here)  # torchrun restarts
    store.add("ranks", 1)
    while store.add("ranks", 0) < world_size or None in (arrived := introductions(meeting, world_size)):
        if refusal := meeting.read("refused"):
            wait_for_listeners(store)
            raise RendezvousError([f"{refusal} cannot start and prints the reason; the other ranks end"])
        if time.monotonic() > deadline:
            absent = [str(rank) for rank, text in enumerate(introductions(meeting, world_size)) if text is None]
            who = f"rank{'s' * (len(absent) > 1)} {', '.join(absent[:8])}{', ...' * (len(absent) > 8)}"
            missing = f"{len(absent)} of {world_size} ranks ({who}) have not arrived within {RENDEZVOUS_TIMEOUT_S} s"
            other = f", or have another {SECRET}" if os.environ.get(SECRET) else ""
            raise Unreachable([f"{place}: {missing}{other}; {ASK}"])
        time.sleep(0.1)
    hosts, backends, _ = zip(*(text.split(", ") for text in arrived), strict=True)
    without = [rank for rank, one in enumerate(backends) if one == "gloo"]
    if 0 < len(without) < world_size:
        wait_for_listeners(store)
        remedy = "repair these machines, leave them out, or set DS_ACCELERATOR=cpu on all"
        raise Unreachable([f"{describe(without, hosts)}: no GPU there, but other ranks have one; {remedy}"])
    return store


def introductions(meeting, world_size):
    """Return "HOST, BACKEND, START" of each rank, None for those that have not arrived. A stranger can change the
    count, but cannot claim that a rank arrived."""
    return meeting.read_all([f"rank {number}" for number in range(world_size)])


def stay_on_loopback():
    """Make this process listen only on the loopback interface, since all ranks are on this machine. No other machine
    can then connect."""
    name = next((name for _, name in socket.if_nameindex() if re.fullmatch(r"lo\d*", name)), None)
    if on_several_machines() or name is None:
        return
    for backend in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{backend}_SOCKET_IFNAME", name)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # that of torchrun, which listens everywhere
        os.environ["MASTER_ADDR"] = "127.0.0.1"


def open_store(seconds):
    """Return the part of the store that belongs to this start, a ``SignedStore``. seconds: how long to wait for it.

    Raises RendezvousError.
    """
    address, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        on_loopback = is_master and not on_several_machines()
        listener = socket.create_server(("127.0.0.1", port)).detach() if on_loopback else None
        store = dist.TCPStore(
            address, port, is_master=is_master, wait_for_workers=False, multi_tenant=True,
            timeout=timedelta(seconds=seconds), master_listen_fd=listener,
        )  # fmt: skip
    except (dist.DistError, OSError) as error:
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            problem = f"MASTER_PORT {port}: is taken by another program on this machine; {PORT_REMEDY}"
            raise RendezvousError([problem]) from error
        problem = f"MASTER_ADDR {address}, MASTER_PORT {port}: rank {rank} found no rank 0 there within {seconds} s"
        raise Unreachable([f"{problem}; {ASK}"]) from error
    # torchrun keeps its store over a restart, and ranks must not find the addresses of their predecessors.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    return SignedStore(f"{os.environ['WORLD_SIZE']} ranks, restart {start}", store)


def refuse():
    """Tell the ranks on other machines that this rank cannot start."""
    is_given = all(name in os.environ for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))  # by a launcher
    if is_given and on_several_machines():
        with contextlib.suppress(ConfigError, RuntimeError):  # nobody is there
            store = open_store(REFUSAL_TIMEOUT_S)
            store.set("refused", f"rank {os.environ['RANK']} on {socket.gethostname()}")
            wait_for_listeners(store.store)


def wait_for_listeners(store):
    """Wait until every rank waits here, because launchers end the other ranks of a machine, even rank 0, when one
    exits."""
    with contextlib.suppress(RuntimeError):  # rank 0 has left
        store.add("heard", 1)
        deadline = time.monotonic() + REFUSAL_TIMEOUT_S
        while store.add("heard", 0) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < deadline:
            time.sleep(0.1)
        if os.environ["RANK"] == "0":  # the others still read its store
            time.sleep(1)
