"""How the layers of a model are cut into pipeline stages."""

import random

import pytest
from deepspeed.runtime.utils import partition_balanced

from moh_lm.cost.layers import stage_bounds


@pytest.mark.parametrize("seed", range(5))
def test_stages_are_those_of_deepspeeds_balanced_partition(seed):
    generator = random.Random(seed)
    for _ in range(100):
        costs = [generator.choice((0, 7, 7, 7, generator.randrange(10), generator.randrange(10**9))) for _ in range(12)]
        costs, stages = costs[: generator.randint(1, 12)], generator.randint(1, 8)
        expected = partition_balanced([max(1, cost) for cost in costs], stages)
        assert stage_bounds(costs, stages) == list(map(int, expected)), (costs, stages)
