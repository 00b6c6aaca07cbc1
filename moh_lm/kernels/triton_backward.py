"""The backward pass of head-sparse attention in Triton: dQ and dGates over slots, dK and dV over keys.

The probabilities P are recomputed from the softmax sums of the forward pass, and delta is kept in slots. Names are
those of ``moh_lm.kernels.triton_forward``.

    dg_i = delta_i = rowsum(dOut_i * H_i)            right for g = 0 too, since nothing is divided by it
    dS_ij = g_i P_ij (dOut_i . V_j - delta_i)        dQ = scale dS K,   dK = scale dS^T Q
    dV_j = sum_i g_i P_ij dOut_i

dK/dV loops over the query heads of its key/value head in a fixed order.
"""

import triton
import triton.language as tl

from moh_lm.kernels.triton_forward import dot, key_block, key_range, key_steps, load_rows, store_rows, visible


@triton.jit
def backward_query_kernel(
    q, k, v, gates, positions, after, starts, ends, kept, lse, dout, dq, dgates, delta,
    stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kh, stride_gs, stride_gb,
    stride_os, stride_ob, stride_oh, num_heads, width, seq, batch,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    SCALE: tl.constexpr, SCALE2: tl.constexpr, WIDE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Compute dQ and dGates for BM slots of a head, and delta for dK/dV. Grid: (blocks of slots, b * heads)."""
    first_slot = tl.program_id(0) * BM
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // num_heads, bh % num_heads
    positions += bh * seq
    if starts is not None:
        starts += b * seq
    count, begin, inner, full, stop = key_range(positions, after + bh * (seq + 1), starts, first_slot, BM, BN)
    slots = first_slot + tl.arange(0, BM)
    selected = slots < count
    position = tl.load(positions + slots, mask=slots < seq, other=0).to(INDEX)
    wanted = tl.where(selected, position, seq)
    q += b * stride_qb + h * stride_qh
    dout += b * stride_ob + h * stride_oh
    kept += bh * seq * (D1 + D2)
    k += b * stride_kb + (h // GROUP) * stride_kh
    v += b * stride_kb + (h // GROUP) * stride_kh
    q1 = load_rows(q, wanted, stride_qs, seq, 0, D1, True)
    do1 = load_rows(dout, wanted, stride_os, seq, 0, D1, True)
    d = tl.sum(do1.to(WIDE) * load_rows(kept, slots, D1 + D2, count, 0, D1, True).to(WIDE), 1)
    q2 = q1
    do2 = do1
    dq1 = tl.zeros([BM, D1], WIDE)
    dq2 = tl.zeros([BM, 1], WIDE)
    if D2 > 0:
        q2 = load_rows(q, wanted, stride_qs, seq, D1, D2, True)
        do2 = load_rows(dout, wanted, stride_os, seq, D1, D2, True)
        d += tl.sum(do2.to(WIDE) * load_rows(kept, slots, D1 + D2, count, D1, D2, True).to(WIDE), 1)
        dq2 = tl.zeros([BM, D2], WIDE)
    tl.store(delta + bh * seq + slots, d, mask=selected)
    tl.store(dgates + (position * batch + b) * width + h, d, mask=slots < seq)
    top = tl.load(lse + bh * seq + slots, mask=selected, other=float("inf"))
    dq1, dq2 = differentiate_keys(
        dq1, dq2, q1, q2, do1, do2, d, top, k, v, stride_ks, wanted, starts, begin, inner, full, stop, seq,
        BM, BN, D1, D2, SCALE2, INDEX, False,
    )  # fmt: skip
    dq1, dq2 = differentiate_keys(
        dq1, dq2, q1, q2, do1, do2, d, top, k, v, stride_ks, wanted, starts, begin, inner, full, stop, seq,
        BM, BN, D1, D2, SCALE2, INDEX, True,
    )  # fmt: skip
    gate = tl.load(gates + position * stride_gs + b * stride_gb + h, mask=selected, other=0.0)
    factor = gate.to(WIDE) * SCALE
    dq += (b * width + h) * (D1 + D2)
    stride_ds = batch * width * (D1 + D2)
    store_rows(dq, position, stride_ds, slots < seq, dq1 * factor[:, None], 0, D1)
    if D2 > 0:
        store_rows(dq, position, stride_ds, slots < seq, dq2 * factor[:, None], D1, D2)


@triton.jit
def differentiate_keys(
    dq1, dq2, q1, q2, do1, do2, delta, lse, k, v, stride, position, starts, begin, inner, full, stop, seq,
    BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, SCALE2: tl.constexpr, INDEX: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add sum_j P_ij (dOut_i . V_j - delta_i) K_j over the keys [inner, full), or, MASKED, over the others of [begin,
    stop)."""
    start, end, oldest = key_steps(starts, position, begin, inner, full, stop, seq, MASKED)
    for step in range(start, end, BN):
        keys = key_block(starts, step, inner, full, BN, MASKED, INDEX)
        k1 = load_rows(k, keys, stride, seq, 0, D1, MASKED)
        scores = dot(q1, tl.trans(k1), tl.zeros([BM, BN], lse.dtype))
        dp = dot(do1, tl.trans(load_rows(v, keys, stride, seq, 0, D1, MASKED)), tl.zeros([BM, BN], lse.dtype))
        if D2 > 0:
            k2 = load_rows(k, keys, stride, seq, D1, D2, MASKED)
            scores = dot(q2, tl.trans(k2), scores)
            dp = dot(do2, tl.trans(load_rows(v, keys, stride, seq, D1, D2, MASKED)), dp)
        p = tl.exp2(scores * SCALE2 - lse[:, None])
        if MASKED:
            p = tl.where(visible(keys[None, :], position[:, None], oldest[:, None], starts), p, 0.0)
        ds = (p * (dp - delta[:, None])).to(k.dtype.element_ty)
        dq1 = dot(ds, k1, dq1)
        if D2 > 0:
            dq2 = dot(ds, k2, dq2)
    return dq1, dq2


@triton.jit
def backward_key_kernel(
    q, k, v, gates, positions, after, starts, ends, lse, dout, delta, dk, dv,
    stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kh, stride_gs, stride_gb,
    stride_os, stride_ob, stride_oh, num_heads, width, seq, batch,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    SCALE: tl.constexpr, SCALE2: tl.constexpr, WIDE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV for BN keys of one key/value head. Grid: (blocks of keys, b * key/value heads)."""
    first_key = tl.program_id(0) * BN
    kv_heads = num_heads // GROUP
    b = tl.program_id(1).to(tl.int64) // kv_heads
    kv = tl.program_id(1).to(tl.int64) % kv_heads
    keys = (first_key + tl.arange(0, BN)).to(INDEX)
    k += b * stride_kb + kv * stride_kh
    v += b * stride_kb + kv * stride_kh
    k1 = load_rows(k, keys, stride_ks, seq, 0, D1, True)
    v1 = load_rows(v, keys, stride_ks, seq, 0, D1, True)
    k2 = k1
    v2 = v1
    dk1 = tl.zeros([BN, D1], WIDE)
    dv1 = tl.zeros([BN, D1], WIDE)
    dk2 = tl.zeros([BN, 1], WIDE)
    dv2 = tl.zeros([BN, 1], WIDE)
    if D2 > 0:
        k2 = load_rows(k, keys, stride_ks, seq, D1, D2, True)
        v2 = load_rows(v, keys, stride_ks, seq, D1, D2, True)
        dk2 = tl.zeros([BN, D2], WIDE)
        dv2 = tl.zeros([BN, D2], WIDE)
    last_key = tl.minimum(first_key + BN, seq) - 1
    if starts is not None:
        starts += b * seq
        first_end = tl.load(ends + b * seq + first_key)  # the first token that no longer sees the first key
        last_end = tl.load(ends + b * seq + last_key)
    for member in range(0, GROUP):
        h = kv * GROUP + member
        bh = b * num_heads + h
        row = after + bh * (seq + 1)
        start = 0
        stop = tl.load(row + first_key)  # slots [start, stop) see a key of the block,
        whole = tl.load(row + last_key)  # those before ``whole`` see every key,
        if starts is not None:
            start = tl.load(row + last_end)
        middle = start + (whole - start) // BM * BM
        gap = middle - start  # whole blocks of them: [middle - gap, middle)
        if starts is not None:  # but not those before ``first_end``
            gap = tl.maximum(gap - tl.cdiv(tl.load(row + first_end) - start, BM) * BM, 0)
        # In the other order ptxas waits for every single product (tests/kernels/test_triton_compiled.py).
        dk1, dk2, dv1, dv2 = differentiate_slots(
            dk1, dk2, dv1, dv2, k1, k2, v1, v2, keys, q + b * stride_qb + h * stride_qh, stride_qs,
            dout + b * stride_ob + h * stride_oh, stride_os, gates + b * stride_gb + h, stride_gs,
            positions + bh * seq, lse + bh * seq, delta + bh * seq, starts, start + gap, stop, middle, gap, seq,
            BM, BN, D1, D2, SCALE2, INDEX, True,
        )  # fmt: skip
        dk1, dk2, dv1, dv2 = differentiate_slots(
            dk1, dk2, dv1, dv2, k1, k2, v1, v2, keys, q + b * stride_qb + h * stride_qh, stride_qs,
            dout + b * stride_ob + h * stride_oh, stride_os, gates + b * stride_gb + h, stride_gs,
            positions + bh * seq, lse + bh * seq, delta + bh * seq, starts, middle - gap, middle, middle, gap, seq,
            BM, BN, D1, D2, SCALE2, INDEX, False,
        )  # fmt: skip
    at = (b * width + kv) * (D1 + D2)
    stride_ds = batch * width * (D1 + D2)
    store_rows(dk + at, keys, stride_ds, keys < seq, dk1 * SCALE, 0, D1)
    store_rows(dv + at, keys, stride_ds, keys < seq, dv1, 0, D1)
    if D2 > 0:
        store_rows(dk + at, keys, stride_ds, keys < seq, dk2 * SCALE, D1, D2)
        store_rows(dv + at, keys, stride_ds, keys < seq, dv2, D1, D2)


@triton.jit
def differentiate_slots(
    dk1, dk2, dv1, dv2, k1, k2, v1, v2, keys, q, stride_qs, dout, stride_os, gates, stride_gs, positions, lse, delta,
    starts, start, stop, middle, gap, seq,
    BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, SCALE2: tl.constexpr, INDEX: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the slots [start, stop) give to dK and dV; scores are transposed, keys by slots. Without MASKED the
    number of slots is a multiple of BM; with it, those before ``middle`` stand for the ones ``gap`` earlier."""
    for step in range(start, stop, BM):
        first = step
        if MASKED and starts is not None:
            first = tl.where(step < middle, step - gap, step)
        slots = first + tl.arange(0, BM)
        selected = slots < stop
        position = tl.load(positions + slots, mask=selected, other=seq).to(INDEX)
        gate = tl.load(gates + position * stride_gs, mask=selected, other=0.0)
        top = tl.load(lse + slots, mask=selected, other=float("inf"))  # p = 0 beyond the selected slots
        d = tl.load(delta + slots, mask=selected, other=0.0)
        q1 = load_rows(q, position, stride_qs, seq, 0, D1, MASKED)
        scores = dot(k1, tl.trans(q1), tl.zeros([BN, BM], top.dtype))
        if D2 > 0:
            q2 = load_rows(q, position, stride_qs, seq, D1, D2, MASKED)
            scores = dot(k2, tl.trans(q2), scores)
        p = tl.exp2(scores * SCALE2 - top[None, :])
        if MASKED:
            oldest = position
            if starts is not None:
                oldest = tl.load(starts + position, mask=selected, other=0)
            p = tl.where(visible(keys[:, None], position[None, :], oldest[None, :], starts), p, 0.0)
        p = p * gate[None, :]
        do1 = load_rows(dout, position, stride_os, seq, 0, D1, MASKED)
        dv1 = dot(p.to(do1.dtype), do1, dv1)
        dp = dot(v1, tl.trans(do1), tl.zeros([BN, BM], top.dtype))
        if D2 > 0:
            do2 = load_rows(dout, position, stride_os, seq, D1, D2, MASKED)
            dv2 = dot(p.to(do2.dtype), do2, dv2)
            dp = dot(v2, tl.trans(do2), dp)
        ds = (p * (dp - d[None, :])).to(q1.dtype)
        dk1 = dot(ds, q1, dk1)
        if D2 > 0:
            dk2 = dot(ds, q2, dk2)
    return dk1, dk2, dv1, dv2
