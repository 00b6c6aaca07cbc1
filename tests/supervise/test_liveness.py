"""Which ranks answer."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from moh_lm.supervise.liveness import UNKNOWN, LivenessCheck, describe
from moh_lm.supervise.secret import SECRET
from tests.distributed import reserved_port, run_ranks


def check_of_three_ranks(hosts):
    """What ranks 0 and 1 find one after the other; rank 2 is not there, and rank 1 stands in a collective."""
    rank = dist.get_rank()
    check = LivenessCheck("test", hosts) if rank < 2 else None
    dist.barrier()
    first = check.unresponsive(1) if rank == 0 else None
    dist.barrier()
    second = (check.unresponsive(1), check.unresponsive(1, known=[2])) if rank == 1 else None
    if check:
        check.end()
    if rank == 0:  # of a store whose machine is lost
        with reserved_port() as port:
            os.environ["MASTER_PORT"] = str(port)
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
            lost = LivenessCheck("test", hosts)
        del store
        return first, (lost.unresponsive(1), lost.unresponsive(1, known=[0]))
    return second


def check_with_a_stranger():
    """What rank 0 finds where a stranger answers for rank 2, which is not there, and tells that rank 1 is lost."""
    os.environ[SECRET] = "of the launch"
    rank, hosts = dist.get_rank(), ["node1", "node2", "node3"]
    check = LivenessCheck("test", hosts) if rank < 2 else None
    if rank == 0:
        for key in ("found 0", "caller 0", "ended", "call 0/2", "1/1", "0/1"):
            check.calling.store.set(key, "" if key[1] == "/" else "here")
    dist.barrier()
    found = check.unresponsive(1) if rank == 0 else None
    dist.barrier()
    if check:
        check.end()
    return found


def test_a_liveness_check_believes_no_stranger():
    first, *_ = run_ranks(check_with_a_stranger, 3)
    assert first == "no answer from node3 (rank 2)"


def test_a_liveness_check_names_the_machines_that_give_no_answer():
    hosts = ["node1", "node2", "node3"]
    (first, lost), second, _ = run_ranks(check_of_three_ranks, 3, hosts)
    assert first == "no answer from node3 (rank 2)" and second == (first, "")
    assert lost == ("no answer from the machine of rank 0 (node1)", "")
    assert describe([1, 2, 3], ["a", "b", "b", "c"]) == "b (ranks 1, 2), c (rank 3)"


@pytest.fixture
def checks(monkeypatch):
    """The checks of six ranks that are all alive, in this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    made = []
    for rank in range(6):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        made.append(LivenessCheck("test", ["node1"] * 6))
    yield made
    for check in made:
        check.dismiss()


def test_of_ranks_that_ask_together_only_one_calls_the_others(checks):
    with ThreadPoolExecutor(6) as ranks:
        assert list(ranks.map(lambda check: check.unresponsive(3), checks)) == [""] * 6
    assert checks[0].calling.store.add("5 was called", 0) == 1


def test_a_check_that_takes_too_long_blames_no_machine(checks):
    checks[0].calling.set("caller 0", "5")  # which never says what it found
    assert checks[0].unresponsive(1) == UNKNOWN
