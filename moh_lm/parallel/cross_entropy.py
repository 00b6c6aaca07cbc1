"""Cross-entropy of logits whose vocabulary is split over the tensor-parallel ranks.

    loss = log(sum_j exp(z_j - m)) - (z_label - m),    m = max_j z_j
    d loss / d z_j = softmax(z)_j - [j = label]

Each rank sees its own slice of z; the maximum, the sum and the logit of the label are combined by all-reduce, so no
rank ever holds all logits of a token. The arithmetic is fp32 or wider.
"""

import torch
import torch.distributed as dist

IGNORED = -100  # label of a position that has no loss


def vocab_parallel_cross_entropy(logits, labels, partition, group):
    """Loss of every position.

    logits: [..., vocab/tp], this rank's rows of ``partition`` (padding included). labels: int64 [...], whole
    vocabulary; IGNORED gives 0. Returns fp32 (or wider) [...], equal on every rank.
    """
    return VocabParallelCrossEntropy.apply(logits, labels, partition, group)


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, partition, group):
        ((start, stop),) = partition.ranges
        z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if partition.padding:
            z[..., stop - start :] = -torch.inf
        maximum = z.amax(-1, keepdim=True)
        all_reduce(maximum, dist.ReduceOp.MAX, group)
        z -= maximum
        ignored = labels == IGNORED
        elsewhere = (labels < start) | (labels >= stop)
        local_label = (labels - start).masked_fill(elsewhere, 0).unsqueeze(-1)
        label_logit = z.gather(-1, local_label).squeeze(-1).masked_fill(elsewhere, 0)
        all_reduce(label_logit, dist.ReduceOp.SUM, group)
        z.exp_()
        total = z.sum(-1, keepdim=True)
        all_reduce(total, dist.ReduceOp.SUM, group)
        z /= total  # softmax
        ctx.save_for_backward(z, local_label, elsewhere, ignored)
        ctx.dtype = logits.dtype
        return (total.squeeze(-1).log() - label_logit).masked_fill(ignored, 0)

    @staticmethod
    def backward(ctx, gradient):
        softmax, local_label, elsewhere, ignored = ctx.saved_tensors
        gradient = gradient.masked_fill(ignored, 0).unsqueeze(-1)
        gradient_logits = softmax * gradient
        at_label = (-gradient).masked_fill(elsewhere.unsqueeze(-1), 0)
        gradient_logits.scatter_add_(-1, local_label, at_label)
        return gradient_logits.to(ctx.dtype), None, None, None


def all_reduce(tensor, operation, group):
    if group is not None:
        dist.all_reduce(tensor, operation, group=group)
