"""Mixture-of-Head attention (Eq. 4): MoH(x_t) = sum_i g_i H_i W_O_i.

The output projection sums over heads, so the gates multiply the heads before it. The layer is tensor parallel by
heads: every rank holds the same share of the shared and of the routed heads, so that none computes more than another.
Files keep the canonical order, shared heads first; ``Partition`` maps one to the other.

Shapes: s sequence, b batch, tp tensor-parallel ranks, h query heads, kv key/value heads, d hidden size, e head
dimension.
"""

import functools

import torch
from torch import nn

from moh_lm.kernels.attention import moh_attention
from moh_lm.model.router import HeadRouter, attach_loss
from moh_lm.parallel.groups import group_rank, group_size
from moh_lm.parallel.layers import ColumnParallelLinear, Partition, RowParallelLinear
from moh_lm.parallel.mappings import gather_heads, gather_sequence


class Attention(nn.Module):
    """Causal self-attention with rotary embeddings and a gate per head.

    ``balance_scale``: gradient given to the layer's balance loss for each micro-batch; it holds beta of Eq. 8, the
    mean over layers and the mean over micro-batches.
    """

    def __init__(self, config, layer_index, init_std, output_std, balance_scale, group):
        super().__init__()
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta
        self.selection = config.heads.head_selection
        self.balance_scale = balance_scale
        self.group = group
        self.heads = LocalHeads(config.num_attention_heads, config.leading_heads(layer_index), group)
        d, e = config.hidden_size, self.head_dim
        query_size, key_size = config.num_attention_heads * e, config.num_key_value_heads * e
        keys = self.heads.partition(0, e, queries_per_key=config.num_attention_heads // config.num_key_value_heads)
        self.q_proj = ColumnParallelLinear(d, query_size, init_std, self.heads.partition(0, e))
        self.k_proj = ColumnParallelLinear(d, key_size, init_std, keys)
        self.v_proj = ColumnParallelLinear(d, key_size, init_std, keys)
        self.o_proj = RowParallelLinear(query_size, d, output_std, self.heads.partition(1, e), group)
        self.router = HeadRouter(config, layer_index, init_std, group) if self.selection == "mixture" else None

    def forward(self, x, mask=None, kept_selection=None):
        """x: [s/tp, b, d], normalised -> [s/tp, b, d]. mask: see ``moh_attention``. kept_selection: ``HeadRouter``."""
        gates = balance_loss = counts = None
        learned = self.router is not None and self.router.routing != "query_norm"
        if learned:
            gates, balance_loss, counts = self.router(x, kept_selection)  # [s/tp, b, h]
            gates = self.heads.take(gather_sequence(gates, self.group))  # [s, b, h/tp]
        x = gather_sequence(x, self.group)  # [s, b, d]
        query, key, value = (self.split_heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.selection == "static":
            gates = self.static_gates(query)
        elif self.router is not None and not learned:
            wide = query.to(torch.promote_types(query.dtype, torch.float32))
            norms = self.heads.in_canonical_order(gather_heads(wide.norm(dim=-1), self.group))  # [s, b, h]
            gates, balance_loss, counts = self.router(x, kept_selection, norms)
            gates = self.heads.take(gates)  # [s, b, h/tp]
        table = rotary_table(query.shape[0], self.head_dim, self.rope_theta, query.dtype, query.device)
        context = moh_attention(rotate(query, table), rotate(key, table), value, gates, mask)  # [s, b, h/tp, e]
        output = self.o_proj(context.flatten(2))  # [s/tp, b, d]
        if balance_loss is None:
            return output
        return attach_loss(output, balance_loss, self.balance_scale, counts, self.router.statistics)

    def static_gates(self, query):
        """1 for the heads that are always on, 0 for the others: [s, b, h/tp]."""
        always_on = torch.tensor([head < self.heads.leading for head in self.heads.indices], device=query.device)
        return always_on.to(query.dtype).expand(query.shape[:-1])

    def split_heads(self, projected):
        return projected.unflatten(-1, (-1, self.head_dim))  # [s, b, heads/tp, e]


class LocalHeads:
    """The heads of a layer that this rank holds: its share of the ``leading`` ones at the front, then of the others.

    indices: their canonical numbers, in local order. canonical_order: puts the heads of all ranks, gathered rank after
    rank, into canonical order.
    """

    def __init__(self, num_heads, leading, group):
        self.num_heads, self.leading, self.group = num_heads, leading, group
        self.ranges = self.ranges_of(group_rank(group))
        self.indices = [head for start, stop in self.ranges for head in range(start, stop)]
        every = [self.ranges_of(rank) for rank in range(group_size(group))]
        gathered = [head for ranges in every for start, stop in ranges for head in range(start, stop)]
        self.canonical_order = sorted(range(len(gathered)), key=gathered.__getitem__)

    def ranges_of(self, rank):
        """Canonical (start, stop) of the heads of ``rank``."""
        ranges = []
        for start, stop in ((0, self.leading), (self.leading, self.num_heads)):
            share = (stop - start) // group_size(self.group)
            if share:
                ranges.append((start + rank * share, start + (rank + 1) * share))
        return ranges

    def take(self, gates):
        """Gates of all heads in canonical order [..., h] -> of this rank's [..., h/tp]."""
        return gates if self.group is None else gates[..., self.indices]

    def in_canonical_order(self, gathered):
        """[..., h] rank after rank -> canonical order."""
        return gathered if self.group is None else gathered[..., self.canonical_order]

    def partition(self, dim, head_dim, queries_per_key=1):
        """The rows or columns of these heads, or of the key/value heads that they share; None on one rank."""
        if self.group is None:
            return None
        width = head_dim / queries_per_key  # of a query head in this projection
        ranges = tuple((int(start * width), int(stop * width)) for start, stop in self.ranges)
        return Partition(dim, int(self.num_heads * width), ranges)


@functools.lru_cache(maxsize=8)
def rotary_table(seq_length, head_dim, theta, dtype, device):
    """cos and sin of t theta^(-2i/e), each [s, 1, 1, e], angles in fp32 or wider; the halves of e repeat."""
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, dtype=wide, device=device) / head_dim
    position = torch.arange(seq_length, dtype=wide, device=device)
    angle = torch.outer(position, 1.0 / theta**exponent).repeat(1, 2)[:, None, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x, table):
    """Rotary embedding, half-split form: feature i turns with feature i + e/2. x: [s, b, heads, e]."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
