"""The kernels of a router. triton_router.py explains and launches them.

The scores of a token are a matrix [GP, W]: a row for each of the G groups of experts that compete, with its NS shared
experts before its E routed ones, and a row of two for W_h where TWO is 1. Ordinarily G is 1. GP, W and RP = GP W are
powers of two.

Shapes: s sequence, b batch, d channels that the router reads, h heads.
"""

import triton
import triton.language as tl


@triton.jit
def forward_kernel(
    x, ws, wr, wt, bias, use, replayed, gates, used, selection, scores, parts, stride_s, stride_b, seq, batch, d,
    RATE: tl.constexpr, K: tl.constexpr, FORM: tl.constexpr, G: tl.constexpr, NS: tl.constexpr, E: tl.constexpr,
    SIZE: tl.constexpr, TWO: tl.constexpr, GP: tl.constexpr, W: tl.constexpr, RP: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """See ``route``. Grid: (blocks of BT tokens, b)."""
    block = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    token = block * BT + tl.arange(0, BT)
    row = tl.arange(0, RP)
    x += b * stride_b + token.to(tl.int64)[:, None] * stride_s
    z = tl.zeros([BT, RP], WIDE)
    for start in range(0, d, BK):
        k = start + tl.arange(0, BK)
        tile = tl.load(x + k[None, :], mask=(token < seq)[:, None] & (k < d)[None, :], other=0.0)
        w = load_weights(ws, wr, wt, k, d, G, NS, E, W, RP, ROWS)
        z = tl.dot(tile, tl.trans(w), z, input_precision="ieee")
    at = token.to(tl.int64) * batch + b
    tl.store(scores + at[:, None] * RP + row[None, :], z, mask=(token < seq)[:, None])
    z = tl.reshape(z, [BT, GP, W])
    expert, head, shared, routed, types = places(G, NS, E, TWO, GP, W)
    gate, probability = activate(z, shared, routed, types, FORM)
    at = at[:, None, None]
    here = (token < seq)[:, None, None]
    c = tl.arange(0, W)[None, None, :]
    ranking = z
    if bias is not None:
        affinity = 0.5 * gate if FORM == "sigmoid" else probability
        ranking = affinity + RATE * tl.load(bias + expert, mask=routed, other=0).to(WIDE)
    ranking = tl.where(ranking == ranking, ranking, float("inf"))  # NaN comes first
    selected = tl.zeros([BT, GP, W], tl.int1)
    for _ in tl.static_range(K):
        free = routed & (selected == 0)
        best = free & (ranking == tl.max(tl.where(free, ranking, -float("inf")), 2)[:, :, None])
        selected = selected | (c == tl.min(tl.where(best, c, W), 2)[:, :, None])
    on = selected.to(WIDE)
    if use is not None:
        kept = tl.load(replayed + at * (G * E) + expert, mask=here & routed, other=0.0)
        on = tl.where(tl.load(use) != 0, kept, on)
    tl.store(selection + at * (G * E) + expert, on, mask=here & routed)
    gate = of_selected(z, gate, on, shared, routed, NS, E, FORM)
    a1 = tl.zeros([BT], WIDE)
    if TWO:
        a1, a2 = of_types(probability, types, c, FORM)
        gate = gate * tl.where(shared, a1[:, None, None], a2[:, None, None])
    real = here & (shared | routed)
    for i in tl.static_range(SIZE):
        of_head = at * (G * (NS + E) * SIZE) + head * SIZE + i
        tl.store(gates + of_head, gate, mask=real)
        if used is not None:
            tl.store(used + of_head, shared | (on != 0), mask=real)
    gate = tl.where(real, gate, 0.0)
    parts += (block * batch + b) * (2 * G * E + 3)
    real = here & routed
    tl.store(parts + expert, tl.sum(tl.where(real, probability, 0.0), 0)[None, :, :], mask=routed)
    tl.store(parts + G * E + expert, tl.sum(tl.where(real, on, 0.0), 0)[None, :, :], mask=routed)
    tl.store(parts + 2 * G * E, tl.sum(gate))
    tl.store(parts + 2 * G * E + 1, tl.sum(gate * gate))
    tl.store(parts + 2 * G * E + 2, tl.sum(tl.where(token < seq, a1, 0.0)))


@triton.jit
def row_numbers(G: tl.constexpr, NS: tl.constexpr, E: tl.constexpr, W: tl.constexpr, RP: tl.constexpr):
    """Return for each score the row of [W_s; W_r; W_h] that gives it, [RP]; ROWS or above where there is none."""
    g = tl.arange(0, RP) // W
    c = tl.arange(0, RP) % W
    experts = tl.where(c < NS, g * NS + c, G * NS + g * E + c - NS)
    return tl.where(g < G, tl.where(c < NS + E, experts, RP + W), G * (NS + E) + (g - G) * W + c)


@triton.jit
def load_weights(
    ws, wr, wt, k, d, G: tl.constexpr, NS: tl.constexpr, E: tl.constexpr, W: tl.constexpr, RP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return channels ``k`` of the weights of each score, [RP, len(k)]."""
    row = row_numbers(G, NS, E, W, RP)[:, None]
    first = tl.where(row < G * (NS + E), wr + (row - G * NS) * d, wt + (row - G * (NS + E)) * d)
    first = tl.where(row < G * NS, ws + row * d, first)
    return tl.load(first + k[None, :], mask=(row < ROWS) & (k < d)[None, :], other=0.0)


@triton.jit
def places(
    G: tl.constexpr, NS: tl.constexpr, E: tl.constexpr, TWO: tl.constexpr, GP: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Return for each score [1, GP, W] its number among routed and among all experts, and whether it belongs to a
    shared expert, to a routed one, or to W_h."""
    g = tl.arange(0, GP)[None, :, None]
    c = tl.arange(0, W)[None, None, :]
    shared = (g < G) & (c < NS)
    routed = (g < G) & (c >= NS) & (c < NS + E)
    return g * E + c - NS, g * (NS + E) + c, shared, routed, (g == G) & (c < 2 * TWO)


@triton.jit
def activate(z, shared, routed, types, FORM: tl.constexpr):
    """Return gates before selection and stages, and P of Eq. 7 with the softmax of W_h x: [tokens, GP, W]."""
    if FORM == "sigmoid":
        gate = 2.0 * sigmoid(z)
        probability = softmax(tl.minimum(z, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(z))), routed)
    else:
        probability = softmax(z, routed | types)
        gate = tl.where(shared, softmax(z, shared), probability)
    return gate, probability


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softmax(z, on):
    """Return the softmax over the values that are ``on`` in each row; 0 elsewhere."""
    powers = tl.where(on, tl.exp(z - tl.max(tl.where(on, z, -float("inf")), 2)[:, :, None]), 0.0)
    return tl.where(on, powers / tl.sum(powers, 2)[:, :, None], 0.0)


@triton.jit
def of_selected(z, gate, on, shared, routed, NS: tl.constexpr, E: tl.constexpr, FORM: tl.constexpr):
    """Return gates before the second stage, 0 for routed experts that are not ``on``."""
    if FORM == "paper_scaled":
        gate = gate * tl.where(shared, NS, E)
    chosen = gate * on
    if FORM == "released":
        gate = gate * NS
        chosen = softmax(z, routed & (on != 0)) * tl.sum(tl.where(routed, on, 0.0), 2)[:, :, None]
    return tl.where(shared, gate, chosen)


@triton.jit
def of_types(probability, types, c, FORM: tl.constexpr):
    """Return a1 and a2 of Eq. 6, [tokens] each."""
    a1 = tl.sum(tl.sum(tl.where(types & (c == 0), probability, 0.0), 2), 1)
    a2 = tl.sum(tl.sum(tl.where(types & (c == 1), probability, 0.0), 2), 1)
    if FORM != "paper":
        a1, a2 = 2.0 * a1, 2.0 * a2
    return a1, a2


@triton.jit
def finish_kernel(
    parts, share, whole, loss, rows, slope, blocks, batch, tokens, micro_batches,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, TOGETHER: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BP: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """See ``finish``. Grid: (1,)."""
    b = tl.arange(0, BP)
    e = tl.arange(0, EP)
    real = (b < batch)[:, None] & (e < E)[None, :]
    p = tl.zeros([BP, EP], WIDE)
    f = tl.zeros([BP, EP], WIDE)
    others = tl.zeros([BP, 4], WIDE)  # sums of gates, their squares, and a1
    i = tl.arange(0, 4)
    for start in range(0, blocks, STEP):
        block = start + tl.arange(0, STEP)[:, None, None]
        inside = (block < blocks) & (b < batch)[None, :, None]
        at = parts + (block * batch + b[None, :, None]) * (2 * E + 3)
        p += tl.sum(tl.load(at + e[None, None, :], mask=inside & (e < E)[None, None, :], other=0.0), 0)
        f += tl.sum(tl.load(at + E + e[None, None, :], mask=inside & (e < E)[None, None, :], other=0.0), 0)
        others += tl.sum(tl.load(at + 2 * E + i[None, None, :], mask=inside & (i < 3)[None, None, :], other=0.0), 0)
    row = rows + b[:, None] * (4 + E)
    tl.store(row + 4 + e[None, :], f, mask=real)
    tl.store(row + tl.where(i < 2, i + 2, 1)[None, :], others, mask=(b < batch)[:, None] & (i < 3)[None, :])
    if whole is not None:
        f = tl.load(whole + b[:, None] * E + e[None, :], mask=real, other=0.0)
    f = f / tokens
    if share is not None:
        f = tl.where(real, tl.load(share + e, mask=e < E, other=0.0).to(WIDE)[None, :], 0.0)
    if TOGETHER:
        f = tl.where(real, (tl.sum(f, 0) / batch)[None, :], 0.0)
        p = tl.where(real, (tl.sum(p, 0) / batch)[None, :], 0.0)
    losses = FACTOR * (tl.sum(f * p, 1) / tokens)
    tl.store(rows + b * (4 + E), losses, mask=b < batch)
    tl.store(loss, SCALE * (tl.sum(losses) / batch / micro_batches))
    tl.store(slope + b[:, None] * E + e[None, :], f * (SCALE * FACTOR) / batch / tokens / micro_batches, mask=real)


@triton.jit
def backward_kernel(
    x, ws, wr, wt, selection, scores, slope, dgates, dloss, dx, sums, stride_s, stride_b, stride_gs, stride_gb,
    seq, batch, d, tiles, SPLIT: tl.constexpr, FORM: tl.constexpr, G: tl.constexpr, NS: tl.constexpr, E: tl.constexpr,
    SIZE: tl.constexpr, TWO: tl.constexpr, GP: tl.constexpr, W: tl.constexpr, RP: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Compute dx of BD channels, and their dW of ``tiles`` blocks of BT tokens. Grid: (parts, channels / BD).

    The gradients of the scores are recomputed for each block of channels, from RP cached numbers per token."""
    k = tl.program_id(1) * BD + tl.arange(0, BD)
    expert, head, shared, routed, types = places(G, NS, E, TWO, GP, W)
    w = load_weights(ws, wr, wt, k, d, G, NS, E, W, RP, ROWS)
    acc = tl.zeros([RP, BD], WIDE)
    of_loss = tl.load(dloss)
    for tile in range(0, tiles):
        flat = (tl.program_id(0) * tiles + tile) * BT + tl.arange(0, BT)
        s = (flat // batch).to(tl.int64)  # after the division, which takes much longer in 64 bits
        b = (flat % batch).to(tl.int64)
        here = (s < seq)[:, None]
        flat = flat.to(tl.int64)
        inside = here & (k < d)[None, :]
        tile_x = tl.load(x + (s * stride_s + b * stride_b)[:, None] + k[None, :], mask=inside, other=0.0)
        z = tl.load(scores + flat[:, None] * RP + tl.arange(0, RP)[None, :], mask=here, other=0.0)
        z = tl.reshape(z, [BT, GP, W])
        here = here[:, :, None]
        dg = tl.zeros([BT, GP, W], WIDE)
        for i in tl.static_range(SIZE):
            at = (s * stride_gs + b * stride_gb)[:, None, None] + head * SIZE + i
            dg += tl.load(dgates + at, mask=here & (shared | routed), other=0.0)
        on = tl.load(selection + flat[:, None, None] * (G * E) + expert, mask=here & routed, other=0.0)
        dp = tl.load(slope + b[:, None, None] * (G * E) + expert, mask=here & routed, other=0.0) * of_loss
        dz = differentiate_gates(z, on, dg, dp, shared, routed, types, NS, E, TWO, FORM)
        dz = tl.reshape(tl.where(here & (shared | routed | types), dz, 0.0), [BT, RP])
        if SPLIT:
            high = dz.to(w.dtype)
            low = (dz - high.to(tl.float32)).to(w.dtype)
            of_x = tl.dot(low, w, tl.dot(high, w))
            acc = tl.dot(tl.trans(low), tile_x, tl.dot(tl.trans(high), tile_x, acc))
        else:
            of_x = tl.dot(dz, w, input_precision="ieee")
            acc = tl.dot(tl.trans(dz), tile_x, acc, input_precision="ieee")
        tl.store(dx + flat[:, None] * d + k[None, :], of_x.to(dx.dtype.element_ty), mask=inside)
    row = row_numbers(G, NS, E, W, RP)[:, None]
    sums += tl.program_id(0).to(tl.int64) * ROWS * d
    tl.store(sums + row * d + k[None, :], acc, mask=(row < ROWS) & (k < d)[None, :])


@triton.jit
def differentiate_gates(
    z, on, dg, dp, shared, routed, types, NS: tl.constexpr, E: tl.constexpr, TWO: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """Return the gradients of the scores, from those of the gates and of P of Eq. 7."""
    gate, probability = activate(z, shared, routed, types, FORM)
    if FORM == "sigmoid":
        dg = tl.where(shared, dg, dg * on)
        return dg * gate * (1.0 - 0.5 * gate) + softmax_backward(probability, dp) * sigmoid(-z)
    of_type = dp
    if TWO:
        c = tl.arange(0, z.shape[2])[None, None, :]
        a1, a2 = of_types(probability, types, c, FORM)
        inner = dg * of_selected(z, gate, on, shared, routed, NS, E, FORM)
        da1 = tl.sum(tl.sum(tl.where(shared, inner, 0.0), 2), 1)
        da2 = tl.sum(tl.sum(tl.where(routed, inner, 0.0), 2), 1)
        of_type = (1.0 if FORM == "paper" else 2.0) * tl.where(c == 0, da1[:, None, None], da2[:, None, None])
        dg = dg * tl.where(shared, a1[:, None, None], a2[:, None, None])
    of_shared = dg if FORM == "paper" else dg * NS
    if FORM == "paper_scaled":
        dg = dg * E
    of_gates = softmax_backward(tl.where(shared, gate, 0.0), of_shared)
    if FORM == "released":
        count = tl.sum(tl.where(routed, on, 0.0), 2)[:, :, None]
        of_gates += softmax_backward(softmax(z, routed & (on != 0)), dg * count)
        dg = tl.zeros_like(dg)
    slopes = tl.where(routed, dg * on + dp, of_type)
    return softmax_backward(probability, slopes) + of_gates


@triton.jit
def softmax_backward(p, dp):
    """Return the gradient of the scores of a softmax ``p`` that is 0 elsewhere."""
    pairs = p * dp
    return pairs - p * tl.sum(pairs, 2)[:, :, None]


@triton.jit
def weights_kernel(sums, out, count, size, BLOCK: tl.constexpr):
    """Add ``count`` parts in their order. Grid: (size / BLOCK,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], sums.dtype.element_ty)
    for _ in range(0, count):
        total += tl.load(sums + at, mask=at < size, other=0.0)
        sums += size
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)
