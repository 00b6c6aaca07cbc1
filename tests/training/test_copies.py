"""Copies of a weight on tensor-parallel ranks and on two pipeline stages stay equal, whatever rounding does."""

import functools
import itertools

import torch
import torch.distributed as dist

from moh_lm.flags import parse_config
from tests.distributed import run_ranks
from tests.training.runs import SIZES, engine_of, equal, micro_batches_of

LAYOUTS = [  # of six ranks: pairs that hold copies, and three data-parallel ranks
    "--precision bf16 --tensor-parallel-size 2 --num-key-value-heads 1 --optimizer muon",
    "--precision fp32 --tensor-parallel-size 2 --zero-stage 2 --offload-optimizer true",
    "--precision bf16 --tensor-parallel-size 2 --zero-stage 3 --router-gradient-clipping 0.01",
    "--precision bf16 --pipeline-parallel-size 2 --tie-embeddings true",
]


def add_in_turn():
    """Make groups of three add from the first rank on, or from the last on if rank 0 is not in them."""
    all_reduce, reduce_scatter = dist.all_reduce, dist.reduce_scatter_tensor

    def summed(tensor, group):
        parts = [torch.empty_like(tensor) for _ in range(3)]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        first, second, third = parts if 0 in dist.get_process_group_ranks(group) else parts[::-1]
        return first + second + third

    def sum_everywhere(tensor, op=dist.ReduceOp.SUM, group=None, **others):
        if op != dist.ReduceOp.SUM or not tensor.is_floating_point() or dist.get_world_size(group) != 3:
            return all_reduce(tensor, op, group, **others)
        tensor.copy_(summed(tensor, group))

    def sum_in_parts(output, tensor, op=dist.ReduceOp.SUM, group=None, **others):
        if dist.get_world_size(group) != 3:
            return reduce_scatter(output, tensor, op, group, **others)
        output.copy_(summed(tensor, group).chunk(3)[dist.get_rank(group)])

    dist.all_reduce, dist.reduce_scatter_tensor = sum_everywhere, sum_in_parts


def copies_after_three_steps():
    """Of every layout: the codes of the steps, and {(kind, name): (start, this rank's part)} of what there is twice."""
    add_in_turn()  # before DeepSpeed looks for the functions
    found = []
    for layout in LAYOUTS:
        engine = engine_of(parse_config([*SIZES.split(), "--batch-tokens", "192", *layout.split()])[0])
        for _, weight in engine.named_parameters():
            weight.register_hook(functools.partial(scaled, itertools.cycle((1, 2**-12))))
        data, codes = torch.Generator().manual_seed(dist.get_rank(engine.groups.data)), []
        for number in range(3):
            engine.begin(number)
            tokens = torch.randint(3, 64, (4, 17), generator=data)
            codes.append(engine.train_step(micro_batches_of(tokens, 2), 1e-3, check_replicas=True).code)
        tied = {name for name, _, _ in engine.model.tied_parameters()}
        parts = {
            (kind, fragment.name): (fragment.start, part.detach().clone())
            for fragment in engine.fragments()
            for kind, part in fragment.tensors.items()
            if fragment.name in tied or engine.groups.tensor and fragment.parameter.tensor_partition is None
        }
        found.append((codes, 0 in dist.get_process_group_ranks(engine.groups.data), parts))
    return found


def scaled(factors, gradient):
    """The gradient of every other micro-batch is so small that fp32 sums of bf16 gradients are not exact."""
    return gradient * next(factors)


def joined(parts):
    """The whole tensors of one copy, from the parts of its ranks."""
    found = {}
    for key, (start, part) in (item for of_rank in parts for item in of_rank.items()):
        found.setdefault(key, {})[start] = part
    return {key: torch.cat([pieces[start] for start in sorted(pieces)]) for key, pieces in found.items()}


def test_copies_stay_equal_where_sums_are_added_in_another_order():
    for layout, ranks in zip(LAYOUTS, zip(*run_ranks(copies_after_three_steps, 6), strict=True), strict=True):
        assert [codes for codes, _, _ in ranks] == [[0, 0, 0]] * 6, layout
        one, other = (joined(parts for _, first, parts in ranks if first is copy) for copy in (True, False))
        assert len(one) > 1 and equal(one, other), layout
