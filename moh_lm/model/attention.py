"""Mixture-of-Head attention: MoH(x_t) = sum_i g_i H_i W_O_i (Eq. 4).

A head is H_i = softmax(q_i k_i^T / sqrt(e)) v_i with q_i = W_Q_i x and so on (Eq. 1 and 2), and the output projection
sums over heads (Eq. 3). So the gates g_i multiply the heads before it. The layer goes in three steps, which training,
generation and the tools that look at heads share:

    project    x -> queries and keys (normalised head by head with --qk-norm), values, and by the router the gates and
               the heads in use
    attend     -> g_i H_i of every head
    output     -> the sum over heads of (g_i H_i) W_O_i

The layer answers for itself: what it costs, what it keeps for the backward pass, what a cache of it holds. It is tensor
parallel by heads: every rank holds the same share of the shared and of the routed heads, so that none computes more
than another. Files keep the canonical order, shared heads first; ``HeadPartition`` maps one to the other.

Shapes: s sequence, b batch, tp tensor-parallel ranks, h query heads, kv key/value heads, d hidden size, e head
dimension, E routed experts.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from moh_lm.cost.attention import AttentionCost
from moh_lm.extras.cpu_rows import output_of_rows
from moh_lm.kernels.gated_attention import choose_backend, moh_attention
from moh_lm.kernels.masks import AttentionMask, document_mask, mean_keys, narrow
from moh_lm.model.positions import ContextualPositions
from moh_lm.model.rotary import rotary_of
from moh_lm.model.router import HeadRouter, RouterOutput
from moh_lm.parallel.groups import group_size
from moh_lm.parallel.head_partition import HeadPartition
from moh_lm.parallel.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear
from moh_lm.parallel.mappings import gather_heads, gather_sequence, replicate
from moh_lm.parallel.ulysses import UlyssesExchange


class Projected(NamedTuple):
    """What tokens ask, are asked and bring. query: [s, b, h/tp, e], key and value [s, b, kv/tp, e], both at their
    positions. gates: [s, b, h/tp], or None for 1. selected: [s, b, h/tp], 0 or 1, the heads in use, or None for all.
    routed: ``RouterOutput``, or None."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gates: torch.Tensor | None
    selected: torch.Tensor | None
    routed: RouterOutput | None

    def in_use(self):
        """The heads in use, bool [s, b, h/tp]."""
        if self.selected is None:
            return self.query.new_ones(self.query.shape[:3], dtype=torch.bool)
        return self.selected != 0


