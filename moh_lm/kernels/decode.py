"""Attention of one new token per row to a cache of keys and values: the inner part of Eq. 4 while text is generated.

``decode_attention`` is the one entry. Every backend computes g_i H_i where the token selects head i, zero elsewhere:

    dense    every head by scaled dot-product attention, times the gate: the reference
    triton   own kernels, which read the keys and values of the selected heads only (CUDA)
    auto     on a CPU loops over the selected heads, which touch no other memory; on a GPU dense, since no GPU was timed

Shapes: b rows, h query heads, k key/value heads, T room for tokens, e head dimension.
"""

from itertools import groupby

import torch
import torch.nn.functional as F

try:
    from moh_lm.kernels import triton_decode
except ModuleNotFoundError:
    triton_decode = None  # no Triton on this machine; asked for by name, it is an error

BACKENDS = ("auto", "dense", "triton")


def decode_attention(query, keys, values, lengths, active, gates=None, backend="auto"):
    """g_i H_i of Eq. 4 of one token per row, before the output projection: [b, h, e] in the dtype of ``query``.

    query: [b, h, e]. keys, values: the cache, [b, k, T, e]; consecutive query heads share a key/value head. lengths:
    int32 [b], the tokens that each row sees, its own the last of them. active: bool [b, h], the heads that the token
    uses. gates: [b, h], 0 where not active; None for 1, if all are. backend: see above. Nothing waits for a GPU.
    Raises ValueError and RuntimeError if the backend asked for by name is none, or cannot run here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend}: choose one of {', '.join(BACKENDS)}")
    if backend == "triton":
        if triton_decode is None:
            raise RuntimeError("attention backend triton: the package triton is not installed; install it, or auto")
        return triton_decode.decode_selected_heads(query, keys, values, lengths, active, gates)
    if backend == "auto" and query.device.type == "cpu":
        context = attend_selected(query, keys, values, lengths, active)
    else:
        context = attend_all(query, keys, values, lengths)
    return context if gates is None else context * gates.unsqueeze(-1).to(context.dtype)


def attend_all(query, keys, values, lengths):
    """H of every head, [b, h, e]."""
    visible = torch.arange(keys.shape[2], device=keys.device) < lengths[:, None]  # [b, T]
    context = F.scaled_dot_product_attention(
        query.unsqueeze(2), keys, values, attn_mask=visible[:, None, None], enable_gqa=True
    )  # [b, h, 1, e]
    return context.squeeze(2)


def attend_selected(query, keys, values, lengths, active):
    """H of the active heads, zeros for the others, by loops over rows and heads (CPU)."""
    rows = zip(query, keys, values, lengths.tolist(), active, strict=True)
    return torch.stack([attend_row(q, k[:, :t], v[:, :t], on.nonzero().flatten()) for q, k, v, t, on in rows])


def attend_row(query, keys, values, heads):
    """H of one token and its ``heads``: query [h, e], keys and values [k, t, e] -> [h, e], zeros for other heads."""
    queries = query.index_select(0, heads) / query.shape[-1] ** 0.5
    read, start = torch.empty_like(queries), 0
    wide = torch.promote_types(query.dtype, torch.float32)
    for key_head, group in groupby(heads.tolist(), key=lambda head: head // (len(query) // len(keys))):
        stop = start + len(list(group))
        scores = queries[start:stop] @ keys[key_head].t()  # [heads of the group, t]
        torch.mm(scores.softmax(-1, dtype=wide).to(query.dtype), values[key_head], out=read[start:stop])
        start = stop
    return torch.zeros_like(query).index_copy(0, heads, read)
