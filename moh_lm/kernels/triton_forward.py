"""Head-sparse causal attention in Triton: FlashAttention-2 over the selected queries of every head. This is the forward
pass.

Differences from FlashAttention-2:

1. Rows. A program takes a block of BM *slots* of one head (triton_compaction.py) and gathers their query rows
   from [s, b, heads, e] inside the kernel; keys and values stay where they are. The grid covers all s slots and each
   program reads the number of selected ones from device memory: no capacity, no dropped token, no synchronisation, and
   a CUDA graph can be replayed with another routing.
2. Causality. Positions descend over the slots, and skip: the block that is not filled is the one with the fewest keys.
   Keys up to the position of the last row need no mask, those up to the position of the first row do; dK/dV ends at the
   last slot that is not before its keys.
3. Documents and windows. ``starts`` and ``ends`` (``moh_lm.kernels.masks``) bound the keys and the slots from the
   other side too. Keys that all rows see then lie between two masked ranges, which one loop takes together; a block
   with parts of several documents is masked throughout. Without, they are None, and nothing of this is compiled.
4. Stores. The slots are a permutation of the sequence, so every row of ``out``, dQ and dGates is written once: results
   where the head is selected, zeros elsewhere. No atomics, no filling beforehand, the same bits every time. All of them
   may be the last heads of a wider tensor whose first heads are computed elsewhere, so nothing is copied to join them.
5. Gates. out = g H, and H itself is kept for the backward pass (``moh_lm.kernels.triton_backward``), in slots.
6. A head dimension that is not a power of two is processed in two parts (96 = 64 + 32), not padded.

The softmax uses base 2 in fp32 (fp64 for fp64, which only the interpreter runs). ``moh_lm.kernels.triton_attention``
launches the kernels.

Names: q, k, v, gates, out as in Eq. 4 of the paper; kept is H in slots, lse the log2 of the softmax sums in slots;
wanted are positions, and ``seq`` for rows that are not selected. stride_qs, _qb, _qh: of the sequence, the batch and
the heads of q; stride_k of k and v, stride_g of gates, stride_o of out and of its gradient. What the kernels write are
the last heads of contiguous tensors with ``width`` heads, query or key/value heads. SCALE = 1 / sqrt(e), SCALE2 = SCALE
/ ln 2, for powers of two; D1 + D2 = e; GROUP query heads share a key/value head. A name that ends in 1 or 2 is the part
of a matrix in the first D1 or the last D2 columns. WIDE: fp32 or fp64. INDEX: int64 for tensors too large for 32-bit
addresses, else int32, which saves half of the instructions for addresses.
"""

import triton
import triton.language as tl


