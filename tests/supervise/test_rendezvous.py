"""Ranks that do not meet."""

import os
import socket

import psutil
import pytest
import torch
import torch.distributed as dist

from moh_lm.config import ConfigError
from moh_lm.supervise import rendezvous
from moh_lm.supervise.processes import start_process_group
from moh_lm.supervise.secret import SECRET, refuse_strangers
from tests.distributed import reserved_port, run_ranks


@pytest.fixture
def rendezvous_port(monkeypatch):
    """Variables of rank 0 of three, at a free port."""
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", SECRET):
        monkeypatch.delenv(name, raising=False)
    with reserved_port() as port:
        place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        yield str(port)


def test_a_port_of_another_program_is_refused_with_the_remedy(rendezvous_port, monkeypatch):
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        monkeypatch.setenv("MASTER_PORT", port)
        for ranks_here in ("1", "3"):  # of three: on several machines, and on one
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
            with pytest.raises(ConfigError, match=f"MASTER_PORT {port}: is taken by another program.*give another"):
                rendezvous.rendezvous_store("gloo")


def test_absent_ranks_are_named(rendezvous_port, monkeypatch):
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_TIMEOUT_S", 1)
    with pytest.raises(ConfigError, match=rf"MASTER_PORT {rendezvous_port}: 2 of 3 ranks \(ranks 1, 2\) have not"):
        rendezvous.rendezvous_store("gloo")


def test_a_rank_that_cannot_begin_ends_those_of_other_machines(rendezvous_port, monkeypatch):
    monkeypatch.setattr(rendezvous, "REFUSAL_TIMEOUT_S", 1)
    store = rendezvous.open_store(1)
    monkeypatch.setenv("RANK", "1")
    rendezvous.refuse()
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match=f"rank 1 on {socket.gethostname()} cannot start"):
        rendezvous.rendezvous_store("gloo")
    del store


def test_a_second_run_at_the_same_port_is_refused(rendezvous_port, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")  # on one machine the second one does not get the port
    store = rendezvous.rendezvous_store("gloo")
    with pytest.raises(ConfigError, match=f"MASTER_PORT {rendezvous_port}: the ranks of another run meet there"):
        rendezvous.rendezvous_store("gloo")
    del store


def test_a_stranger_neither_refuses_a_start_nor_stands_for_a_rank(rendezvous_port, monkeypatch):
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_TIMEOUT_S", 1)
    monkeypatch.setattr(rendezvous, "REFUSAL_TIMEOUT_S", 1)
    monkeypatch.setenv(SECRET, "of the launch")
    meeting = rendezvous.open_store(1)
    for key in ("rank 0", "rank 1", "rank 2", "refused"):
        meeting.store.set(key, "a stranger")
    meeting.store.add("ranks", 5)
    meeting.set("rank 2", "node3, gloo, start 7")
    with pytest.raises(rendezvous.Unreachable, match=f"1 of 3 ranks .* not arrived within 1 s, or .* another {SECRET}"):
        rendezvous.rendezvous_store("gloo")
    meeting.set("refused", "rank 2 on node3")
    meeting.store.set("rank 2", "a stranger")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="rank 2 on node3 cannot start") as refused:
        rendezvous.rendezvous_store("gloo")
    assert not isinstance(refused.value, rendezvous.Unreachable)  # it would fail again


@pytest.mark.parametrize("key, text", [("rank 1", "a"), ("rank 2", "b"), ("other/rank 1", "a")])
def test_a_signature_is_of_one_key_and_one_text(key, text, rendezvous_port, monkeypatch):
    monkeypatch.setenv(SECRET, "of the launch")
    meeting = rendezvous.open_store(1)
    meeting.set("rank 1", "a")
    signed = meeting.store.get("rank 1")
    meeting.store.set(key, signed.replace(b" a", b" " + text.encode()))
    assert meeting.read(key) == (text if (key, text) == ("rank 1", "a") else None)
    monkeypatch.setenv(SECRET, "another")
    assert meeting.read("rank 1") is None


def strangers(secrets):
    os.environ[SECRET] = secrets[dist.get_rank()]
    return refuse_strangers(torch.device("cpu"))


@pytest.mark.parametrize("secrets, found", [
    ("aaa", [[], [], []]), ("aba", [[1], [0, 2], [1]]), (["", "", ""], [[], [], []]),
])  # fmt: skip
def test_every_rank_proves_that_it_knows_the_secret(secrets, found):
    assert run_ranks(strangers, 3, secrets) == found


def listening(address, port, local):
    """[address that this rank listens at] after it has joined, through ``address``, and made a group."""
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), LOCAL_WORLD_SIZE=local)
    start_process_group(900)
    dist.barrier(dist.new_group())
    found = psutil.Process().net_connections("inet")
    return sorted({connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN})


def test_ranks_of_one_machine_listen_on_loopback_only():
    with reserved_port() as port:
        assert run_ranks(listening, 2, socket.gethostname(), port, "2") == [["127.0.0.1"]] * 2
