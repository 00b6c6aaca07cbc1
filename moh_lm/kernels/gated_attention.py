"""Attention whose heads are weighted per token: the inner part of Eq. 4.

``gated_attention`` computes g_i H_i where a token selects head i, and zero elsewhere. Every backend computes the same
function with the same gradients:

    dense        every head by scaled dot-product attention, times the gate: the reference
    triton       own kernels on the selected queries of every routed head (CUDA)
    cpu_sparse   matrix products over the selected queries (CPU; moh_lm/extras/cpu_sparse.py)

In all of them shared heads use scaled dot-product attention, since every token computes them. With a sliding window or
documents this would need a mask and compute all scores. Sparse backends then compute every head, but only the visible
scores.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from moh_lm.kernels.masks import document_mask
from moh_lm.kernels.selected_keys import in_slots, with_marks

try:
    from moh_lm.kernels import triton_attention
except ModuleNotFoundError:
    triton_attention = None  # no Triton on this machine; naming it raises an error

CPU_WIDTH = 16  # torch's fp32 kernel for CPUs takes longer for narrower heads: 1.2 times with 12, 1.8 times with 10


class Backend(NamedTuple):
    """A sparse backend: functions that map (query, key, value, gates, selected, mask) to g_i H_i.

    heads: for routed heads that see all tokens. own_keys: for heads that see only the tokens that use them. joined: for
    shared and routed heads together, without copies; see ``joined_heads`` in triton_attention.py. Each may be None.
    """

    name: str
    heads: Callable
    own_keys: Callable
    joined: Callable | None = None


TRITON = triton_attention and Backend(
    "triton",
    triton_attention.triton_heads,
    partial(in_slots, triton_attention.triton_heads),
    triton_attention.joined_heads,
)


def gated_attention(
    query, key, value, gates=None, selected=None, num_shared=0, mask=None, backend=None, causal=True, own_keys=False,
):  # fmt: skip
    """Compute g_i H_i of Eq. 4 for every token and head, [s, b, heads, head_dim] in the dtype of ``query``.

    query: [s, b, heads, head_dim]. key, value: [s, b, key_value_heads, head_dim]; consecutive query heads share one.
    gates: [s, b, heads]; None: all are 1. selected: [s, b, heads], bool or 0 and 1, the heads that each token uses;
    None: all. It is not computed from gates because they may underflow. num_shared: number of leading heads that all
    tokens use, whatever ``selected`` contains. mask: ``AttentionMask``, or None for the whole sequence. backend:
    ``Backend``; None: dense. causal: whether a token sees only itself and earlier tokens; False requires dense.
    own_keys: whether a head sees only the tokens that use it.
    """
    heads, kv_heads = query.shape[2], key.shape[2]
    if backend is None or needs_no_kernel(mask, selected, num_shared, heads):
        if selected is not None:
            selected = always_on(selected, num_shared)
            gates = selected if gates is None else gates * selected
        return dense_heads(query, key, value, gates, mask, causal, selected if own_keys else None)
    if selected is None:
        selected = query.new_ones(query.shape[:3], dtype=torch.bool)
    wide = torch.promote_types(query.dtype, torch.float32)
    gates = torch.ones_like(selected, dtype=wide) if gates is None else gates.to(wide)
    groups = 0 if mask else num_shared * kv_heads // heads  # key/value heads of shared heads alone, computed densely
    first = groups * heads // kv_heads
    if first < num_shared:
        selected = always_on(selected, num_shared)
    sparse = backend.own_keys if own_keys else backend.heads
    if groups == 0:
        return sparse(query, key, value, gates, selected, mask)
    if backend.joined and not own_keys:
        return backend.joined(query, key, value, gates, selected, first, groups, dense_heads)
    query, gates, selected = (part.split([first, heads - first], dim=2) for part in (query, gates, selected))
    key, value = (part.split([groups, kv_heads - groups], dim=2) for part in (key, value))
    routed = sparse(query[1], key[1], value[1], gates[1], selected[1])
    return torch.cat((dense_heads(query[0], key[0], value[0], gates[0]), routed), dim=2)


def needs_no_kernel(mask, selected, num_shared, heads):
    """Return whether all tokens use all heads and see all earlier tokens, so that every backend computes densely."""
    return mask is None and (selected is None or num_shared == heads)


def always_on(selected, num_shared):
    """Return ``selected`` [s, b, heads] with 1 for the shared heads."""
    return torch.cat((torch.ones_like(selected[..., :num_shared]), selected[..., num_shared:]), dim=-1)


def dense_heads(query, key, value, gates=None, mask=None, causal=True, own=None):
    """Compute the reference: softmax(q k^T / sqrt(e)) v of all heads (Eq. 1), times their gates. See
    ``gated_attention``.

    Values may be narrower or wider than queries and keys. own: [s, b, heads], the heads that each token uses, if they
    see only the tokens that use them; else None.
    """
    scores_mask, head_dim, width = None, query.shape[-1], value.shape[-1]
    if own is not None:
        query, key, value = with_marks(query, key, value, own)
    if query.device.type == "cpu" and query.dtype == torch.float32 and query.shape[-1] < CPU_WIDTH:
        # features of zero change no score
        query, key, value = (F.pad(part, (0, CPU_WIDTH - part.shape[-1])) for part in (query, key, value))
    if mask is not None:
        made = document_mask(mask.starts, query.dtype) if mask.mask is None else mask.mask
        scores_mask = made.to(query.dtype)  # a comparison computes in another one
    repeats = query.shape[2] // key.shape[2]
    if repeats > 1 and query.is_cuda and (scores_mask is not None or query.dtype == torch.float32):
        # only cuDNN's fused kernel accepts such masks with shared keys; others would hold all scores in memory
        key, value = (part.repeat_interleave(repeats, dim=2) for part in (key, value))
    context = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),  # [b, heads, s, head_dim]
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        attn_mask=scores_mask,
        is_causal=causal and scores_mask is None,
        scale=head_dim**-0.5,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    context = context.permute(2, 0, 1, 3)[..., :width]  # [s, b, heads, width]
    return context if gates is None else context * gates.unsqueeze(-1).to(context.dtype)
