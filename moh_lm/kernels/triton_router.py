"""A router in four Triton kernels: two of the forward pass and two of the backward pass.

    forward     scores W x, gates, the K largest of each group, and sums over blocks of tokens
    finish      the sums of all blocks in a fixed order: L_b (Eq. 7), its part of the loss, rows of sequences
    backward    gradients of the scores, dx, and the part of dW of some blocks of tokens
    weights     dW, the sum of these parts in a fixed order

They compute what moh_lm/model/router.py, gates.py and balance.py explain. Nothing waits for the device, no shape
depends on the routing, and nothing is added atomically, so that every run gives the same bits. Products of bf16 or fp16
are exact and summed in fp32; backward, the fp32 gradient of a score goes as two such numbers, as in wide_linear.py.

Shapes: s sequence, b batch, d channels that the router reads, h heads, R rows of the weights.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from moh_lm.kernels.triton_router_kernels import backward_kernel, finish_kernel, forward_kernel, weights_kernel

FORWARD = dict(BT=64, BK=64, num_warps=4, num_stages=4)  # tokens of a block, channels of a step
BACKWARD = dict(BT=64, BD=64, num_warps=4, num_stages=2)  # tokens of a block, channels of a program
MANY_SCORES = BACKWARD | dict(BT=32, num_warps=8)  # for 64 or more scores per token: registers would not suffice
# Scores per token, by bytes of a number of x, from which shared memory, or registers in fp32, would not suffice either.
WIDE_SCORES = {2: 128, 4: 32, 8: 32}
FORWARD_WIDE = dict(BT=32, BK=64, num_warps=8, num_stages=2)
BACKWARD_WIDE = dict(BT=32, BD=32, num_warps=8, num_stages=1)
PARTS = 64  # largest number of parts of dW
AT_ONCE = 4096  # numbers that ``finish_kernel`` reads at once


def constants(form, numbers, dtype):
    """Return the constants of the kernels, which explain them. numbers: G, NS, E, heads of an expert, TWO."""
    groups, shared, routed, size, two = numbers
    padded = triton.next_power_of_2(groups + two)
    width = max(2 * two, triton.next_power_of_2(shared + routed), 16 // padded)  # 16: the smallest side of a product
    return dict(
        FORM=form, G=groups, NS=shared, E=routed, SIZE=size, TWO=two, GP=padded, W=width, RP=padded * width,
        ROWS=groups * (shared + routed) + 2 * two, WIDE=wide_of(dtype),
    )  # fmt: skip


def forward_tiles(of, dtype):
    return FORWARD_WIDE if of["RP"] >= WIDE_SCORES[dtype.itemsize] else FORWARD


def backward_tiles(of, dtype):
    if of["RP"] >= WIDE_SCORES[dtype.itemsize]:
        return BACKWARD_WIDE
    return MANY_SCORES if of["RP"] >= 64 else BACKWARD


def wide_of(dtype):
    return tl.float64 if dtype == torch.float64 else tl.float32


def pointers(w_shared, w_routed, w_type):
    """Return the weights. Another weight, which no kernel reads, takes the place of each missing one."""
    weights = (w_shared, w_routed, w_type)
    return [next(w for w in (weight, *weights) if w is not None) for weight in weights]


@torch.library.custom_op("moh_lm::router", mutates_args=())
def route(
    x: torch.Tensor, w_shared: torch.Tensor | None, w_routed: torch.Tensor | None, w_type: torch.Tensor | None,
    bias: torch.Tensor | None, use: torch.Tensor | None, replayed: torch.Tensor | None,
    form: str, numbers: Sequence[int], active: int, rate: float, says_selected: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return gates [s, b, h]; the heads in use, bool [s, b, h], or empty unless ``says_selected``; the selection
    [s, b, G E]; scores [s, b, RP]; and sums over blocks of tokens of P, selections, gates, their squares and a1,
    [blocks, b, 2 G E + 3].

    bias: int32 [G E], to be multiplied by ``rate``, or None. use, replayed: see ``SelectionReplay``, or None. active: K
    in a group.
    """
    gates, selected, selection, scores, parts = results = empty_results(x, form, numbers, says_selected)
    of = constants(form, numbers, x.dtype)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        forward_kernel[parts.shape[:2]](
            x, *pointers(w_shared, w_routed, w_type), bias, use, replayed, gates, selected if says_selected else None,
            selection, scores, parts, x.stride(0), x.stride(1), *x.shape, RATE=rate, K=active,
            **of, **forward_tiles(of, x.dtype),
        )  # fmt: skip
    return results


