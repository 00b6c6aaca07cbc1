"""Copies of weights on several ranks, one of which may hold other bits."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from moh_lm.training.replicas import Replicas
from tests.distributed import run_ranks


def found(lowest):
    """What the ranks find before and after a bit of rank 1 flips, in weights whose bits sum to ``lowest`` and to 1."""
    weights = [torch.tensor([number]).view(torch.float64) for number in (lowest, 1)]
    for weight in weights:
        weight.tensor_partition = None
    named, groups = list(zip("ab", weights, strict=True)), SimpleNamespace(data=dist.group.WORLD, tensor=None)
    replicas = Replicas(named, [], [], SimpleNamespace(zero_stage=1), groups)
    before = [differ.item() for differ in replicas.differ()], replicas.differences()
    if dist.get_rank() == 1:
        weights[0].view(torch.int64)[0] ^= 1
    return *before, [differ.item() for differ in replicas.differ()], replicas.differences()


def test_the_rank_whose_bits_are_not_those_of_most_is_named():
    said = ["rank 1 holds another a than rank 0"]
    assert run_ranks(found, 3, torch.iinfo(torch.int64).min) == [([False], [], [True], said)] * 3
