"""What tokens see of a sequence: the documents in it, which they do not see beyond, and a sliding window.

A token attends to the keys from the start of its document to its own position: a range, as in causal attention, with a
lower bound besides the upper one. With a window of W keys, Mistral's convention, token i sees the keys i - W + 1 to i:
a range too, and so is what is in both. Neither bound descends along the sequence, so that what a block of queries or of
keys needs is a range as well.

Rotary attention depends on differences of positions only. So tokens keep their positions in the sequence: what they see
of their own document is the same as if it stood alone.

Shapes: s sequence, b batch.
"""

import functools
from typing import NamedTuple

import torch


class AttentionMask(NamedTuple):
    """starts, ends: int32 [b, s], positions of the first token that each token sees, such as the first one of its
    document, and of the first one after it that does not see it. mask: bool [b or 1, 1, s, s], of ``document_mask``,
    for layers that compute densely, or what they add to their scores, [b, heads, s, s]; None: each makes it."""

    starts: torch.Tensor
    ends: torch.Tensor
    mask: torch.Tensor | None


def document_bounds(positions, masked):
    """``AttentionMask`` of documents from the positions of their tokens in them, int64 [b, s]. masked: make the mask.

    The first document may have begun before the sequence.
    """
    token = torch.arange(positions.shape[1], dtype=torch.int32, device=positions.device).expand_as(positions)
    starts = (token - positions).to(torch.int32).clamp_min(0)
    ends = torch.searchsorted(starts, token.contiguous(), right=True, out_int32=True)
    return AttentionMask(starts, ends, document_mask(starts) if masked else None)


def document_mask(starts):
    """Which tokens attend to which: those of their document up to themselves; bool [b, 1, s, s], query by key."""
    token = torch.arange(starts.shape[1], device=starts.device)
    return ((token >= starts[:, :, None]) & (token <= token[:, None])).unsqueeze(1)


def apply_window(documents, window, x, masked):
    """``AttentionMask`` of tokens x [s, b, ...] that see the last ``window`` keys inside their documents.

    documents: their ``AttentionMask``, or None. window: keys, that of the token itself among them; where 0, or not
    below s, it hides nothing, and the result is ``documents``. masked: make the mask.
    """
    length, batch = x.shape[:2]
    if not 0 < window < length:
        return documents
    make = sliding.__wrapped__ if torch.compiler.is_compiling() else sliding  # a graph makes its own
    starts, ends, mask = make(window, length, x.device, masked and documents is None)
    if documents is None:
        return AttentionMask(starts.expand(batch, -1), ends.expand(batch, -1), mask)
    starts, ends = torch.maximum(starts, documents.starts), torch.minimum(ends, documents.ends)
    return AttentionMask(starts, ends, document_mask(starts) if masked else None)


@functools.lru_cache(maxsize=4)
def sliding(window, length, device, masked):
    """``AttentionMask`` of a window in one sequence."""
    token = torch.arange(length, dtype=torch.int32, device=device)[None]
    starts, ends = (token - window + 1).clamp_min(0), (token + window).clamp_max(length)
    return AttentionMask(starts, ends, document_mask(starts) if masked else None)


def mean_keys(length, window):
    """Keys that a token of a sequence sees on average, with a window or 0: half of the sequence, or W - W^2 / 2s."""
    width = min(window or length, length)
    return width - width**2 / (2 * length)


def share_of_scores(length, window):
    """What a window leaves of the scores of causal attention over ``length`` tokens; 1 without a window."""
    return mean_keys(length, window) / mean_keys(length, 0)
