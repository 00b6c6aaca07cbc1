"""Sums over the sequences of a step: the losses of every source, and the statistics of the routers.

Sums are float64 on the device, so reading them is the caller's choice. They cover this rank's sequences until they are
reduced over the ranks.

Shapes: s sequence, b batch, E routed experts of a layer, heads or key/value groups.
"""

import torch

from moh_lm.model.balance import COUNTS, MicroBatchParts, row_width
from moh_lm.model.router import BIAS
from moh_lm.parallel.cross_entropy import IGNORED
from moh_lm.parallel.groups import sum_over_ranks


class StepSums:
    """Losses of one step, or of one evaluation.

    rows: number of sources that a sequence may come from. groups: ``ParallelGroups``. losses: [rows, 3] float64, the
    loss summed over tokens, the number of tokens, the number of sequences. not_finite: bool [b] for each micro-batch,
    the sequences whose loss is not finite.
    """

    def __init__(self, rows, groups, device):
        self.groups = groups
        self.counts_sequences = groups.context is None or groups.context.rank() == 0  # one of its ranks
        self.losses = torch.zeros(rows, 3, dtype=torch.float64, device=device)
        self.not_finite = MicroBatchParts()

    def add(self, losses, labels, sources):
        """Add the losses [s, b] of a micro-batch's sequences, with ``labels`` [b, s], to the rows ``sources`` [b]."""
        counted = (labels != IGNORED).double().sum(1)
        one = torch.full_like(counted, self.counts_sequences)
        per_sample = torch.stack((losses.double().sum(0), counted, one), dim=1)  # [b, 3]
        self.not_finite.add(~per_sample[:, 0].isfinite())
        self.losses += one_hot(sources, len(self.losses)) @ per_sample  # index_add_ would not be deterministic on a GPU

    def reduce(self):
        """Sum ``losses`` over all ranks, in place, and return them."""
        return sum_over_ranks(self.losses, self.groups.data, self.groups.pipeline)


# The coefficient of the L1 norm of ``relu`` gates, as in ReMoE (arXiv 2412.14711): lambda = L1_START L1_FACTOR^n.
# After each step n grows by 1 if tokens selected more experts than the budget, over all layers, and falls if fewer.
# It stays between 0 and L1_MOST, where lambda is 1: in a long warm-up the gates cannot follow it yet.
L1_START, L1_FACTOR, L1_MOST = 1e-8, 1.2, 101


class RouterSums:
    """What the routers of this rank report about a step, and the shares that ``global_batch`` balances against.

    blocks: ``RoutedBlock``s of this pipeline stage. batch: their ``BatchContext``, which receives what routers follow.
    layers: ``RoutedLayer``s of the whole model. shares: for each layer with routed experts, the share of a step's
    tokens that selected each of them, [E] float64. l1_steps: n of lambda, int64 [].
    """

    def __init__(self, blocks, batch, layers, num_sources, groups, device):
        self.blocks = blocks
        self.batch = batch
        self.layers = layers
        self.num_sources = num_sources
        self.groups = groups
        self.device = device
        shares = [
            torch.full((layer.num_routed,), layer.uniform_load, dtype=torch.float64, device=device)
            for layer in layers
            if layer.num_routed
        ]
        self.set_shares(shares)
        self.by_sign = any(layer.by_sign for layer in layers)
        self.set_l1_steps(torch.zeros((), dtype=torch.int64, device=device))

    def take(self, sources, tokens, frozen):
        """Return the sums of a step over all ranks, [num_sources, sum of (4 + E)], and update the routers with the
        step's shares.

        sources: [b] of each of this rank's micro-batches. tokens: their number in the step over all ranks. frozen: keep
        the shares and biases of the previous step, because this step has no numbers that can be trusted. A dense
        warm-up adds nothing.
        """
        widths = [row_width(layer) for layer in self.layers]
        sums = torch.zeros(self.num_sources, sum(widths), dtype=torch.float64, device=self.device)
        parts = {layer.index: part for layer, part in zip(self.layers, sums.split(widths, dim=1), strict=True)}  # views
        sources = [part.to(self.device, non_blocking=True) for part in sources]  # ``cat`` would leave pinned memory
        of_source = one_hot(torch.cat(sources), self.num_sources)
        for block in self.blocks:
            rows = block.rows.take()
            if rows is not None:
                parts[block.index] += of_source @ rows
        sum_over_ranks(sums, self.groups.tensor, self.groups.data, self.groups.pipeline)
        if not frozen:
            self.follow({index: part[:, COUNTS].sum(0) for index, part in parts.items()}, tokens)
        return sums

    def follow(self, counts, tokens):
        """Update shares and biases of the routers. counts: {layer index: [E], selections in the whole step}."""
        shares = (counts[layer.index] * layer.stride / tokens for layer in self.layers)
        self.set_shares([share for share in shares if len(share)])
        if self.by_sign:
            excess = sum(counts[layer.index].sum() - layer.num_active * tokens for layer in self.layers)
            self.set_l1_steps((self.l1_steps + excess.sign().long()).clamp(0, L1_MOST))
        for block in self.blocks:
            router = block.router()
            if getattr(router, BIAS, None) is not None:
                router.move_bias(counts[block.index])

    def set_shares(self, shares):
        self.shares = shares
        routed = [layer.index for layer in self.layers if layer.num_routed]
        self.batch.set_shares(dict(zip(routed, shares, strict=True)))

    def set_l1_steps(self, steps):
        self.l1_steps = steps
        if self.by_sign:
            self.batch.set_l1(L1_START * L1_FACTOR ** steps.double())


def one_hot(sources, num_sources):
    """Map sources [b] to float64 [num_sources, b]: 1 where a sequence belongs to the source."""
    return (sources == torch.arange(num_sources, device=sources.device).unsqueeze(1)).double()
