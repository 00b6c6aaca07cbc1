"""What a run finds when it compares its kernels with torch on the first micro-batch, in Triton's interpreter."""

import pytest
import torch
import torch.distributed as dist

from moh_lm.compared import Differs, differences, distance, rounding
from moh_lm.flags import parse_config
from moh_lm.kernels.masks import document_bounds
from moh_lm.parallel import layers
from tests.interpreting import run_ranks
from tests.training.runs import arguments, engine_of, micro_batches_of

pytest.importorskip("triton", reason="Triton is not installed")

FORMS = ["--attention-backend triton", "--fused-loss", "--fused-projections", "--fused-router"]
LAYOUTS = ["--tensor-parallel-size 2", "--pipeline-parallel-size 2", "--context-parallel-size 2 --dense-warmup-iters 2"]


def engine(directory, flags):
    """The engine of this rank, and a function that reads its first micro-batch."""
    config, *_ = parse_config(arguments("data", directory, "--head-dim", "16", *" ".join(flags).split()))
    generator = torch.Generator().manual_seed(0)
    batches = micro_batches_of(torch.randint(64, (4, config.seq_length + 1), generator=generator), 2)
    return engine_of(config), lambda: batches[0]


def said(directory, flags, broken=None):
    """The sentences of this rank, or its error. broken: form of which the second rank computes something else."""
    found, first = engine(directory, flags)
    if broken and dist.get_rank() == 1:
        break_form(broken)
    try:
        return list(found.compare_kernels(first))
    except Differs as error:
        return str(error)


def break_form(flag):
    """Let a form's results be one percent larger."""
    from moh_lm.kernels import core_attention
    from moh_lm.model.fused_router import FusedRouting
    from moh_lm.parallel import triton_cross_entropy

    if flag == "--attention-backend triton":
        attention = core_attention.gated_attention
        core_attention.gated_attention = lambda *given: attention(*given) * (1 if given[7] is None else 1.01)
    elif flag == "--fused-loss":
        loss = triton_cross_entropy.triton_differentiate
        triton_cross_entropy.triton_differentiate = lambda z, *others: loss(z.mul_(1.01), *others)
    elif flag == "--fused-projections":
        split = layers.JoinedProducts.apply
        layers.JoinedProducts.apply = lambda *given: [product * 1.01 for product in split(*given)]
    else:
        routed = FusedRouting.apply
        FusedRouting.apply = lambda *given: (lambda gates, *others: (gates * 1.01, *others))(*routed(*given))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_hears_of_every_form(interpreter, tmp_path, layout):
    one, other = interpreter(run_ranks, said, 2, tmp_path, [*FORMS, layout])
    assert one == other and [sentence.split(":")[0] for sentence in one] == FORMS
    assert all(": compared with torch on the first micro-batch: outputs differ by " in text for text in one)


@pytest.mark.parametrize("form", FORMS)
def test_all_ranks_refuse_a_form_that_is_wrong_on_one_of_them(interpreter, tmp_path, form):
    one, other = interpreter(run_ranks, said, 2, tmp_path, [form, "--dense-warmup-iters 2"], form)
    assert one == other and one.startswith(f"{form}: rank 1, ") and "does not compute what torch does: outputs" in one
    assert ("choose --attention-backend dense" if "backend" in form else "leave the flag out") in one


def test_frozen_weights_are_compared_too(interpreter, tmp_path):
    flags = ["--fused-projections", "--train-only router"]
    ((sentence,),) = interpreter(run_ranks, said, 1, tmp_path, flags)
    assert sentence.startswith("--fused-projections: compared")


FROM_64 = torch.ones(4096)
FROM_64[64:] = 1.05


@pytest.mark.parametrize("wrong", [
    lambda exact: exact * FROM_64,
    lambda exact: torch.where(exact == 0, torch.nan, exact), lambda exact: torch.where(exact == 0, torch.inf, exact),
])  # fmt: skip
def test_what_bf16_rounds_is_allowed_and_nothing_more(wrong):
    """Numbers that shrink along a sequence as means of more and more values do, and one exact zero."""
    exact = torch.randn(4096, generator=torch.Generator().manual_seed(0)) / torch.arange(1, 4097).sqrt()
    exact[100] = 0
    assert distance(exact.bfloat16(), exact) < rounding(torch.bfloat16) / 2
    assert distance(wrong(exact), exact) > rounding(torch.bfloat16)


def test_one_wrong_number_of_many_is_not_allowed():
    exact = torch.randn(2**20, generator=torch.Generator().manual_seed(0))
    assert distance(exact.index_fill(0, torch.tensor([9]), 2.0), exact) > rounding(torch.bfloat16)


def test_a_tie_on_few_tokens_is_allowed_and_many_are_not():
    same = [torch.ones(2)], [torch.ones(2)]
    for others, tokens, is_allowed in ((1 / 512, 512, True), (8 / 512, 512, False), (2e-3, 10**6, False)):
        assert (differences(same, same, others, tokens).excess <= 1) == is_allowed


def check_first_positions():
    """Attention whose first 7 of 12 positions are compared, with documents and a window, and without."""
    from moh_lm.kernels import core_attention
    from moh_lm.kernels.gated_attention import TRITON

    core_attention.COMPARED_TOKENS = 7
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(12, 2, heads, 16, generator=generator) for heads in (4, 2, 2))
    selected = torch.rand(12, 2, 4, generator=generator) < 0.5
    gates = torch.rand(12, 2, 4, generator=generator) * selected
    def wrong_at(position):
        scale = 1 + 0.01 * (torch.arange(12) == position)
        return TRITON._replace(heads=lambda *given: TRITON.heads(*given) * scale[:, None, None, None])

    documents = document_bounds(torch.arange(12).repeat(2, 1) % 5, torch.bfloat16)
    for mask, window in ((None, 0), (documents, 0), (documents, 3)):
        for position, is_right in ((12, True), (8, True), (6, False)):
            core = core_attention.CoreAttention(wrong_at(position), window)
            assert (core.compare(query, key, value, gates, selected, mask).excess <= 1) == is_right


def test_attention_is_compared_on_the_first_positions(interpreter):
    interpreter(check_first_positions)


def step(directory, flags, compared):
    """What a first step leaves, and the state of torch's random numbers."""
    found, first = engine(directory, flags)
    if compared:
        found.compare_kernels(first)
    result = found.train_step([first()] * found.micro_batches, 1e-2)
    left = [part for fragment in found.fragments() for part in fragment.tensors.values()]
    return result.loss, result.grad_norm, result.routers.tolist(), torch.get_rng_state().tolist(), left


def test_a_comparison_leaves_the_run_as_it_was(interpreter, tmp_path):
    flags = [*FORMS, "--load-balance-bias-rate 0.001", "--dense-warmup-iters 2", "--recompute"]
    ((*compared, left),), ((*alone, expected),) = (
        interpreter(run_ranks, step, 1, tmp_path, flags, whether) for whether in (True, False)
    )
    assert compared == alone and all(torch.equal(*pair) for pair in zip(left, expected, strict=True))
