"""Parallel layers: each rank holds a slice of each weight matrix (Shoeybi et al. 2019).

A parameter carries its own description: ``tensor_partition`` says which rows or columns of the whole parameter
this rank holds, ``init_std`` or ``init_value`` says how it is initialised. Initialisation, checkpoints and export read
these attributes and need to know neither names nor layers.

Shapes: s sequence, b batch, tp ranks of the tensor-parallel group. Weights are [output, input] as in torch.nn.Linear.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from moh_lm.compared import COMPARED_TOKENS, Compared, differences, leaves, results
from moh_lm.parallel.groups import group_rank, group_size
from moh_lm.parallel.mappings import replicate, scatter_sum


@dataclass(frozen=True)
class Partition:
    """The part of a whole parameter that this rank holds: ``ranges`` of dimension ``dim``, end to end.

    size: length of ``dim`` in the whole parameter. padding: unused slots after the ranges (for a vocabulary that does
    not divide evenly); they are zero and are never saved.
    """

    dim: int
    size: int
    ranges: tuple[tuple[int, int], ...]
    padding: int = 0

    def local_size(self):
        return sum(stop - start for start, stop in self.ranges) + self.padding

    def take(self, whole):
        """Return this rank's slice of the whole parameter, padded with zeros."""
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        if self.padding:
            parts.append(torch.zeros_like(whole.narrow(self.dim, 0, 1)).repeat_interleave(self.padding, self.dim))
        return torch.cat(parts, self.dim)

    def locate(self, indices):
        """Return the position of each index in this rank's only range, 0 if it is outside, and whether it is inside."""
        ((start, stop),) = self.ranges
        here = (indices >= start) & (indices < stop)
        return (indices - start).masked_fill(~here, 0), here


