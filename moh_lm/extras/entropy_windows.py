"""Sliding windows that follow the entropy of attention: --window-strategy entropy.

After each step, in each layer, with H the entropy of the attention weights in nats, the mean over the queries and heads
of the step, and W = --window-min to --window-max:

    H_s = 0.2 H + 0.8 H_s              beginning with H
    W = min + (max - min) H_s / ln W   rounded down; with ln s, of the sequence length, where W has no bound yet

Nothing of it is learned: the window is a mask. A step that is skipped moves nothing. The sums run over all ranks, so
that every layout has the same windows. Measuring computes the scores of all heads once more, a sequence at a time.
"""

import math

import torch

from moh_lm.model.attention import Attention
from moh_lm.parallel.groups import sum_over_ranks

NEW = 0.2  # share of the newest step


class EntropyWindows:
    """The windows of all layers, ``widths`` and ``entropies`` (H_s; None before the first step), and the layers of this
    pipeline stage that follow them."""

    def __init__(self, model, config, groups, device):
        self.layers = [module for module in model.modules() if isinstance(module, Attention)]
        self.run, self.groups, self.device = config.run, groups, device
        self.set(list(config.model.window), [None] * config.model.num_layers)
        self.forget()

    def set(self, widths, entropies):
        self.widths, self.entropies = widths, entropies
        for layer in self.layers:
            layer.window = widths[layer.index]

    def forget(self):
        for layer in self.layers:
            layer.entropy = torch.zeros(2, dtype=torch.float64, device=self.device)

    def move(self, skipped):
        """Take the step that was done."""
        sums = torch.zeros(len(self.widths), 2, dtype=torch.float64, device=self.device)
        for layer in self.layers:
            sums[layer.index] = layer.entropy
        self.forget()
        groups = (self.groups.tensor, self.groups.data, self.groups.pipeline)
        means = [total / count for total, count in sum_over_ranks(sums, *groups).tolist()]
        if skipped or not all(map(math.isfinite, means)):
            return
        entropies = [new if old is None else NEW * new + (1 - NEW) * old
                     for new, old in zip(means, self.entropies, strict=True)]  # fmt: skip
        self.set([self.width(*pair) for pair in zip(entropies, self.widths, strict=True)], entropies)

    def width(self, entropy, width):
        least, most = self.run.window_min, self.run.window_max
        share = entropy / math.log(width or self.run.seq_length)
        return int(min(max(least + (most - least) * share, least), most))
