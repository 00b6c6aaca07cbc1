"""Routing by the norms of queries (``--routing query_norm``, Eq. 9 and 10): the router follows the query projection."""

from moh_lm.model.attention import Attention
from moh_lm.parallel.mappings import gather_heads, gather_sequence


class QueryNormAttention(Attention):
    """See ``Attention``. Each rank computes the norms of its own heads; the router reads those of all heads."""

    def forward(self, x, inputs, mask=None, replay=None):
        x = gather_sequence(x, self.o_proj.group)  # [s, b, d]
        table = self.positions.table(x)
        query, key, value = self.project(x, table)
        routing = self.router(self.norms(query), inputs, replay)
        return self.attend(x, query, key, value, table, routing, mask), routing

    def norms(self, query):
        """Map this rank's queries [s, b, h/tp, e] to the norms of all heads, [s, b, h]."""
        return self.router.heads.in_canonical_order(gather_heads(self.router.norms(query), self.o_proj.group))
