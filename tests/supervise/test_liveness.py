"""Which ranks answer."""

import os

import torch.distributed as dist

from moh_lm.supervise.liveness import LivenessCheck, describe
from tests.distributed import free_port, run_ranks


def check_of_three_ranks(hosts):
    """What ranks 0 and 1 find one after the other; rank 2 is not there, and rank 1 stands in a collective."""
    rank = dist.get_rank()
    check = LivenessCheck("test", hosts) if rank < 2 else None
    dist.barrier()
    first = check.unresponsive(1) if rank == 0 else None
    dist.barrier()
    second = check.unresponsive(1) if rank == 1 else None
    if check:
        check.end()
    if rank == 0:  # of a store whose machine is lost
        os.environ["MASTER_PORT"] = str(free_port())
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
        lost = LivenessCheck("test", hosts)
        del store
        return first, lost.unresponsive(1)
    return second


def test_a_liveness_check_names_the_machines_that_give_no_answer():
    hosts = ["node1", "node2", "node3"]
    (first, lost), second, _ = run_ranks(check_of_three_ranks, 3, hosts)
    assert first == second == "no answer from node3 (rank 2)"
    assert lost == "no answer from the machine of rank 0 (node1)"
    assert describe([1, 2, 3], ["a", "b", "b", "c"]) == "b (ranks 1, 2), c (rank 3)"