def empty_results(x, form, numbers, says_selected):
    length, batch, _ = x.shape
    of, wide = constants(form, numbers, x.dtype), torch.promote_types(x.dtype, torch.float32)
    heads, experts = of["G"] * (of["NS"] + of["E"]) * of["SIZE"], of["G"] * of["E"]
    selected = x.new_empty((length, batch, heads) if says_selected else 0, dtype=torch.bool)
    gates, selection, scores = (x.new_empty((length, batch, n), dtype=wide) for n in (heads, experts, of["RP"]))
    parts = x.new_empty((triton.cdiv(length, forward_tiles(of, x.dtype)["BT"]), batch, 2 * experts + 3), dtype=wide)
    return gates, selected, selection, scores, parts


@route.register_fake
def _(x, w_shared, w_routed, w_type, bias, use, replayed, form, numbers, active, rate, says_selected):
    return empty_results(x, form, numbers, says_selected)


@torch.library.custom_op("moh_lm::router_loss", mutates_args=())
def finish(
    parts: torch.Tensor, share: torch.Tensor | None, whole: torch.Tensor | None, tokens: int, micro_batches: int,
    scale: float, factor: float, together: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the loss [], the rows [b, 4 + E] of moh_lm/model/balance.py, and d loss / d P of a token [b, E].

    parts: see ``route``. share: f of Eq. 7 for all routed experts [E], or None for that of each sequence. whole:
    selections of whole sequences [b, E] where ``parts`` cover slices, or None. tokens: length of a sequence. factor:
    multiplies L_b. scale: also multiplies the returned loss, which is divided by ``micro_batches``. together:
    compute f and P over all sequences.
    """
    loss, rows, slope = results = empty_sums(parts)
    blocks, batch, _ = parts.shape
    experts, sequences = (triton.next_power_of_2(max(1, n)) for n in (slope.shape[1], batch))
    step = max(1, min(triton.next_power_of_2(blocks), AT_ONCE // (experts * sequences)))
    with torch.cuda.device_of(parts):
        finish_kernel[(1,)](
            parts, share, whole, loss, rows, slope, blocks, batch, tokens, micro_batches, SCALE=scale, FACTOR=factor,
            TOGETHER=together, E=slope.shape[1], EP=experts, BP=sequences, STEP=step, WIDE=wide_of(parts.dtype),
        )  # fmt: skip
    return results


@finish.register_fake
def empty_sums(parts, *_):
    batch, experts = parts.shape[1], (parts.shape[2] - 3) // 2
    return parts.new_empty(()), parts.new_empty((batch, 4 + experts)), parts.new_empty((batch, experts))


@torch.library.custom_op("moh_lm::router_backward", mutates_args=())
def differentiate(
    x: torch.Tensor, w_shared: torch.Tensor | None, w_routed: torch.Tensor | None, w_type: torch.Tensor | None,
    selection: torch.Tensor, scores: torch.Tensor, slope: torch.Tensor, dgates: torch.Tensor, dloss: torch.Tensor,
    form: str, numbers: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return dx [s, b, d] and d[W_s; W_r; W_h], [R, d], from the gradients of gates [s, b, h] and loss."""
    dx, dweights = results = empty_gradients(x, form, numbers)
    (length, batch, d), rows = x.shape, len(dweights)
    dgates = dgates if dgates.stride(-1) == 1 else dgates.contiguous()
    of = constants(form, numbers, x.dtype)
    chosen = backward_tiles(of, x.dtype)
    blocks = triton.cdiv(length * batch, chosen["BT"])
    tiles = triton.cdiv(blocks, PARTS)
    sums = scores.new_empty((triton.cdiv(blocks, tiles), rows, d))
    with torch.cuda.device_of(x):
        backward_kernel[(len(sums), triton.cdiv(d, chosen["BD"]))](
            x, *pointers(w_shared, w_routed, w_type), selection, scores, slope, dgates, dloss, dx, sums, x.stride(0),
            x.stride(1), dgates.stride(0), dgates.stride(1), *x.shape, tiles, SPLIT=x.dtype.itemsize == 2, **of,
            **chosen,
        )  # fmt: skip
        weights_kernel[(triton.cdiv(rows * d, 1024),)](sums, dweights, len(sums), rows * d, BLOCK=1024)
    return results


def empty_gradients(x, form, numbers):
    return x.new_empty(x.shape), x.new_empty((constants(form, numbers, x.dtype)["ROWS"], x.shape[2]))


@differentiate.register_fake
def _(x, w_shared, w_routed, w_type, selection, scores, slope, dgates, dloss, form, numbers):
    return empty_gradients(x, form, numbers)
