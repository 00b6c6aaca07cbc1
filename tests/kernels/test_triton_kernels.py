"""The Triton kernels in Triton's interpreter, on the CPU, against head-by-head float64 arithmetic.

The fixture ``interpreter`` runs a test in a process of its own.
"""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from moh_lm.kernels.gated_attention import TRITON, gated_attention
from tests.attention_cases import (
    DOCUMENTS,
    ROUTINGS,
    Problem,
    assert_all_close,
    make_inputs,
    make_mask,
    reference,
    with_gradients,
)
from tests.interpreting import multiply_bf16

pytest.importorskip("triton", reason="Triton is not installed")

SHAPES = {  # length, batch, heads, key/value heads, head dimension, shared heads
    "16": (70, 2, 4, 4, 16, 0),
    "64, groups": (131, 1, 4, 2, 64, 2),
    "96": (65, 1, 4, 2, 96, 1),
    "128": (66, 1, 2, 1, 128, 0),
    "one token": (1, 2, 4, 2, 16, 1),
    "a whole block": (64, 1, 3, 3, 32, 0),
    "shorter than a block": (9, 2, 3, 1, 16, 0),
}


def attention(*arguments):
    """``gated_attention`` by the kernels, of (query, key, value, gates, selected, num_shared, mask)."""
    return gated_attention(*arguments, backend=TRITON)


@contextmanager
def small_tiles():
    """Tiles of 16 slots and 16 keys in every kernel: many blocks in a short sequence."""
    from moh_lm.kernels import triton_attention

    plain = triton_attention.HOPPER.copy()
    triton_attention.HOPPER.update(dict.fromkeys(plain, {128: triton_attention.Tiles(16, 16, 4, 1)}))
    try:
        yield
    finally:
        triton_attention.HOPPER.update(plain)


def check_small(*arguments):
    with small_tiles():
        check(*arguments)


def check(shape, routing, dtype, tolerance, lengths=None, window=0, own_keys=False):
    if dtype == torch.bfloat16:
        multiply_bf16()
    Problem(shape, routing, dtype, lengths, window, own_keys).check(TRITON, tolerance)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kernels_compute_the_reference_with_every_gradient(interpreter, shape):
    interpreter(check, shape, "odd_routing" if shape[2] > 3 else "random_routing", torch.float64, 1e-12)


@pytest.mark.parametrize("shape", ["16", "64, groups", "one token"])
def test_kernels_leave_out_the_tokens_that_do_not_use_a_head(interpreter, shape):
    interpreter(check, SHAPES[shape], "odd_routing", torch.float64, 1e-12, None, 0, True)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_kernels_compute_every_routing(interpreter, routing):
    interpreter(check, (100, 1, 4, 2, 16, 0), routing, torch.float32, 2e-6)


@pytest.mark.parametrize(
    "shape, documents",
    [
        *(("16", documents) for documents in DOCUMENTS),
        ("64, groups", "that end where blocks end"),
        ("64, groups", "that end beside the ends of blocks"),
        ("96", "some, other ones in each sequence"),
    ],
)
def test_no_kernel_sees_beyond_a_document(interpreter, shape, documents):
    interpreter(check, SHAPES[shape], "odd_routing", torch.float64, 1e-12, DOCUMENTS[documents])


@pytest.mark.parametrize("routing", ["varying_routing", "everything"])
def test_a_document_may_have_many_blocks_and_a_block_many(interpreter, routing):
    interpreter(check_small, (100, 1, 2, 1, 16, 0), routing, torch.float64, 1e-12, [[3, 50, 1, 1, 9, 1000]])


@pytest.mark.parametrize(
    "routing, window, lengths",
    [
        ("varying_routing", 2, None),
        ("varying_routing", 40, None),
        ("everything", 40, None),
        ("everything", 33, [[3, 50, 1, 1, 9, 1000]]),
    ],
)
def test_no_kernel_sees_beyond_the_window(interpreter, routing, window, lengths):
    interpreter(check_small, (100, 1, 2, 1, 16, 0), routing, torch.float64, 1e-12, lengths, window)


