"""The attention layer on a CPU: queries and outputs of the selected rows only.

Where the router chooses the heads before the queries are made, a head needs queries, attention and outputs of the
tokens that use it; with ``--routed-keys selected`` keys and values of them only. On a CPU that saves as much as
head-sparse attention itself at short lengths. The rows are those of moh_lm/extras/cpu_sparse.py. Heads of key/value
groups that every token uses go through the usual products.
"""

import torch.nn.functional as F

from moh_lm.extras.cpu_sparse import AttendRows, ProjectRows, SelectedRows, SumRows, weigh
from moh_lm.kernels.gated_attention import moh_attention
from moh_lm.parallel.mappings import gather_sequence


def output_of_rows(layer, x, gates, selected, documents):
    """What ``layer``, an ``Attention``, makes of x [s/tp, b, d]: [s/tp, b, d].

    gates, selected: [s, b, h/tp], of ``Attention.route``. documents: ``AttentionMask``, or None.
    """
    x = gather_sequence(x, layer.group)  # [s, b, d]
    documents = layer.sees(documents, x, "cpu_sparse")
    by_rows = layer.own_keys and not layer.kv_replication and layer.k_proj.weight.shape == layer.q_proj.weight.shape
    # Key/value heads of shared heads alone, and their query heads. Runs differ between ranks, and q_norm is collective.
    groups = first = 0 if layer.kv_replication else layer.heads.num_leading
    if not by_rows:
        key, value, table = layer.keys_and_values(x)
        groups = groups * key.shape[2] // gates.shape[2]
        first = groups * gates.shape[2] // key.shape[2]
    split = first * layer.head_dim
    rows = SelectedRows(selected[..., first:], documents and documents.starts, layer.own_keys)

    def project(x, weight):
        return F.linear(x, weight[:split]), ProjectRows.apply(x, weight[split:], rows)

    shared, queries = layer.q_proj(x, project)
    if by_rows:
        (key, keys), (value, values) = layer.k_proj(x, project), layer.v_proj(x, project)
        table = layer.positions.table(x.shape[0], x.dtype, x.device)
        key, value = layer.positions.turn(layer.k_norm(layer.split_heads(key)), table), layer.split_heads(value)
    table_of_rows = [part.flatten(1).index_select(0, rows.position) for part in table]
    queries = layer.positions.turn(layer.q_norm(queries), table_of_rows)
    if by_rows:
        keys = layer.positions.turn(layer.k_norm(keys), table_of_rows)
    else:
        keys, values = key[:, :, groups:], value[:, :, groups:]
        if layer.own_keys:
            keys, values = rows.gather(keys), rows.gather(values)
    heads = AttendRows.apply(queries, keys, values, rows)
    heads = weigh(heads, rows.gather(gates[..., first:]))
    if first == 0:
        return layer.o_proj(heads, lambda heads, weight: SumRows.apply(heads, weight, rows))
    shared = layer.positions.turn(layer.q_norm(layer.split_heads(shared)), table)
    context = moh_attention(
        shared, key[:, :, :groups], value[:, :, :groups], gates[..., :first], documents=documents, backend="cpu_sparse"
    )  # fmt: skip
    return layer.o_proj(
        context.flatten(2),
        lambda x, weight: F.linear(x, weight[:, :split]) + SumRows.apply(heads, weight[:, split:], rows),
    )
