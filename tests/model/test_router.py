"""The router and the attention layer against Eq. 4-10 written out token by token and head by head in float64."""

import math
from dataclasses import replace

import pytest
import torch

from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.model.attention import Attention
from moh_lm.model.balance import BALANCE

D, HEADS, HEAD_DIM, LENGTH, BATCH = 24, 8, 6, 7, 2

CASES = {
    "shared and routed": dict(shared=3, active=2),
    "released": dict(shared=3, active=2, routing="released"),
    "query norm": dict(shared=3, active=2, routing="query_norm"),
    "no shared head": dict(shared=0, active=3),
    "released, no shared head": dict(shared=0, active=3, routing="released"),
    "query norm, no shared head": dict(shared=0, active=3, routing="query_norm"),
    "one shared head": dict(shared=1, active=4),
    "released, one shared head": dict(shared=1, active=4, routing="released"),
    "all routed heads": dict(shared=2, active=6),
    "one routed head": dict(shared=7, active=1),
    "query norm, one routed head": dict(shared=7, active=1, routing="query_norm"),
    "no routed head": dict(shared=8, active=0),
    "one stage": dict(shared=3, active=2, two_stage=False),
    "released, one stage": dict(shared=3, active=2, two_stage=False, routing="released"),
    "grouped queries": dict(shared=4, active=2, key_value_heads=4),
    "query norm, grouped queries": dict(shared=4, active=2, key_value_heads=2, routing="query_norm"),
    "all heads": dict(shared=3, active=2, selection="all"),
    "static": dict(shared=3, active=2, selection="static"),
    "previous step's shares": dict(shared=3, active=2, scope="global_batch"),
    "micro-batch": dict(shared=3, active=2, scope="micro_batch"),
    "micro-batch, released": dict(shared=3, active=2, scope="micro_batch", routing="released"),
    "12.5%": dict(shared=0, active=1),
    "12.5%, released": dict(shared=0, active=1, routing="released"),
    "25%, grouped queries": dict(shared=1, active=1, key_value_heads=2),
    "25%, no shared head": dict(shared=0, active=2, key_value_heads=4),
    "groups": dict(shared=2, active=2, key_value_heads=4, unit="key_value_group"),
    "groups, released": dict(shared=4, active=2, key_value_heads=4, unit="key_value_group", routing="released"),
    "groups, query norm": dict(shared=2, active=4, key_value_heads=4, unit="key_value_group", routing="query_norm"),
    "groups, no shared head": dict(shared=0, active=4, key_value_heads=2, unit="key_value_group"),
    "groups, no routed head": dict(shared=8, active=0, key_value_heads=2, unit="key_value_group"),
    "groups of one head": dict(shared=3, active=2, unit="key_value_group"),
    "scaled": dict(shared=3, active=2, routing="paper_scaled"),
    "scaled, one stage": dict(shared=3, active=2, routing="paper_scaled", two_stage=False),
    "scaled, no shared head": dict(shared=0, active=3, routing="paper_scaled"),
    "sigmoid": dict(shared=3, active=2, routing="sigmoid"),
    "sigmoid, no shared head": dict(shared=0, active=3, routing="sigmoid"),
    "sigmoid, groups": dict(shared=2, active=2, key_value_heads=4, unit="key_value_group", routing="sigmoid"),
    "gated": dict(shared=0, active=1, selection="gated"),
    "relu": dict(shared=3, active=2, routing="relu"),
    "relu, no shared head": dict(shared=0, active=3, routing="relu", scope="global_batch"),
    "relu, groups": dict(shared=2, active=2, key_value_heads=4, unit="key_value_group", routing="relu"),
    "bias": dict(shared=2, active=3, bias=(-1, 4, 0, 2, -3, 1)),
    "bias, released": dict(shared=3, active=2, bias=(1, 0, -4, 3, 0), routing="released"),
    "bias, scaled": dict(shared=0, active=3, bias=(1, 0, -4, 3, 0, 2, -1, 5), routing="paper_scaled"),
    "bias, sigmoid": dict(shared=2, active=3, bias=(-1, 4, 0, 2, -3, 1), routing="sigmoid"),
    "bias, query norm": dict(shared=3, active=2, bias=(1, 0, -4, 3, 0), routing="query_norm"),
    "bias, groups": dict(shared=2, active=2, bias=(-2, 1, 0), key_value_heads=4, unit="key_value_group"),
    "top-p": dict(shared=3, active=4, top_p=0.7),
    "top-p, released": dict(shared=2, active=5, top_p=0.7, routing="released"),
    "top-p, no shared head": dict(shared=0, active=8, top_p=0.9),
    "top-p, previous step's shares": dict(shared=3, active=3, top_p=0.5, scope="global_batch"),
    "window": dict(shared=3, active=2, window=3),
    "window, released, groups": dict(
        shared=2, active=4, key_value_heads=4, unit="key_value_group", routing="released", window=2
    ),
    "window, query norm": dict(shared=3, active=2, routing="query_norm", window=4),
    "window, top-p": dict(shared=3, active=4, top_p=0.7, window=4),
    "window, all heads": dict(shared=3, active=2, selection="all", window=4),
    "top-p, groups": dict(shared=2, active=6, top_p=0.7, key_value_heads=4, unit="key_value_group"),
    "no positions": dict(shared=3, active=2, position="none"),
    "no positions, query norm, grouped queries": dict(
        shared=4, active=2, key_value_heads=2, routing="query_norm", position="none"
    ),
    "a third of the features": dict(shared=3, active=2, rotary_fraction=0.4),
    "two thirds of the features, all heads": dict(shared=3, active=2, selection="all", rotary_fraction=0.67),
    "CoPE": dict(shared=3, active=2, position="cope", cope_max_position=2),
    "CoPE, all positions": dict(shared=3, active=2, position="cope", cope_max_position=9, routing="released"),
    "CoPE, one position": dict(shared=0, active=3, position="cope", cope_max_position=1, routing="sigmoid"),
    "CoPE, query norm, one key": dict(shared=3, active=2, position="cope", key_value_heads=1, routing="query_norm"),
    "CoPE, relu": dict(shared=3, active=2, position="cope", routing="relu"),
    "CoPE, top-p, window": dict(shared=3, active=4, position="cope", top_p=0.7, window=3),
    "CoPE, groups, window": dict(
        shared=2, active=2, position="cope", cope_max_position=1, key_value_heads=4, unit="key_value_group", window=5
    ),
    "CoPE, all heads": dict(shared=3, active=2, position="cope", cope_max_position=3, selection="all"),
    "CoPE, static": dict(shared=3, active=2, position="cope", cope_max_position=3, selection="static"),
}


