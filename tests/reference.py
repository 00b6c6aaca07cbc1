"""The equations in numpy, one token and one head at a time: training, export and vision are all compared with them.

Nothing here is taken from moh_lm. Numbered equations are those of the paper (arXiv 2410.11842). Arrays are float64, or
complex128: decisions look at real parts and all else is analytic, so ``slope`` reads derivatives off an imaginary part
and nothing here needs autograd. Shared heads come first.

Shapes: s tokens of a sequence, d width, h heads, e features of a head, n_s shared and E routed experts; an expert is a
head, or all heads that share a key/value head. Where heads are chosen inside their key/value groups, shared heads come
first in each group, and experts are numbered group after group.
"""

import functools
import math
from typing import NamedTuple

import numpy as np

# --- What a token selects ---


class Routing(NamedTuple):
    """How the heads of a layer are used. Numbers count heads; ``size`` of them are an expert, selected together.

    form: all, static, or a choice of --routing. top_p: see ``chosen``. bias_rate: how much a step of the bias adds to
    what a token selects by. groups: of heads, in each of which as many are shared and as many selected. width:
    channels of a token that scores are made of, the first ones; 0: all.
    """

    form: str
    heads: int
    shared: int = 0
    active: int = 0
    size: int = 1
    two_stage: bool = True
    top_p: float | None = None
    bias_rate: float = 0.0
    groups: int = 1
    width: int = 0


class Route(NamedTuple):
    """The heads of a token: gates [h] and used, bool [h]; of its routed experts probability, selected, scores, [E]."""

    gates: np.ndarray
    used: np.ndarray
    probability: np.ndarray = np.empty(0)
    selected: np.ndarray = np.empty(0)
    scores: np.ndarray = np.empty(0)


def softmax(scores):
    scores = np.asarray(scores)
    powers = np.exp(scores - max(np.real(scores), default=0))
    return powers / powers.sum()


def sigmoid(scores):
    return 1 / (1 + np.exp(-scores))


def deviation(values):
    """The unbiased standard deviation of three numbers or more; 1 of fewer."""
    if len(values) <= 2:
        return 1.0
    spread = values - values.mean()
    return np.sqrt(spread @ spread / (len(values) - 1))


def route(routing, x, weights, queries=None, divisor=None):
    """The ``Route`` of a token x [d]. queries: [h][e], before positions, for query_norm.

    weights: w_shared [n_s, w], w_routed [E, w], w_type [2, w] and bias_steps [E], where the layer has them. divisor:
    what query_norm divides its norms by, in place of their own deviation.
    """
    if routing.groups > 1:
        return route_in_groups(routing, x, weights, queries)
    form, heads, shared, active, size = routing[:5]
    if form in ("all", "static"):
        used = np.arange(heads) < (heads if form == "all" else shared + active)
        return Route(used.astype(float), used)
    shared, active, routed = shared // size, active // size, (heads - shared) // size
    x = x[: routing.width or None]
    products = [np.array([row @ x for row in weights.get(name, ())]) for name in ("w_shared", "w_routed", "w_type")]
    on, scores, kinds = products
    if form == "query_norm":
        experts = [np.concatenate(queries[i : i + size]) for i in range(shared * size, heads, size)]
        scores = np.array([np.sqrt(query @ query) for query in experts])
        scores = scores / (deviation(scores) if divisor is None else divisor)
        on = np.ones(shared)
    elif form in ("sigmoid", "relu"):
        on = 2 * sigmoid(on)
    elif form == "softplus":
        on = np.log(1 + np.exp(on))
    else:
        on = softmax(on) * (1 if form == "paper" else shared)

    probability = affinity = softmax(scores)
    if form in ("sigmoid", "softplus"):
        affinity = sigmoid(scores)
        probability = affinity / affinity.sum()
    if form == "relu":
        probability, selected = scores * (np.real(scores) > 0), np.real(scores) > 0
    else:
        ranks = affinity + routing.bias_rate * weights["bias_steps"] if routing.bias_rate and routed else scores
        selected = chosen(np.real(ranks), np.real(probability), active, routing.top_p)

    gates = probability * selected
    if form == "sigmoid":
        gates = 2 * affinity * selected
    if form == "softplus":
        gates = np.log(1 + np.exp(scores)) * selected
    if form == "paper_scaled":
        gates = gates * routed
    if form == "released" and routed:
        gates = gates / gates.sum() * selected.sum()
    if form == "query_norm":
        gates = selected * (1 + probability - np.real(probability))  # Eq. 9, with the derivative of Eq. 10
    if routing.two_stage and form in ("paper", "paper_scaled", "released") and shared and routed:
        a1, a2 = softmax(kinds) * (1 if form == "paper" else 2)  # Eq. 6
        on, gates = a1 * on, a2 * gates
    gates, used = np.concatenate([on, gates]), np.concatenate([np.ones(shared, bool), selected])
    return Route(np.repeat(gates, size), np.repeat(used, size), probability, selected, scores)