def even_partition(dim, size, group):
    """Return consecutive slices of equal length; the last ranks are padded where ``size`` does not divide evenly."""
    length = -(-size // group_size(group))
    start = min(size, group_rank(group) * length)
    stop = min(size, start + length)
    return Partition(dim, size, ((start, stop),), padding=length - (stop - start))


def make_parameter(shape, init_std=None, partition=None, init_value=1.0):
    """Return an empty parameter of ``shape``, or of this rank's part. Without ``init_std``, it is ``init_value``."""
    local = list(shape)
    if partition is not None:
        local[partition.dim] = partition.local_size()
    parameter = nn.Parameter(torch.empty(local))
    parameter.whole_shape = tuple(shape)
    parameter.init_std, parameter.init_value = init_std, init_value
    parameter.tensor_partition = partition
    # DeepSpeed counts a parameter in the gradient norm of every tensor-parallel rank only if it has this attribute.
    parameter.tensor_model_parallel = partition is not None
    return parameter


class ColumnParallelLinear(nn.Module):
    """Y = X A^T with A = [A_1; ...; A_tp] split by outputs: x [s, b, input] -> [s, b, output/tp].

    ``product`` of (x, weight) may replace the ordinary product; under ZeRO-3 the weight exists inside ``forward`` only.
    By default ``F.linear`` is looked up in each call, because DeepSpeed replaces it under ZeRO-3 by one that does not
    keep the gathered weight until the backward pass.
    """

    def __init__(self, input_size, output_size, init_std, partition):
        super().__init__()
        self.weight = make_parameter((output_size, input_size), init_std, partition)

    def forward(self, x, product=None):
        return self.finished((product or F.linear)(x, self.factor()))

    def factor(self):
        """Return the weight that x is multiplied by; see ``Joined``."""
        return self.weight

    def finished(self, product):
        """Return the output, from the product of x and ``factor``."""
        return product


class KeyValueParallelLinear(ColumnParallelLinear):
    """Keys or values of this rank's query heads: x [s, b, input] -> [s, b, kv/tp * head_dim].

    A rank holds whole key/value heads. Where there are fewer of them than ranks it holds all, and its output has one
    for each run of query heads that share it, or for each query head; see ``HeadPartition.kv_replication``.
    """

    def __init__(self, input_size, num_heads, head_dim, init_std, heads):
        shared_by = heads.num_heads // num_heads
        few = num_heads < group_size(heads.group)
        partition = None if few else heads.partition(0, head_dim, queries_per_key=shared_by)
        super().__init__(input_size, num_heads * head_dim, init_std, partition)
        self.head_dim, self.group = head_dim, heads.group
        self.runs = heads.kv_replication(shared_by) if few else None

    def factor(self):
        return self.weight if self.runs is None else replicate(self.weight, self.group)

    def finished(self, product):
        if self.runs is None:
            return product
        heads = product.unflatten(-1, (-1, self.head_dim))
        runs = [heads[:, :, key : key + 1].expand(-1, -1, count, -1) for key, count in self.runs]
        return torch.cat(runs, dim=2).flatten(2)


def separate(x, *layers):
    """Return the output of each of the ``layers`` for x."""
    return [layer(x) for layer in layers]


class Joined(Compared):
    """Does the same as ``separate`` with one product, by stacked copies of all weights (``--fused-projections``)."""

    flag = "--fused-projections"

    def forward(self, x, *layers):
        products = JoinedProducts.apply(x, *(layer.factor() for layer in layers))
        return [layer.finished(product) for layer, product in zip(layers, products, strict=True)]

    def compare(self, x, *layers):
        """See ``Compared``."""
        (x,) = leaves(x[:COMPARED_TOKENS])
        weights = [x, *(layer.weight for layer in layers)]
        return differences(*(results(products(x, *layers), weights) for products in (self.forward, separate)))


class JoinedProducts(torch.autograd.Function):
    """Returns x A_1^T, x A_2^T, ... for x [..., input] and A_i [output_i, input]. The backward pass copies again."""

    @staticmethod
    def forward(ctx, *given):  # torch.compile takes x for ctx if as many tensors are given as there are parameters here
        ctx.save_for_backward(*given)
        x, *weights = given
        return F.linear(x, torch.cat(weights)).split([len(weight) for weight in weights], -1)

    @staticmethod
    def backward(ctx, *gradients):
        x, *weights = ctx.saved_tensors
        gradient = torch.cat(gradients, -1)
        dx, of_weights = gradient @ torch.cat(weights), [None] * len(weights)
        if any(ctx.needs_input_grad[1:]):
            product = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
            of_weights = product.split([len(weight) for weight in weights])
        return dx, *of_weights


class ReplicatedLinear(ColumnParallelLinear):
    """Y = X A^T, whole on every rank. Each rank uses it for its own heads, so the weight's gradient is summed over
    ranks."""

    def __init__(self, input_size, output_size, init_std, group):
        super().__init__(input_size, output_size, init_std, None)
        self.group = group

    def factor(self):
        return replicate(self.weight, self.group)


class RowParallelLinear(nn.Module):
    """Y = sum_i X_i A_i^T with A = [A_1, ..., A_tp] split by inputs: x [s, b, input/tp] -> [s/tp, b, output].

    ``product``: see ``ColumnParallelLinear``.
    """

    def __init__(self, input_size, output_size, init_std, partition, group):
        super().__init__()
        self.weight = make_parameter((output_size, input_size), init_std, partition)
        self.group = group

    def forward(self, x, product=None):
        return scatter_sum((product or F.linear)(x, self.weight), self.group)


class VocabParallelEmbedding(nn.Module):
    """Rows of the embedding split over the ranks: tokens [b, s] -> [s/tp, b, d]."""

    def __init__(self, vocab_size, hidden_size, init_std, group):
        super().__init__()
        self.partition = even_partition(0, vocab_size, group)
        self.weight = make_parameter((vocab_size, hidden_size), init_std, self.partition)
        self.group = group

    def forward(self, tokens):
        tokens = tokens.t()  # [s, b]
        if self.group is None:
            return F.embedding(tokens, self.weight)
        row, here = self.partition.locate(tokens)
        rows = F.embedding(row, self.weight)  # [s, b, d]
        return scatter_sum(rows.masked_fill(~here.unsqueeze(-1), 0), self.group)


class RMSNorm(nn.Module):
    """w x / sqrt(mean(x^2) + eps), the mean in fp32 or wider. x: a slice of the sequence; w: whole on every rank.

    The norm is rounded to the dtype of x before w multiplies it, as in Hugging Face's Llama, and so torch gets no w.
    """

    def __init__(self, hidden_size, eps, group, init_value=1.0):
        super().__init__()
        self.weight = make_parameter((hidden_size,), init_value=init_value)
        self.eps = eps
        self.group = group

    def forward(self, x):
        return replicate(self.weight, self.group) * F.rms_norm(x, x.shape[-1:], eps=self.eps)
