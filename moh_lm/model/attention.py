"""Mixture-of-Head attention (Eq. 4): MoH(x_t) = sum_i g_i H_i W_O_i.

The output projection sums over heads, so the gates multiply the heads before it. The layer is tensor parallel by
heads: every rank holds the same share of the shared and of the routed heads, so that none computes more than another.
Files keep the canonical order, shared heads first; ``Partition`` maps one to the other.

Shapes: s sequence, b batch, tp tensor-parallel ranks, h query heads, kv key/value heads, d hidden size, e head
dimension.
"""

import torch
import torch.nn.functional as F
from torch import nn

from moh_lm.kernels.attention import choose_backend, moh_attention
from moh_lm.kernels.cpu_sparse import AttendRows, ProjectRows, SelectedRows, SumRows, weigh
from moh_lm.model.rotary import rotary_of, rotary_table, rotate
from moh_lm.model.router import HeadRouter
from moh_lm.parallel.groups import group_size
from moh_lm.parallel.layers import ColumnParallelLinear, RowParallelLinear
from moh_lm.parallel.local_heads import LocalHeads
from moh_lm.parallel.mappings import gather_heads, gather_sequence


class Attention(nn.Module):
    """Causal self-attention with rotary embeddings and a gate per head.

    ``loss_terms``: of ``HeadRouter``. ``backend``: of ``moh_attention``.
    """

    def __init__(self, config, layer_index, init_std, output_std, loss_terms, group, backend="auto"):
        super().__init__()
        self.backend = backend
        self.active_share = config.active_heads(layer_index) / config.num_attention_heads
        self.head_dim = config.head_dim
        self.rotary = rotary_of(config)
        self.selection = config.heads.head_selection
        self.group = group
        self.heads = LocalHeads(config.num_attention_heads, config.leading_heads(layer_index), group)
        d, e = config.hidden_size, self.head_dim
        query_size, key_size = config.num_attention_heads * e, config.num_key_value_heads * e
        keys = self.heads.partition(0, e, queries_per_key=config.num_attention_heads // config.num_key_value_heads)
        self.q_proj = ColumnParallelLinear(d, query_size, init_std, self.heads.partition(0, e))
        self.k_proj = ColumnParallelLinear(d, key_size, init_std, keys)
        self.v_proj = ColumnParallelLinear(d, key_size, init_std, keys)
        self.o_proj = RowParallelLinear(query_size, d, output_std, self.heads.partition(1, e), group)
        mixture = self.selection == "mixture"
        self.router = HeadRouter(config, layer_index, init_std, group, loss_terms) if mixture else None

    def forward(self, x, documents=None, kept=None):
        """x: [s/tp, b, d], normalised -> [s/tp, b, d], with loss, statistics and selection of the ``HeadRouter``.

        documents: see ``moh_attention``. kept: ``HeadRouter``.
        """
        gates = loss = statistics = selection = selected = None
        length = x.shape[0] * group_size(self.group)
        shape = (length, x.shape[1], self.heads.num_heads // group_size(self.group), self.head_dim)  # of the queries
        backend = choose_backend(self.backend, x.device, x.dtype, shape, self.active_share)
        learned = self.router is not None and self.router.routing != "query_norm"
        if learned:
            gates, loss, statistics, selection = self.router(x, kept)  # [s/tp, b, h]
            gates = self.heads.take(gather_sequence(gates, self.group))  # [s, b, h/tp]
            if selection is not None and backend != "dense":  # dense: the gates of the other heads are 0
                selected = self.local_selection(gather_sequence(selection, self.group))  # [s, b, h/tp]
        x = gather_sequence(x, self.group)  # [s, b, d]
        key, value = (self.split_heads(project(x)) for project in (self.k_proj, self.v_proj))
        table = rotary_table(length, self.rotary, x.dtype, x.device)
        key = rotate(key, table)
        if learned and selected is not None and backend == "cpu_sparse":
            output = self.selected_rows(x, key, value, table, gates, selected, documents)
        else:
            query = self.split_heads(self.q_proj(x))
            if self.selection == "static":
                gates = selected = self.static_gates(query)
            elif self.router is not None and not learned:
                wide = query.to(torch.promote_types(query.dtype, torch.float32))
                norms = self.heads.in_canonical_order(gather_heads(wide.norm(dim=-1), self.group))  # [s, b, h]
                gates, loss, statistics, selection = self.router(x, kept, norms)
                gates = self.heads.take(gates)  # [s, b, h/tp]
                selected = None if selection is None else self.local_selection(selection)
            context = moh_attention(
                rotate(query, table), key, value, gates, selected, self.heads.num_leading, documents, backend
            )  # [s, b, h/tp, e]
            output = self.o_proj(context.flatten(2))  # [s/tp, b, d]
        return output, loss, statistics, selection

    def local_selection(self, routed):
        """Routed experts that the router selected [s, b, E] -> heads of this rank that are on [s, b, h/tp]."""
        return self.heads.take(self.router.per_head(F.pad(routed, (self.router.num_shared, 0), value=1)))

    def selected_rows(self, x, key, value, table, gates, selected, documents):
        """The output [s/tp, b, d] with queries, attention and outputs of the selected rows of the routed heads only."""
        groups = self.heads.num_leading * key.shape[2] // gates.shape[2]  # key/value heads of shared heads alone
        first = groups * gates.shape[2] // key.shape[2]
        split = first * self.head_dim
        rows = SelectedRows(selected[..., first:], documents and documents.starts)
        shared, queries = self.q_proj(
            x, lambda x, weight: (F.linear(x, weight[:split]), ProjectRows.apply(x, weight[split:], rows))
        )
        queries = rotate(queries, [part.flatten(1).index_select(0, rows.position) for part in table])
        heads = AttendRows.apply(queries, key[:, :, groups:], value[:, :, groups:], rows)
        heads = weigh(heads, rows.gather(gates[..., first:]))
        if first == 0:
            return self.o_proj(heads, lambda heads, weight: SumRows.apply(heads, weight, rows))
        shared = rotate(self.split_heads(shared), table)
        context = moh_attention(
            shared, key[:, :, :groups], value[:, :, :groups], gates[..., :first], documents=documents,
            backend="cpu_sparse",
        )  # fmt: skip
        return self.o_proj(
            context.flatten(2),
            lambda x, weight: F.linear(x, weight[:, :split]) + SumRows.apply(heads, weight[:, split:], rows),
        )

    def static_gates(self, query):
        """1 for the heads that are always on, 0 for the others: [s, b, h/tp]."""
        always_on = torch.arange(query.shape[2], device=query.device) < self.heads.num_leading
        return always_on.to(query.dtype).expand(query.shape[:-1])

    def split_heads(self, projected):
        return projected.unflatten(-1, (-1, self.head_dim))  # [s, b, heads/tp, e]