def make_config(
    shared, active, routing=None, two_stage=True, key_value_heads=HEADS, selection="mixture", scope="sequence",
    unit="head", top_p=None, window=0, bias=None, keys="all", position="rotary", **positions,
):  # fmt: skip
    heads = HeadsConfig(
        head_selection=selection,
        num_shared_heads=(shared,),
        num_active_routed_heads=(active,),
        routing=routing or ("sigmoid" if selection == "gated" else "paper"),
        two_stage=two_stage,
        load_balance_scope=scope,
        routing_unit=unit,
        routing_top_p=top_p,
        routed_keys=keys,
        load_balance_bias_rate=0.05 if bias else 0.0,
        routing_entropy_coefficient=0.53,
        router_z_loss=0.29,
    )
    return ModelConfig(
        num_layers=1,
        hidden_size=D,
        num_attention_heads=HEADS,
        num_key_value_heads=key_value_heads,
        head_dim=HEAD_DIM,
        window=(window,),
        position=(position,),
        **positions,
        heads=heads,
    )


def make_attention(config, beta, seed=0):
    config = replace(config, heads=replace(config.heads, load_balance_coefficient=beta))
    layer = Attention(config, 0, 0.02, 0.02, loss_terms=1, group=None).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    return layer


def softmax(values):
    total = sum(v.exp() for v in values)
    return [v.exp() / total for v in values]


