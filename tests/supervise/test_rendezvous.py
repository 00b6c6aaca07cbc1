"""Ranks that do not meet."""

import socket

import pytest

from moh_lm.config import ConfigError
from moh_lm.supervise import rendezvous
from tests.distributed import free_port


@pytest.fixture
def rendezvous_port(monkeypatch):
    """Variables of rank 0 of three, at a free port."""
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    return place["MASTER_PORT"]


def test_a_port_of_another_program_is_refused_with_the_remedy(rendezvous_port, monkeypatch):
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ConfigError, match=f"MASTER_PORT {port}: is taken by another program.*give another"):
            rendezvous.rendezvous_store()


def test_absent_ranks_are_named(rendezvous_port, monkeypatch):
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_TIMEOUT_S", 1)
    with pytest.raises(ConfigError, match=rf"MASTER_PORT {rendezvous_port}: 2 of 3 ranks \(ranks 1, 2\) have not come"):
        rendezvous.rendezvous_store()


def test_a_rank_that_cannot_begin_ends_those_of_other_machines(rendezvous_port, monkeypatch):
    monkeypatch.setattr(rendezvous, "REFUSAL_TIMEOUT_S", 1)
    store = rendezvous.open_store(1)
    monkeypatch.setenv("RANK", "1")
    rendezvous.refuse()
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match=f"rank 1 on {socket.gethostname()} cannot begin"):
        rendezvous.rendezvous_store()
    del store


def test_a_second_run_at_the_same_port_is_refused(rendezvous_port, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    store = rendezvous.rendezvous_store()
    with pytest.raises(ConfigError, match=f"MASTER_PORT {rendezvous_port}: the ranks of another run meet there"):
        rendezvous.rendezvous_store()
    del store
