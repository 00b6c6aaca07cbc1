"""Heads of several widths in one layer, ``--head-dims``: head i has e_i features, and divides scores by sqrt(e_i).

The paper names them as future work. Weights have exactly one row for each feature. Queries, keys and values are
padded with zeros to the widest head, e, so that every backend accepts them; a query is multiplied by sqrt(e / e_i),
since backends divide by sqrt(e). Each head is rotated by the angles of its own width. A run is a number of consecutive
heads with the same width. Shapes: see moh_lm/model/attention.py.
"""

from itertools import accumulate, groupby

import torch
import torch.nn.functional as F
from torch import nn

from moh_lm.model.attention import Attention
from moh_lm.model.positions import RotaryPositions
from moh_lm.model.rotary import rotary_of
from moh_lm.parallel.layers import ColumnParallelLinear, Partition, RowParallelLinear


class Runs:
    """The widths of this rank's heads. runs: [(features, number of consecutive heads)]. head_dim: the largest width."""

    def __init__(self, config, heads):
        own = [head for start, stop in heads.ranges for head in range(start, stop)]
        self.runs = [(width, len(list(same))) for width, same in groupby(config.head_dims[head] for head in own)]
        self.head_dim = config.head_dim

    def pad(self, parts):
        """Join the heads of each run [s, b, count, width] to all heads [s, b, h, e], padded with zeros."""
        return torch.cat([F.pad(part, (0, self.head_dim - part.shape[-1])) for part in parts], 2)

    def split(self, features):
        """Split [s, b, features of all heads] into padded heads [s, b, h, e]."""
        parts = features.split([width * count for width, count in self.runs], -1)
        return self.pad(
            part.unflatten(-1, (count, width)) for part, (width, count) in zip(parts, self.runs, strict=True)
        )

    def unpadded(self, heads):
        """Return the heads of each run without padding, [s, b, count, width], from heads [s, b, h, e]."""
        parts = heads.split([count for _, count in self.runs], 2)
        return [part[..., :width] for part, (width, _) in zip(parts, self.runs, strict=True)]


class HeterogeneousAttention(Attention):
    """See ``Attention``; without shared keys."""

    def make_projections(self, config, heads, init_std, output_std):
        self.runs = Runs(config, heads)
        d, size = config.hidden_size, sum(config.head_dims)
        rows = partition(0, config, heads)
        self.q_proj, self.k_proj, self.v_proj = (ColumnParallelLinear(d, size, init_std, rows) for _ in range(3))
        self.q_norm = nn.Identity()
        self.o_proj = OutputOfRuns(size, d, output_std, partition(1, config, heads), heads.group, self.runs)

    def project(self, x, table):
        key, value, query = map(self.runs.split, self.products(x, self.k_proj, self.v_proj, self.q_proj))
        return query, self.positions.key(key, table), value


class OutputOfRuns(RowParallelLinear):
    """The output projection of padded heads: [s, b, h e] -> [s/tp, b, d]. runs: ``Runs``."""

    def __init__(self, input_size, output_size, init_std, partition, group, runs):
        super().__init__(input_size, output_size, init_std, partition, group)
        self.runs = runs

    def forward(self, x):
        heads = x.unflatten(-1, (-1, self.runs.head_dim))
        return super().forward(torch.cat([part.flatten(2) for part in self.runs.unpadded(heads)], -1))


class HeterogeneousPositions(RotaryPositions):
    """See ``RotaryPositions``; each run has a table. A query is scaled for the scores of its own width."""

    def __init__(self, config, layer_index, heads, rotary, context=None):
        super().__init__(rotary, context)
        self.runs = Runs(config, heads)
        self.of_runs = [RotaryPositions(rotary_of(config, layer_index, width), context) for width, _ in self.runs.runs]

    def table(self, x, positions=None, length=None):
        return [run.table(x, positions, length) for run in self.of_runs]

    def query(self, query, table):
        return self.runs.pad(
            positions.query(part, own) * (self.runs.head_dim / part.shape[-1]) ** 0.5
            for positions, part, own in zip(self.of_runs, self.runs.unpadded(query), table, strict=True)
        )

    def key(self, key, table):
        return self.runs.pad(
            positions.key(part, own)
            for positions, part, own in zip(self.of_runs, self.runs.unpadded(key), table, strict=True)
        )


def partition(dim, config, heads):
    """Return the ``Partition`` of this rank's heads, or None on one rank."""
    if heads.group is None:
        return None
    ends = [0, *accumulate(config.head_dims)]
    return Partition(dim, ends[-1], tuple((ends[start], ends[stop]) for start, stop in heads.ranges))