def check_one_document():
    shape = (50, 1, 2, 1, 16, 0)
    problems = [Problem(shape, "varying_routing", torch.float32, lengths) for lengths in (None, [[50]])]
    with small_tiles():
        assert all(map(torch.equal, *(problem.results(TRITON) for problem in problems)))


def test_one_document_gives_the_bits_of_none(interpreter):
    interpreter(check_one_document)


@pytest.mark.parametrize("num_shared", [1, 2])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 3e-3), (torch.bfloat16, 0.02)])
def test_kernels_stay_near_the_reference_in_lower_precision(interpreter, dtype, tolerance, num_shared):
    interpreter(check, (70, 1, 4, 2, 32, num_shared), "random_routing", dtype, tolerance)


def heads_first(tensor):
    """The same numbers, laid out [b, heads, s, ...]."""
    return tensor.movedim(0, 2).contiguous().movedim(2, 0)


def last_first(tensor):
    """The same numbers, the last dimension outermost."""
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1)


def of_one_sequence(tensor):
    """The first sequence for all: a stride of 0."""
    return tensor[:, :1].expand_as(tensor)


LAYOUTS = (torch.Tensor.contiguous, heads_first, last_first, of_one_sequence)


def check_layouts(first, second, lengths, num_shared):
    """Two layouts of the tensors in turn, and upstream gradients of the second."""
    *tensors, upstream, selected = make_inputs(40, 2, 4, 2, 16, "varying_routing")
    mask = make_mask(lengths, 40, 2)
    if mask:
        mask = mask._replace(starts=last_first(mask.starts), ends=last_first(mask.ends))
    laid_out = [layout(tensor) for layout, tensor in zip((first, second) * 2, tensors, strict=True)]
    found = []
    for function in (reference, attention):
        leaves = [tensor.detach().requires_grad_() for tensor in laid_out]
        out = function(*leaves, first(selected), num_shared, mask if function is attention else lengths)
        found.append([out, *torch.autograd.grad(out, leaves, second(upstream))])
    assert_all_close(*found[::-1], 1e-12)


@pytest.mark.parametrize("shift", range(2))
@pytest.mark.parametrize("first", range(len(LAYOUTS)))
def test_inputs_and_gradients_may_have_any_layout(interpreter, first, shift):
    """Every layout of one tensor beside two layouts of the next, and either of them with each kind of heads."""
    second = (first + shift) % len(LAYOUTS)
    heads = ((None, 0), (None, 2), ([[9, 40], [30, 40]], 2))[(first + second) % len(LAYOUTS) % 3]
    interpreter(check_layouts, LAYOUTS[first], LAYOUTS[second], *heads)


