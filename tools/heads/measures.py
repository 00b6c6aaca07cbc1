"""Measures on text what each head of a model does: which tokens use it, what it writes, where its attention goes.

The model runs one layer at a time over all of the text and keeps its hidden states; only the attention map of one head
and window is in memory. With g_i(t) the gate of head i for token t (1 in a dense model) and H_i(t) its output before
it:

    load_i      share of the tokens that use head i
    gate_i      mean of g_i(t) over these
    gate_rms    root mean square of the gates of a layer, over its heads and the tokens that use them
    written_i   mean over all tokens of |g_i(t) W_O_i H_i(t)|, the size of what it adds to the residual stream; with
                --element-gates every feature of H_i(t) has a gate of its own here
    CKA_ij      linear centred kernel alignment of two heads of a layer (Kornblith et al. 2019, arXiv 1905.00414), over
                all tokens: |C_ij|^2 / (|C_ii| |C_jj|), C_ij the cross-covariance of H_i and H_j, | | the Frobenius
                norm; 1 if they are equal up to a rotation and a factor

Attention a_i(t, u) of query t to token u <= t, over the queries that use the head:

    offset      the distance o <= s / 2 at which the largest weight lies most often, and how often: the share of the
                queries t >= max(o, 1) with argmax_u a(t, u) = t - o (Voita et al. 2019, section 5.1)
    previous    mean of a(t, t - 1), t >= 1 (Olsson et al. 2022, head activation evaluators)
    second      mean of a(t, t - 2), t >= 2
    first       mean of a(t, 0), t >= 1: how much attention goes to the first token
    sink        the same over all heads of a layer, for each domain
    prefix      on random tokens repeated four times: mean over t, whose token has occurred before, of the sum of
                a(t, u) over all u whose preceding token is that of t (Olsson et al. 2022, where the mean is over the
                entries a(t, u); with the sum, 1 is the maximum for any distribution over the repetitions)
    rare        on text cut into pieces of 32 tokens: share of the queries t >= 8 whose largest weight lies on one of
                the two rarest tokens that they see, where the rarest is not among the 500 most frequent (an eighth of
                a vocabulary below 4000) (Voita et al. 2019, section 5.3)

A measure with fewer than 20 queries is NaN.
"""

from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from moh_lm.inference.sampling import wide
from moh_lm.kernels.core_attention import CoreAttention
from moh_lm.kernels.gated_attention import dense_heads
from moh_lm.kernels.masks import AttentionMask
from moh_lm.model.batch_context import RouterInputs
from moh_lm.model.block import modules_of
from tools.heads.importance import written_sizes

FEWEST = 20  # queries that a measure needs
SEGMENT, FIRST_QUERY = 32, 8  # tokens of a piece of text, and the first query, of the test of rare tokens
FREQUENT = 500
ROWS = 64  # test texts that go through the model together


