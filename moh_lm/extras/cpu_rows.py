"""The attention layer on a CPU: computes queries and outputs of the selected rows only.

If the router chooses heads before the queries are made, a head needs queries, attention and outputs only for the tokens
that use it; with ``--routed-keys selected`` also keys and values. On a CPU, at short lengths, this saves as much as
head-sparse attention itself. The rows are those of cpu_sparse.py. Heads of key/value groups that every token uses go
through the usual products.
"""

import torch.nn.functional as F

from moh_lm.extras.cpu_sparse import CPU_SPARSE, AttendRows, ProjectRows, SelectedRows, SumRows, weigh
from moh_lm.kernels.gated_attention import gated_attention
from moh_lm.model.attention import Attention
from moh_lm.parallel.mappings import gather_sequence


class CPURowAttention(Attention):
    """See ``Attention``. Training computes rows; evaluation and a dense warm-up use the core attention."""

    def forward(self, x, inputs, mask=None, replay=None):
        if inputs.dense_warmup or not self.training:
            return super().forward(x, inputs, mask, replay)
        routing = self.router(x, inputs, replay)
        x = gather_sequence(x, self.o_proj.group)  # [s, b, d]
        mask = self.core_attention.visible(x, None, mask)
        return self.output_of_rows(x, routing.gates, routing.selected, mask), routing

    def output_of_rows(self, x, gates, selected, mask):
        """Return [s/tp, b, d]. x: [s, b, d]. gates, selected: [s, b, h/tp]. mask: ``AttentionMask``, or None."""
        own_keys, runs = self.core_attention.own_keys, self.k_proj.runs
        by_rows = own_keys and not runs and self.k_proj.weight.shape == self.q_proj.weight.shape
        # Key/value heads of shared heads alone, and their query heads. Runs differ between ranks, and q_norm is
        # collective.
        groups = first = 0 if runs else self.core_attention.num_shared
        table = self.positions.table(x)
        if not by_rows:
            key, value = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.k_proj, self.v_proj))
            key = self.positions.key(self.k_norm(key), table)
            groups = groups * key.shape[2] // gates.shape[2]
            first = groups * gates.shape[2] // key.shape[2]
        split = first * self.head_dim
        rows = SelectedRows(selected[..., first:], mask and mask.starts, own_keys)

        def project(x, weight):
            return F.linear(x, weight[:split]), ProjectRows.apply(x, weight[split:], rows)

        shared, queries = self.q_proj(x, project)
        if by_rows:
            (key, keys), (value, values) = self.k_proj(x, project), self.v_proj(x, project)
            key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in (key, value))
            key = self.positions.key(self.k_norm(key), table)
        table_of_rows = [part.flatten(1).index_select(0, rows.position) for part in table]
        queries = self.positions.query(self.q_norm(queries), table_of_rows)
        if by_rows:
            keys = self.positions.key(self.k_norm(keys), table_of_rows)
        else:
            keys, values = key[:, :, groups:], value[:, :, groups:]
            if own_keys:
                keys, values = rows.gather(keys), rows.gather(values)
        heads = AttendRows.apply(queries, keys, values, rows)
        heads = weigh(heads, rows.gather(gates[..., first:]))
        if first == 0:
            return self.o_proj(heads, lambda heads, weight: SumRows.apply(heads, weight, rows))
        shared = self.positions.query(self.q_norm(shared.unflatten(-1, (-1, self.head_dim))), table)
        context = gated_attention(
            shared, key[:, :, :groups], value[:, :, :groups], gates[..., :first], mask=mask, backend=CPU_SPARSE
        )
        return self.o_proj(
            context.flatten(2),
            lambda x, weight: F.linear(x, weight[:, :split]) + SumRows.apply(heads, weight[:, split:], rows),
        )
