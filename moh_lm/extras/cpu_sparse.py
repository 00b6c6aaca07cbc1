"""Head-sparse attention on a CPU: matrix products over the selected rows, written out with torch's own operations.

The selected queries of a head attend in chunks of consecutive rows, so that the scores of a chunk, from the first key
that its first row sees to the key of its last one, stay in the cache. The forward pass needs two products and a
softmax; the backward pass recomputes the probabilities and needs five products. ``ProjectRows`` and ``SumRows`` are a
layer's query and output projections for the selected rows only, which saves as much as the attention itself at short
lengths. Heads that keep only their own tokens (``own_keys``) have keys and values by rows too: each head is then plain
causal attention over a shorter sequence. Threads process whole heads, or shares of the tokens (threads.py).

The number of rows depends on the routing, so torch.compile breaks its graph here.

Shapes: s sequence, b batch, e head dimension, d hidden size; rows: all selected (token, head) pairs, ordered by head,
sequence and position.
"""

from functools import partial
from itertools import chain, pairwise

import torch

from moh_lm.extras.threads import in_threads
from moh_lm.kernels.gated_attention import Backend

CHUNK = 64  # rows; faster than 32 and 128 from T = 512 to 4096


class SelectedRows:
    """Where the rows of a selection [s, b, heads] (bool or 0 and 1) are. starts: see ``AttentionMask``, or None.
    own_keys: whether the keys of a head are its rows, and not all tokens.

    token: int64 [rows], t b + j of position t in sequence j. position: int64 [rows], t. place: int64 [rows], of its own
    key among those of its head and sequence. start: int64 [rows], place of the first key that it sees, or None.
    heads: (head, start, stop) of the rows of each head. sequences: (head, j, start, stop) of those of each sequence in
    each head. shares: for every thread of torch, a share of the tokens: (head, start, stop) of their rows.
    """

    def __init__(self, selected, starts=None, own_keys=False):
        self.shape, self.own_keys = selected.shape, own_keys
        chosen = selected.permute(2, 1, 0) != 0  # [heads, b, s]
        self.head, sequence, self.position = chosen.nonzero().unbind(1)
        self.token = self.position * self.shape[1] + sequence
        self.place, self.start = self.position, None if starts is None else starts[sequence, self.position].long()
        if own_keys:
            zero = (self.head * self.shape[1] + sequence) * self.shape[0]  # ascends with the rows, as ``order`` does
            order = zero + self.position
            first = torch.searchsorted(order, zero)
            self.place = torch.arange(len(order)) - first
            self.start = None if starts is None else torch.searchsorted(order, zero + self.start) - first
        ends = [0, *chosen.sum(-1).flatten().cumsum(0).tolist()]
        self.sequences = [(*divmod(i, self.shape[1]), start, stop) for i, (start, stop) in enumerate(pairwise(ends))]
        self.heads = [(head, *bounds) for head, bounds in enumerate(pairwise(ends[:: self.shape[1]]))]
        shares = chosen.flatten(1).tensor_split(torch.get_num_threads(), 1)
        ends = [0, *torch.stack([share.sum(1) for share in shares], 1).flatten().cumsum(0).tolist()]
        bounds = [(i // len(shares), *bounds) for i, bounds in enumerate(pairwise(ends))]
        self.shares = [bounds[share :: len(shares)] for share in range(len(shares))]

    def chunks(self, group):
        """Return [(key/value head, sequence, chunks), ...], most chunks first. group: query heads per key/value head.

        A chunk (start, stop, (first, inner, whole, end)) has up to CHUNK rows. They see only keys in [first, end), and
        all of them see those in [inner, whole).
        """
        place = self.place.tolist()
        first_key = [0] * len(place) if self.start is None else self.start.tolist()
        found = {}
        for head, sequence, first, last in self.sequences:
            chunks = found.setdefault((head // group, sequence), [])
            for start in range(first, last, CHUNK):
                stop = min(start + CHUNK, last)
                keys = first_key[start], first_key[stop - 1], place[start] + 1, place[stop - 1] + 1
                chunks.append((start, stop, keys))
        return [(*at, found[at]) for at in sorted(found, key=lambda at: -len(found[at]))]

    def pieces(self, kv_heads):
        """Return [(number of the first key row, chunks), ...]. Key rows are ordered by sequence, key/value head
        and position, or are those of the queries."""
        found, length = self.chunks(self.shape[2] // kv_heads), self.shape[0]
        if self.own_keys:
            return [(chunks[0][0], chunks) for _, _, chunks in found if chunks]
        return [((sequence * kv_heads + head) * length, chunks) for head, sequence, chunks in found]

    def gather(self, tensor):
        """Gather [rows, ...] from [s, b, heads, ...], whose heads may be the key/value heads that they share."""
        shared_by = self.shape[2] // tensor.shape[2]
        return tensor.flatten(0, 2).index_select(0, self.token * tensor.shape[2] + self.head // shared_by)

    def scatter(self, rows):
        """Scatter [rows, ...] to [s, b, heads, ...], with zeros elsewhere."""
        whole = rows.new_zeros(self.shape.numel(), *rows.shape[1:])
        return whole.index_copy(0, self.token * self.shape[2] + self.head, rows).unflatten(0, self.shape)


def sparse_heads(query, key, value, gates, selected, mask=None, own_keys=False):
    """Return g_i H_i of the selected heads, 0 elsewhere. For shapes see ``gated_attention``."""
    rows = SelectedRows(selected, mask and mask.starts, own_keys)
    if own_keys:
        key, value = rows.gather(key), rows.gather(value)
    heads = AttendRows.apply(rows.gather(query), key, value, rows)
    return rows.scatter(weigh(heads, rows.gather(gates)))


CPU_SPARSE = Backend("cpu_sparse", sparse_heads, partial(sparse_heads, own_keys=True))


class AttendRows(torch.autograd.Function):
    """Causal attention of query rows [rows, e] to keys and values [s, b, key_value_heads, e] -> [rows, e].

    With own keys these are [rows, e] too. Computed in fp32 or wider.
    """

    @staticmethod
    def forward(ctx, query, key, value, rows):
        wide = torch.promote_types(query.dtype, torch.float32)
        q = query.to(wide) * query.shape[1] ** -0.5
        k, v = (tensor.to(wide).contiguous() for tensor in (key, value))
        if not rows.own_keys:
            k, v = (tensor.permute(1, 2, 0, 3).flatten(0, 2) for tensor in (k, v))  # [b kv s, e]
        out = torch.empty_like(q)
        pieces = rows.pieces(rows.shape[2] if rows.own_keys else key.shape[2])

        def attend(first, chunks):
            buffer = q.new_empty(CHUNK * rows.shape[0])
            for start, stop, keys in chunks:
                at = slice(first + keys[0], first + keys[-1])
                p = probabilities(q[start:stop], k[at], rows, start, keys, buffer)
                torch.mm(p, v[at], out=out[start:stop])

        in_threads(attend, pieces)
        ctx.save_for_backward(q, k, v, out)
        ctx.rows, ctx.pieces, ctx.key = rows, pieces, (key.shape, key.dtype)
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out = ctx.saved_tensors
        rows, shape, dtype = ctx.rows, *ctx.key
        gradient = gradient.to(q.dtype).contiguous()
        delta = (gradient * out).sum(1, keepdim=True)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)

        def attend_backward(first, chunks):
            buffers = q.new_empty(2, CHUNK * rows.shape[0])
            for start, stop, keys in chunks:
                at = slice(first + keys[0], first + keys[-1])
                p = probabilities(q[start:stop], k[at], rows, start, keys, buffers[0])
                dv[at].addmm_(p.t(), gradient[start:stop])
                ds = torch.mm(gradient[start:stop], v[at].t(), out=buffers[1, : p.numel()].view_as(p))
                ds.sub_(delta[start:stop]).mul_(p)
                torch.mm(ds, k[at], out=dq[start:stop])
                dk[at].addmm_(ds.t(), q[start:stop])

        in_threads(attend_backward, ctx.pieces)
        dq *= q.shape[1] ** -0.5
        if not rows.own_keys:
            s, b, kv, _ = shape
            dk, dv = (tensor.unflatten(0, (b, kv, s)).permute(2, 0, 1, 3) for tensor in (dk, dv))
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None


def probabilities(q, k, rows, start, keys, buffer):
    """Write softmax(q k^T) of the chunk that begins with row ``start`` to ``buffer``, [rows, keys]; see ``chunks``."""
    first, inner, whole, end = keys
    at = slice(start, start + len(q))
    p = torch.mm(q, k.t(), out=buffer[: len(q) * len(k)].view(len(q), len(k)))
    if whole < end:
        p[:, whole - first :].masked_fill_(torch.arange(whole, end) > rows.place[at].unsqueeze(1), -torch.inf)
    if first < inner:
        p[:, : inner - first].masked_fill_(torch.arange(first, inner) < rows.start[at].unsqueeze(1), -torch.inf)
    return torch.softmax(p, 1, out=p)


def weigh(heads, gates):
    """Return g H, multiplied in the dtype of the gates. heads: [rows, e]. gates: [rows]."""
    return (heads * gates.unsqueeze(1)).to(heads.dtype)


class ProjectRows(torch.autograd.Function):
    """x [s, b, d] W^T for the selected rows of each head: W [heads e, d] -> [rows, e]."""

    @staticmethod
    def forward(ctx, x, weight, rows):
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        x, weight = x.flatten(0, 1), weight.unflatten(0, (len(rows.heads), -1))
        out = x.new_empty(len(rows.token), weight.shape[1])

        def project(head, start, stop):
            torch.mm(x.index_select(0, rows.token[start:stop]), weight[head].t(), out=out[start:stop])

        in_threads(project, chain(*rows.shares))
        return out

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        rows = ctx.rows
        flat, dw = x.flatten(0, 1), torch.empty_like(weight)
        of_head = dw.unflatten(0, (len(rows.heads), -1))

        def weight_gradient(head, start, stop):
            torch.mm(gradient[start:stop].t(), flat.index_select(0, rows.token[start:stop]), out=of_head[head])

        dx = add_up(gradient, weight, rows, weight_gradient if ctx.needs_input_grad[1] else None)
        return dx.to(x.dtype), dw if ctx.needs_input_grad[1] else None, None


class SumRows(torch.autograd.Function):
    """The sum over heads of their rows [rows, e] times W^T, W [d, heads e] -> [s, b, d]."""

    @staticmethod
    def forward(ctx, heads, weight, rows):
        ctx.save_for_backward(heads, weight)
        ctx.rows = rows
        return add_up(heads, weight.t(), rows).to(heads.dtype)

    @staticmethod
    def backward(ctx, gradient):
        heads, weight = ctx.saved_tensors
        rows, trained = ctx.rows, ctx.needs_input_grad[1]
        gradient = gradient.flatten(0, 1)
        dheads, dw = torch.empty_like(heads), torch.empty_like(weight)
        size = heads.shape[1]

        def add_backward(head, start, stop):
            columns = slice(head * size, (head + 1) * size)
            picked = gradient.index_select(0, rows.token[start:stop])
            torch.mm(picked, weight[:, columns], out=dheads[start:stop])
            if trained:
                dw[:, columns] = picked.t() @ heads[start:stop]

        in_threads(add_backward, rows.heads)
        return dheads, dw if trained else None, None


def add_up(values, weight, rows, also=None):
    """Sum the rows ``values`` [rows, e] of all heads times W [heads e, d] to [s, b, d], fp32 or wider.

    Each thread adds up a share of the tokens. ``also``(head, start, stop) is called for every head as well.
    """
    wide = torch.promote_types(values.dtype, torch.float32)
    out = values.new_zeros(rows.shape[0] * rows.shape[1], weight.shape[1], dtype=wide)
    size = values.shape[1]

    def add(*share):
        for head, start, stop in share:
            summand = values[start:stop] @ weight[head * size : (head + 1) * size]
            out.index_add_(0, rows.token[start:stop], summand.to(wide))

    pieces = [(add, *share) for share in rows.shares]
    if also:
        pieces += [(also, *head) for head in rows.heads]
    in_threads(lambda function, *piece: function(*piece), pieces)
    return out.unflatten(0, rows.shape[:2])
