"""Conjugate collectives: the backward of each is the other of its pair.

Between layers the activations are [s/tp, b, d]: every tensor-parallel rank holds a slice of the sequence (sequence
parallelism, Korthikanti et al. 2022). Inside a layer they are whole, and the weights are sliced.

    forward                                   backward
    gather_sequence    all-gather             reduce-scatter
    gather_heads       all-gather             reduce-scatter
    scatter_sum        reduce-scatter         all-gather
    replicate          identity               all-reduce
    exchange           all-to-all             all-to-all

On one rank (``group`` None) each of them is the identity.
"""

import torch
import torch.distributed as dist


def gather_sequence(shard, group):
    """Gather [s/tp, ...] to [s, ...]; the gradients of all ranks are summed back into the shards."""
    return shard if group is None else Collective.apply(shard, group, all_gather, reduce_scatter)


def gather_heads(shard, group):
    """Gather [..., h/tp] to [..., h], rank after rank; the gradients of all ranks are summed back into the shards."""
    return shard if group is None else gather_sequence(shard.movedim(-1, 0), group).movedim(0, -1)


def scatter_sum(partial, group):
    """Sum partial sums [s, ...] over the ranks, to [s/tp, ...]."""
    return partial if group is None else Collective.apply(partial, group, reduce_scatter, all_gather)


def replicate(weight, group):
    """Return a weight that all ranks hold whole but apply to their own tokens. Its gradient is summed over ranks."""
    return weight if group is None else Collective.apply(weight, group, identity, all_reduce)


def exchange(parts, group):
    """Send part i of [cp, ...] to rank i, and receive part i of the result from it; gradients go the other way."""
    return Collective.apply(parts, group, all_to_all, all_to_all)


class Collective(torch.autograd.Function):
    """collective(tensor, group) of the ranks of a group; the gradients are those of ``conjugate``."""

    @staticmethod
    def forward(ctx, tensor, group, collective, conjugate):
        ctx.group, ctx.conjugate = group, conjugate
        return collective(tensor, group)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.conjugate(gradient, ctx.group), None, None, None


def identity(weight, group):
    return weight.view_as(weight)


def all_reduce(partial, group):
    total = partial.contiguous()
    dist.all_reduce(total, group=group)
    return total


def all_gather(shard, group):
    whole = shard.new_empty(shard.shape[0] * dist.get_world_size(group), *shard.shape[1:])
    dist.all_gather_into_tensor(whole, shard.contiguous(), group=group)
    return whole


def reduce_scatter(whole, group):
    shard = whole.new_empty(whole.shape[0] // dist.get_world_size(group), *whole.shape[1:])
    dist.reduce_scatter_tensor(shard, whole.contiguous(), group=group)
    return shard


def all_to_all(parts, group):
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
