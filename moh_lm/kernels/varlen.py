"""Heads with their own keys, by the stock kernel for sequences of many lengths (torch.nn.attention.varlen; CUDA).

A head that keeps its own tokens only is causal attention over the sequence of these tokens. All of them, text after
text and head after head, are packed end to end: the kernel is FlashAttention, told where each sequence begins. A
document is a sequence of its own too.

Shapes: s sequence, b batch, h query heads, kv key/value heads, e head dimension, n pairs of a token and a head in use.
"""

import functools
from inspect import signature

import torch
import torch.nn.functional as F

CAUSAL = (-1, 0)
HEAD_DIMS = range(8, 257, 8)  # what the kernel takes
CAPABILITY = (8, 0)  # of a GPU that runs it, at least
MOST_SEQUENCES = 65_535  # in one call: they are the second dimension of its grid


@functools.cache
def stock_kernel():
    """torch's ``varlen_attn`` with window_size; None before torch 2.11.

    Loaded when it is asked for: with it comes torch's compiler, a second that most commands need not wait.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # torch before 2.10; that of 2.10 is asked for causal attention in another way
        return None
    return varlen_attn if "window_size" in signature(varlen_attn).parameters else None


def varlen_heads(query, key, value, gates, used, documents=None):
    """g_i H_i [s, b, h, e], zero where a token does not use the head; see ``moh_attention``, with its own keys.

    used: [s, b, h], bool or 0 and 1. documents: ``AttentionMask`` without windows, or None.
    """
    length, _, heads, _ = query.shape
    rows = (used != 0).permute(1, 2, 0).flatten().nonzero()[:, 0]  # of [b, h, s]
    key, value = (part.repeat_interleave(heads // key.shape[2], dim=2) for part in (key, value))
    if not len(rows):
        return (query + key + value) * gates.unsqueeze(-1).to(query.dtype) * 0
    sequence = rows // length  # n of [b, h]
    if documents is not None:
        sequence = sequence * length + documents.starts[sequence // heads, rows % length]
    lengths = sequence.unique_consecutive(return_counts=True)[1]
    runs = lengths.split(MOST_SEQUENCES)
    tokens = [int(run.sum()) for run in runs]
    packed = [part.permute(1, 2, 0, 3).flatten(0, 2)[rows].split(tokens) for part in (query, key, value)]
    context = torch.cat([attend(*part) for part in zip(*packed, runs, strict=True)])
    whole = torch.zeros_like(query).permute(1, 2, 0, 3).contiguous()  # [b, h, s, e]
    whole = whole.flatten(0, 2).index_copy(0, rows, context).view(whole.shape).permute(2, 0, 1, 3)
    return whole * gates.unsqueeze(-1).to(whole.dtype)


def attend(query, key, value, lengths):
    """Causal attention in each of the sequences of ``lengths`` that are packed in [n, e]."""
    ends, longest = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32), int(lengths.max())
    packed = (part.unsqueeze(1) for part in (query, key, value))  # [n, 1, e]
    return stock_kernel()(*packed, ends, ends, longest, longest, window_size=CAUSAL).squeeze(1)
