"""Attention of one new token per row to a cache of keys and values: the inner part of Eq. 4 while text is generated.

Every backend of ``decode_attention`` computes g_i H_i where the token selects head i, and zero elsewhere:

    dense    every head by scaled dot-product attention, times the gate: the reference
    triton   own kernels, which read the keys and values of the selected heads only (CUDA)
    loops    loops over rows and selected heads, which touch no other memory (CPU)
    auto     loops or dense on a CPU, triton or dense on a GPU, as was measured

Shapes: b rows, h query heads, k key/value heads, T room for tokens, e head dimension.
"""

from itertools import groupby

import torch
import torch.nn.functional as F

from moh_lm.kernels.measured import TRITON_HEAD_DIMS

try:
    from moh_lm.inference import triton_decode
except ModuleNotFoundError:
    triton_decode = None  # no Triton on this machine; naming it raises an error

BACKENDS = ("auto", "dense", "loops", "triton")

# Numbers of the keys that a row need not read, and their share of all, from which on loops are faster than dense by
# more than noise. By benchmarks/decode.py (docs/history/benchmarks.md): equal at 200,000 to 330,000, slower at 0.22.
WORTH_IT, SHARE = 2**19, 0.24
# Bytes of the keys and values of a layer from which on triton is faster than dense on an H200, by the same program.
# With fewer, both wait for the host.
WORTH_A_KERNEL = 2**27
CAPABILITY = (8, 0)  # lowest of a GPU for which the tests compile the kernels


def decode_attention(query, keys, values, lengths, active, gates=None, backend="auto", used=None, added=None):
    """Return g_i H_i of Eq. 4 for one token per row, before the output projection, [b, h, e] in the dtype of ``query``.

    query: [b, h, e]. keys, values: the cache, [b, k, T, e]; consecutive query heads share a key/value head. lengths:
    int32 [b], the tokens that each row sees, including its own. active: bool [b, h], the heads that the token uses.
    gates: [b, h], 0 where not active; None: all are 1. backend: see above. used: bool [b, h, T], the heads
    that use each token, if they see no others. added: [b, h, T], values to add to scores, -inf where a row sees
    nothing. With either of them the dense backend is used. Nothing waits for a GPU.
    Raises ValueError for an unknown backend, RuntimeError if a backend requested by name cannot run here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend}: choose one of {', '.join(BACKENDS)}")
    if used is not None and backend == "triton":
        raise RuntimeError("attention backend triton: cannot leave out keys of a cache; choose auto or dense")
    backend = backend if added is None else "dense"
    if backend == "auto" and query.is_cuda:
        nvidia = triton_decode is not None and torch.version.hip is None
        able = nvidia and torch.cuda.get_device_capability(query.device) >= CAPABILITY
        backend = "triton" if able and used is None and worth_a_kernel(keys, gates) else "dense"
    if backend == "triton":
        if triton_decode is None:
            raise RuntimeError("attention backend triton: triton is not installed; install it, or choose auto")
        return triton_decode.decode_selected_heads(query, keys, values, lengths, active, gates)
    if backend == "loops" and query.device.type != "cpu":
        raise RuntimeError(f"attention backend loops: the tensors are on {query.device}, not on a CPU; choose auto")
    if backend == "auto":
        backend = "loops" if worth_looping(keys, lengths, active) else "dense"
        keys, values = (cache[:, :, : lengths.max()] for cache in (keys, values))
    if backend == "loops" and used is None:
        context = attend_selected(query, keys, values, lengths, active)
    else:
        context = attend_all(query, keys, values, lengths, active, used, added)
    return context if gates is None else context * gates.unsqueeze(-1).to(context.dtype)


def worth_a_kernel(keys, gates):
    """Return whether triton is faster than dense on a GPU: with bf16 or fp16, if a token may leave out heads."""
    fits = keys.dtype.itemsize == 2 and keys.shape[3] in TRITON_HEAD_DIMS
    return fits and gates is not None and 2 * keys.nbytes >= WORTH_A_KERNEL


def worth_looping(keys, lengths, active):
    needless = ~active.unflatten(1, (keys.shape[1], -1)).any(-1)  # [b, k]
    unread = (needless.sum(1) * lengths).float().mean() * keys.shape[3]
    return bool(unread >= WORTH_IT and needless.float().mean() >= SHARE)


def attend_all(query, keys, values, lengths, active=None, used=None, added=None):
    """Return H of every head, [b, h, e]. Query heads of a key/value head are rows of one product; no key is copied."""
    visible = (torch.arange(keys.shape[2], device=keys.device) < lengths[:, None])[:, None, None]  # [b, 1, 1, T]
    if used is not None:  # a head that the token does not use sees all keys: its gate is 0
        seen = used[:, :, : keys.shape[2]] | ~active.unsqueeze(-1)
        visible = visible & seen.unflatten(1, (keys.shape[1], -1))  # [b, k, h / k, T]
    mask = visible if added is None else added.unflatten(1, (keys.shape[1], -1))
    queries = query.unflatten(1, (keys.shape[1], -1))  # [b, k, h / k, e]
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask).flatten(1, 2)


def attend_selected(query, keys, values, lengths, active):
    """Return H of the active heads, zeros for the others, by loops over rows and heads (CPU)."""
    rows = zip(query, keys, values, lengths.tolist(), active, strict=True)
    return torch.stack([attend_row(q, k[:, :t], v[:, :t], on.nonzero().flatten()) for q, k, v, t, on in rows])


def attend_row(query, keys, values, heads):
    """Return H of one token's ``heads``, [h, e], 0 for others. query: [h, e]. keys, values: [k, t, e]."""
    queries = query.index_select(0, heads) / query.shape[-1] ** 0.5
    read, start = torch.empty_like(queries), 0
    wide = torch.promote_types(query.dtype, torch.float32)
    for key_head, group in groupby(heads.tolist(), key=lambda head: head // (len(query) // len(keys))):
        stop = start + len(list(group))
        scores = queries[start:stop] @ keys[key_head].t()  # [heads of the group, t]
        torch.mm(scores.softmax(-1, dtype=wide).to(query.dtype), values[key_head], out=read[start:stop])
        start = stop
    return torch.zeros_like(query).index_copy(0, heads, read)
