"""Two Triton kernels compute the losses of a chunk of logits and overwrite the logits by their gradient.

They compute the same as ``torch_differentiate`` of moh_lm/parallel/cross_entropy.py, which gives the formulas. That
function passes over fp32 logits ten times and moves about 60 bytes for each bf16 logit. These kernels read every logit
twice and write it once:

    stats       m = max_j z_j, sum_j exp(z_j - m) and z_label, of one rank's slice of the vocabulary
    gradient    z <- (softmax(z) (1 + 2 zeta log sum_j exp(z_j)) - [j = label]) / count, and 0 for ignored labels

Between the two, the ranks that share the vocabulary combine their three numbers for each token. Sums are fp32, or fp64
for fp64 logits, and the gradient is rounded to the dtype of the logits once.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from moh_lm.compared import COMPARED_TOKENS, Compared, differences, leaves, results
from moh_lm.parallel.cross_entropy import IGNORED, all_reduce, linear_cross_entropy, torch_differentiate

COLUMNS, OPTIONS = 4096, dict(num_warps=8, enable_fp_fusion=True)  # columns and options of one program


class FusedLoss(Compared):
    """``linear_cross_entropy`` by these kernels. group: tensor-parallel group. z_loss: zeta."""

    flag = "--fused-loss"

    def __init__(self, group, z_loss):
        super().__init__()
        self.group, self.z_loss = group, z_loss

    def forward(self, x, weight, labels, partition, differentiate=None):
        """See ``linear_cross_entropy``."""
        differentiate = differentiate or triton_differentiate
        return linear_cross_entropy(x, weight, labels, partition, self.group, self.z_loss, differentiate)

    def compare(self, x, weight, labels, partition):
        """See ``Compared``."""
        x, weight = leaves(x.flatten(0, -2)[:COMPARED_TOKENS], weight)
        both = []
        for differentiate in (triton_differentiate, torch_differentiate):
            mean, losses = self.forward(x, weight, labels.flatten()[:COMPARED_TOKENS], partition, differentiate)
            (mean,), gradients = results([mean], [x, weight])
            both.append(([mean, losses], gradients))
        return differences(*both)


def triton_differentiate(z, labels, partition, group, z_loss, count):
    """Compute the same as ``torch_differentiate``."""
    wide = torch.promote_types(z.dtype, torch.float32)
    tokens, width = z.shape
    labels, first = labels.contiguous(), partition.ranges[0][0]
    settings = dict(WIDE=tl.float64 if wide == torch.float64 else tl.float32, COLUMNS=COLUMNS, **OPTIONS)
    stats = torch.empty((3, tokens), dtype=wide, device=z.device)
    with torch.cuda.device_of(z):  # Triton launches on the current device
        stats_kernel[(tokens,)](z, labels, stats, z.stride(0), width, first, partition.padding, tokens, **settings)
    top, total, label_logit = stats
    if group is not None:
        own = top.clone()
        all_reduce(top, dist.ReduceOp.MAX, group)
        total *= torch.exp(own - top)
        all_reduce(stats[1:], dist.ReduceOp.SUM, group)
    logsumexp = total.log() + top
    if count is not None:
        grid = (tokens, triton.cdiv(width, COLUMNS))
        with torch.cuda.device_of(z):
            gradient_kernel[grid](
                z, labels, logsumexp, z.stride(0), width, first, 1 / count, z_loss, IGNORED=IGNORED, **settings
            )
    return (logsumexp - label_logit).masked_fill(labels == IGNORED, 0), logsumexp


@triton.jit
def stats_kernel(
    z, labels, stats, stride, width, first, padding, tokens, WIDE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """stats [3, tokens]: max_j z_j, sum_j exp(z_j - max), and z of the label, or 0 where another rank has it.
    first: id of the first column. padding: columns at the end that belong to no id. Grid: (tokens,)."""
    row = tl.program_id(0)
    z += row.to(tl.int64) * stride
    top = tl.full([COLUMNS], -float("inf"), WIDE)
    total = tl.zeros([COLUMNS], WIDE)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        value = tl.load(z + column, mask=column < width, other=-float("inf")).to(WIDE)
        larger = tl.maximum(top, value)
        finite = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(top - finite) + tl.exp(value - finite)
        top = larger
    best = tl.max(top, 0)
    total = tl.sum(total * tl.exp(top - tl.where(best == -float("inf"), 0.0, best)), 0)
    column = tl.load(labels + row) - first
    here = (column >= 0) & (column < width - padding)
    of_label = tl.load(z + tl.where(here, column, 0), mask=here, other=0.0).to(WIDE)
    tl.store(stats + row, best)
    tl.store(stats + tokens + row, total)
    tl.store(stats + 2 * tokens + row, of_label)


@triton.jit
def gradient_kernel(
    z, labels, logsumexp, stride, width, first, scale, zeta,
    IGNORED: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Overwrite z by the gradient of the mean loss; see above. Grid: (tokens, blocks of columns)."""
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    z += row.to(tl.int64) * stride
    lse = tl.load(logsumexp + row)
    label = tl.load(labels + row)
    value = tl.load(z + column, mask=column < width, other=-float("inf")).to(WIDE)
    slope = tl.exp(value - lse) * (1.0 + 2.0 * zeta * lse)
    slope = tl.where(column == label - first, slope - 1.0, slope) * scale
    slope = tl.where(label == IGNORED, 0.0, slope)
    tl.store(z + column, slope.to(z.dtype.element_ty), mask=column < width)
