"""How much attention goes to the first token, in each layer: heads that have nothing to say rest there (attention
sinks, Xiao et al. 2023, arXiv 2309.17453). Measured on held-out text, beside the evaluation.

    sink of a layer = mean of a_i(t, 0) over the tokens t >= 1 and the heads i that they use

a_i(t, 0) is the weight that head i of token t gives to the first token of the sequence. With --reset-at-documents it is
the first token of the document, of which the sequence may hold a later part. Attention itself gives the weight: with
values of 1 for that token, and 0 for all others, it is H_i. The head report has the same figure of text without
documents (docs/heads.md).
"""

import contextlib

import torch

from moh_lm.model.transformer import DecoderLayer
from moh_lm.parallel.cross_entropy import IGNORED
from moh_lm.parallel.groups import sum_over_ranks


class Sinks:
    """Sums of the layers of this pipeline stage. sums: float64 [L, 2] of all layers, weights and their number."""

    def __init__(self, model, num_layers, groups, device):
        self.layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
        self.groups = groups
        self.sums = torch.zeros(num_layers, 2, dtype=torch.float64, device=device)

    @contextlib.contextmanager
    def measured(self):
        """Measure in each forward pass. Layers then run as they are, not as torch.compile made them."""
        ran = [layer.run for layer in self.layers]
        for layer in self.layers:
            layer.run = self.run
        try:
            yield
        finally:
            for layer, run in zip(self.layers, ran, strict=True):
                layer.run = run

    def run(self, layer, x, boundaries, replay):
        """In place of ``DecoderLayer.block``."""

        def attend(x, boundaries, replay):
            self.add(layer, x, boundaries)
            return layer.self_attn(x, boundaries, replay)

        return layer.block(x, boundaries, replay, attend=attend)

    def add(self, layer, x, boundaries):
        """x: [s/tp, b, d], normalised. boundaries: ``AttentionMask`` of its documents, or None."""
        attention = layer.self_attn
        projected = attention.project(x)
        if attention.exchange:
            projected = attention.whole_sequences(projected)
        token = torch.arange(len(projected.query), device=x.device)
        starts = token.new_zeros(1, len(token)) if boundaries is None else boundaries.starts
        value = torch.zeros_like(projected.value)
        value[..., 0] = (starts == token).t().unsqueeze(-1)  # [s, b, kv/tp, e]
        ones = projected._replace(value=value, gates=None)
        weights = attention.attend(ones, boundaries, attention.chosen_backend(x))[..., 0]
        asks = (starts < token).t() & (layer.documents.samples >= 0)  # [s, b]
        used = projected.in_use() & asks.unsqueeze(-1)
        self.sums[attention.index] += torch.stack((weights.double().mul(used).sum(), used.sum()))

    def means(self):
        """Of each layer, over all ranks; NaN without a token that asks."""
        total, count = sum_over_ranks(self.sums, self.groups.tensor, self.groups.data, self.groups.pipeline).unbind(1)
        return (total / count).tolist()


def with_numbers(batch):
    """The ``MicroBatch`` with a number for each sequence: -1 for filler, which has no labels, and else 0."""
    return batch._replace(samples=(batch.labels != IGNORED).any(1).long() - 1)
