"""What the layers of a stage need to know about the micro-batch that passes through the model.

The engine fills the context before a forward pass, and each pass begins with ``advance``. Layers only read from it.
Without document boundaries the mask is None, and attention is causal over the whole sequence.

Shapes: s sequence, b batch, E routed experts of a layer.
"""

from collections import deque
from typing import NamedTuple

import torch

from moh_lm.kernels.masks import document_bounds, document_mask


class RouterInputs(NamedTuple):
    """What a router needs besides tokens.

    samples: int64 [b], the numbers of the sequences in the run, or None if unknown. dense_warmup: whether all heads
    have gate 1 for now. previous_share: float32 [E], the share of the previous step's tokens that selected each expert,
    for ``--load-balance-scope global_batch``: uniform before the first step, None without an engine. l1: float32 [],
    the coefficient of the balance loss in forms that adapt it; else None. micro_batches: number in a step, over which
    losses are averaged.
    """

    samples: torch.Tensor | None = None
    dense_warmup: bool = False
    previous_share: torch.Tensor | None = None
    l1: torch.Tensor | None = None
    micro_batches: int = 1


class BatchContext:
    """The context of the current micro-batch, shared by the layers of a stage.

    positions: int64 [b, s], the position of each token in its document, or None. samples: see ``RouterInputs``.
    makes_masks: whether dense layers see whole documents, so that one mask [s, s] is made for all of them.
    """

    def __init__(self, makes_masks=True):
        self.makes_masks = makes_masks
        self.waiting = deque()
        self.mask = self.positions = self.samples = None
        self.dense_warmup, self.shares, self.l1, self.micro_batches = False, {}, None, 1

    def feed(self, positions, samples=None):
        """Take the data of the coming micro-batches, in the order of their forward passes.

        positions: for each micro-batch int64 [b, s], the positions of tokens in their documents, or None. samples: for
        each micro-batch int64 [b], or None.
        """
        self.waiting.extend(zip(positions, samples or [None] * len(positions), strict=True))

    def following(self):
        """Return the positions and samples of the next queued micro-batch, or (None, None) if none is queued."""
        return self.waiting.popleft() if self.waiting else (None, None)

    def advance(self, device):
        """Move on to the next micro-batch."""
        positions, samples = self.following()
        self.samples = None if samples is None else samples.to(device, non_blocking=True)
        self.mask = self.positions = None
        if positions is not None:
            self.positions = positions.to(device, non_blocking=True)
            self.mask = document_bounds(self.positions)

    def documents(self, dtype):
        """Return the ``AttentionMask`` of the documents, or None. dtype: of the scores."""
        if self.makes_masks and self.mask is not None and self.mask.mask is None:
            self.mask = self.mask._replace(mask=document_mask(self.mask.starts, dtype))
        return self.mask

    def begin(self, dense_warmup, micro_batches=1):
        """Set whether the coming steps belong to the dense warm-up, and how many micro-batches each of them has."""
        self.dense_warmup, self.micro_batches = dense_warmup, micro_batches

    def kind(self):
        """Return the Python values that decide how a step's passes run; all other changes happen inside tensors."""
        return self.dense_warmup, self.micro_batches

    def set_shares(self, shares):
        """Set the share of the last step's tokens that selected each expert. shares: {layer index: float [E]}."""
        for layer, share in shares.items():
            self.shares.setdefault(layer, torch.empty_like(share, dtype=torch.float32)).copy_(share)

    def set_l1(self, coefficient):
        """Set the coefficient of the L1 norm of ``relu`` gates, float []."""
        self.l1 = torch.empty_like(coefficient, dtype=torch.float32) if self.l1 is None else self.l1
        self.l1.copy_(coefficient)

    def router_inputs(self, layer_index):
        """Return the ``RouterInputs`` of a layer for the current micro-batch."""
        share = self.shares.get(layer_index)
        return RouterInputs(self.samples, self.dense_warmup, share, self.l1, self.micro_batches)
