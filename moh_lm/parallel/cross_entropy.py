"""Fused output head and cross-entropy for a vocabulary that is split over the tensor-parallel ranks.

    z = W x,    loss = log(sum_j exp(z_j - m)) - (z_label - m),    m = max_j z_j
    d loss / d z_j = softmax(z)_j - [j = label],    d loss / dx = W^T dz,    d loss / dW = sum over tokens of dz x^T

With a z-loss, which keeps logits small (Chowdhery et al. 2022, arXiv 2204.02311), zeta (log sum_j exp(z_j))^2 is added,
and the softmax in the gradient is multiplied by 1 + 2 zeta log sum_j exp(z_j).

The logits of all tokens are by far the largest tensor of a step (65,536 for each token, in fp32). They never exist all
at once. Tokens are processed in chunks, each of which yields its losses and at the same time its part of both gradients
before its logits are dropped. The backward pass has nothing left to compute, and every product is computed only once,
as without chunks.

Each rank sees its own slice of z; the maximum, the sum and the logit of the label are combined by all-reduce, so no
rank ever holds all logits of a token. Softmax and sums over tokens are fp32 or wider.
"""

from functools import partial

import torch
import torch.distributed as dist

IGNORED = -100  # the label of a position without a loss
MOST_LIKELY = -101  # without gradients: the label of a position that returns its most likely token instead of a loss
CHUNK_BYTES = 2**30  # size of the fp32 logits of a chunk: 4,096 tokens with 65,536 logits each


def linear_cross_entropy(x, weight, labels, partition, group, z_loss=0.0, differentiate=None):
    """Return the mean loss over all positions, with gradients, and the loss of each position, without.

    x: [..., d]. weight: [vocab/tp, d], this rank's rows of ``partition`` (padding included). labels: int64 [...], ids
    of the whole vocabulary, IGNORED, which gives a loss of 0 that counts in the mean, or MOST_LIKELY. z_loss: zeta, for
    the mean only. differentiate: the function that turns the logits of a chunk into their gradient; default:
    ``torch_differentiate``. Returns fp32 (or wider) tensors [] and [...], equal on every rank. The gradient of x is
    this rank's part of a sum over the ranks.
    """
    rows, targets, with_gradients = x.flatten(0, -2), labels.flatten(), torch.is_grad_enabled()
    differentiate = differentiate or torch_differentiate
    if not with_gradients:
        differentiate = partial(losses_or_tokens, differentiate)
    settings = (partition, group, z_loss, differentiate, with_gradients)
    mean, losses = LinearCrossEntropy.apply(rows, weight, targets, *settings)
    return mean, losses.view(labels.shape)


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels, partition, group, z_loss, differentiate, with_gradients):
        wide = torch.promote_types(x.dtype, torch.float32)
        losses, squares = torch.zeros(2, len(x), dtype=wide, device=x.device)
        x_gradient, weight_gradient = torch.empty_like(x) if with_gradients else None, None
        trained = with_gradients and ctx.needs_input_grad[1]
        chunk = max(1, CHUNK_BYTES // (len(weight) * wide.itemsize))
        for start in range(0, len(x), chunk):
            rows = slice(start, start + chunk)
            z = x[rows] @ weight.t()  # [tokens, vocab/tp]
            if partition.padding:
                z[:, -partition.padding :] = -torch.inf
            count = len(x) if with_gradients else None
            losses[rows], logsumexp = differentiate(z, labels[rows], partition, group, z_loss, count)
            if z_loss:
                squares[rows] = logsumexp.square().masked_fill(labels[rows] == IGNORED, 0)
            if with_gradients:
                torch.mm(z, weight, out=x_gradient[rows])
            if trained:
                product = z.t() @ x[rows]
                weight_gradient = product if weight_gradient is None else weight_gradient.to(wide).add_(product)
            z = product = None  # before the next chunk has its own
        ctx.gradients = x_gradient, weight_gradient
        ctx.mark_non_differentiable(losses)
        return losses.mean() + z_loss * squares.mean(), losses

    @staticmethod
    def backward(ctx, gradient, _):
        x_gradient, weight_gradient = ctx.gradients
        ctx.gradients = None  # they are large, and changed in place
        x_gradient *= gradient
        if weight_gradient is not None:
            weight_gradient = weight_gradient.mul_(gradient).to(x_gradient.dtype)
        return x_gradient, weight_gradient, *[None] * 6


def torch_differentiate(logits, labels, partition, group, z_loss, count):
    """Return losses and logsumexp, fp32 or wider [tokens], and overwrite the logits by the gradient of the mean loss.

    logits: [tokens, vocab/tp], -inf in padding, in the dtype of the weights. labels: int64 [tokens]. count: number of
    tokens in the mean, which includes the z-loss; None: no gradient is needed, and the contents of ``logits`` are
    undefined afterwards.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    maximum = z.amax(-1, keepdim=True)
    all_reduce(maximum, dist.ReduceOp.MAX, group)
    z -= maximum
    column, here = partition.locate(labels)
    column = column.unsqueeze(-1)
    label_logit = z.gather(-1, column).squeeze(-1).masked_fill(~here, 0)
    total = z.exp_().sum(-1)
    sums = torch.stack((total, label_logit))
    all_reduce(sums, dist.ReduceOp.SUM, group)
    total, label_logit = sums
    ignored = labels == IGNORED
    losses = (total.log() - label_logit).masked_fill(ignored, 0)
    logsumexp = total.log() + maximum.squeeze(-1)
    if count is not None:  # softmax, z-loss, mean and ignored labels in one pass over the logits
        z *= ((1 + 2 * z_loss * logsumexp) / (count * total)).masked_fill(ignored, 0).unsqueeze(-1)
        z.scatter_add_(-1, column, -here.to(z.dtype).unsqueeze(-1) / count)
        logits.copy_(z)
    return losses, logsumexp


def losses_or_tokens(differentiate, z, labels, partition, group, z_loss, count):
    """Return what ``differentiate`` does, with the most likely tokens in place of losses where labels ask for them."""
    asked = labels == MOST_LIKELY
    ids = most_likely(z, partition, group) if asked.any() else None  # first, because the logits are overwritten
    losses, logsumexp = differentiate(z, labels, partition, group, z_loss, count)
    return losses if ids is None else torch.where(asked, ids, losses), logsumexp


def most_likely(z, partition, group):
    """Return the ids of the largest logits, int64 [tokens], equal on every rank."""
    values, columns = z.max(-1)
    largest, ids = values.clone(), columns + partition.ranges[0][0]
    all_reduce(largest, dist.ReduceOp.MAX, group)
    ids[values < largest] = partition.size
    all_reduce(ids, dist.ReduceOp.MIN, group)
    return ids


def all_reduce(tensor, operation, group):
    if group is not None:
        dist.all_reduce(tensor, operation, group=group)