class Heads(NamedTuple):
    """The heads of a layer over a batch. query [s, b, h, e] and key [s, b, k, e] with rotary, output [s, b, h, e]
    before the gates, gates [s, b, h] (1 in a dense model), used bool [s, b, h]. projected [s, b, h, e]: what the output
    projection reads. seen: ``AttentionMask``, or None. own_keys: whether heads see only the tokens that use them."""

    query: torch.Tensor
    key: torch.Tensor
    output: torch.Tensor
    gates: torch.Tensor
    used: torch.Tensor
    projected: torch.Tensor
    seen: AttentionMask | None
    own_keys: bool

    def weighted(self):
        return self.output * self.gates.unsqueeze(-1).to(self.output.dtype)

    def attention(self, head):
        """The attention weights of a head: fp32 or wider [b, s, s], query by key."""
        shared_by = self.query.shape[2] // self.key.shape[2]
        query, key = self.query[:, :, head], self.key[:, :, head // shared_by]
        query, key = (part.to(wide(part)).transpose(0, 1) for part in (query, key))  # [b, s, e]
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
        if self.seen is not None:
            added = self.seen.mask[:, head % self.seen.mask.shape[1]]  # of all heads, or head by head
            scores, hidden = scores + added, added == -torch.inf
        if self.own_keys:
            others = ~self.used[:, :, head].t().unsqueeze(1)  # [b, 1, s]; a token sees itself
            hidden = hidden | others & ~torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
        return scores.masked_fill_(hidden, -torch.inf).softmax(-1)


@torch.no_grad()
def sweep(model, batches):
    """Run ``model`` over batches of tokens, int64 [b, s] each, layer after layer: yields (layer, batch, ``Heads``)."""
    device = model.model.embed_tokens.weight.device
    states = [model.model.embed(tokens.to(device)) for tokens in batches]  # [s, b, d]
    for index, layer in enumerate(model.model.layers):
        for number, x in enumerate(states):
            heads = read_heads(layer, x)
            yield index, number, heads
            states[number] = finish(layer, x, heads.weighted())


def read_heads(layer, x):
    """The ``Heads`` of a layer with input x [s, b, d]: the inputs of its core attention and of its output projection,
    and the output of the core attention without gates."""
    attention, found = layer.self_attn, []
    (core,) = modules_of(attention, CoreAttention)
    read = [part.register_forward_pre_hook(lambda _, given: found.append(given)) for part in (core, attention.o_proj)]
    with read[0], read[1]:
        attention(layer.input_layernorm(x), RouterInputs())
    (query, key, value, gates, selected, mask), (projected,) = found
    gates = query.new_ones(query.shape[:-1]) if gates is None else gates
    used = torch.ones_like(gates, dtype=torch.bool) if selected is None else selected != 0
    seen = core.visible(query, key, mask)
    output = dense_heads(query, key, value, mask=seen, own=used if core.own_keys else None)
    return Heads(query, key, output, gates, used, projected.view_as(output), seen, core.own_keys)


def finish(layer, x, weighted):
    """The output of the layer for ``x``, given g_i H_i [s, b, h, e]."""
    return layer.finish(x, layer.self_attn.output(weighted, layer.input_layernorm(x)))


@torch.no_grad()
def measure_text(model, domains, progress):
    """{measure: array} over the windows of ``domains``.

    load, gate: {domain: [L, h]}. gate_rms, sink: {domain: [L]}. half_load: {domain: [2, L, h]}, of its windows in turn.
    gates: {domain: float16 [windows, s, L, h]}. written, offset, offset_share, previous, second, first: [L, h]. cka:
    [L, h, h]. progress: called after each layer. L layers, h heads.
    """
    windows = [(number, index) for number, domain in enumerate(domains) for index in range(len(domain.windows))]
    batches = [domains[number].windows[index][None] for number, index in windows]
    shape = (len(model.model.layers), model.config.of_layer(0).num_attention_heads)
    counts = np.zeros((len(domains), 2, *shape))  # tokens that use a head, in windows of either half
    gates = [np.zeros((len(d.windows), len(d.windows[0]), *shape), np.float16) for d in domains]
    sums, written, cka = np.zeros((len(domains), *shape)), np.zeros(shape), np.zeros((*shape, shape[1]))
    squares, sinks = np.zeros((len(domains), shape[0])), np.zeros((2, len(domains), shape[0]))
    columns = []
    for layer, visits in groupby(sweep(model, batches), key=lambda visit: visit[0]):
        weight, moments = model.model.layers[layer].self_attn.o_proj.weight, Moments()
        offsets = Offsets(shape[1], max(tokens.shape[1] for tokens in batches))
        for _, batch, heads in visits:
            number, index = windows[batch]
            counts[number, index % 2, layer] += heads.used.sum((0, 1)).cpu().numpy()
            sums[number, layer] += heads.gates.double().sum((0, 1)).cpu().numpy()
            squares[number, layer] += heads.gates.double().square().sum().item()
            gates[number][index, :, layer] = heads.gates[:, 0].float().cpu().numpy()
            projected = heads.projected.to(wide(weight))
            written[layer] += written_sizes(projected, weight.to(projected.dtype)).double().sum((0, 1)).cpu().numpy()
            moments.add(heads.output)
            sinks[:, number, layer] += offsets.add(heads)
        cka[layer] = moments.cka()
        columns.append(offsets.figures())
        progress()
    sizes = np.array([[sum(map(len, domain.windows[half::2])) for half in (0, 1)] for domain in domains])  # in tokens
    used = counts.sum(1)

    def by_domain(values):
        return {domain.name: of for domain, of in zip(domains, values, strict=True)}

    return {
        "load": by_domain(used / sizes.sum(1)[:, None, None]),
        "half_load": {
            domain.name: count / size[:, None, None]
            for domain, count, size in zip(domains, counts, sizes, strict=True)
            if size.all()
        },
        "gate": by_domain(ratio(sums, used)),
        "gates": by_domain(gates),
        "gate_rms": by_domain(np.sqrt(ratio(squares, used.sum(2)))),
        "sink": by_domain(ratio(*sinks)),
        "written": written / sizes.sum(),
        "cka": cka,
        **{key: np.stack([column[key] for column in columns]) for key in columns[0]},
    }


def ratio(part, whole):
    """Return part / whole, NaN where whole is 0."""
    return np.divide(part, whole, out=np.full(np.shape(part), np.nan), where=np.asarray(whole) > 0)


class Moments:
    """Accumulates sums for the covariances between the heads of a layer, in float64."""

    def __init__(self):
        self.count, self.sum, self.squares = 0, 0, 0

    def add(self, output):
        """output: [s, b, h, e]."""
        self.shape = output.shape[2:]
        rows = output.flatten(2).flatten(0, 1).double()  # [s b, h e]
        self.count += len(rows)
        self.sum += rows.sum(0)
        self.squares += rows.t() @ rows

    def cka(self):
        """Return the CKA [h, h], NaN for a head whose output does not vary."""
        covariance = (self.squares - torch.outer(self.sum, self.sum) / self.count).view(*self.shape, *self.shape)
        squares = covariance.square().sum((1, 3)).cpu().numpy()  # |C_ij|^2
        norms = np.sqrt(squares.diagonal())
        return ratio(squares, np.outer(norms, norms))


class Offsets:
    """Counts where the largest weight of each head lies relative to the query, for one layer."""

    def __init__(self, num_heads, length):
        self.hits = torch.zeros(num_heads, length // 2 + 1, dtype=torch.int64)
        self.queries = torch.zeros_like(self.hits)  # queries with a token at this distance
        self.weights = torch.zeros(num_heads, 3, dtype=torch.float64)  # sums of a(t, t - 1), a(t, t - 2) and a(t, 0)

    def add(self, heads):
        """Count the queries, and return the sum of their a(t, 0) over all heads, and their number."""
        before, queries = self.weights[:, 2].sum(), 0
        length, farthest = len(heads.query), self.hits.shape[1]
        position = torch.arange(length, device=heads.query.device)
        for head in range(len(self.hits)):
            used = heads.used[1:, :, head].t()  # [b, s - 1]: of the queries t >= 1
            weights = heads.attention(head)[:, 1:]
            offset = (position[1:] - weights.argmax(-1))[used]
            hits = torch.bincount(offset.clamp(max=farthest), minlength=farthest + 1)[:farthest]
            of_position = torch.zeros(farthest + length, dtype=torch.int64, device=used.device)
            of_position[1:length] = used.sum(0)
            reached = of_position.flip(0).cumsum(0).flip(0)[:farthest]  # used queries t >= o
            back = (weights.diagonal(-o, 1, 2)[used[:, o:]].sum() for o in (0, 1))  # a(t, t - 1) and a(t, t - 2)
            self.hits[head] += hits.cpu()
            self.queries[head] += reached.cpu()
            queries += used.sum().item()
            self.weights[head] += torch.stack((*back, weights[..., 0][used].sum())).double().cpu()
        return (self.weights[:, 2].sum() - before).item(), queries

    def figures(self):
        queries = np.where(self.queries.numpy() < FEWEST, 0, self.queries.numpy())
        shares = ratio(self.hits.numpy(), queries)
        known = ~np.isnan(shares).all(1)
        best = np.where(known, np.nan_to_num(shares, nan=-1.0).argmax(1), -1)
        previous, second, first = ratio(self.weights.numpy(), queries[:, [1, 2, 1]]).T
        share = np.where(known, shares[np.arange(len(best)), best], np.nan)
        return {"offset": best, "offset_share": share, "previous": previous, "second": second, "first": first}


def measure_prefix(model, sequences):
    """prefix [L, h] of sequences int64 [b, s]."""
    earlier = (sequences[:, :, None] == sequences[:, None, :-1]).tril(-1)  # [b, query, token before the key]
    matches = F.pad(earlier, (1, 0))  # [b, query, key]

    def score(weights, matches):
        return (weights * matches).sum(-1)

    return mean_over_queries(model, sequences, matches, matches.any(-1), score)


def measure_rare(model, domains, ranks):
    """Return (rare [L, h], the share of a head whose largest weight lies anywhere with equal probability).

    ranks: int64 [vocab]; see ``frequency_ranks`` in text.py.
    """
    windows = [window for domain in domains for window in domain.windows]
    pieces = torch.stack([piece for window in windows for piece in window.unfold(0, SEGMENT, SEGMENT)])
    seen = ranks[pieces][:, None].expand(-1, SEGMENT, -1).tril() - torch.ones(SEGMENT, SEGMENT).triu(1).long()
    rarest = seen.amax(-1, keepdim=True)  # rank; -1 stands for unseen tokens
    second = seen.masked_fill(seen == rarest, -1).amax(-1, keepdim=True)
    rare = seen >= second  # [b, query, key]
    asked = ((rarest >= min(FREQUENT, len(ranks) // 8)) & (second >= 0)).squeeze(-1)  # [b, query]
    asked[:, :FIRST_QUERY] = False
    chance = (rare.sum(-1) / torch.arange(1, SEGMENT + 1))[asked].double().mean().item()

    def score(weights, rare):
        return rare.gather(-1, weights.argmax(-1, keepdim=True)).squeeze(-1)

    return mean_over_queries(model, pieces, rare, asked, score), chance


@torch.no_grad()
def mean_over_queries(model, tokens, keys, asked, score):
    """Return the mean of score(weights [b, s, s], keys [b, s, s]) -> [b, s] over the queries of each head: [L, h].

    tokens: int64 [b, s]. keys: bool, the keys to be found. asked: bool [b, s], the queries that count.
    """
    device = model.model.embed_tokens.weight.device
    keys, asked = (list(part.to(device).split(ROWS)) for part in (keys, asked))
    figures = []
    for _, visits in groupby(sweep(model, tokens.split(ROWS)), key=lambda visit: visit[0]):
        sums = 0
        for _, batch, heads in visits:
            found = []
            for head in range(heads.query.shape[2]):
                values = score(heads.attention(head), keys[batch])[heads.used[:, :, head].t() & asked[batch]]
                found.append((values.double().sum().item(), len(values)))
            sums = sums + np.array(found)
        figures.append(ratio(sums[:, 0], np.where(sums[:, 1] < FEWEST, 0, sums[:, 1])))
    return np.stack(figures)
