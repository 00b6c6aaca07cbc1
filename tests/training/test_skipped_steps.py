"""A step that is skipped leaves nothing behind: the step after it is that of a run in which it never was.

Two engines stand side by side on two ranks. Both take the same good steps; before each of them one engine takes a bad
step, which differs from the last in what is wrong with it. After every good step both have the same gradient norm and,
parameter by parameter, the same bits of first moment (which adds up the gradients), second moment and master.
"""

import itertools
import math
import os

import pytest
import torch

from moh_lm.flags import parse_config
from moh_lm.parallel.groups import group_size
from moh_lm.training.guard import DIVERGENCE, GRADIENT, LOSS, OUT_OF_RANGE, SPIKE
from moh_lm.training.text_engine import PipelineEngine
from tests.distributed import run_ranks
from tests.training.runs import SIZES, engine_of, micro_batches_of

RATE = 1e-3
NORM_WEIGHT, MATRIX = "model.layers.1.input_layernorm.weight", "model.layers.1.mlp.down_proj.weight"


def nan_loss(engine, weights):
    last = engine.model.forward_funcs[-1] if isinstance(engine, PipelineEngine) else engine.model.model
    return last.register_forward_hook(lambda module, inputs, out: out * math.nan)


def nan_gradient(engine, weights):
    """Of a weight that tensor-parallel ranks hold copies of: here of one that no norm counts."""
    return weights[NORM_WEIGHT].register_hook(lambda grad: grad * math.nan)


def inf_gradient(engine, weights):
    return weights[MATRIX].register_hook(lambda grad: torch.full_like(grad, math.inf))


def absurd_gradient(engine, weights):
    """One element, as a flipped bit of its exponent makes it, where no norm counts it."""
    return weights[NORM_WEIGHT].register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), 1e38))


def spike(engine, weights):
    return weights[MATRIX].register_hook(lambda grad: grad + 1e3)


def flipped_bit(engine, weights):
    """In the copy of a weight: of any under ZeRO-1 and 2, of a norm between tensor-parallel ranks under ZeRO-3."""
    weight = getattr(weights[NORM_WEIGHT], "ds_tensor", weights[NORM_WEIGHT]).data
    weight.view(torch.int16 if weight.dtype == torch.bfloat16 else torch.int32).view(-1)[3] ^= 1


HARMS = {  # the greatest code is that of all ranks; squares of 1e38 are infinite in DeepSpeed's own fp32 norm
    nan_loss: {LOSS},
    nan_gradient: {GRADIENT},
    inf_gradient: {GRADIENT},
    absurd_gradient: {OUT_OF_RANGE, GRADIENT},
    spike: {SPIKE},
    flipped_bit: {DIVERGENCE},
}
FACTORS = ((1, 2), (1, 2), (1, 2, 3), ("fp32", "bf16"), (False, True), ("adamw", "muon"))
LAYOUTS = [  # tensor, pipeline, ZeRO stage, precision, offload, optimizer: every pair that may be combined
    (1, 1, 2, "fp32", False, "adamw"),
    (1, 1, 3, "fp32", True, "muon"),
    (2, 1, 1, "fp32", True, "adamw"),
    (2, 1, 2, "bf16", True, "muon"),
    (2, 1, 3, "bf16", False, "adamw"),
    (1, 2, 1, "bf16", False, "muon"),
    (1, 2, 1, "fp32", False, "adamw"),
]


def step(engine, number, seed):
    """The result of a step of two micro-batches of this rank, recorded as the program does."""
    different = int(os.environ["RANK"]) if group_size(engine.groups.data) > 1 else 0
    tokens = torch.randint(3, 64, (4, 17), generator=torch.Generator().manual_seed(2 * seed + different))
    result = engine.train_step(micro_batches_of(tokens, 2), RATE, check_replicas=True)
    engine.guard.record(number, result.loss, result.grad_norm, result.skipped)
    return result


def left_behind(layout):
    """{name of a harm: in what the two engines differ after the good step that follows it}."""
    tensor, pipeline, zero, precision, offload, optimizer = layout
    copies = zero < 3 and pipeline == 1 or tensor == 2  # there is more than one of a weight
    flags = f"""--tensor-parallel-size {tensor} --pipeline-parallel-size {pipeline} --zero-stage {zero}
        --precision {precision} --batch-tokens {16 * 8 // tensor // pipeline} --spike-window 2 --spike-sigmas 1e3
        --optimizer {optimizer} --load-balance-bias-rate 0.02"""
    config, _ = parse_config([*SIZES.split(), *flags.split(), "--offload-optimizer", str(offload)])
    harmed, sound = engine_of(config), engine_of(config)
    weights, found = dict(harmed.named_parameters()), {}
    for seed, harm in enumerate((None, None, *HARMS)):
        if harm is flipped_bit and not copies:
            continue
        if harm:
            handle = harm(harmed, weights) if os.environ["RANK"] == "1" else None
            bad = step(harmed, seed, 100 + seed)
            assert bad.skipped and bad.code in HARMS[harm], (harm.__name__, bad.code)
            if handle:
                handle.remove()
        mine, theirs = (step(engine, seed, seed) for engine in (harmed, sound))
        assert not mine.skipped and not theirs.skipped
        differing = [name for name, same in compare(harmed, sound) if not same]
        if differing or mine.grad_norm != theirs.grad_norm:
            found[harm.__name__] = [f"norm {mine.grad_norm}, not {theirs.grad_norm}", *differing]
    return found


def compare(engine, other):
    """(name, whether the bits are the same) of what this rank's optimizers own of each parameter."""
    for mine, theirs in zip(engine.fragments(), other.fragments(), strict=True):
        yield mine.name, all(torch.equal(tensor, theirs.tensors[key]) for key, tensor in mine.tensors.items())


def all_left_behind(layouts):
    return {layout: left_behind(layout) for layout in layouts}


@pytest.fixture(scope="module")
def left():
    return run_ranks(all_left_behind, 2, LAYOUTS)


def test_the_table_holds_every_legal_pair_of_values():
    def pairs(layout):
        return {((i, layout[i]), (j, layout[j])) for i, j in itertools.combinations(range(len(FACTORS)), 2)}

    def legal(layout):
        tensor, pipeline, zero, _, offload, _ = layout
        return pipeline == 1 or (tensor, zero, offload) == (1, 1, False)  # two ranks

    wanted = set().union(*map(pairs, filter(legal, itertools.product(*FACTORS))))
    assert wanted <= set().union(*map(pairs, LAYOUTS))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
def test_a_skipped_step_leaves_nothing_behind(layout, left):
    assert [of_rank[layout] for of_rank in left] == [{}, {}]