@triton.jit
def load_rows(matrix, rows, stride, limit, FIRST: tl.constexpr, WIDTH: tl.constexpr, CHECKED: tl.constexpr):
    """Load columns from FIRST on, [len(rows), WIDTH]. If CHECKED, rows from ``limit`` on are 0. rows: of type INDEX."""
    at = matrix + rows[:, None] * stride + (FIRST + tl.arange(0, WIDTH))[None, :]
    if CHECKED:
        return tl.load(at, mask=(rows < limit)[:, None], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(matrix, rows, stride, mask, values, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    at = matrix + rows[:, None] * stride + (FIRST + tl.arange(0, WIDTH))[None, :]
    tl.store(at, values.to(matrix.dtype.element_ty), mask=mask[:, None])


@triton.jit
def dot(a, b, acc):
    return tl.dot(a, b, acc, input_precision="tf32x3", out_dtype=acc.dtype)  # fp32 as three products of tf32


@triton.jit
def key_range(position, after, starts, first_slot, BM: tl.constexpr, BN: tl.constexpr):
    """Return (count, begin, inner, full, stop) for the slots from ``first_slot`` on. count: selected slots of the head.
    Keys [inner, full) are visible to all selected rows, the others of [begin, stop) to some. Without a selected row all
    but count are 0."""
    count = tl.load(after)
    some = first_slot < count
    highest = tl.load(position + first_slot, mask=some, other=-1)
    lowest = tl.load(position + tl.minimum(first_slot + BM, count) - 1, mask=some, other=-1)
    full = (lowest + 1) // BN * BN
    if starts is None:
        return count, 0, 0, full, highest + 1
    else:
        begin = tl.load(starts + lowest, mask=some, other=0) // BN * BN
        inner = tl.minimum(tl.cdiv(tl.load(starts + highest, mask=some, other=0), BN) * BN, full)
        return count, begin, inner, full, highest + 1


@triton.jit
def key_steps(starts, position, begin, inner, full, stop, seq, MASKED: tl.constexpr):
    """Return steps [start, end) over the keys [inner, full), or, MASKED, over the others of [begin, stop), where those
    before ``inner`` are taken as if they ended at ``full``; and the first key that each row sees."""
    oldest = position
    if MASKED:
        if starts is not None:
            oldest = tl.load(starts + position, mask=position < seq, other=0)
        return begin + (full - inner), stop, oldest
    else:
        return inner, full, oldest


@triton.jit
def key_block(starts, step, inner, full, BN: tl.constexpr, MASKED: tl.constexpr, INDEX: tl.constexpr):
    """Return the keys [BN] of a step of ``key_steps``."""
    if MASKED and starts is not None:
        step = tl.where(step < full, step - (full - inner), step)
    return (step + tl.arange(0, BN)).to(INDEX)


@triton.jit
def visible(keys, position, oldest, starts):
    """Return whether rows at ``position`` see ``keys``. oldest: the first key that they see, used with ``starts``."""
    if starts is None:
        return position >= keys
    else:
        return (position >= keys) & (oldest <= keys)


@triton.jit
def attend_keys(
    sum1, sum2, top, total, q1, q2, k, v, stride, position, starts, begin, inner, full, stop, seq,
    BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, SCALE2: tl.constexpr, INDEX: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Continue the online softmax over the keys [inner, full), or, MASKED, over the others of [begin, stop)."""
    start, end, oldest = key_steps(starts, position, begin, inner, full, stop, seq, MASKED)
    for step in range(start, end, BN):
        keys = key_block(starts, step, inner, full, BN, MASKED, INDEX)
        scores = tl.zeros([BM, BN], top.dtype)
        scores = dot(q1, tl.trans(load_rows(k, keys, stride, seq, 0, D1, MASKED)), scores)
        if D2 > 0:
            scores = dot(q2, tl.trans(load_rows(k, keys, stride, seq, D1, D2, MASKED)), scores)
        if MASKED:
            scores = tl.where(visible(keys[None, :], position[:, None], oldest[:, None], starts), scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * SCALE2)  # finite: every row sees key 0, or top was
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
    q, k, v, gates, positions, after, starts, ends, out, kept, lse,
    stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kh, stride_gs, stride_gb,
    num_heads, width, seq, batch,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    SCALE: tl.constexpr, SCALE2: tl.constexpr, WIDE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Compute out, H and log2 of the softmax sums for BM slots of a head. Grid: (blocks of slots, b * heads)."""
    first_slot = tl.program_id(0) * BM  # the longest rows first
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // num_heads, bh % num_heads
    positions += bh * seq
    if starts is not None:
        starts += b * seq
    count, begin, inner, full, stop = key_range(positions, after + bh * (seq + 1), starts, first_slot, BM, BN)
    slots = first_slot + tl.arange(0, BM)
    selected = slots < count
    position = tl.load(positions + slots, mask=slots < seq, other=0).to(INDEX)
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
    if starts is not None:
        top = tl.full([BM], -1e30, WIDE)  # finite: a row may see no key of the first blocks
    total = tl.zeros([BM], WIDE)
    sum1, sum2, top, total = attend_keys(
        sum1, sum2, top, total, q1, q2, k, v, stride_ks, wanted, starts, begin, inner, full, stop, seq,
        BM, BN, D1, D2, SCALE2, INDEX, False,
    )  # fmt: skip
    sum1, sum2, top, total = attend_keys(
        sum1, sum2, top, total, q1, q2, k, v, stride_ks, wanted, starts, begin, inner, full, stop, seq,
        BM, BN, D1, D2, SCALE2, INDEX, True,
    )  # fmt: skip
    gate = tl.load(gates + position * stride_gs + b * stride_gb + h, mask=selected, other=0.0)
    total = tl.where(selected, total, 1.0)
    out += (b * width + h) * (D1 + D2)
    kept += bh * seq * (D1 + D2)
    stride_os = batch * width * (D1 + D2)
    head1 = tl.where(selected[:, None], sum1 / total[:, None], 0.0)
    store_rows(out, position, stride_os, slots < seq, head1 * gate[:, None], 0, D1)
    store_rows(kept, slots, D1 + D2, selected, head1, 0, D1)
    if D2 > 0:
        head2 = tl.where(selected[:, None], sum2 / total[:, None], 0.0)
        store_rows(out, position, stride_os, slots < seq, head2 * gate[:, None], D1, D2)
        store_rows(kept, slots, D1 + D2, selected, head2, D1, D2)
    tl.store(lse + bh * seq + slots, top + tl.log2(total), mask=selected)
