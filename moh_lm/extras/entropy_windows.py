"""Sliding windows that follow the entropy of attention: --window-strategy entropy.

After each step, in each layer, with H the entropy of the attention weights in nats, the mean over the queries and heads
of the step, and W = --window-min to --window-max:

    H_s = 0.2 H + 0.8 H_s              beginning with H
    W = min + (max - min) H_s / ln W   rounded down; without a window so far, ln s of the sequence length replaces ln W

Nothing is learned: the window is a mask. A skipped step changes nothing. The sums run over all ranks, so
that every layout has the same windows. Measuring computes the scores of all heads once more, a sequence at a time.
"""

import math
from functools import partial

import torch

from moh_lm.kernels.core_attention import CoreAttention
from moh_lm.kernels.masks import AttentionMask, document_mask, sliding
from moh_lm.model.block import modules_of
from moh_lm.parallel.groups import sum_over_ranks

NEW = 0.2  # weight of the newest step


class EntropyWindows:
    """The windows of all layers, ``widths`` and ``entropies`` (H_s; None before the first step), and ``sums`` of the
    layers of this pipeline stage that follow them, float64 [L, 2]: entropies and their number."""

    def __init__(self, model, config, groups, device):
        self.cores = {block.index: core for block in modules_of(model) for core in modules_of(block, CoreAttention)}
        for index, core in self.cores.items():
            core.register_forward_pre_hook(partial(self.add, index))
        self.run, self.groups = config.run, groups
        self.sums = torch.zeros(config.model.num_layers, 2, dtype=torch.float64, device=device)
        self.set(list(config.model.window), [None] * config.model.num_layers)

    def set(self, widths, entropies):
        self.widths, self.entropies = widths, entropies
        sliding.cache_clear()  # of masks for the widths before
        for index, core in self.cores.items():
            core.set_window(widths[index])

    def add(self, index, core, given):
        """Add the entropies of a layer's attention in training. given: the arguments of ``CoreAttention``."""
        query, key, *_, mask = given
        if core.training:
            self.sums[index] += entropy_sums(query, key, core.visible(query, key, mask))

    def move(self, skipped):
        """Move the windows after a step."""
        groups = (self.groups.tensor, self.groups.data, self.groups.pipeline)
        means = [total / count for total, count in sum_over_ranks(self.sums, *groups).tolist()]
        self.sums.zero_()
        if skipped or not all(map(math.isfinite, means)):
            return
        entropies = [new if old is None else NEW * new + (1 - NEW) * old
                     for new, old in zip(means, self.entropies, strict=True)]  # fmt: skip
        self.set([self.width(*pair) for pair in zip(entropies, self.widths, strict=True)], entropies)

    def width(self, entropy, width):
        least, most = self.run.window_min, self.run.window_max
        share = entropy / math.log(width or self.run.seq_length)
        return int(min(max(least + (most - least) * share, least), most))


@torch.no_grad()
def entropy_sums(query, key, seen):
    """Return the sum of the attention entropies of all queries and heads, in nats, and their number, float64 [2].

    query: [s, b, h, e], key: [s, b, k, e]. seen: ``AttentionMask``, or None. Sequences are processed one at a time.
    """
    wide, total = torch.promote_types(query.dtype, torch.float32), query.new_zeros((), dtype=torch.float64)
    seen = seen or AttentionMask(query.new_zeros(1, len(query)), None, None)
    masks = document_mask(seen.starts, wide) if seen.mask is None else seen.mask
    key = key.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    for row in range(query.shape[1]):
        mask = masks[row % len(masks)]
        scores = torch.einsum("qhe,khe->hqk", query[:, row].to(wide), key[:, row].to(wide)) / query.shape[3] ** 0.5
        total += torch.special.entr((scores + mask).softmax(-1)).sum(dtype=torch.float64)
    return torch.stack((total, torch.full_like(total, query[..., 0].numel())))
