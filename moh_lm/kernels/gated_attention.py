"""Attention whose heads are weighted per token: the inner part of Eq. 4.

``moh_attention`` is the one entry. Every backend computes the same function with the same gradients: g_i H_i where a
token selects head i, zero elsewhere.

    dense        every head by scaled dot-product attention, times the gate: the reference
    triton       own kernels on the selected queries of every routed head (CUDA)
    flex         FlexAttention on the same queries (CUDA; on a CPU without gradients): the check of the former
    varlen       the stock kernel for packed sequences, for heads with their own keys (CUDA, bf16)
    cpu_sparse   matrix products over the selected queries (CPU)

``choose_backend`` takes auto too: dense, or the sparse backend where it was measured to be faster (break_even.py).

Shared heads go through scaled dot-product attention in all of them, since every token computes them. But where tokens
see a sliding window, or their document only, it would need a mask, and compute all scores: the sparse backends then
take every head, and the scores of what is seen only.
"""

from functools import partial

import torch
import torch.nn.functional as F

from moh_lm.extras import cpu_sparse
from moh_lm.kernels import flex, varlen
from moh_lm.kernels.choose import fastest
from moh_lm.kernels.masks import document_mask
from moh_lm.kernels.selected_keys import in_slots, with_marks

try:
    from moh_lm.kernels import triton_attention
except ModuleNotFoundError:
    triton_attention = None  # no Triton on this machine; asked for by name, it is an error

CPU_WIDTH = 16  # torch's fp32 kernel for CPUs takes longer for narrower heads: 1.2 times with 12, 1.8 times with 10


def moh_attention(
    query, key, value, gates=None, selected=None, num_shared=0, documents=None, backend="dense", causal=True,
    own_keys=False,
):  # fmt: skip
    """g_i H_i of Eq. 4 for every token and head, before the output projection.

    query: [s, b, heads, head_dim]. key, value: [s, b, key_value_heads, head_dim]; consecutive query heads share one.
    gates: [s, b, heads], or None for 1. selected: [s, b, heads], bool or 0 and 1, the heads that each token uses; None
    for all. It is the router's choice and not gates != 0: a gate may underflow. The first ``num_shared`` heads are
    used by every token, whatever ``selected`` says of them. documents: ``AttentionMask`` that no token sees beyond, of
    documents or a window; None: over the whole sequence. backend: see above. causal: whether a token sees only itself
    and those before it; otherwise the backend is dense. own_keys: whether a head sees only the tokens that use it.
    Returns [s, b, heads, head_dim] in the dtype of ``query``.
    """
    heads, kv_heads = query.shape[2], key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    check_backend(backend, query.device)
    if backend == "dense" or (documents is None and (selected is None or num_shared == heads)):
        if selected is not None:
            selected = always_on(selected, num_shared)
            gates = selected if gates is None else gates * selected
        return dense_heads(query, key, value, gates, documents, causal, selected if own_keys else None)
    if selected is None:
        selected = query.new_ones(query.shape[:3], dtype=torch.bool)
    gates = torch.ones_like(selected, dtype=wide) if gates is None else gates.to(wide)
    groups = 0 if documents else num_shared * kv_heads // heads  # key/value heads of shared heads alone, taken densely
    first = groups * heads // kv_heads
    if first < num_shared:
        selected = always_on(selected, num_shared)
    sparse = OF_OWN_KEYS[backend] if own_keys else SPARSE[backend]
    if groups == 0:
        return sparse(query, key, value, gates, selected, documents)
    if backend == "triton" and not own_keys:
        return triton_attention.joined_heads(query, key, value, gates, selected, first, groups, dense_heads)
    query, gates, selected = (part.split([first, heads - first], dim=2) for part in (query, gates, selected))
    key, value = (part.split([groups, kv_heads - groups], dim=2) for part in (key, value))
    routed = sparse(query[1], key[1], value[1], gates[1], selected[1])
    return torch.cat((dense_heads(query[0], key[0], value[0], gates[0]), routed), dim=2)


def always_on(selected, num_shared):
    return torch.cat((torch.ones_like(selected[..., :num_shared]), selected[..., num_shared:]), dim=-1)


def dense_heads(query, key, value, gates=None, documents=None, causal=True, own=None):
    """The reference: softmax(q k^T / sqrt(e)) v of all heads (Eq. 1), times their gates; see ``moh_attention``.

    Values may have another width than queries and keys. own: [s, b, heads], the heads that each token uses, if they see
    the tokens only that use them; else None.
    """
    mask, head_dim, width = None, query.shape[-1], value.shape[-1]
    if own is not None:
        query, key, value = with_marks(query, key, value, own)
    if query.device.type == "cpu" and query.dtype == torch.float32 and query.shape[-1] < CPU_WIDTH:
        # features of zero change no score
        query, key, value = (F.pad(part, (0, CPU_WIDTH - part.shape[-1])) for part in (query, key, value))
    if documents is not None:
        mask = document_mask(documents.starts) if documents.mask is None else documents.mask
    repeats = query.shape[2] // key.shape[2]
    if repeats > 1 and query.is_cuda and (mask is not None or query.dtype == torch.float32):
        # no fused kernel but cuDNN's takes such masks with shared keys: the scores of all heads would be in memory
        key, value = (part.repeat_interleave(repeats, dim=2) for part in (key, value))
    context = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),  # [b, heads, s, head_dim]
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=head_dim**-0.5,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    context = context.permute(2, 0, 1, 3)[..., :width]  # [s, b, heads, width]
    return context if gates is None else context * gates.unsqueeze(-1).to(context.dtype)


def choose_backend(backend, device, dtype, shape, active_share, causal=True, own_keys=False, compiled=False):
    """The backend that computes queries of ``shape`` [s, b, heads, head_dim]: never ``auto``.

    active_share: share of the heads that a token uses, by which ``auto`` chooses. own_keys: see ``moh_attention``.
    compiled: whether torch.compile makes the layer. Raises as ``check_backend``.
    """
    if not causal:
        return "dense"
    if backend == "auto":
        if device.type == "cpu" and compiled:
            return "dense"  # the graph would break at cpu_sparse
        chosen = fastest(device, dtype, tuple(shape), active_share, compiled)
        return "dense" if chosen == "triton" and (triton_attention is None or own_keys) else chosen
    check_backend(backend, device)
    return backend


def check_backend(backend, device):
    """Raises RuntimeError if a backend asked for by name cannot run here, ValueError if there is no such backend."""
    if backend == "triton" and triton_attention is None:
        raise RuntimeError("attention backend triton: the package triton is not installed; install it, or choose auto")
    if backend == "varlen" and varlen.stock_kernel() is None:
        raise RuntimeError("attention backend varlen: this torch has no varlen_attn with window_size; choose auto")
    if backend == "cpu_sparse" and device.type != "cpu":
        raise RuntimeError(f"attention backend cpu_sparse: the tensors are on {device}; choose auto")
    if backend != "dense" and backend not in SPARSE:
        raise ValueError(f"attention backend {backend}: choose one of auto, dense, {', '.join(SPARSE)}")


SPARSE = {
    "triton": triton_attention and triton_attention.triton_heads,
    "flex": flex.flex_heads,
    "cpu_sparse": cpu_sparse.sparse_heads,
}
OF_OWN_KEYS = {name: partial(in_slots, heads) for name, heads in SPARSE.items()}
OF_OWN_KEYS["cpu_sparse"] = partial(cpu_sparse.sparse_heads, own_keys=True)
OF_OWN_KEYS["varlen"] = SPARSE["varlen"] = varlen.varlen_heads  # other heads only where every token uses them