class Attention(AttentionCost, nn.Module):
    """Self-attention with a gate per head.

    loss_terms, context: of ``HeadRouter``. backend: of ``choose_backend``. positions: an encoding like ``Rotary``, by
    default that of ``config``. causal: whether a token sees only those before it, and itself.

    one_cache: whether what is kept of a token is its key and its value. by_rows: whether row_path.py computes it.
    """

    one_cache, by_rows = False, True

    def __init__(
        self, config, layer_index, init_std, output_std, loss_terms, group, backend="auto", positions=None, causal=True,
        context=None,
    ):  # fmt: skip
        super().__init__()
        config = config.of_layer(layer_index)
        self.backend = backend
        self.active_share = config.active_heads(layer_index) / config.num_attention_heads
        self.head_dim, self.query_dim = config.head_dim, config.query_dim
        self.positions = positions or rotary_of(config, layer_index)
        self.causal = causal
        self.window = config.window[layer_index]
        self.index, self.entropy = layer_index, None  # of moh_lm.extras.entropy_windows, where it is measured
        self.selection, self.own_keys = config.heads.head_selection, config.own_keys(layer_index)
        self.group = group
        self.heads = HeadPartition(config.num_attention_heads, config.leading_heads(layer_index), group)
        local = config.num_attention_heads // group_size(group), self.heads.num_leading
        self.exchange = UlyssesExchange(*local, context) if context else None
        self.ranks = group_size(group) * (self.exchange.size if context else 1)  # that share a sequence
        self.num_leading = (self.exchange or self.heads).num_leading  # of the heads whose scores this rank makes
        cope = config.position[layer_index] == "cope"
        table_std = init_std / math.sqrt(config.width_ratio)  # no sum over the width: see parameter_groups
        self.cope = ContextualPositions(config, table_std, self.heads, self.exchange) if cope else None
        self.make_projections(config, init_std)
        size, columns = sum(config.widths_of_heads()), self.partition(1, config)
        self.o_proj = RowParallelLinear(size, config.hidden_size, output_std, columns, group)
        mixture = config.heads.head_selection == "mixture"
        self.router = HeadRouter(config, layer_index, init_std, group, loss_terms, context) if mixture else None
        self.reads_queries = mixture and self.router.form.reads_queries
        by_rows = self.by_rows and mixture and not self.reads_queries and context is None
        self.selects_first = by_rows and self.router.layer.num_routed > 0

    def make_projections(self, config, init_std):
        """The weights of queries, keys and values."""
        d, e = config.hidden_size, self.head_dim
        shared_by = config.num_attention_heads // config.num_key_value_heads
        few_keys = config.num_key_value_heads < group_size(self.group)  # every rank holds all of them
        self.kv_replication = self.heads.kv_replication(shared_by) if few_keys else None
        keys = None if few_keys else self.heads.partition(0, e, queries_per_key=shared_by)
        self.q_proj = ColumnParallelLinear(d, config.num_attention_heads * e, init_std, self.heads.partition(0, e))
        self.k_proj = ColumnParallelLinear(d, config.num_key_value_heads * e, init_std, keys)
        self.v_proj = ColumnParallelLinear(d, config.num_key_value_heads * e, init_std, keys)
        self.q_norm, self.k_norm = (
            RMSNorm(e, config.rms_norm_eps, self.group) if config.qk_norm else nn.Identity() for _ in range(2)
        )

    def partition(self, dim, config):
        """The rows or columns of this rank's heads, in values and outputs; None on one rank."""
        return self.heads.partition(dim, self.head_dim)

    def forward(self, x, documents=None, replay=None):
        """x: [s/tp, b, d], normalised -> [s/tp, b, d], and the ``RouterOutput`` of the router, or None.

        documents: ``AttentionMask`` that no token sees beyond, or None. replay: ``SelectionReplay``, or None.
        """
        backend = self.chosen_backend(x)
        if backend == "cpu_sparse" and self.selects_first and not self.rests() and self.entropy is None:
            gates, selected, routed = self.route(x, replay)
            return output_of_rows(self, x, gates, selected, documents), routed
        projected = self.project(x, replay=replay, needs_selection=self.own_keys or backend != "dense")
        if self.exchange is None:
            return self.output(self.attend(projected, documents, backend)), projected.routed
        attended = self.attend(self.whole_sequences(projected), documents, backend)
        return self.output(self.exchange.to_tokens(attended)), projected.routed

    def rests(self):
        """Whether all heads are in use, in a dense warm-up."""
        return self.router is not None and self.router.resting

    def chosen_backend(self, x):
        """What computes the attention of x [s/tp, b, d]."""
        length = x.shape[0] * self.ranks
        shape = (length, x.shape[1], self.heads.num_heads // self.ranks, self.query_dim)  # of the queries
        share = (1.0 if self.rests() else self.active_share) * share_of_scores(length, self.window)
        in_a_range = self.causal and self.cope is None  # else the backend is dense
        compiled = torch.compiler.is_compiling()
        return choose_backend(self.backend, x.device, x.dtype, shape, share, in_a_range, self.own_keys, compiled)

    def whole_sequences(self, projected):
        """``Projected`` of this rank's tokens and all heads -> of all tokens and its share of the heads."""
        query, key, value = self.exchange.to_heads(*projected[:3])
        per_head = [part.to(projected.gates.dtype).unsqueeze(-1) for part in projected[3:5] if part is not None]
        per_head = [part.squeeze(-1) for part in self.exchange.to_heads(*per_head)] if per_head else []
        gates, selected = (*per_head, None, None)[:2]
        return Projected(query, key, value, gates, selected, projected.routed)

    def project(self, x, positions=None, length=None, replay=None, needs_selection=True):
        """``Projected`` of x [s/tp, b, d], normalised.

        positions: int64 [s] or [1, b], all below ``length``; None: 0 to s - 1. Without ``needs_selection`` the heads
        in use may be left out where gates of 0 say as much.
        """
        gates = selected = routed = None
        if self.router is not None and not self.reads_queries:
            gates, selected, routed = self.route(x, replay, needs_selection)
        x = gather_sequence(x, self.group)  # [s, b, d], or with context parallelism [s/cp, b, d]
        if self.exchange and positions is None:
            first, length = self.exchange.context.rank() * len(x), self.exchange.size * len(x)
            positions = torch.arange(first, first + len(x), device=x.device)
        key, value, table = self.keys_and_values(x, positions, length)
        query = self.queries(x)
        if self.selection == "static":
            gates = selected = self.static_gates(query)
        elif self.reads_queries:
            norms = self.heads.in_canonical_order(gather_heads(self.router.norms(query), self.group))  # [s, b, h]
            gates, routed = self.router(x, replay, norms)
            gates = self.heads.take(gates)  # [s, b, h/tp]
            if routed is not None and self.router.layer.num_routed:
                selected = self.heads.take(self.router.heads_in_use(routed.selection))
        return Projected(self.turned(query, table), key, value, gates, selected, routed)

    def route(self, x, replay, needs_selection=True):
        """Gates [s, b, h/tp], heads in use [s, b, h/tp] or None for all, and ``RouterOutput``, by the router."""
        gates, routed = self.router(x, replay)  # [s/tp, b, h]
        gates, selected = self.heads.take(gather_sequence(gates, self.group)), None
        if routed is not None and needs_selection and self.router.layer.num_routed:
            selection = gather_sequence(routed.selection, self.group)  # [s, b, E]
            selected = self.heads.take(self.router.heads_in_use(selection))
        return gates, selected, routed

    def queries(self, x):
        """Of x [s, b, d], before norm and positions: [s, b, h/tp, e]."""
        return self.split_heads(self.q_proj(x))

    def turned(self, query, table):
        """Queries at the positions of the ``table``."""
        return self.positions.turn(self.q_norm(query), table)

    def keys_and_values(self, x, positions=None, length=None):
        """Keys at their positions and values [s, b, kv/tp, e] of x [s, b, d], and the table of the positions.

        With fewer key/value heads than ranks there is one for each of ``kv_replication``, or for each query head.
        """
        product = self.whole if self.kv_replication else None  # the ranks use the same weight for other heads
        key, value = (self.split_heads(project(x, product)) for project in (self.k_proj, self.v_proj))
        if self.kv_replication:
            runs = self.kv_replication
            key, value = (
                torch.cat([part[:, :, key : key + 1].expand(-1, -1, count, -1) for key, count in runs], dim=2)
                for part in (key, value)
            )
        table = self.positions.table(length or x.shape[0], x.dtype, x.device, positions)
        return self.positions.turn(self.k_norm(key), table), value, table

    def whole(self, x, weight):
        """A product that every rank makes; its gradient is the sum over their heads."""
        return F.linear(x, replicate(weight, self.group))

    def attend(self, projected, documents=None, backend="dense"):
        """g_i H_i of every head: [s, b, h/tp, e]. documents: ``AttentionMask``, or None. backend: any but ``auto``."""
        seen = self.sees(documents, projected.query, backend, projected.key)
        if self.entropy is not None and self.training:
            self.entropy += entropy_sums(projected.query, projected.key, seen)
        own_keys = self.own_keys and projected.selected is not None
        return moh_attention(*projected[:5], self.num_leading, seen, backend, self.causal, own_keys)

    def sees(self, documents, x, backend, key=None):
        """``AttentionMask`` of what tokens x [s, b, ...] see of ``documents`` in the window of the layer, or None.

        Where positions are counted, x is their queries, and the mask what is added to the scores.
        """
        seen = narrow(documents, self.window, x, masked=backend == "dense")
        return self.cope.narrow(x, key, seen) if self.cope else seen

    def output(self, context):
        """The sum over heads of W_O_i: [s, b, h/tp, e] -> [s/tp, b, d]."""
        return self.o_proj(context.flatten(2))

    def static_gates(self, query):
        """1 for the heads that are always on, 0 for the others: [s, b, h/tp]."""
        always_on = torch.arange(query.shape[2], device=query.device) < self.heads.num_leading
        return always_on.to(query.dtype).expand(query.shape[:-1])

    def split_heads(self, projected):
        return projected.unflatten(-1, (-1, self.head_dim))  # [s, b, heads/tp, e]

    def project_token(self, x, positions, length):
        """``Projected`` of tokens that ask a cache, with the key and the value that it keeps of them."""
        return self.project(x, positions, length)

    def to_cache(self, x, projected, positions, length):
        """(keys, values) that a cache keeps of x, [s, b, kv, e]; projected: of ``project``."""
        return projected.key, projected.value

    def from_cache(self, context):
        """g_i H_i [b, h, e] of what a cache answers to ``project_token``."""
        return context

    def cache_shape(self, rows, length):
        """Shape of the keys, and of the values, that a cache holds for ``rows`` texts of at most ``length`` tokens: of
        the last ones, as many as the window holds."""
        return rows, self.k_proj.weight.shape[0] // self.head_dim, min(self.window or length, length), self.head_dim


@torch.no_grad()
def entropy_sums(query, key, seen):
    """Entropies of the attention weights of all queries and heads, in nats: their sum and their number, float64 [2].

    query: [s, b, h, e], key: [s, b, k, e]. seen: ``AttentionMask``, or None. A sequence at a time.
    """
    wide, total = torch.promote_types(query.dtype, torch.float32), query.new_zeros((), dtype=torch.float64)
    seen = seen or AttentionMask(query.new_zeros(1, len(query)), None, None)
    masks = document_mask(seen.starts) if seen.mask is None else seen.mask
    key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    for row in range(query.shape[1]):
        mask = masks[row % len(masks)]
        scores = torch.einsum("qhe,khe->hqk", query[:, row].to(wide), key[:, row].to(wide)) / query.shape[3] ** 0.5
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
        total += torch.special.entr(scores.softmax(-1)).sum(dtype=torch.float64)
    return torch.stack((total, torch.full_like(total, query[..., 0].numel())))


def share_of_scores(length, window):
    """What a window leaves of the scores of causal attention, by which ``choose_backend`` goes: 1 without."""
    return mean_keys(length, window) / mean_keys(length, 0)
