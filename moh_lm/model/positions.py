"""Positions of tokens: rotary ones for queries and keys (rotary.py has the angles), and a learned table.

Shapes: s sequence, b batch, tp tensor-parallel ranks, d hidden size, e head dimension.
"""

import torch
import torch.nn.functional as F
from torch import nn

from moh_lm.parallel.groups import group_rank, group_size
from moh_lm.parallel.layers import make_parameter
from moh_lm.parallel.mappings import replicate


class RotaryPositions:
    """Rotary positions of the queries and keys of a layer.

    rotary: ``Rotary``. context: ``ContextGroups`` whose ranks have consecutive slices of the sequence, or None.
    """

    def __init__(self, rotary, context=None):
        self.rotary, self.context = rotary, context

    def table(self, x, positions=None, length=None):
        """Return the table that ``query`` and ``key`` need for tokens x [s, b, d].

        positions: int64 [s] or [1, b], all below ``length``; by default those of this rank's slice of the sequence.
        """
        if self.context and positions is None:
            first, length = self.context.rank() * len(x), self.context.size() * len(x)
            positions = torch.arange(first, first + len(x), device=x.device)
        return self.rotary.table(length or len(x), x.dtype, x.device, positions)

    def query(self, query, table):
        """Rotate queries [s, b, h, e] to their positions."""
        return self.rotary.apply_rotary(query, table)

    def key(self, key, table):
        """Rotate keys [s, b, kv, e] to their positions."""
        return self.rotary.apply_rotary(key, table)


class LearnedPositions(nn.Module):
    """Adds e[t] to the embedding of the token at position t of its sequence, or of its document if positions restart.

    Every rank holds the whole table. batch: ``BatchContext``. context: ``ContextGroups``, or None.
    """

    def __init__(self, config, init_std, group, batch, context=None):
        super().__init__()
        self.slices = context.sequence if context else group
        self.weight = make_parameter((config.learned_positions, config.hidden_size), init_std)
        self.rows, self.group, self.batch = config.learned_positions, group, batch

    def forward(self, x, positions=None):
        """Add positions to x [s/tp, b, d]. positions: int64 [b, s]; by default those in documents, or 0 to s - 1."""
        positions = self.batch.positions if positions is None else positions
        if positions is None:
            positions = torch.arange(self.within(len(x) * group_size(self.slices)), device=x.device)[None]
        mine = positions.tensor_split(group_size(self.slices), dim=1)[group_rank(self.slices)]  # [b, s/tp]
        return x + F.embedding(mine.t(), replicate(self.weight, self.group))

    def within(self, length):
        """Return ``length``. Raises ValueError if the table is shorter."""
        if length > self.rows:
            raise ValueError(f"a sequence of {length} tokens: the model has --learned-positions {self.rows}")
        return length