def reference_gates(config, x, queries, weights, bias=None):
    """(gates of all heads; probabilities, selection and scores of the routed experts) of one token, from the formulas.

    x: [d]. queries: [heads, head_dim] before rotary. weights: W_s, W_r, W_h by name; those absent are None. bias: of
    the routed experts. An expert is a head, or the heads of a key/value head.
    """
    heads = config.heads
    if heads.head_selection == "all":
        return [torch.tensor(1.0).double()] * HEADS, [], [], []
    h_s, k = heads.num_shared_heads[0], heads.num_active_routed_heads[0]
    if heads.head_selection == "static":
        return [torch.tensor(float(i < h_s + k)).double() for i in range(HEADS)], [], [], []
    size = HEADS // config.num_key_value_heads if heads.routing_unit == "key_value_group" else 1
    n, h_s, k = HEADS // size, h_s // size, k // size
    by_sigmoid, k = heads.routing in ("sigmoid", "expert_choice"), n if heads.routing == "expert_choice" else k
    released, query_norm, scaled = (heads.routing == name for name in ("released", "query_norm", "paper_scaled"))
    if query_norm:
        experts = [queries[i * size : (i + 1) * size] for i in range(h_s, n)]
        norms = [(q * q).sum().sqrt() for q in experts]
        if len(norms) > 1:
            mean = sum(norms) / len(norms)
            deviation = (sum((n - mean) ** 2 for n in norms) / (len(norms) - 1)).sqrt()
            norms = [n / deviation for n in norms]
        scores, probabilities, shared = norms, softmax(norms), [torch.tensor(1.0).double()] * h_s
    else:
        shared = [row @ x for row in weights["w_shared"]] if h_s else []
        scores = [row @ x for row in weights["w_routed"]] if h_s < n else []
        if heads.routing == "relu":
            shared = [2 / (1 + (-s).exp()) for s in shared]
            gates = shared + [s * (s > 0) for s in scores]
            positive = [s.item() > 0 for s in scores]
            return [gate for gate in gates for _ in range(size)], [s * (s > 0) for s in scores], positive, scores
        if by_sigmoid:
            shared = [2 / (1 + (-s).exp()) for s in shared]
            sigmoids = [1 / (1 + (-s).exp()) for s in scores]
            probabilities = [p / sum(sigmoids) for p in sigmoids]
        else:
            shared, probabilities = softmax(shared), softmax(scores)
    affinities = sigmoids if by_sigmoid else probabilities
    ranks = [a.item() + b for a, b in zip(affinities, bias or [0] * len(affinities), strict=True)]
    best = sorted(range(len(ranks)), key=lambda i: (-ranks[i], i))[:k]
    if heads.routing_top_p is not None:
        enough = [m for m in range(1, k) if sum(probabilities[i] for i in best[:m]) >= heads.routing_top_p]
        best = best[: min([k, *enough])]
    selected = [i in best for i in range(len(probabilities))]
    if query_norm:
        routed = [p + (1 - p).detach() if on else 0 * p for p, on in zip(probabilities, selected, strict=True)]
        return [gate for gate in shared + routed for _ in range(size)], probabilities, selected, scores
    if by_sigmoid:
        routed = [2 * p if on else 0 * p for p, on in zip(sigmoids, selected, strict=True)]
        return [gate for gate in shared + routed for _ in range(size)], probabilities, selected, scores
    routed = [p if on else 0 * p for p, on in zip(probabilities, selected, strict=True)]
    if released and routed:
        routed = [p / sum(routed) * sum(selected) for p in routed]
    if scaled:
        routed = [p * (n - h_s) for p in routed]
    if released or scaled:
        shared = [p * h_s for p in shared]
    a1 = a2 = 1.0
    if heads.two_stage and 0 < h_s < n:
        a1, a2 = softmax([row @ x for row in weights["w_type"]])
        if released or scaled:
            a1, a2 = 2 * a1, 2 * a2
    gates = [a1 * p for p in shared] + [a2 * p for p in routed]
    return [gate for gate in gates for _ in range(size)], probabilities, selected, scores


