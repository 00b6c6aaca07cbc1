"""Measures how much attention goes to the first token in each layer, on held-out text. Heads with nothing to contribute
attend to it (attention sinks, Xiao et al. 2023, arXiv 2309.17453).

    sink of a layer = mean of a_i(t, 0) over the tokens t >= 1 and the heads i that they use

a_i(t, 0) is the weight that head i of token t gives to the first token of the sequence. With --reset-at-documents, it
is the first token of the document, which may have begun in an earlier sequence. Attention itself computes the weight:
with a value of 1 for that token and 0 for all others, H_i is the weight.
"""

import contextlib
from functools import partial

import torch

from moh_lm.kernels.core_attention import CoreAttention
from moh_lm.model.block import modules_of
from moh_lm.parallel.cross_entropy import IGNORED
from moh_lm.parallel.groups import sum_over_ranks


class Sinks:
    """Sums over the layers of this pipeline stage. sums: float64 [L, 2] for all layers, the sum of the weights and
    their number."""

    def __init__(self, model, num_layers, groups, device):
        self.blocks, self.groups = modules_of(model), groups
        self.sums = torch.zeros(num_layers, 2, dtype=torch.float64, device=device)

    @contextlib.contextmanager
    def measured(self):
        """Measure in each forward pass. Layers then run without torch.compile."""
        with contextlib.ExitStack() as stack:
            for block in self.blocks:
                stack.enter_context(block.uncompiled())
                for core in modules_of(block, CoreAttention):
                    stack.enter_context(core.register_forward_pre_hook(partial(self.add, block)))
            yield

    def add(self, block, core, given):
        """Add the sums of a layer. given: the arguments of ``CoreAttention``."""
        query, key, value, _, selected, mask = given
        token = torch.arange(len(query), device=query.device)
        starts = token.new_zeros(1, len(token)) if mask is None else mask.starts
        value = torch.zeros_like(value)
        value[..., 0] = (starts == token).t().unsqueeze(-1)  # [s, b, kv/tp, e]
        weights = core.forward(query, key, value, None, selected, mask)[..., 0]
        asks = (starts < token).t() & (block.batch.samples >= 0)  # [s, b]
        used = asks.unsqueeze(-1).expand(query.shape[:3])
        used = used if selected is None else used & (selected != 0)
        self.sums[block.index] += torch.stack((weights.double().mul(used).sum(), used.sum()))

    def means(self):
        """Return the mean of each layer over all ranks; NaN if no token was measured."""
        groups = self.groups.tensor, self.groups.data, self.groups.pipeline
        total, count = sum_over_ranks(self.sums, *groups).unbind(1)
        return (total / count).tolist()


def with_numbers(batch):
    """Return the ``MicroBatch`` with a number for each sequence: -1 for filler, which has no labels, and else 0."""
    return batch._replace(samples=(batch.labels != IGNORED).any(1).long() - 1)
