"""Routings, inputs and a reference for the tests of head-sparse attention."""

from functools import cached_property

import torch

from moh_lm.kernels.gated_attention import gated_attention
from moh_lm.kernels.masks import apply_window, document_bounds


def reference(query, key, value, gates, selected, num_shared=0, lengths=None, window=0, own_keys=False):
    """g_i H_i, head by head: softmax(q K^T / sqrt(e)) V over the keys of the query's document up to it, the last
    ``window`` of them if it is not 0. Shapes as in moh_attention. lengths: of the documents of each sequence, see
    ``make_boundaries``; None: one document. own_keys: a head sees those of them only that use it, and the query's."""
    length, batch, heads, head_dim = query.shape
    hidden = torch.ones(batch, length, length, dtype=torch.bool)
    for sequence in range(batch):
        stop = 0
        for document in [length] if lengths is None else lengths[sequence % len(lengths)]:
            start, stop = stop, min(stop + document, length)
            for query_at in range(start, stop):
                first = max(start, query_at + 1 - window) if window else start
                hidden[sequence, query_at, first : query_at + 1] = False
    out = []
    for head in range(heads):
        kv = head * key.shape[2] // heads
        used = torch.ones(length, batch) if head < num_shared else selected[..., head]
        unseen = hidden
        if own_keys:
            others = (used.t() == 0).unsqueeze(1) & ~torch.eye(length, dtype=torch.bool)  # [b, q, k]
            unseen = hidden | others
        scores = torch.einsum("qbe,kbe->bqk", query[:, :, head], key[:, :, kv]) * head_dim**-0.5
        weights = torch.exp(scores - scores.detach().amax(-1, keepdim=True)).masked_fill(unseen, 0)
        context = torch.einsum("bqk,kbe->qbe", weights / weights.sum(-1, keepdim=True), value[:, :, kv])
        out.append(context * (gates[..., head] * used).unsqueeze(-1))
    return torch.stack(out, dim=2)


def random_routing(length, batch, heads, k, generator):
    return top_k(torch.rand(length, batch, heads, generator=generator), k)


