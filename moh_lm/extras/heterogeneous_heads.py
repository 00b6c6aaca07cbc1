"""Heads of several widths in one layer, ``--head-dims``: head i has e_i features, and scores over sqrt(e_i).

The paper names them as future work. Weights have a row for each feature and none more. Queries, keys and values are
padded with zeros to the widest head, e, so that every backend takes them; a query is multiplied by sqrt(e / e_i),
since backends divide by sqrt(e). Each head turns by the angles of its own width. Shapes: as of attention.py.
"""

from itertools import accumulate, groupby

import torch
import torch.nn.functional as F

from moh_lm.model.attention import Attention
from moh_lm.model.gates import FORMS
from moh_lm.model.rotary import rotary_of
from moh_lm.parallel.layers import ColumnParallelLinear, Partition


class UnevenAttention(Attention):
    """As ``Attention``, without shared keys. runs: [(features, heads in a row that have as many)] of this rank."""

    by_rows = False

    def make_projections(self, config, init_std):
        own = [head for start, stop in self.heads.ranges for head in range(start, stop)]
        self.runs = [(width, len(list(same))) for width, same in groupby(config.head_dims[head] for head in own)]
        self.rotaries = [rotary_of(config, self.index, width) for width, _ in self.runs]
        self.q_proj, self.k_proj, self.v_proj = (
            ColumnParallelLinear(config.hidden_size, sum(config.head_dims), init_std, self.partition(0, config))
            for _ in range(3)
        )

    def partition(self, dim, config):
        """The rows or columns of this rank's heads; None on one rank."""
        if self.group is None:
            return None
        ends = [0, *accumulate(config.head_dims)]
        return Partition(dim, ends[-1], tuple((ends[start], ends[stop]) for start, stop in self.heads.ranges))

    def split_heads(self, projected):
        """[s, b, features of all heads] -> [s, b, h/tp, e], with zeros behind the features of a head."""
        parts = projected.split([width * count for width, count in self.runs], -1)
        return torch.cat(
            [
                F.pad(part.unflatten(-1, (count, width)), (0, self.head_dim - width))
                for part, (width, count) in zip(parts, self.runs, strict=True)
            ],
            2,
        )

    def of_runs(self, heads):
        """The heads of each run, without padding: [s, b, count, width]."""
        parts = heads.split([count for _, count in self.runs], 2)
        return [part[..., :width] for part, (width, _) in zip(parts, self.runs, strict=True)]

    def placed(self, heads, tables, scaled=False):
        """Heads at the positions of the ``tables``, one for each run; ``scaled``: for the scores."""
        placed = []
        for part, rotary, table in zip(self.of_runs(heads), self.rotaries, tables, strict=True):
            width = part.shape[-1]
            part = rotary.turn(part, table) * ((self.head_dim / width) ** 0.5 if scaled else 1)
            placed.append(F.pad(part, (0, self.head_dim - width)))
        return torch.cat(placed, 2)

    def turned(self, query, table):
        return self.placed(query, table, scaled=True)

    def keys_and_values(self, x, positions=None, length=None):
        tables = [rotary.table(length or x.shape[0], x.dtype, x.device, positions) for rotary in self.rotaries]
        key, value = self.split_heads(self.k_proj(x)), self.split_heads(self.v_proj(x))
        return self.placed(key, tables), value, tables

    def output(self, context):
        return self.o_proj(torch.cat([part.flatten(2) for part in self.of_runs(context)], -1))

    def cache_shape(self, rows, length):
        return rows, self.heads.num_heads, min(self.window or length, length), self.head_dim

    @staticmethod
    def products(config):
        d, total = config.hidden_size, sum(config.head_dims)
        mean = total / config.num_attention_heads
        return 2 * d * mean, 2 * mean, 2 * d * total

    @classmethod
    def activation_bytes(cls, config, width, tp, counted=0):
        """As of ``Attention``: of the rank's heads padded q, k, v and context, and the context without padding; the
        gathered input."""
        heads = 4 * config.num_attention_heads * config.head_dim + sum(config.head_dims)
        if config.heads.head_selection == "mixture" and FORMS[config.heads.routing].reads_queries:
            heads += config.num_attention_heads * config.head_dim * 4 / width  # their norms, in fp32
        return width * (heads / tp + config.hidden_size)
