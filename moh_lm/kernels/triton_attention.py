"""The Triton backend as two operators of torch: ``moh_lm::head_sparse_attention`` and its backward pass.

Both have fake versions, so ``torch.compile(fullgraph=True)`` accepts them. No shape depends on the routing, so another
routing never recompiles, and a CUDA graph can be replayed. ``moh_lm.kernels.triton_forward`` explains the kernels.

Shapes: s sequence, b batch, e head dimension, heads query heads, a multiple of the key/value heads.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable
from torch.cuda import get_device_capability

from moh_lm.kernels.measured import TRITON_HEAD_DIMS, measured_tiles
from moh_lm.kernels.triton_backward import backward_key_kernel, backward_query_kernel
from moh_lm.kernels.triton_compaction import compact
from moh_lm.kernels.triton_forward import forward_kernel
from moh_lm.kernels.triton_gates import differentiate_gates


class Tiles(NamedTuple):
    """block_m: slots per block. block_n: keys per block. The other two fields are Triton's."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# For GPUs without measurements: {largest head dimension: tiles}. Those for Hopper were within 6% of the fastest on an
# H200 with 1024 to 8192 tokens (docs/history/benchmarks.md). The others were chosen so that registers do not spill (in
# fp32 they do from 96 on) and products wait for nothing.
HOPPER = {
    "forward": {128: Tiles(64, 64, 4, 3)},
    "query": {96: Tiles(64, 64, 4, 3), 128: Tiles(64, 64, 4, 2)},
    "key": {
        32: Tiles(64, 64, 4, 2),
        48: Tiles(32, 64, 4, 2),
        64: Tiles(32, 64, 4, 3),
        80: Tiles(32, 64, 4, 2),
        96: Tiles(64, 64, 4, 2),
        128: Tiles(32, 64, 4, 3),
    },
}
AMPERE = {
    "forward": {64: Tiles(64, 64, 4, 3), 128: Tiles(64, 32, 4, 3)},
    "query": {128: Tiles(64, 64, 8, 2)},
    "key": {64: Tiles(32, 64, 4, 2), 128: Tiles(32, 64, 8, 2)},
}
BLACKWELL = HOPPER | {"key": AMPERE["key"]}
FP32 = dict.fromkeys(("forward", "query", "key"), {128: Tiles(32, 32, 4, 1)})


def tiles(kernel, dtype, head_dim, capability):
    """Return the ``Tiles`` of "forward", "query" (dQ) or "key" (dK/dV). capability: such as (9, 0); None: interpreted.
    """
    if capability is None:
        table = HOPPER
    else:
        table = FP32 if dtype.itemsize >= 4 else {9: HOPPER, 10: BLACKWELL}.get(capability[0], AMPERE)
    return up_to(head_dim, table[kernel])


def fastest_tiles(kernel, query):
    """Return the tiles that were measured on the GPU of ``query`` [s, ..., e], or else the default ones."""
    measured = measured_tiles(query.device, query.dtype, kernel, query.shape[0], query.shape[-1])
    if measured:
        return Tiles(*measured)
    return tiles(kernel, query.dtype, query.shape[-1], get_device_capability(query.device))


def up_to(head_dim, choices):
    return next(choice for limit, choice in choices.items() if head_dim <= limit)


def triton_heads(query, key, value, gates, selected, documents=None):
    """Compute g_i H_i of the selected heads, and 0 elsewhere. For shapes see ``gated_attention``."""
    starts, ends = (None, None) if documents is None else (bound.contiguous() for bound in documents[:2])
    return head_sparse_attention(query, key, value, gates, selected, None, starts, ends)[0]


def joined_heads(query, key, value, gates, selected, first, groups, attend_shared):
    """Compute g_i H_i of all heads; the ``first`` ones, on ``groups`` key/value heads, are shared by all tokens.

    attend_shared: maps query, key and value of the shared heads to their H [s, b, first, e].
    """
    *shared, query, key, value = Take.apply(query, key, value, first, groups)
    return head_sparse_attention(query, key, value, gates, selected, attend_shared(*shared))[0]