def route_in_groups(routing, x, weights, queries):
    """The ``Route`` of a token that chooses heads inside their groups: Eq. 5, 9 and 10 in each group by itself.

    [a1, a2] of Eq. 6 are the same in all groups. query_norm divides by the deviation of all routed heads.
    """
    groups = routing.groups
    numbers = {name: getattr(routing, name) // groups for name in ("heads", "shared", "active")}
    of_group, routes = routing._replace(groups=1, **numbers), []
    experts = {"w_shared": of_group.shared, "w_routed": of_group.heads - of_group.shared}
    experts["bias_steps"] = experts["w_routed"]
    parts = [queries[group * of_group.heads :][: of_group.heads] for group in range(groups)]
    norms = [np.sqrt(query @ query) for part in parts for query in part[of_group.shared :]]
    for group, part in enumerate(parts):
        own = {name: weights[name][group * n :][:n] for name, n in experts.items() if name in weights}
        own |= {"w_type": weights["w_type"]} if "w_type" in weights else {}
        routes.append(route(of_group, x, own, part, deviation(np.array(norms))))
    return Route(*map(np.concatenate, zip(*routes, strict=True)))


def chosen(ranks, probability, k, top_p=None):
    """The k largest ranks, of equal ones the first: bool [E]. top_p: only the first of them, in that order, whose
    probabilities add up to it; all k if they do not."""
    best = sorted(range(len(ranks)), key=lambda i: (-ranks[i], i))[:k]
    if top_p is not None:
        enough = [m for m in range(1, k) if sum(probability[i] for i in best[:m]) >= top_p]
        best = best[: min([k, *enough])]
    return np.isin(np.arange(len(ranks)), best)


def balance_loss(routing, routes, share=None):
    """L_b of Eq. 7 over the tokens of ``routes``, the mean over groups; None without routed experts. share: f [E] in
    place of theirs."""
    number = len(routes[0].probability) // routing.groups
    if not number:
        return None
    share = np.mean([route.selected for route in routes], axis=0) if share is None else share
    factor = {"released": number, "relu": number * routing.size / max(1, routing.active)}.get(routing.form, 1)
    products = share * np.mean([route.probability for route in routes], axis=0)
    return factor * sum(of_group.sum() for of_group in np.split(products, routing.groups)) / routing.groups


def entropy(routes):
    """Mean over the tokens of - sum p ln p."""
    return -sum(route.probability @ np.log(route.probability) for route in routes) / len(routes)


def z_loss(routes, groups=1):
    """Mean over the tokens, and over their groups, of (ln sum exp s)^2."""
    logs = [np.log(np.exp(scores).sum()) for route in routes for scores in np.split(route.scores, groups)]
    return sum(value * value for value in logs) / len(logs)


# --- Where tokens are ---


class Rotary(NamedTuple):
    """Of the first w features of a head, feature i and feature i + w/2 are a point that turns with the position.

    share: w over all features, unless ``width`` says w. kind: default, linear, llama3 or yarn (arXiv 2309.00071).
    length: the original one.
    """

    theta: float
    share: float = 1.0
    kind: str = "default"
    factor: float = 1.0
    low: float | None = None
    high: float | None = None
    length: int | None = None
    width: int | None = None


def frequency(rotary, i, width):
    """Radians per position of pair i of width/2."""
    plain = rotary.theta ** (-2 * i / width)
    if rotary.kind == "default":
        return plain
    slow = plain / rotary.factor
    if rotary.kind == "linear":
        return slow
    if rotary.kind == "llama3":
        turns = rotary.length * plain / (2 * math.pi)  # in the original length
        kept = (turns - rotary.low) / (rotary.high - rotary.low)
    else:

        def pair(turns):
            """The pair that turns so many times in the original length."""
            return width * math.log(rotary.length / (2 * math.pi * turns)) / (2 * math.log(rotary.theta))

        first, last = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), width - 1)
        kept = 1 - (i - first) / (last - first or 0.001)
    kept = min(max(kept, 0.0), 1.0)
    return kept * plain + (1 - kept) * slow