def bursty_routing(length, batch, heads, k, generator):
    """The same heads for runs of some thirty tokens."""
    scores = torch.rand(length // 30 + 1, batch, heads, generator=generator)
    return top_k(scores.repeat_interleave(30, 0)[:length], k)


def skewed_routing(length, batch, heads, k, generator):
    """All tokens choose the last heads, but for one token in ten."""
    scores = torch.rand(length, batch, heads, generator=generator) + torch.linspace(0, 2, heads)
    return top_k(torch.where(torch.rand(length, batch, 1, generator=generator) < 0.1, -scores, scores), k)


def odd_routing(length, batch, heads, k, generator):
    """No token on the first head, all tokens on the second, one token on the third, the last token on the fourth."""
    selected = torch.rand(length, batch, heads, generator=generator) < 0.5
    selected[..., 0] = False
    selected[..., 1] = True
    selected[..., 2:4] = False
    selected[length // 2, 0, 2] = True
    selected[-1, :, 3] = True
    return selected


def varying_routing(length, batch, heads, k, generator):
    """From one head to all of them, for each token another number."""
    number = torch.randint(1, heads + 1, (length, batch, 1), generator=generator)
    return torch.rand(length, batch, heads, generator=generator).argsort(-1) < number


def everything(length, batch, heads, k, generator):
    return torch.ones(length, batch, heads, dtype=torch.bool)


def nothing(length, batch, heads, k, generator):
    return torch.zeros(length, batch, heads, dtype=torch.bool)


ROUTINGS = {
    function.__name__: function
    for function in (
        random_routing, bursty_routing, skewed_routing, odd_routing, varying_routing, everything, nothing,
    )
}


def top_k(scores, k):
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(k, -1).indices, True)


def make_inputs(length, batch, heads, kv_heads, head_dim, routing="random_routing", dtype=torch.float64, seed=0):
    """(query, key, value, gates, upstream gradient, selection); gates of either sign, those of one token 0."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(length, batch, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    query, key, value, upstream = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    gates = torch.randn(length, batch, heads, generator=generator, dtype=torch.float64)
    gates[length // 3, 0] = 0
    selected = ROUTINGS[routing](length, batch, heads, max(1, heads // 3), generator)
    return *(tensor.to(dtype) for tensor in (query, key, value, gates, upstream)), selected


SHAPES = {  # length, batch, heads, key/value heads, head dimension, shared heads
    "heads of their own keys": (150, 2, 6, 6, 16, 2),
    "groups": (97, 1, 8, 4, 8, 4),
    "shared heads end inside a group": (65, 2, 8, 2, 8, 5),
    "no shared head": (70, 1, 6, 3, 12, 0),
    "one token": (1, 2, 6, 6, 8, 2),
}
DOCUMENTS = {  # name -> lengths of the documents of each sequence, in turn; what is beyond the window does not count
    "one document": [[1000]],
    "some, other ones in each sequence": [[20, 37, 5, 1000], [1, 90, 1, 1, 1000]],
    "of one token": [[1] * 1000],
    "that end where blocks end": [[64, 64, 1000], [32, 32, 128, 1000]],
    "that end beside the ends of blocks": [[63, 2, 64, 1000], [31, 1, 33, 62, 2, 1000]],
    "short ones": [[7, 5, 1, 2] * 100, [3] * 400],
}


def make_mask(lengths, length, batch, masked=False, window=0):
    """``AttentionMask`` of sequences with documents of these ``lengths``, a list for each in turn, or None, seen
    through a ``window``; None where tokens see the whole sequence. masked: make the mask of [s, s]."""
    documents = None
    if lengths is not None:
        rows = []
        for sequence in range(batch):
            row = [place for document in lengths[sequence % len(lengths)] for place in range(document)]
            rows.append(row[:length])
        documents = document_bounds(torch.tensor(rows), torch.float32 if masked else None)
    return apply_window(documents, window, torch.empty(length, batch), masked)


def with_gradients(function, query, key, value, gates, upstream):
    """[output, dq, dk, dv, dgates] of ``function(query, key, value, gates)``."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value, gates)]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


NAMES = ("output", "dq", "dk", "dv", "dgates")


def assert_all_close(got, expected, tolerance):
    """Largest difference at most ``tolerance`` of the largest expected value (or of 1), of each result."""
    for name, mine, theirs in zip(NAMES, got, expected, strict=True):
        error = (mine.double() - theirs.double()).abs().max().item()
        assert error <= tolerance * max(1, theirs.abs().max().item()), f"{name}: {error:.1e}"


class Problem:
    """Attention to be computed: float64 inputs rounded to ``dtype``, and what the reference makes of them.

    shape: length, batch, heads, key/value heads, head dimension, shared heads. routing: a name of ``ROUTINGS``.
    lengths, window: see ``make_mask``. own_keys: whether routed heads see only the tokens that use them.
    """

    def __init__(self, shape, routing="random_routing", dtype=torch.float64, lengths=None, window=0, own_keys=False):
        *self.sizes, self.num_shared = shape
        *tensors, gates, self.upstream, self.selected = make_inputs(*self.sizes, routing, dtype)
        self.tensors = *tensors, gates.to(torch.promote_types(dtype, torch.float32))  # gates are wide in any precision
        self.lengths, self.window, self.own_keys = lengths, window, own_keys

    @cached_property
    def expected(self):
        """[output, dq, dk, dv, dgates] of the reference, in float64."""
        wide = [tensor.double() for tensor in (*self.tensors, self.upstream)]
        sees = self.num_shared, self.lengths, self.window, self.own_keys
        return with_gradients(lambda *tensors: reference(*tensors, self.selected, *sees), *wide)

    def attend(self, backend, masked=False, device="cpu"):
        """A function of query, key, value and gates: ``gated_attention`` of this problem. backend: a ``Backend``, or
        None for dense. masked: whether the mask of [s, s] is made for it beforehand."""
        mask = make_mask(self.lengths, *self.sizes[:2], masked, self.window)
        if mask is not None:
            mask = mask._replace(**{name: part.to(device) for name, part in mask._asdict().items() if part is not None})
        given = self.selected.to(device), self.num_shared, mask, backend
        return lambda *tensors: gated_attention(*tensors, *given, own_keys=self.own_keys)

    def results(self, backend, masked=False, device="cpu"):
        """[output, dq, dk, dv, dgates] of a backend."""
        tensors = [tensor.to(device) for tensor in (*self.tensors, self.upstream)]
        return [result.cpu() for result in with_gradients(self.attend(backend, masked, device), *tensors)]

    def check(self, backend, tolerance, masked=False, device="cpu"):
        """Compare output and every gradient of a backend with the reference."""
        assert_all_close(self.results(backend, masked, device), self.expected, tolerance)

    def check_output(self, backend, tolerance):
        """Compare the output alone, for a backend that has no backward pass here."""
        with torch.no_grad():
            output = self.attend(backend)(*self.tensors)
        torch.testing.assert_close(output, self.expected[0], rtol=0, atol=tolerance)
