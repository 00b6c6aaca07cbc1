"""Flash-decoding of the selected heads in Triton: one new token per row reads what its heads need of the cache.

    out_i = g_i softmax(q_i K^T / sqrt(e)) V  where the row selects head i,  0 elsewhere

Differences from flash-decoding (Dao et al. 2023), which splits the keys of a row over programs and combines them:

1. Heads. A program takes one split of one key/value head with all of its query heads, so a tile of keys and values is
   read once for the whole group. It returns at once if the row selects no head of the group: without groups, no byte of
   the other heads' keys and values is read.
2. Lengths. They are read from device memory. The tokens of a row, not the room for them, are divided over the splits,
   and programs without tokens return. The number of splits depends only on shapes and multiprocessors, so nothing
   synchronises, and a CUDA graph can be replayed with another routing and other lengths.
3. Rows. Tensor cores process at least 16 rows, so every group, even a single head, is padded to 16. The 16
   multiplications per number read take less time than reading it, and Triton prefetches loads only for products.

Partial results of a split are kept with the log2 of their softmax sums, in fp32 (fp64 for fp64, which only the
interpreter runs), where the head is selected; the second kernel adds up those of a head in their order, multiplies by
the gate, and writes zeros for the other heads. No atomics, no filling beforehand, the same bits every time.

Names as in ``moh_lm.kernels.triton_forward``, whose loop over keys this is; stride_kb, _kh, _kt: of the rows, heads and
tokens of the cache. Shapes: b rows, h query heads, k key/value heads, T room for tokens, e head dimension.
"""

import torch
import triton
import triton.language as tl

from moh_lm.kernels.triton_attention import Tiles, check_runs, constants, index_type, up_to, wide
from moh_lm.kernels.triton_forward import attend_keys, load_rows, store_rows

# {bytes of a number: {head dimension up to: tiles}}; block_n: tokens of the cache. Those of 2 bytes were within 1% of
# the fastest of an H200 (docs/history/benchmarks.md). Those of 4 were chosen so that registers do not spill.
TILES = {2: {96: Tiles(16, 128, 8, 2), 128: Tiles(16, 32, 4, 3)}, 4: {128: Tiles(16, 32, 8, 3)}}
PROGRAMS_PER_MULTIPROCESSOR = 4
MAX_SPLITS = 64  # the second kernel holds them in registers
COMBINE_WARPS = 4


