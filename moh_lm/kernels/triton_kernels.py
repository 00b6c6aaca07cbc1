"""Head-sparse causal attention in Triton: FlashAttention-2 over the selected queries of every head.

What differs from FlashAttention-2:

1. Rows. A program takes a block of BM *slots* of one head (``moh_lm.kernels.compaction``) and gathers their query rows
   from [s, b, heads, e] inside the kernel; keys and values stay where they are. The grid covers all s slots and each
   program reads the number of selected ones from device memory: no capacity, no dropped token, no synchronisation, and
   a CUDA graph can be replayed with another routing.
2. Causality. Positions ascend with the slots, but skip. Keys up to the position of the first row need no mask, those up
   to the position of the last row do; dK/dV starts at the first slot that is not before its keys.
3. Stores. The slots are a permutation of the sequence, so every row of ``out``, dQ and dGates is written once: results
   where the head is selected, zeros elsewhere. No atomics, no filling beforehand, the same bits every time.
4. Gates. out = g H, and H itself is kept for the backward pass, in slots. With P the probabilities:

       dg_i = delta_i = rowsum(dOut_i * H_i)            right for g = 0 too, since nothing is divided by it
       dS_ij = g_i P_ij (dOut_i . V_j - delta_i)        dQ = scale dS K,   dK = scale dS^T Q
       dV_j = sum_i g_i P_ij dOut_i

5. Grouped queries: dK/dV loops over the query heads of its key/value head in a fixed order.
6. A head dimension that is no power of two is taken in two parts (96 = 64 + 32), not padded.

The softmax is kept in base 2, in fp32 (in fp64 for fp64, which only the interpreter runs).
``moh_lm.kernels.triton_attention`` launches the kernels.

Names: q, k, v, gates, out as in Eq. 4 of the paper; kept is H in slots, lse the log2 of the softmax sums in slots,
delta rowsum(dOut * H) in slots; stride_qs, _qb, _qh: of the sequence, the batch and the heads of q (k and v share
theirs, out and all gradients are contiguous). SCALE = 1 / sqrt(e), SCALE2 = SCALE / ln 2, for powers of two; D1 + D2 =
e; GROUP query heads share a key/value head. A name that ends in 1 or 2 is the part of a matrix in the first D1 or the
last D2 columns.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(matrix, rows, stride, limit, FIRST: tl.constexpr, WIDTH: tl.constexpr, CHECKED: tl.constexpr):
    """[len(rows), WIDTH]: columns from FIRST on; if CHECKED, zeros for rows from ``limit`` on."""
    at = matrix + rows.to(tl.int64)[:, None] * stride + (FIRST + tl.arange(0, WIDTH))[None, :]
    if CHECKED:
        return tl.load(at, mask=(rows < limit)[:, None], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(matrix, rows, stride, mask, values, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    at = matrix + rows.to(tl.int64)[:, None] * stride + (FIRST + tl.arange(0, WIDTH))[None, :]
    tl.store(at, values.to(matrix.dtype.element_ty), mask=mask[:, None])


@triton.jit
def dot(a, b, acc):
    return tl.dot(a, b, acc, input_precision="tf32x3", out_dtype=acc.dtype)  # fp32 as three products of tf32


@triton.jit
def key_range(position, before, first_slot, seq, BM: tl.constexpr, BN: tl.constexpr):
    """(count, full, stop) for the slots from ``first_slot`` on: how many slots of the head are selected; keys [0, full)
    are visible to all selected rows, [full, stop) to some. Without a selected row both are 0."""
    count = tl.load(before + seq)
    some = first_slot < count
    lowest = tl.load(position + first_slot, mask=some, other=-1)
    highest = tl.load(position + tl.minimum(first_slot + BM, count) - 1, mask=some, other=-1)
    return count, (lowest + 1) // BN * BN, highest + 1


@triton.jit
def attend_keys(
    sum1, sum2, top, total, q1, q2, k, v, stride, position, start, stop, seq,
    BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, SCALE2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [start, stop)."""
    for first in range(start, stop, BN):
        keys = first + tl.arange(0, BN)
        scores = tl.zeros([BM, BN], top.dtype)
        scores = dot(q1, tl.trans(load_rows(k, keys, stride, seq, 0, D1, MASKED)), scores)
        if D2 > 0:
            scores = dot(q2, tl.trans(load_rows(k, keys, stride, seq, D1, D2, MASKED)), scores)
        if MASKED:
            scores = tl.where(position[:, None] >= keys[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * SCALE2)  # finite: every row sees key 0
        p = tl.exp2(scores * SCALE2 - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        top = new_top
        total = total * shrink + tl.sum(p, 1)
        p = p.to(v.dtype.element_ty)
        sum1 = dot(p, load_rows(v, keys, stride, seq, 0, D1, MASKED), sum1 * shrink[:, None])
        if D2 > 0:
            sum2 = dot(p, load_rows(v, keys, stride, seq, D1, D2, MASKED), sum2 * shrink[:, None])
    return sum1, sum2, top, total


@triton.jit
def forward_kernel(
    q, k, v, gates, positions, before, out, kept, lse,
    stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kh, stride_gs, stride_gb, num_heads, seq, batch,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    SCALE: tl.constexpr, SCALE2: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """out, H in slots, and log2 of the softmax sums, for BM slots of one head. Grid: (blocks of slots, b * heads)."""
    first_slot = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # the longest rows first
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // num_heads, bh % num_heads
    positions += bh * seq
    count, full, stop = key_range(positions, before + bh * (seq + 1), first_slot, seq, BM, BN)
    slots = first_slot + tl.arange(0, BM)
    selected = slots < count
    position = tl.load(positions + slots, mask=slots < seq, other=0)
    wanted = tl.where(selected, position, seq)  # rows beyond the sequence are read as zeros
    q += b * stride_qb + h * stride_qh
    k += b * stride_kb + (h // GROUP) * stride_kh
    v += b * stride_kb + (h // GROUP) * stride_kh
    q1 = load_rows(q, wanted, stride_qs, seq, 0, D1, True)
    q2 = q1
    sum1 = tl.zeros([BM, D1], WIDE)
    sum2 = tl.zeros([BM, 1], WIDE)
    if D2 > 0:
        q2 = load_rows(q, wanted, stride_qs, seq, D1, D2, True)
        sum2 = tl.zeros([BM, D2], WIDE)
    top = tl.full([BM], -float("inf"), WIDE)
    total = tl.zeros([BM], WIDE)
    sum1, sum2, top, total = attend_keys(
        sum1, sum2, top, total, q1, q2, k, v, stride_ks, wanted, 0, full, seq, BM, BN, D1, D2, SCALE2, False
    )
    sum1, sum2, top, total = attend_keys(
        sum1, sum2, top, total, q1, q2, k, v, stride_ks, wanted, full, stop, seq, BM, BN, D1, D2, SCALE2, True
    )
    gate = tl.load(gates + position.to(tl.int64) * stride_gs + b * stride_gb + h, mask=selected, other=0.0)
    total = tl.where(selected, total, 1.0)
    out += (b * num_heads + h) * (D1 + D2)
    kept += bh * seq * (D1 + D2)
    stride_os = batch * num_heads * (D1 + D2)
    head1 = tl.where(selected[:, None], sum1 / total[:, None], 0.0)
    store_rows(out, position, stride_os, slots < seq, head1 * gate[:, None], 0, D1)
    store_rows(kept, slots, D1 + D2, slots < seq, head1, 0, D1)
    if D2 > 0:
        head2 = tl.where(selected[:, None], sum2 / total[:, None], 0.0)
        store_rows(out, position, stride_os, slots < seq, head2 * gate[:, None], D1, D2)
        store_rows(kept, slots, D1 + D2, slots < seq, head2, D1, D2)
    tl.store(lse + bh * seq + slots, tl.where(selected, top + tl.log2(total), 0.0), mask=slots < seq)


@triton.jit
def backward_query_kernel(
    q, k, v, gates, positions, before, kept, lse, dout, dq, dgates, delta,
    stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kh, stride_gs, stride_gb,
    stride_os, stride_ob, stride_oh, num_heads, seq, batch,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    SCALE: tl.constexpr, SCALE2: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dQ and dGates for BM slots of one head, and delta in slots for dK/dV. Grid: (blocks of slots, b * heads)."""
    first_slot = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // num_heads, bh % num_heads
    positions += bh * seq
    count, full, stop = key_range(positions, before + bh * (seq + 1), first_slot, seq, BM, BN)
    slots = first_slot + tl.arange(0, BM)
    selected = slots < count
    position = tl.load(positions + slots, mask=slots < seq, other=0)
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
    tl.store(delta + bh * seq + slots, d, mask=slots < seq)
    tl.store(dgates + (position.to(tl.int64) * batch + b) * num_heads + h, d, mask=slots < seq)
    top = tl.load(lse + bh * seq + slots, mask=selected, other=float("inf"))
    dq1, dq2 = differentiate_keys(
        dq1, dq2, q1, q2, do1, do2, d, top, k, v, stride_ks, wanted, 0, full, seq, BM, BN, D1, D2, SCALE2, False
    )
    dq1, dq2 = differentiate_keys(
        dq1, dq2, q1, q2, do1, do2, d, top, k, v, stride_ks, wanted, full, stop, seq, BM, BN, D1, D2, SCALE2, True
    )
    gate = tl.load(gates + position.to(tl.int64) * stride_gs + b * stride_gb + h, mask=selected, other=0.0)
    factor = gate.to(WIDE) * SCALE
    dq += (b * num_heads + h) * (D1 + D2)
    stride_ds = batch * num_heads * (D1 + D2)
    store_rows(dq, position, stride_ds, slots < seq, dq1 * factor[:, None], 0, D1)
    if D2 > 0:
        store_rows(dq, position, stride_ds, slots < seq, dq2 * factor[:, None], D1, D2)


@triton.jit
def differentiate_keys(
    dq1, dq2, q1, q2, do1, do2, delta, lse, k, v, stride, position, start, stop, seq,
    BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, SCALE2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add sum_j P_ij (dOut_i . V_j - delta_i) K_j over the keys [start, stop)."""
    for first in range(start, stop, BN):
        keys = first + tl.arange(0, BN)
        k1 = load_rows(k, keys, stride, seq, 0, D1, MASKED)
        scores = dot(q1, tl.trans(k1), tl.zeros([BM, BN], lse.dtype))
        dp = dot(do1, tl.trans(load_rows(v, keys, stride, seq, 0, D1, MASKED)), tl.zeros([BM, BN], lse.dtype))
        if D2 > 0:
            k2 = load_rows(k, keys, stride, seq, D1, D2, MASKED)
            scores = dot(q2, tl.trans(k2), scores)
            dp = dot(do2, tl.trans(load_rows(v, keys, stride, seq, D1, D2, MASKED)), dp)
        p = tl.exp2(scores * SCALE2 - lse[:, None])
        if MASKED:
            p = tl.where(position[:, None] >= keys[None, :], p, 0.0)
        ds = (p * (dp - delta[:, None])).to(k.dtype.element_ty)
        dq1 = dot(ds, k1, dq1)
        if D2 > 0:
            dq2 = dot(ds, k2, dq2)
    return dq1, dq2


@triton.jit
def backward_key_kernel(
    q, k, v, gates, positions, before, lse, dout, delta, dk, dv,
    stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kh, stride_gs, stride_gb,
    stride_os, stride_ob, stride_oh, num_heads, seq, batch,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    SCALE: tl.constexpr, SCALE2: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dK and dV for BN keys of one key/value head. Grid: (blocks of keys, b * key/value heads)."""
    first_key = tl.program_id(0) * BN
    kv_heads = num_heads // GROUP
    b = tl.program_id(1).to(tl.int64) // kv_heads
    kv = tl.program_id(1).to(tl.int64) % kv_heads
    keys = first_key + tl.arange(0, BN)
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
    for member in range(0, GROUP):
        h = kv * GROUP + member
        bh = b * num_heads + h
        row = before + bh * (seq + 1)
        count = tl.load(row + seq)
        first = tl.load(row + first_key)
        whole = tl.load(row + tl.minimum(first_key + BN - 1, seq))  # slots from here on see every key of the block
        middle = tl.minimum(first + tl.cdiv(whole - first, BM) * BM, count)
        dk1, dk2, dv1, dv2 = differentiate_slots(
            dk1, dk2, dv1, dv2, k1, k2, v1, v2, keys, q + b * stride_qb + h * stride_qh, stride_qs,
            dout + b * stride_ob + h * stride_oh, stride_os, gates + b * stride_gb + h, stride_gs,
            positions + bh * seq, lse + bh * seq, delta + bh * seq, first, middle, count, seq,
            BM, BN, D1, D2, SCALE2, True,
        )  # fmt: skip
        dk1, dk2, dv1, dv2 = differentiate_slots(
            dk1, dk2, dv1, dv2, k1, k2, v1, v2, keys, q + b * stride_qb + h * stride_qh, stride_qs,
            dout + b * stride_ob + h * stride_oh, stride_os, gates + b * stride_gb + h, stride_gs,
            positions + bh * seq, lse + bh * seq, delta + bh * seq, middle, count, count, seq,
            BM, BN, D1, D2, SCALE2, False,
        )  # fmt: skip
    at = (b * kv_heads + kv) * (D1 + D2)
    stride_ds = batch * kv_heads * (D1 + D2)
    store_rows(dk + at, keys, stride_ds, keys < seq, dk1 * SCALE, 0, D1)
    store_rows(dv + at, keys, stride_ds, keys < seq, dv1, 0, D1)
    if D2 > 0:
        store_rows(dk + at, keys, stride_ds, keys < seq, dk2 * SCALE, D1, D2)
        store_rows(dv + at, keys, stride_ds, keys < seq, dv2, D1, D2)


@triton.jit
def differentiate_slots(
    dk1, dk2, dv1, dv2, k1, k2, v1, v2, keys, q, stride_qs, dout, stride_os, gates, stride_gs, positions, lse, delta,
    start, stop, count, seq,
    BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, SCALE2: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what the slots [start, stop) give to dK and dV; scores are transposed, keys by slots."""
    for first in range(start, stop, BM):
        slots = first + tl.arange(0, BM)
        selected = slots < count
        position = tl.load(positions + slots, mask=selected, other=seq)
        gate = tl.load(gates + position.to(tl.int64) * stride_gs, mask=selected, other=0.0)
        top = tl.load(lse + slots, mask=selected, other=float("inf"))  # p = 0 beyond the selected slots
        d = tl.load(delta + slots, mask=selected, other=0.0)
        q1 = load_rows(q, position, stride_qs, seq, 0, D1, True)
        scores = dot(k1, tl.trans(q1), tl.zeros([BN, BM], top.dtype))
        if D2 > 0:
            q2 = load_rows(q, position, stride_qs, seq, D1, D2, True)
            scores = dot(k2, tl.trans(q2), scores)
        p = tl.exp2(scores * SCALE2 - top[None, :])
        if MASKED:
            p = tl.where(position[None, :] >= keys[:, None], p, 0.0)
        p = p * gate[None, :]
        do1 = load_rows(dout, position, stride_os, seq, 0, D1, True)
        dv1 = dot(p.to(do1.dtype), do1, dv1)
        dp = dot(v1, tl.trans(do1), tl.zeros([BN, BM], top.dtype))
        if D2 > 0:
            do2 = load_rows(dout, position, stride_os, seq, D1, D2, True)
            dv2 = dot(p.to(do2.dtype), do2, dv2)
            dp = dot(v2, tl.trans(do2), dp)
        ds = (p * (dp - d[None, :])).to(q1.dtype)
        dk1 = dot(ds, q1, dk1)
        if D2 > 0:
            dk2 = dot(ds, q2, dk2)
    return dk1, dk2, dv1, dv2
