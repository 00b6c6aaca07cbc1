"""Attention that stays inside documents: a window of training data may hold the end of one and the beginning of others.

Rotary attention depends on differences of positions only, so tokens keep their positions in the window: what they see
of their own document is the same as if it stood alone.

Shapes: s sequence, b batch.
"""

from collections import deque


class Documents:
    """The boundaries in the micro-batch that is going through the model, for all layers of a stage.

    ``feed`` takes the positions of micro-batches to come, in the order of their forward passes; each pass begins with
    ``advance``. Without boundaries ``mask`` is None, and attention is causal over the whole window.
    """

    def __init__(self):
        self.waiting = deque()
        self.mask = None

    def feed(self, positions):
        """positions: for each micro-batch int64 [b, s], of each token in its document, or None."""
        self.waiting.extend(positions)

    def advance(self, device):
        positions = self.waiting.popleft() if self.waiting else None
        self.mask = None if positions is None else document_mask(positions.to(device, non_blocking=True))


def document_mask(positions):
    """Which tokens attend to which: those of their document up to themselves; bool [b, 1, s, s], query by key."""
    document = (positions == 0).cumsum(dim=1)  # [b, s]
    return (document[:, :, None] == document[:, None, :]).tril().unsqueeze(1)