@torch.library.custom_op("moh_lm::decode_selected_heads", mutates_args=())
def decode_selected_heads(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    active: torch.Tensor,
    gates: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Return g_i H_i of one token per row where ``active``, else 0: [b, h, e] in the dtype of ``query``. No gradients.

    query: [b, h, e]. keys, values: [b, k, T, e] with equal strides. lengths: int32 [b], the tokens that each row sees,
    1 to T. active: bool [b, h]. gates: [b, h], or None for 1. num_splits: parts of the cache, at most ``MAX_SPLITS``;
    None: chosen for the device. Raises RuntimeError and ValueError as ``check_runs`` does.
    """
    check_runs(attend_split_kernel, query)
    if keys.stride() != values.stride() or keys.stride(-1) != 1:
        strides = f"{keys.stride()} and {values.stride()}"
        raise ValueError(f"attention backend triton: strides of keys and values {strides}; allocate both alike")
    (batch, heads, head_dim), (kv_heads, room) = query.shape, keys.shape[1:3]
    tile = tiles(query.dtype, head_dim)
    num_splits = num_splits or choose_splits(batch * kv_heads, triton.cdiv(room, tile.block_n), query.device)
    query, lengths, active = query.contiguous(), lengths.contiguous(), active.contiguous()
    gates = gates if gates is None else gates.contiguous()
    dtype, group = wide(query.dtype), heads // kv_heads
    parts = query.new_empty(num_splits, batch, heads, head_dim, dtype=dtype)
    lse = query.new_empty(num_splits, batch, heads, dtype=dtype)
    out = torch.empty_like(query)
    part = constants(head_dim)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        attend_split_kernel[(batch * kv_heads, num_splits)](
            query, keys, values, lengths, active, parts, lse, *keys.stride()[:3], batch, kv_heads,
            GROUP=group, BM=max(tile.block_m, triton.next_power_of_2(group)), BN=tile.block_n,
            D1=part["D1"], D2=part["D2"], SCALE2=part["SCALE2"],
            WIDE=tl.float64 if dtype == torch.float64 else tl.float32, INDEX=index_type([keys.movedim(2, 0)]),
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
        combine_kernel[(batch * heads,)](
            parts, lse, lengths, active, gates, out, batch, heads, num_splits,
            E=head_dim, COLUMNS=triton.next_power_of_2(head_dim), SPLITS=triton.next_power_of_2(num_splits),
            BN=tile.block_n, num_warps=COMBINE_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return out


@decode_selected_heads.register_fake
def _(query, keys, values, lengths, active, gates=None, num_splits=None):
    return query.new_empty(query.shape)


def tiles(dtype, head_dim):
    return up_to(head_dim, TILES[min(dtype.itemsize, 4)])


def choose_splits(programs, tiles, device):
    """Return how many splits keep the device busy.

    programs: their number in one split. tiles: their number in the cache; a split has at least one.
    """
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    wanted = triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors, programs)
    return min(wanted, tiles, MAX_SPLITS)


@triton.jit
def split_size(length, num_splits, BN: tl.constexpr):
    """Return the tokens of a split: the same number of whole tiles for each split but the last, which has the rest."""
    return tl.cdiv(tl.cdiv(length, BN), num_splits) * BN


@triton.jit
def attend_split_kernel(
    q, k, v, lengths, active, parts, lse, stride_kb, stride_kh, stride_kt, batch, kv_heads,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, SCALE2: tl.constexpr,
    WIDE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Write H of a group's selected heads for a split of the cache, and log2 of its softmax sums, [splits, b, h] each.
    Grid: (b * k, splits)."""
    b = tl.program_id(0).to(tl.int64) // kv_heads
    kv = tl.program_id(0).to(tl.int64) % kv_heads
    split = tl.program_id(1)
    num_heads = kv_heads * GROUP
    rows = tl.arange(0, BM)
    on = tl.load(active + b * num_heads + kv * GROUP + rows, mask=rows < GROUP, other=0) != 0
    length = tl.load(lengths + b)
    size = split_size(length, tl.num_programs(1), BN)
    begin = split * size
    stop = tl.minimum(begin + size, length)
    if (tl.sum(on.to(tl.int32), 0) == 0) | (begin >= stop):
        return
    q += (b * num_heads + kv * GROUP) * (D1 + D2)
    k += b * stride_kb + kv * stride_kh
    v += b * stride_kb + kv * stride_kh
    q1 = load_rows(q, rows, D1 + D2, GROUP, 0, D1, True)
    q2 = q1
    sum1 = tl.zeros([BM, D1], WIDE)
    sum2 = tl.zeros([BM, 1], WIDE)
    if D2 > 0:
        q2 = load_rows(q, rows, D1 + D2, GROUP, D1, D2, True)
        sum2 = tl.zeros([BM, D2], WIDE)
    top = tl.full([BM], -float("inf"), WIDE)
    total = tl.zeros([BM], WIDE)
    last = tl.zeros([BM], tl.int32) + (stop - 1)  # every row sees the whole split
    full = begin + (stop - begin) // BN * BN
    sum1, sum2, top, total = attend_keys(
        sum1, sum2, top, total, q1, q2, k, v, stride_kt, last, None, begin, begin, full, stop, stop,
        BM, BN, D1, D2, SCALE2, INDEX, False,
    )  # fmt: skip
    sum1, sum2, top, total = attend_keys(
        sum1, sum2, top, total, q1, q2, k, v, stride_kt, last, None, begin, begin, full, stop, stop,
        BM, BN, D1, D2, SCALE2, INDEX, True,
    )  # fmt: skip
    results = (split * batch + b) * num_heads + kv * GROUP + rows
    store_rows(parts, results, D1 + D2, on, sum1 / total[:, None], 0, D1)
    if D2 > 0:
        store_rows(parts, results, D1 + D2, on, sum2 / total[:, None], D1, D2)
    tl.store(lse + results, top + tl.log2(total), mask=on)


@triton.jit
def combine_kernel(
    parts, lse, lengths, active, gates, out, batch, num_heads, num_splits,
    E: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one head that hold tokens into out. Grid: (b * h,)."""
    bh = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    head = tl.zeros([COLUMNS], lse.dtype.element_ty)
    if tl.load(active + bh) != 0:
        length = tl.load(lengths + bh // num_heads)
        splits = tl.arange(0, SPLITS)
        used = splits < tl.cdiv(length, split_size(length, num_splits, BN))
        results = splits.to(tl.int64) * batch * num_heads + bh
        sums = tl.load(lse + results, mask=used, other=-float("inf"))
        weights = tl.exp2(sums - tl.max(sums, 0))
        at = parts + results[:, None] * E + columns[None, :]
        found = tl.load(at, mask=used[:, None] & (columns < E)[None, :], other=0.0)
        head = tl.sum(weights[:, None] * found, 0) / tl.sum(weights, 0)
        if gates is not None:
            head = head * tl.load(gates + bh).to(head.dtype)
    tl.store(out + bh * E + columns, head.to(out.dtype.element_ty), mask=columns < E)
