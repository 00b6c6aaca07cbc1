"""Mixture-of-Head attention (Eq. 4): MoH(x_t) = sum_i g_i H_i W_O_i.

The output projection sums over heads, so the gates multiply the heads before it. The layer is tensor parallel by heads:
every rank holds the same share of the shared and of the routed heads, since a rank with all of the shared ones would
wait for nobody. Files keep the canonical order, shared heads first; ``Partition`` maps one to the other.

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
        first = leading_heads(config, layer_index)
        size = group_size(group)
        heads = head_ranges(config.num_attention_heads, first, group_rank(group), size)
        shared_by = config.num_attention_heads // config.num_key_value_heads
        key_value_heads = tuple((start // shared_by, -(-stop // shared_by)) for start, stop in heads)
        self.heads = members(heads)
        every = [members(head_ranges(config.num_attention_heads, first, rank, size)) for rank in range(size)]
        self.canonical_order = torch.tensor(sum(every, [])).argsort().tolist()  # of heads gathered rank by rank
        self.num_always_on = first

        def width(ranges, count, dim):
            e = self.head_dim
            return Partition(dim, count * e, tuple((a * e, b * e) for a, b in ranges)) if group is not None else None

        d, query_size = config.hidden_size, config.num_attention_heads * self.head_dim
        key_size = config.num_key_value_heads * self.head_dim
        key_partition = width(key_value_heads, config.num_key_value_heads, 0)
        self.q_proj = ColumnParallelLinear(d, query_size, init_std, width(heads, config.num_attention_heads, 0))
        self.k_proj = ColumnParallelLinear(d, key_size, init_std, key_partition)
        self.v_proj = ColumnParallelLinear(d, key_size, init_std, key_partition)
        self.o_proj = RowParallelLinear(query_size, d, output_std, width(heads, config.num_attention_heads, 1), group)
        self.router = HeadRouter(config, layer_index, init_std, group) if self.selection == "mixture" else None

    def forward(self, x):
        """x: [s/tp, b, d], normalised -> [s/tp, b, d]."""
        gates = balance_loss = counts = None
        learned = self.router is not None and self.router.routing != "query_norm"
        if learned:
            gates, balance_loss, counts = self.router(x)  # [s/tp, b, h]
            gates = gather_sequence(gates, self.group)[..., self.heads]  # [s, b, h/tp]
        x = gather_sequence(x, self.group)  # [s, b, d]
        query, key, value = (self.split_heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.selection == "static":
            gates = self.static_gates(query)
        elif self.router is not None and not learned:
            wide = query.to(torch.promote_types(query.dtype, torch.float32))
            norms = gather_heads(wide.norm(dim=-1), self.group)[..., self.canonical_order]  # [s, b, h]
            gates, balance_loss, counts = self.router(x, query_norms=norms)
            gates = gates[..., self.heads]  # [s, b, h/tp]
        table = rotary_table(query.shape[0], self.head_dim, self.rope_theta, query.dtype, query.device)
        context = moh_attention(rotate(query, table), rotate(key, table), value, gates)  # [s, b, h/tp, e]
        output = self.o_proj(context.flatten(2))  # [s/tp, b, d]
        if balance_loss is None:
            return output
        return attach_loss(output, balance_loss, self.balance_scale, counts, self.router.statistics)

    def static_gates(self, query):
        """1 for the heads that are always on, 0 for the others: [s, b, h/tp]."""
        always_on = torch.tensor([head < self.num_always_on for head in self.heads], device=query.device)
        return always_on.to(query.dtype).expand(query.shape[:-1])

    def split_heads(self, projected):
        return projected.unflatten(-1, (-1, self.head_dim))  # [s, b, heads/tp, e]


def leading_heads(config, layer_index):
    """Heads at the front of the canonical order, to be spread evenly over ranks: the shared, or the static, ones."""
    heads = config.heads
    if heads.head_selection == "all":
        return 0
    shared = heads.num_shared_heads[layer_index]
    return shared + heads.num_active_routed_heads[layer_index] if heads.head_selection == "static" else shared


def head_ranges(num_heads, leading, rank, size):
    """Canonical (start, stop) of the heads of ``rank``: its share of the ``leading`` ones, then of the others."""
    ranges = []
    for start, stop in ((0, leading), (leading, num_heads)):
        share = (stop - start) // size
        if share:
            ranges.append((start + rank * share, start + (rank + 1) * share))
    return tuple(ranges)


def members(ranges):
    return [head for start, stop in ranges for head in range(start, stop)]


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
