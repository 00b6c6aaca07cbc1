"""The heads of a layer that a tensor-parallel rank holds.

Every rank holds the same share of the always-on heads and of the other heads, so that no rank computes more than
another. Files keep the canonical order, in which always-on heads come first; ``HeadPartition`` maps one order to the
other.

A rank also holds whole key/value heads. If there are fewer of them than ranks, it holds all of them and uses those that
its query heads need.

Shapes: tp tensor-parallel ranks, h query heads.
"""

from itertools import groupby

import torch

from moh_lm.parallel.groups import group_rank, group_size
from moh_lm.parallel.layers import Partition


class HeadPartition:
    """The heads of a layer that this rank holds: first its share of the ``always_on`` heads, then its share of the
    others.

    ranges: (start, stop) of their canonical numbers, in local order; the first ``num_always_on`` are always on.
    """

    def __init__(self, num_heads, always_on, group):
        self.num_heads, self.always_on, self.group = num_heads, always_on, group
        self.num_always_on = always_on // group_size(group)
        self.ranges, rank = [], group_rank(group)
        for start, stop in ((0, always_on), (always_on, num_heads)):
            share = (stop - start) // group_size(group)
            if share:
                self.ranges.append((start + rank * share, start + (rank + 1) * share))

    def take(self, gates):
        """Return this rank's gates [..., h/tp] of those of all heads in canonical order [..., h]."""
        if self.group is None:
            return gates
        return torch.cat([gates[..., start:stop] for start, stop in self.ranges], dim=-1)

    def in_canonical_order(self, gathered):
        """Reorder [..., h] from rank order to canonical order: the always-on heads of all ranks, then the others."""
        if self.group is None:
            return gathered
        of_ranks = gathered.unflatten(-1, (group_size(self.group), -1))  # [..., tp, h/tp]
        return torch.cat([part.flatten(-2) for part in of_ranks.tensor_split([self.num_always_on], dim=-1)], dim=-1)

    def kv_replication(self, queries_per_key):
        """Return [(key/value head, number of consecutive query heads that share it)] for this rank's query heads. The
        numbers are 1 if they would all be equal."""
        numbers = [head // queries_per_key for start, stop in self.ranges for head in range(start, stop)]
        runs = [(key, len(list(run))) for key, run in groupby(numbers)]
        return [(key, 1) for key, _ in runs] if len({count for _, count in runs}) == 1 else runs

    def partition(self, dim, head_dim, queries_per_key=1):
        """Return the ``Partition`` of these heads, or of the key/value heads that they share; None on one rank."""
        if self.group is None:
            return None

        def place(head):  # a whole number: ranks hold whole key/value heads
            return head * head_dim // queries_per_key

        ranges = tuple((place(start), place(stop)) for start, stop in self.ranges)
        return Partition(dim, place(self.num_heads), ranges)
