"""Context parallelism: several ranks share a sequence, for contexts that one device cannot hold.

Between layers each of the cp ranks holds a contiguous part of the sequence. Attention needs whole sequences but can
work on few heads. The ranks therefore exchange tokens for heads before attention, and heads for tokens after it
(Ulysses: Jacobs et al. 2023, arXiv 2309.14509). Every other layer works on its own tokens. Weights are whole on every
rank, and ZeRO shards them over context- and data-parallel ranks together.

    queries of all heads, own tokens   [s/cp, b, h, e]  ->  [s, b, h/cp, e]   own heads, all tokens

Every rank gets the same share of the always-on heads and of the others, so that none computes more than another.

Shapes: s sequence, b batch, h heads of this tensor-parallel rank, cp ranks that share a sequence.
"""

import functools
import math
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from moh_lm.parallel.mappings import exchange


class ContextGroups(NamedTuple):
    """ranks: the ranks that share a sequence and hold the same shards. sequence: these and their tensor-parallel
    neighbours, in the order of the sequence slices that they hold between layers."""

    ranks: dist.ProcessGroup
    sequence: dist.ProcessGroup

    def size(self):
        return dist.get_world_size(self.ranks)

    def rank(self):
        return dist.get_rank(self.ranks)


def local_shard(tensor, context):
    """Return the tokens of this rank, [b, s/cp] of [b, s]."""
    return tensor if context is None else tensor.chunk(context.size(), dim=1)[context.rank()]


def order_of_ranks(num_heads, leading, size):
    """Return head numbers in the order of the ``size`` ranks: for each rank its leading heads, then its others."""
    parts = [range(leading), range(leading, num_heads)]
    shares = [(part, len(part) // size) for part in parts]
    return [head for rank in range(size) for part, n in shares for head in part[rank * n : (rank + 1) * n]]


def keys_of_ranks(order, shared_by, size):
    """Return the numbers of the key/value heads, each shared by ``shared_by`` heads, that the ranks' heads need, in the
    ``order`` of these heads. Each entry serves the same number of consecutive heads, so a key/value head may occur more
    than once."""
    keys, share = [head // shared_by for head in order], len(order) // size
    ranks = [keys[first : first + share] for first in range(0, len(keys), share)]
    return keys[:: math.gcd(*(len(list(run)) for rank in ranks for _, run in groupby(rank)))]


def picked(tensor, dim, numbers):
    """Return the slices with these ``numbers`` along ``dim``, in their order."""
    index = on_device.__wrapped__ if torch.compiler.is_compiling() else on_device  # in a graph it is a constant
    return tensor.index_select(dim, index(tuple(numbers), tensor.device))


@functools.cache  # a CUDA graph may read any of them later
def on_device(numbers, device):
    """Return an index as a tensor that is copied once. A list would be copied, and wait for the GPU, in each call."""
    return torch.tensor(numbers, device=device)


class UlyssesExchange:
    """Exchanges tokens for heads and back in a layer whose first ``leading`` of ``num_heads`` heads are always on."""

    def __init__(self, num_heads, leading, context):
        self.num_heads, self.context = num_heads, context
        self.size = context.size()
        self.num_always_on = leading // self.size
        self.order = order_of_ranks(num_heads, leading, self.size)
        self.places = sorted(range(num_heads), key=self.order.__getitem__)  # where each head is in that order

    def own(self, per_head):
        """Return the rows of this rank's heads, [h/cp, ...], from a tensor with a row for every head, [h, ...]."""
        return picked(per_head, 0, self.order).chunk(self.size)[self.context.rank()]

    def to_heads(self, *tensors):
        """Exchange each [s/cp, b, heads, width] for [s, b, heads/cp, width], in one message; of one dtype. Fewer heads
        than ``num_heads`` are key/value heads: those that several ranks need are copied (``keys_of_ranks``)."""
        parts = []
        for tensor in tensors:
            order = keys_of_ranks(self.order, self.num_heads // tensor.shape[2], self.size)
            dealt = picked(tensor, 2, order).unflatten(2, (self.size, -1))  # [s/cp, b, cp, heads/cp, width]
            parts.append(dealt.movedim(2, 0))
        shapes = [part.shape[3:] for part in parts]
        sent = torch.cat([part.flatten(3) for part in parts], dim=3)
        received = exchange(sent, self.context.ranks).flatten(0, 1)  # [s, b, widths of all]
        split = received.split([shape.numel() for shape in shapes], dim=2)
        # Copies, so that keeping one of them does not keep the memory of the others.
        return [part.unflatten(2, shape).contiguous() for part, shape in zip(split, shapes, strict=True)]

    def to_tokens(self, heads):
        """Exchange [s, b, h/cp, e] for [s/cp, b, h, e]."""
        received = exchange(heads.unflatten(0, (self.size, -1)), self.context.ranks)  # [cp, s/cp, b, h/cp, e]
        return picked(received.movedim(0, 2).flatten(2, 3), 2, self.places)


class UlyssesAttention(nn.Module):
    """Core attention of whole sequences and this rank's share of the heads. core: a ``CoreAttention``."""

    def __init__(self, core, exchange):
        super().__init__()
        self.core, self.exchange = core, exchange

    def forward(self, query, key, value, gates=None, selected=None, mask=None):
        """See ``CoreAttention``. Inputs and output hold this rank's tokens and all heads. mask: for whole sequences."""
        query, key, value = self.exchange.to_heads(query, key, value)
        if gates is not None:
            per_head = [gates] if selected is None else [gates, selected.to(gates.dtype)]
            per_head = self.exchange.to_heads(*(part.unsqueeze(-1) for part in per_head))
            gates, selected = (*(part.squeeze(-1) for part in per_head), None)[:2]
        return self.exchange.to_tokens(self.core(query, key, value, gates, selected, mask))