def tokens_of_experts(config, routes):
    """``routes`` of a sequence whose tokens use all experts -> those that each expert chooses of its tokens."""
    size = HEADS // config.num_key_value_heads if config.heads.routing_unit == "key_value_group" else 1
    routed, first = len(routes[0][2]), config.heads.num_shared_heads[0]
    number = round(LENGTH * config.heads.num_active_routed_heads[0] / size / routed)
    for i in range(routed):
        best = sorted(range(LENGTH), key=lambda t: (-routes[t][3][i].item(), t))[:number]
        for t in set(range(LENGTH)) - set(best):
            routes[t][2][i] = False
            for head in range(first + i * size, first + (i + 1) * size):
                routes[t][0][head] = 0 * routes[t][0][head]
    return routes


def rotate(config, vector, position):
    """Rotary embedding of one head's vector: the pair (i, i + r/2) of the first r features turns by position *
    theta^(-2i/r)."""
    if config.position[0] != "rotary":
        return vector
    width = int(HEAD_DIM * config.rotary_fraction)
    half = width // 2
    turned = []
    for i in range(width):
        angle = position * 10_000.0 ** (-2 * (i % half) / width)
        partner = -vector[i + half] if i < half else vector[i - half]
        turned.append(vector[i] * math.cos(angle) + partner * math.sin(angle))
    return torch.stack([*turned, *vector[width:]])


def counted(table, query, keys):
    """What CoPE adds to the scores of the ``keys`` that a query sees, the last of them its own."""
    position, added = 0, []
    for key in reversed(keys):
        position = position + 1 / (1 + (-(query @ key)).exp())
        below, last = int(position), len(table) - 1
        if below >= last:
            added.append(query @ table[last])
        else:
            rest = position - below
            added.append((1 - rest) * (query @ table[below]) + rest * (query @ table[below + 1]))
    return added[::-1]


def uses(config, selected, head):
    """Whether a token with this selection of the routed experts uses a head."""
    size = HEADS // config.num_key_value_heads if config.heads.routing_unit == "key_value_group" else 1
    expert = head // size + len(selected) - HEADS // size  # its number among the routed ones
    return expert < 0 or selected[expert]


