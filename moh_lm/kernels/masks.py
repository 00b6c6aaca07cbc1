"""Which keys tokens see: those of their own document, and those in a sliding window.

A token attends to the keys from the start of its document to its own position. With a window of W keys, in Mistral's
convention, token i sees the keys i - W + 1 to i. Both are ranges, and so is their intersection. Neither bound decreases
along the sequence, so a block of queries or keys also needs only a range.

Tokens keep their positions in the sequence, because rotary attention depends only on differences of positions.

Shapes: s sequence, b batch.
"""

import functools
from typing import NamedTuple

import torch


class AttentionMask(NamedTuple):
    """starts, ends: int32 [b, s], the first position that each token sees, and the first later one that does not see
    it. mask: values to add to scores, [b or 1, 1 or heads, s, s], for layers that compute densely, see
    ``document_mask``; None: each such layer makes it."""

    starts: torch.Tensor
    ends: torch.Tensor
    mask: torch.Tensor | None

    def first(self, length):
        """Return the mask of the first ``length`` tokens."""
        mask = None if self.mask is None else self.mask[..., :length, :length]
        return AttentionMask(self.starts[:, :length], self.ends[:, :length].clamp_max(length), mask)


def document_bounds(positions, dtype=None):
    """Return the ``AttentionMask`` of documents. positions: int64 [b, s], positions of tokens in their documents.
    dtype: of the mask; None: it has none. The first document may have begun before the sequence."""
    token = torch.arange(positions.shape[1], dtype=torch.int32, device=positions.device).expand_as(positions)
    starts = (token - positions).to(torch.int32).clamp_min(0)
    ends = torch.searchsorted(starts, token.contiguous(), right=True, out_int32=True)
    return AttentionMask(starts, ends, dtype and document_mask(starts, dtype))


def visible_keys(starts):
    """Return which tokens attend to which, query by key: bool [b, 1, s, s]. starts: see ``AttentionMask``."""
    token = torch.arange(starts.shape[1], device=starts.device)
    return ((token >= starts[:, :, None]) & (token <= token[:, None])).unsqueeze(1)


def document_mask(starts, dtype):
    """Return what is added to scores, [b, 1, s, s]: 0 for keys that a token sees, and -inf for others.

    Scaled dot-product attention would turn a mask of bool into these values in every layer, and keep a copy in each.
    """
    visible = visible_keys(starts)
    return torch.zeros(visible.shape, dtype=dtype, device=starts.device).masked_fill_(~visible, -torch.inf)


def apply_window(documents, window, x, masked):
    """Return the ``AttentionMask`` of tokens x [s, b, ...] that see the last ``window`` keys of their documents.

    documents: their ``AttentionMask``, or None. window: number of keys, including the token's own; if it is 0 or at
    least s, the result is ``documents``. masked: whether to make the mask, in the dtype of x.
    """
    length, batch = x.shape[:2]
    dtype = x.dtype if masked else None
    if not 0 < window < length:
        return documents
    starts, ends, mask = windows(window, length, x.device, dtype if documents is None else None)
    if documents is None:
        return AttentionMask(starts.expand(batch, -1), ends.expand(batch, -1), mask)
    starts, ends = torch.maximum(starts, documents.starts), torch.minimum(ends, documents.ends)
    return AttentionMask(starts, ends, dtype and document_mask(starts, dtype))


def windows(window, length, device, dtype):
    """Return the ``AttentionMask`` of a window in one sequence, from a cache unless torch.compile traces this."""
    if torch.compiler.is_compiling():
        return sliding.__wrapped__(window, length, device, dtype)
    half = max(1, 1 << (length - 1).bit_length() >> 2)  # of the power of two below, so that lengths share masks
    room = -(-length // half) * half
    with torch.inference_mode(False):  # a step of training may read the mask next
        return sliding(window, room, device, dtype).first(length)


@functools.cache  # a CUDA graph may read any of them later
def sliding(window, length, device, dtype):
    """Return the ``AttentionMask`` of a window in one sequence. Windows that move clear the cache."""
    token = torch.arange(length, dtype=torch.int32, device=device)[None]
    starts, ends = (token - window + 1).clamp_min(0), (token + window).clamp_max(length)
    return AttentionMask(starts, ends, dtype and document_mask(starts, dtype))


def mean_keys(length, window):
    """Return the mean number of keys that a token of a sequence sees: half of the sequence, or W - W^2 / 2s."""
    width = min(window or length, length)
    return width - width**2 / (2 * length)


def share_of_scores(length, window):
    """Return the share of causal attention's scores that a window keeps; 1 without a window."""
    return mean_keys(length, window) / mean_keys(length, 0)