def magnitude(rotary):
    """What yarn multiplies queries and keys with."""
    return 0.1 * math.log(rotary.factor) + 1 if rotary.kind == "yarn" else 1.0


@functools.cache
def turn(rotary, position, width):
    """Cosine and sine of the angle of every pair at a position, times ``magnitude``: [w/2] each."""
    angles = position * np.array([frequency(rotary, i, width) for i in range(width // 2)])
    return magnitude(rotary) * np.cos(angles), magnitude(rotary) * np.sin(angles)


def rotate(rotary, vector, position):
    """A query or key [e] at its position; ``rotary`` None: positions change nothing."""
    if rotary is None:
        return vector
    width = rotary.width or int(len(vector) * rotary.share)
    (cos, sin), first, second = turn(rotary, position, width), vector[: width // 2], vector[width // 2 : width]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, vector[width:]])


def counted(table, query, keys):
    """What CoPE (arXiv 2405.18719) adds to the scores of ``keys``, the last of which is the query's own.

    The position of a key is the sum of sigmoid(q k) from it to the last one, at most P. table: [P + 1, e].
    """
    position, most, added = 0.0, len(table) - 1, []
    for key in keys[::-1]:
        position = position + sigmoid(query @ key)
        below = int(np.real(position))
        if below >= most:
            added.append(query @ table[most])
        else:
            rest = position - below
            added.append((1 - rest) * (query @ table[below]) + rest * (query @ table[below + 1]))
    return np.array(added[::-1])


# --- Attention ---


def rms_norm(x, weight, eps):
    return weight * x / np.sqrt((x * x).mean() + eps)


def attention_maps(queries, keys, seen, tables=None):
    """a_i(t, u) = softmax over the tokens u that head i of token t sees of q_i k_i^T / sqrt(e) (Eq. 1): [h, s, s].

    queries: [s][h][e] and keys: [s][heads that share them][e], at their positions. seen: function of (t, i), which
    gives the numbers u. tables: of CoPE, one for each head.
    """
    count, heads = len(queries), len(queries[0])
    kind = np.result_type(queries[0][0], keys[0][0], 0.0 if tables is None else tables)
    found = np.zeros((heads, count, count), kind)
    for i, t in np.ndindex(heads, count):
        query, tokens = queries[t][i], list(seen(t, i))
        own = np.array([keys[u][i * len(keys[u]) // heads] for u in tokens])
        scores = own @ query / math.sqrt(len(query))
        found[i, t, tokens] = softmax(scores if tables is None else scores + counted(tables[i], query, own))
    return found


def weighted_heads(maps, values, gates, output, of_features=1):
    """MoH(x_t) = sum_i g_i H_i W_O_i (Eq. 4): [s, d]. values: [s][heads that share them][e]. output: W_O, [d, h e].
    of_features: gates [s, h e] beside those of heads."""
    heads, shared_by = len(maps), len(maps) // len(values[0])
    weighed = [gates[:, i, None] * (maps[i] @ np.array([of[i // shared_by] for of in values])) for i in range(heads)]
    return (of_features * np.concatenate(weighed, axis=1)) @ output.T


class Layer(NamedTuple):
    """An attention layer. widths: features of each head's query and key. window: keys that a token sees, or 0 for all.

    own_keys: whether a routed head sees only the tokens that use it. eps: of its norms. counted: whether the position
    of a token in a head is the number of earlier ones that use it.
    """

    routing: Routing
    widths: tuple
    rotary: Rotary | None = None
    window: int = 0
    own_keys: bool = False
    eps: float = 1e-5
    counted: bool = False


class Attended(NamedTuple):
    """output [s, d], the ``Route`` of each token, and ``attention_maps`` [h, s, s]."""

    output: np.ndarray
    routes: list
    maps: np.ndarray


def attention_layer(layer, weights, inputs, starts=None):
    """What a layer makes of normalised inputs [s, d]: ``Attended``. weights: by name, without ``.weight``.

    starts: of each token, the first of its document; by default that of the sequence.
    """
    split = latent_heads if "kv_b_proj" in weights else plain_heads
    queries, keys, values = zip(*(split(layer, weights, x) for x in inputs), strict=True)
    routes = [route(layer.routing, x, weights, asked) for x, asked in zip(inputs, queries, strict=True)]
    if "q_norm" in weights:
        queries, keys = ([[rms_norm(head, weights[name], layer.eps) for head in token] for token in part]
                         for part, name in ((queries, "q_norm"), (keys, "k_norm")))  # fmt: skip

    def seen(t, i):
        first = max(t - layer.window + 1 if layer.window else 0, 0 if starts is None else starts[t])
        return [u for u in range(first, t + 1) if u == t or not layer.own_keys or routes[u].used[i]]

    def position(t, i):
        return sum(routes[u].used[i] for u in range(t)) if layer.counted else t

    heads = len(layer.widths)
    queries, keys = ([[rotate(layer.rotary, head, position(t, i * heads // len(token))) for i, head in enumerate(token)]
                      for t, token in enumerate(part)] for part in (queries, keys))  # fmt: skip
    maps = attention_maps(queries, keys, seen, weights.get("cope"))
    gates = np.array([of_token.gates for of_token in routes])
    of_features = 1
    if "g_proj" in weights:
        of_features = np.array([[2 * sigmoid(row @ x) for row in weights["g_proj"]] for x in inputs])
    return Attended(weighted_heads(maps, values, gates, weights["o_proj"], of_features), routes, maps)


def plain_heads(layer, weights, x):
    """Queries, keys and values of a token x [d], head by head (Eq. 2). Heads may share keys and values."""

    def heads(name):
        features, ends = weights[f"{name}_proj"] @ x, np.cumsum(layer.widths)
        return np.split(features, ends[ends < len(features)])

    return heads("q"), heads("k"), heads("v")


def latent_heads(layer, weights, x):
    """Those of latent attention (DeepSeek-V2, arXiv 2405.04434, equations 9 to 19), the features that turn in front.

    In the rows of a head's query the features that turn are the last ones.
    """
    heads, latent, asked, rows = len(layer.widths), len(weights["kv_a_layernorm"]), x, "q_proj"
    if rows not in weights:
        asked, rows = rms_norm(weights["q_a_proj"] @ x, weights["q_a_layernorm"], layer.eps), "q_b_proj"
    both = weights["kv_a_proj_with_mqa"] @ x
    turning = both[latent:]
    made = weights["kv_b_proj"] @ rms_norm(both[:latent], weights["kv_a_layernorm"], layer.eps)
    queries = [np.roll(part, len(turning)) for part in np.split(weights[rows] @ asked, heads)]
    keys, values = zip(*(np.split(part, 2) for part in np.split(made, heads)), strict=True)
    return queries, [np.concatenate([turning, key]) for key in keys], list(values)


# --- Derivatives ---


def slope(function, arrays, name, direction):
    """The derivative of ``function(arrays)`` along ``direction`` in the array ``name``: Im f(a + i h v) / h.

    The complex step (Squire and Trapp 1998) takes no difference, so it is exact but for rounding.
    """
    step = 1e-30
    return np.imag(function(arrays | {name: arrays[name] + 1j * step * direction})) / step


def assert_slopes(function, arrays, gradients, rtol=1e-11, atol=1e-11):
    """``gradients``, {name: array}, are those of ``function(arrays)``, by their slopes along random directions: an
    error in any element shows in nearly all of them."""
    draw = np.random.default_rng(0)
    for name, gradient in gradients.items():
        for direction in draw.standard_normal((3, *gradient.shape)):
            wanted = slope(function, arrays, name, direction)
            np.testing.assert_allclose((gradient * direction).sum(), wanted, rtol, atol, err_msg=name)