def check_gates_of_shared_heads(dtype):
    """dg = rowsum(dOut * H) in fp32: no rounding but that of the inputs."""
    from moh_lm.kernels.triton_gates import differentiate_gates

    generator = torch.Generator().manual_seed(0)
    gradient, context = (torch.randn(30, 2, 3, 96, generator=generator).to(dtype) for _ in range(2))
    gates, dgates = torch.rand(30, 2, 3), torch.empty(30, 2, 5)
    differentiate_gates(gradient, context, gates, torch.empty_like(context), dgates)
    exact = (gradient.double() * context.double()).sum(-1)
    torch.testing.assert_close(dgates[..., :3].double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gates_of_shared_heads_have_gradients_in_fp32(interpreter, dtype):
    interpreter(check_gates_of_shared_heads, dtype)


def check_index_type():
    """The same bits with addresses of 64 bits, which tensors of more than 2**31 elements need."""
    from moh_lm.kernels import triton_attention

    *tensors, upstream, selected = make_inputs(40, 2, 4, 2, 48, "varying_routing", torch.float32)
    short = with_gradients(lambda *t: attention(*t, selected), *tensors, upstream)
    types = set()
    plain = triton_attention.index_type
    triton_attention.index_type = lambda tensors: types.add(plain(tensors)) or plain(tensors)
    with mock.patch.object(triton_attention, "LARGEST_INT32", 1000):
        wide = with_gradients(lambda *t: attention(*t, selected), *tensors, upstream)
    triton_attention.index_type = plain
    assert types == {triton_attention.tl.int64} and all(map(torch.equal, short, wide))
    assert plain([torch.empty(2**16, 2**15, 1, device="meta")]) == triton_attention.tl.int64
    assert plain([torch.empty(2**16 - 1, 2**15, 1, device="meta")]) == triton_attention.tl.int32


def test_tensors_of_any_size_are_addressed(interpreter):
    interpreter(check_index_type)


def check_rows():
    *tensors, upstream, selected = make_inputs(120, 1, 3, 1, 16)
    changed = [torch.cat((t[:90], 3 * t[90:] + 50)) for t in tensors]
    results = [with_gradients(lambda *t: attention(*t, selected), *tensors, upstream) for _ in range(2)]
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
    out, dq, _, _, dgates = results[0]
    assert torch.equal(attention(*changed, torch.cat((selected[:90], ~selected[90:])))[:90], out[:90])
    for rows in (out, dq, dgates):
        assert (rows[~selected] == 0).all()
    assert (tensors[3][40] == 0).all() and (dgates[40][selected[40]] != 0).all()


def test_results_repeat_and_follow_from_what_tokens_see(interpreter):
    interpreter(check_rows)


def check_compaction(dtype):
    from moh_lm.kernels import triton_compaction
    from tests.kernels import blocks

    for length in (1, 75, 1024, 2100):
        *_, selected = make_inputs(length, 2, 4, 4, 8, "odd_routing" if length > 1 else "everything")
        part = selected.to(dtype)[..., 1:]
        assert all(map(torch.equal, triton_compaction.compact(part), blocks.compact(part)))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_the_kernel_of_the_compaction_gives_what_torch_gives(interpreter, dtype):
    interpreter(check_compaction, dtype)


def check_tiles(lengths, window=0):
    """Products of the interpreter are counted: two per tile forward, three for dQ, four for dK/dV."""
    from triton.runtime.interpreter import InterpreterBuilder

    from tests.kernels.blocks import compact, key_blocks, slot_blocks

    count = 0
    mask = make_mask(lengths, 82, 1, window=window)
    starts, ends = mask[:2] if mask else (None, None)
    plain = InterpreterBuilder.create_dot

    def create_dot(*arguments):
        nonlocal count
        count += 1
        return plain(*arguments)

    InterpreterBuilder.create_dot = create_dot
    try:
        *tensors, upstream, selected = make_inputs(82, 1, 2, 2, 16, "bursty_routing", torch.float16)
        tensors[3] = tensors[3].float()
        leaves = [tensor.requires_grad_() for tensor in tensors]
        with small_tiles():
            out = attention(*leaves, selected, 0, mask)
            forward = count
            torch.autograd.grad(out, leaves, upstream)
        backward = count - forward
    finally:
        InterpreterBuilder.create_dot = plain
    compaction = compact(selected)
    begin, _, _, end = key_blocks(compaction, 16, 16, starts)
    tiles = (end - begin).sum().item()
    assert forward == 2 * tiles
    assert backward == 3 * tiles + 4 * slot_blocks(compaction, 16, 16, ends).sum()
    return forward, backward


def test_the_tiles_computed_are_those_of_the_compaction(interpreter):
    whole, halves, short = (interpreter(check_tiles, lengths) for lengths in (None, [[41, 41]], [[17] * 5]))
    assert all(a > b > c for a, b, c in zip(whole, halves, short, strict=True))
    windowed = interpreter(check_tiles, None, 26)
    assert all(a < b for a, b in zip(windowed, whole, strict=True))
