"""Causal attention whose heads are weighted per token: the inner part of Eq. 4.

``moh_attention`` is the one entry. It computes every head by scaled dot-product attention and multiplies by the gate,
which is zero for heads that a token does not select: exact, and the reference for anything faster behind the same
name.
"""

import torch.nn.functional as F


def moh_attention(query, key, value, gates, mask=None):
    """g_i H_i of Eq. 4 for every token and head, before the output projection.

    query: [s, b, heads, head_dim]. key, value: [s, b, key_value_heads, head_dim]; consecutive query heads share one.
    gates: [s, b, heads], or None for 1. mask: bool [b, 1, s, s], true where a query attends to a key; None: causal.
    Returns [s, b, heads, head_dim] in the dtype of ``query``.
    """
    context = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),  # [b, heads, s, head_dim]
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    context = context.permute(2, 0, 1, 3)  # [s, b, heads, head_dim]
    return context if gates is None else context * gates.unsqueeze(-1).to(context.dtype)
