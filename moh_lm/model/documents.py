"""Attention that stays inside documents: a window of training data may hold the end of one and the beginning of others.

Rotary attention depends on differences of positions only, so tokens keep their positions in the window: what they see
of their own document is the same as if it stood alone.

Shapes: s sequence, b batch.
"""

from collections import deque

from moh_lm.kernels.boundaries import boundaries


class Documents:
    """The boundaries in the micro-batch that is going through the model, for all layers of a stage.

    ``feed`` takes the positions of micro-batches to come, in the order of their forward passes; each pass begins with
    ``advance``. Without boundaries ``boundaries`` is None, and attention is causal over the whole window.
    attention_backend: of ``moh_attention``; one that is sparse in every layer needs no mask.
    """

    def __init__(self, attention_backend="auto"):
        self.masked = attention_backend in ("auto", "dense")
        self.waiting = deque()
        self.boundaries = None

    def feed(self, positions):
        """positions: for each micro-batch int64 [b, s], of each token in its document, or None."""
        self.waiting.extend(positions)

    def advance(self, device):
        positions = self.waiting.popleft() if self.waiting else None
        self.boundaries = None
        if positions is not None:
            self.boundaries = boundaries(positions.to(device, non_blocking=True), self.masked)
