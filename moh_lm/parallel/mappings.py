"""Conjugate collectives: each is an autograd function whose backward is the other of its pair.

Between layers the activations are [s/tp, b, d]: every tensor-parallel rank holds a slice of the sequence (sequence
parallelism, Korthikanti et al. 2022). Inside a layer they are whole, and the weights are sliced.

    forward                                   backward
    gather_sequence    all-gather             reduce-scatter
    gather_heads       all-gather             reduce-scatter
    scatter_sum        reduce-scatter         all-gather
    replicate          identity               all-reduce

On one rank (``group`` None) each of them is the identity.
"""

import torch
import torch.distributed as dist

from moh_lm.parallel.groups import group_size


def gather_sequence(shard, group):
    """[s/tp, ...] -> [s, ...]; the gradients of all ranks are summed back into the shards."""
    return shard if group is None else Gather.apply(shard, group)


def gather_heads(shard, group):
    """[..., h/tp] -> [..., h], rank after rank; the gradients of all ranks are summed back into the shards."""
    return shard if group is None else Gather.apply(shard.movedim(-1, 0), group).movedim(0, -1)


def scatter_sum(partial, group):
    """Partial sums [s, ...] -> sums [s/tp, ...]."""
    return partial if group is None else Scatter.apply(partial, group)


def replicate(weight, group):
    """Return a weight that all ranks hold whole but apply to their own tokens. Its gradient is summed over ranks."""
    return weight if group is None else Replicate.apply(weight, group)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, group):
        ctx.group = group
        return all_gather(shard, group)

    @staticmethod
    def backward(ctx, gradient):
        return reduce_scatter(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial, group):
        ctx.group = group
        return reduce_scatter(partial, group)

    @staticmethod
    def backward(ctx, gradient):
        return all_gather(gradient, ctx.group), None


class Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, group):
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def all_gather(shard, group):
    whole = shard.new_empty(shard.shape[0] * group_size(group), *shard.shape[1:])
    dist.all_gather_into_tensor(whole, shard.contiguous(), group=group)
    return whole


def reduce_scatter(whole, group):
    shard = whole.new_empty(whole.shape[0] // group_size(group), *whole.shape[1:])
    dist.reduce_scatter_tensor(shard, whole.contiguous(), group=group)
    return shard