class Take(torch.autograd.Function):
    """Returns query, key and value of the first heads, and the whole tensors unchanged for ``head_sparse_attention``.

    Splitting and joining heads would copy whole tensors. Instead, the operator allocates outputs and gradients for all
    heads, and this function writes the gradients of the first heads into them.
    """

    @staticmethod
    def forward(ctx, query, key, value, first, groups):
        whole = (query.view_as(query), key.view_as(key), value.view_as(value))
        return query[:, :, :first], key[:, :, :groups], value[:, :, :groups], *whole

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        whole = gradients[3:]
        for part, gradient in zip(gradients[:3], whole, strict=True):
            # ``data``: torch.compile traces this with outputs as gradients, which may be views of one product
            gradient.data[:, :, : part.shape[2]] = part
        return *whole, None, None


@torch.library.custom_op("moh_lm::head_sparse_attention", mutates_args=())
def head_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gates: torch.Tensor,
    selected: torch.Tensor,
    context: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute g_i H_i of the heads in ``context``, and of the others where a token selects them, else 0: [s, b, heads,
    e].

    Also returns what the backward pass needs: positions and after of ``compact``, H in selected slots [b, heads, s,
    e], and the log2 of the softmax sums, [b, heads, s]. Only the first result has a gradient.

    query: [s, b, heads, e]. key, value: [s, b, key_value_heads, e]. gates: fp32 [s, b, heads]. selected: [s, b, heads],
    bool or 0 and 1. context: H_i of the first heads [s, b, first, e], which share no keys with others, or None. starts,
    ends: see ``AttentionMask``, or None. Gradients of query, key and value are not written for the heads in context.
    """
    check_runs(forward_kernel, query)
    out = query.new_empty(query.shape)
    first = 0 if context is None else context.shape[2]
    if first:
        torch.mul(context, gates[..., :first].unsqueeze(-1), out=out[:, :, :first])
    query, key, value, gates = kernel_layout(*others(first, query, key, value, gates))
    kept, lse = empty_in_slots(query)
    out_of_others = out[:, :, first:]
    with torch.cuda.device_of(query):  # Triton launches on the current device
        positions, after = compact(selected[..., first:])
        inputs = (query, key, value, gates, positions, after, starts, ends)
        launch(forward_kernel, "forward", *inputs, (out_of_others, kept, lse), out_of_others)
    return out, positions, after, kept, lse


def others(first, query, key, value, gates):
    """Return views of the heads after the ``first`` query heads."""
    groups = first * key.shape[2] // query.shape[2]
    return query[:, :, first:], key[:, :, groups:], value[:, :, groups:], gates[:, :, first:]


def empty_in_slots(query):
    length, batch, heads, head_dim = query.shape
    kept = query.new_empty(batch, heads, length, head_dim)
    return kept, query.new_empty(kept.shape[:3], dtype=wide(query.dtype))


@head_sparse_attention.register_fake
def _(query, key, value, gates, selected, context=None, starts=None, ends=None):
    routed = query if context is None else query[:, :, context.shape[2] :]
    length, batch, heads, _ = routed.shape
    positions, after = (selected.new_empty((batch, heads, n), dtype=torch.int32) for n in (length, length + 1))
    return query.new_empty(query.shape), positions, after, *empty_in_slots(routed)


@torch.library.custom_op("moh_lm::head_sparse_attention_backward", mutates_args=())
def head_sparse_attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gates: torch.Tensor,
    context: torch.Tensor | None,
    starts: torch.Tensor | None,
    ends: torch.Tensor | None,
    positions: torch.Tensor,
    after: torch.Tensor,
    kept: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key, value, gates and context, from that of the first result."""
    gradients = dq, dk, dv, dgates, dcontext = empty_gradients(query, key, value, gates, context)
    if torch.is_anomaly_enabled():  # it would find NaN where ``Take`` has not written yet
        for tensor in (dq, dk, dv):
            tensor.zero_()
    with torch.cuda.device_of(query):  # Triton launches on the current device
        first = 0 if context is None else context.shape[2]
        if first:
            differentiate_gates(gradient[:, :, :first], context, gates, dcontext, dgates)
        dq, dk, dv, dgates = others(first, dq, dk, dv, dgates)
        query, key, value, gates = kernel_layout(*others(first, query, key, value, gates))
        gradient = gradient[:, :, first:] if gradient.stride(-1) == 1 else gradient[:, :, first:].contiguous()
        delta = torch.empty_like(lse)
        inputs = (query, key, value, gates, positions, after, starts, ends)
        launch(backward_query_kernel, "query", *inputs, (kept, lse, gradient, dq, dgates, delta), dq, gradient)
        launch(backward_key_kernel, "key", *inputs, (lse, gradient, delta, dk, dv), dk, gradient)
    return gradients


