"""Where a layer's tokens are: the kinds of --position, one for each layer.

    rotary    queries and keys turn by their positions (rotary.py)
    cope      each query counts the keys that matter to it, and scores depend on the counts (cope.py)
    learned   e[t] is added to the embedding of the token at position t: ``LearnedPositions``
    none      nothing; the causal mask alone tells positions apart (Kazemnejad et al. 2023, arXiv 2305.19466)

Shapes: s sequence, b batch, tp tensor-parallel ranks, d hidden size.
"""

import torch
import torch.nn.functional as F
from torch import nn

from moh_lm.model.rotary import rotary_of
from moh_lm.parallel.groups import group_rank, group_size
from moh_lm.parallel.layers import make_parameter
from moh_lm.parallel.mappings import replicate


def encoding_of(config, layer_index):
    """What turns the queries and keys of a layer: a ``Rotary``, or ``Unturned``."""
    return rotary_of(config) if config.position[layer_index] == "rotary" else Unturned()


class Unturned:
    """An encoding as ``Rotary`` that leaves queries and keys as they are."""

    def table(self, length, dtype, device, positions=None):
        return ()

    def turn(self, x, table):
        return x


class LearnedPositions(nn.Module):
    """A table over the positions in a sequence, or in each document where attention is reset at documents.

    documents: the ``Documents`` of the micro-batch. Every tensor-parallel rank holds the whole table.
    """

    def __init__(self, config, init_std, group, documents):
        super().__init__()
        self.weight = make_parameter((config.learned_positions, config.hidden_size), init_std)
        self.rows, self.group, self.documents = config.learned_positions, group, documents

    def forward(self, x, positions=None):
        """Embeddings x [s/tp, b, d] with their positions added. positions: int64 [b, s], or None for those of the
        documents, or 0 to s - 1. Raises ValueError for a sequence that is longer than the table."""
        length = x.shape[0] * group_size(self.group)
        positions = self.documents.positions if positions is None else positions
        if positions is None:
            self.check(length)
            positions = torch.arange(length, device=x.device)[None]
        mine = positions.tensor_split(group_size(self.group), dim=1)[group_rank(self.group)]  # [b, s/tp]
        return x + F.embedding(mine.t(), replicate(self.weight, self.group))

    def check(self, length):
        if length > self.rows:
            raise ValueError(f"a sequence of {length} tokens: the model has --learned-positions {self.rows}")
