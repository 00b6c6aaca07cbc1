"""Positions inside a head's own tokens, ``--routed-positions head`` (NAMOH, arXiv 2609.38832).

The rotary position of a token in head i is the number of earlier tokens of the sequence that use head i. All tokens use
a shared head, so its positions are those of the text. The core attention rotates queries and keys instead of the layer,
because it knows the heads in use, and under context parallelism it has whole sequences. Rotary attention depends on
differences of positions only, so inside a document the result is the same as if the count began there.

Shapes: s sequence, b batch, h query heads, k key/value heads, e head dimension.
"""

from torch import nn


class HeadPositions(nn.Module):
    """A core attention that rotates queries and keys first. core: ``CoreAttention``. rotary: ``Rotary``."""

    def __init__(self, core, rotary):
        super().__init__()
        self.core, self.rotary = core, rotary

    def forward(self, query, key, value, gates=None, selected=None, mask=None):
        """See ``CoreAttention``; queries and keys are not rotated yet."""
        used = query.new_ones(query.shape[:3]) if selected is None else selected
        return self.core(*self.turned(query, key, used), value, gates, selected, mask)

    def turned(self, query, key, used, before=0, length=None):
        """Rotate query [s, b, h, e] and key [s, b, k, e] to their positions in each head.

        used: [s, b, h], bool or 0 and 1, the heads that tokens use; those that share a key are used together. before:
        int64 [b, h], tokens of earlier calls that use each head. length: number of possible positions, default s.
        """
        positions = before + (used != 0).cumsum(0) - 1  # arbitrary in a head that a token does not use
        table = self.rotary.table(length or len(query), query.dtype, query.device, positions.clamp_min(0))
        of_keys = [part[:, :, :: query.shape[2] // key.shape[2]] for part in table]
        return self.rotary.apply_rotary(query, table), self.rotary.apply_rotary(key, of_keys)
