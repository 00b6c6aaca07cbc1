"""Mixture-of-Head attention: MoH(x_t) = sum_i g_i H_i W_O_i (Eq. 4).

A head is H_i = softmax(q_i k_i^T / sqrt(e)) v_i with q_i = W_Q_i x and so on (Eq. 1 and 2), and the output projection
sums over heads (Eq. 3). The gates g_i therefore multiply the heads before it. The layer is tensor parallel by heads:
every rank holds the same share of the shared and of the routed heads, so that none computes more than another. Files
keep the canonical order, shared heads first; ``HeadPartition`` maps one order to the other.

Shapes: s sequence, b batch, tp tensor-parallel ranks, h query heads, kv key/value heads, d hidden size, e head
dimension.
"""

from torch import nn

from moh_lm.parallel.layers import ColumnParallelLinear, KeyValueParallelLinear, RMSNorm, RowParallelLinear, separate
from moh_lm.parallel.mappings import gather_sequence


class Attention(nn.Module):
    """Self-attention with a gate per head.

    moh_lm/build.py makes the parts and chooses the class. Subclasses change how x is projected (``project``), route
    after the queries are computed (``forward``), or scale the outputs of heads (``output``).
    """

    def __init__(
        self, config, heads, router, core_attention, positions, init_std, output_std, products=separate
    ):  # fmt: skip
        """config: ``ModelConfig`` of the layer. heads: ``HeadPartition``. positions: ``RotaryPositions``. products:
        ``separate`` or ``Joined``, by which queries, keys and values are projected."""
        super().__init__()
        self.head_dim = config.head_dim
        self.make_projections(config, heads, init_std, output_std)
        self.router, self.core_attention, self.positions = router, core_attention, positions
        self.products = products

    def make_projections(self, config, heads, init_std, output_std):
        """Create the weights of queries, keys, values and outputs."""
        d, e = config.hidden_size, config.head_dim
        h, kv = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = ColumnParallelLinear(d, h * e, init_std, heads.partition(0, e))
        self.k_proj = KeyValueParallelLinear(d, kv, e, init_std, heads)
        self.v_proj = KeyValueParallelLinear(d, kv, e, init_std, heads)
        self.q_norm, self.k_norm = (
            RMSNorm(e, config.rms_norm_eps, heads.group) if config.qk_norm else nn.Identity() for _ in range(2)
        )
        self.o_proj = RowParallelLinear(h * e, d, output_std, heads.partition(1, e), heads.group)

    def forward(self, x, inputs, mask=None, replay=None):
        """Apply the layer to x [s/tp, b, d], normalised. Returns its output, [s/tp, b, d], and the ``RouterOutput``.

        inputs: ``RouterInputs``. mask: ``AttentionMask`` of the documents, or None. replay: ``SelectionReplay``, or
        None.
        """
        routing = self.router(x, inputs, replay)
        x = gather_sequence(x, self.o_proj.group)  # [s, b, d]
        table = self.positions.table(x)
        return self.attend(x, *self.project(x, table), table, routing, mask), routing

    def attend(self, x, query, key, value, table, routing, mask):
        """Return the output [s/tp, b, d] for x [s, b, d], given its projections and the ``RouterOutput``."""
        query = self.positions.query(self.q_norm(query), table)
        heads = self.core_attention(query, key, value, routing.gates, routing.selected, mask)  # g_i H_i
        return self.output(heads, x)

    def output(self, heads, x):
        """Project the gated heads [s, b, h/tp, e] to [s/tp, b, d]. x: [s, b, d], the input of the projections."""
        return self.o_proj(heads.flatten(2))

    def project(self, x, table):
        """Project x [s, b, d] to queries [s, b, h/tp, e], keys and values [s, b, kv/tp, e].

        Keys are already normalised and rotated, queries not yet. table: from ``RotaryPositions.table``.
        """
        products = self.products(x, self.k_proj, self.v_proj, self.q_proj)
        key, value, query = (product.unflatten(-1, (-1, self.head_dim)) for product in products)
        return query, self.positions.key(self.k_norm(key), table), value