@head_sparse_attention_backward.register_fake
def _(gradient, query, key, value, gates, context, *_):
    return empty_gradients(query, key, value, gates, context)


def empty_gradients(query, key, value, gates, context):
    shape, stride = ((0,), (1,)) if context is None else (context.shape, context.stride())
    dcontext = query.new_empty_strided(shape, stride)
    return *(tensor.new_empty(tensor.shape) for tensor in (query, key, value, gates)), dcontext


def keep_for_backward(ctx, inputs, output):
    query, key, value, gates, _, context, starts, ends = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, gates, context, starts, ends, *output[1:])


def differentiate(ctx, gradient, *_):
    saved = ctx.saved_tensors
    dq, dk, dv, dgates, dcontext = head_sparse_attention_backward(gradient, *saved)
    return dq, dk, dv, dgates, None, None if saved[4] is None else dcontext, None, None


head_sparse_attention.register_autograd(differentiate, setup_context=keep_for_backward)


def kernel_layout(query, key, value, gates):
    """Return the inputs with contiguous rows, key and value with equal strides, without copies if possible."""
    if key.stride() != value.stride():
        key, value = key.contiguous(), value.contiguous()
    return tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value, gates))


def launch(kernel, name, query, key, value, gates, positions, after, starts, ends, others, result, gradient=None):
    """Run a kernel of triton_forward or triton_backward. others: its arguments between ``ends`` and the strides.
    result: one of its outputs."""
    length, batch, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    tile = fastest_tiles(name, query) if query.is_cuda else tiles(name, query.dtype, head_dim, None)
    by_keys = name == "key"
    blocks = triton.cdiv(length, tile.block_n if by_keys else tile.block_m)
    strides = [*query.stride()[:3], *key.stride()[:3], *gates.stride()[:2]]
    if gradient is not None:
        strides += gradient.stride()[:3]
    kernel[(blocks, batch * (kv_heads if by_keys else heads))](
        query, key, value, gates, positions, after, starts, ends, *others, *strides,
        heads, result.stride(1) // head_dim, length, batch,
        GROUP=heads // kv_heads, BM=tile.block_m, BN=tile.block_n,
        **constants(head_dim), WIDE=tl.float64 if query.dtype == torch.float64 else tl.float32,
        INDEX=index_type([tensor for tensor in (query, key, gates, gradient, result) if tensor is not None]),
        num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
    )  # fmt: skip


LARGEST_INT32 = 2**31 - 1


def index_type(tensors):
    """Return the integer type for a position times the stride of the sequence in ``tensors`` [s, ...]."""
    return tl.int32 if max(tensor.shape[0] * tensor.stride(0) for tensor in tensors) < LARGEST_INT32 else tl.int64


def check_runs(kernel, query):
    """Raise ValueError for an unsupported head dimension, RuntimeError for tensors that are not on a GPU."""
    head_dim = query.shape[-1]
    if head_dim not in TRITON_HEAD_DIMS:
        raise ValueError(f"attention backend triton: head dimension {head_dim}, only {TRITON_HEAD_DIMS}; choose dense")
    if isinstance(kernel, triton.JITFunction) and not query.is_cuda:
        raise RuntimeError(f"attention backend triton: the tensors are on {query.device}, not on a GPU; choose auto")


def constants(head_dim):
    """Return the constants of a kernel for a head dimension, split into two parts: 96 = 64 + 32."""
    power = 1 << head_dim.bit_length() - 1  # the largest power of two in it
    scale = head_dim**-0.5
    return dict(D1=power, D2=head_dim - power, SCALE=scale, SCALE2=scale * math.log2(math.e))


def wide(dtype):
    return torch.promote_types(dtype, torch.float32)