def reference_attention(config, layer, x, bias=None):
    """(output [s, b, d], balance loss, entropy, z-loss) of Eq. 4 and 7; the losses None without routed heads."""
    weights = dict(layer.router.named_parameters()) if layer.router else {}
    group, window = HEADS // config.num_key_value_heads, config.window[0] or LENGTH
    output, losses, entropies, squares, every = torch.zeros_like(x), [], [], [], []
    for b in range(BATCH):
        projected = [layer.q_proj.weight @ token for token in x[:, b]]
        queries = [q.view(HEADS, HEAD_DIM) for q in projected]
        keys = [(layer.k_proj.weight @ token).view(-1, HEAD_DIM) for token in x[:, b]]
        values = [(layer.v_proj.weight @ token).view(-1, HEAD_DIM) for token in x[:, b]]
        routes = [reference_gates(config, x[t, b], queries[t], weights, bias) for t in range(LENGTH)]
        if config.heads.routing == "expert_choice":
            routes = tokens_of_experts(config, routes)
        rows = []
        for t in range(LENGTH):
            total = torch.zeros(D).double()
            for i in range(HEADS):
                q = rotate(config, queries[t][i], t)
                seen = range(max(0, t - window + 1), t + 1)
                if config.heads.routed_keys == "selected":
                    seen = [u for u in seen if u == t or uses(config, routes[u][2], i)]
                seen_keys = [rotate(config, keys[u][i // group], u) for u in seen]
                scores = [q @ key / math.sqrt(HEAD_DIM) for key in seen_keys]
                if layer.cope is not None:
                    more = counted(layer.cope.weight[i], q, seen_keys)
                    scores = [score + added for score, added in zip(scores, more, strict=True)]
                head = sum(w * values[u][i // group] for u, w in zip(seen, softmax(scores), strict=True))
                columns = layer.o_proj.weight[:, i * HEAD_DIM : (i + 1) * HEAD_DIM]
                total = total + routes[t][0][i] * (columns @ head)
            rows.append(total)
        output[:, b] = torch.stack(rows)
        routed = len(routes[0][1])
        every += routes
        if routed:
            size = HEADS // config.num_key_value_heads if config.heads.routing_unit == "key_value_group" else 1
            k = config.heads.num_active_routed_heads[0] // size
            previous = config.heads.load_balance_scope == "global_batch"
            f = [k / routed if previous else sum(r[2][i] for r in routes) / LENGTH for i in range(routed)]
            p = [sum(r[1][i] for r in routes) / LENGTH for i in range(routed)]
            loss = sum(fi * pi for fi, pi in zip(f, p, strict=True))
            factor = {"released": routed, "relu": routed / k}.get(config.heads.routing, 1)
            losses.append(loss * factor)
            entropies += [-sum(pi * pi.log() for pi in r[1]) for r in routes]
            squares += [sum(score.exp() for score in r[3]).log() ** 2 for r in routes]
    if not losses:
        return output, None, None, None
    if config.heads.load_balance_scope == "micro_batch":
        f, p = ([sum(route[part][i] for route in every) / len(every) for i in range(routed)] for part in (2, 1))
        loss = sum(fi * pi for fi, pi in zip(f, p, strict=True))
        losses = [loss * routed if config.heads.routing == "released" else loss] * BATCH
    return output, sum(losses) / BATCH, sum(entropies) / (LENGTH * BATCH), sum(squares) / (LENGTH * BATCH)


OWN_KEYS = (
    "shared and routed", "released, no shared head", "query norm", "12.5%", "all routed heads", "one stage",
    "25%, grouped queries", "groups", "groups, query norm", "scaled", "sigmoid", "gated", "relu", "bias", "top-p",
    "window", "window, released, groups", "window, top-p",
)  # fmt: skip
OF_OWN = {f"{name}, own keys": CASES[name] | {"keys": "selected"} for name in OWN_KEYS}


@pytest.mark.parametrize("case", [*CASES.values(), *OF_OWN.values()], ids=[*CASES, *OF_OWN])
def test_attention_computes_the_equations_with_every_gradient(case):
    beta, gamma, zeta = 0.37, 0.53, 0.29
    config = make_config(**case)
    layer = make_attention(config, beta)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(LENGTH, BATCH, D, generator=generator, dtype=torch.double)
    upstream = torch.randn(LENGTH, BATCH, D, generator=generator, dtype=torch.double)

    expected_input = x.clone().requires_grad_()
    bias = case.get("bias")
    if bias:
        layer.router.bias_steps.copy_(torch.tensor(bias))
        bias = [0.05 * steps for steps in bias]
    expected, balance, entropy, squares = reference_attention(config, layer, expected_input, bias)
    objective = (expected * upstream).sum() + (beta * balance + zeta * squares if balance is not None else 0)
    if config.heads.routing_top_p is not None:
        objective = objective + gamma * entropy
    leaves = [expected_input, *layer.parameters()]
    expected_gradients = torch.autograd.grad(objective, leaves, allow_unused=True)

    got_input = x.clone().requires_grad_()
    got, routed = layer(got_input)
    ((got * upstream).sum() + (routed.loss if routed else 0)).backward()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
    names = ["input", *(name for name, _ in layer.named_parameters())]
    gradients = [got_input.grad, *(parameter.grad for parameter in layer.parameters())]
    for name, mine, theirs in zip(names, gradients, expected_gradients, strict=True):
        theirs = torch.zeros_like(mine) if theirs is None else theirs
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    if balance is not None:
        torch.testing.assert_close(routed.rows[:, BALANCE].mean(), balance.detach(), rtol=0, atol=1e-12)
