"""The attention backends that run anywhere, against head-by-head float64 arithmetic: outputs and every gradient."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from moh_lm.extras.cpu_sparse import CPU_SPARSE
from moh_lm.kernels.gated_attention import dense_heads, gated_attention
from tests.attention_cases import DOCUMENTS, ROUTINGS, SHAPES, Problem, make_inputs, make_mask, with_gradients
from tests.kernels import flex
from tests.kernels.flex import FLEX

BACKENDS = {"dense": None, "cpu_sparse": CPU_SPARSE}
MASKED = ((None, True), (None, False), (CPU_SPARSE, False))  # backends, and whether the mask is made beforehand
each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


@pytest.fixture
def uncompiled_flex(monkeypatch):
    """FlexAttention as torch runs it without a compiler."""
    monkeypatch.setattr(flex, "compiled", lambda: flex_attention)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_backend_computes_the_reference(shape, routing, uncompiled_flex):
    problem = Problem(shape, routing)
    for backend in BACKENDS.values():
        problem.check(backend, 1e-12)
    problem.check_output(FLEX, 1e-12)


@pytest.mark.parametrize("routing", ["random_routing", "odd_routing", "varying_routing"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_no_backend_sees_beyond_a_document(lengths, shape, routing, uncompiled_flex):
    problem = Problem(shape, routing, lengths=lengths)
    for backend, masked in MASKED:
        problem.check(backend, 1e-12, masked)
    problem.check_output(FLEX, 1e-12)


WINDOWS = {  # keys, and the lengths of documents
    "one key": (1, None),
    "some keys": (40, None),
    "a chunk": (64, None),
    "all but one": (149, None),
    "some keys of documents": (30, DOCUMENTS["some, other ones in each sequence"]),
    "keys of short documents": (6, DOCUMENTS["short ones"]),
}


@pytest.mark.parametrize("routing", ["odd_routing", "varying_routing"])
@pytest.mark.parametrize("shape", list(SHAPES.values())[:3], ids=list(SHAPES)[:3])
@pytest.mark.parametrize("window, lengths", WINDOWS.values(), ids=WINDOWS)
def test_no_backend_sees_beyond_the_window(window, lengths, shape, routing, uncompiled_flex):
    problem = Problem(shape, routing, lengths=lengths, window=window)
    for backend, masked in MASKED:
        problem.check(backend, 1e-12, masked)
    problem.check_output(FLEX, 1e-12)


OWN_KEYS = {  # shape, routing, lengths of documents, window
    "heads of their own": ((150, 2, 6, 6, 16, 2), "odd_routing", None, 0),
    "documents and a window": ((97, 2, 4, 2, 8, 0), "odd_routing", DOCUMENTS["some, other ones in each sequence"], 30),
    "a window": ((150, 1, 6, 3, 12, 2), "varying_routing", None, 40),
    "short documents": ((65, 2, 8, 2, 8, 5), "varying_routing", DOCUMENTS["short ones"], 0),
    "no head": ((40, 1, 4, 4, 8, 0), "nothing", None, 0),
    "all heads": ((130, 1, 4, 2, 8, 0), "everything", None, 0),
    "one token": ((1, 2, 6, 6, 8, 2), "odd_routing", None, 0),
}


@pytest.mark.parametrize("shape, routing, lengths, window", OWN_KEYS.values(), ids=OWN_KEYS)
def test_heads_that_keep_their_own_tokens_see_no_others(shape, routing, lengths, window, uncompiled_flex):
    problem = Problem(shape, routing, lengths=lengths, window=window, own_keys=True)
    problem.check(None, 1e-12, masked=True)
    problem.check(CPU_SPARSE, 1e-12)
    if lengths or window:
        with pytest.raises(RuntimeError, match="not of documents or windows; choose auto"):
            problem.check_output(FLEX, 1e-12)
    else:
        problem.check_output(FLEX, 1e-12)


@each_backend
def test_a_needle_is_found_by_the_heads_only_that_keep_it(backend):
    """Token 5 selects heads 1 and 2, the last token 2 and 3; head 0 is shared."""
    query, key, value, *_ = make_inputs(40, 1, 4, 4, 8)
    selected = torch.rand(40, 1, 4, generator=torch.Generator().manual_seed(2)) < 0.5
    selected[5, 0], selected[-1, 0] = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]]).bool()
    key[5] *= 5
    query[-1] = key[5]  # all of them ask for it
    last = {}
    for own, needle in itertools.product((False, True), (7, -7)):
        value[5] = needle
        heads = gated_attention(query, key, value, None, selected, 1, backend=backend, own_keys=own)
        last[own, needle] = heads[-1, 0]
    found = {case: ((heads - case[1]).abs().amax(-1) < 1e-3).tolist() for case, heads in last.items()}
    assert found[False, 7] == found[False, -7] == [True, False, True, True]  # of all keys, by the heads in use
    assert found[True, 7] == found[True, -7] == [True, False, True, False]
    assert last[True, 7][3].equal(last[True, -7][3])  # whatever the needle says


def test_one_document_gives_the_bits_of_none():
    shape = (150, 2, 6, 3, 16, 0)
    found = [Problem(shape, dtype=torch.float32, lengths=lengths).results(CPU_SPARSE) for lengths in (None, [[150]])]
    assert all(map(torch.equal, *found))


@each_backend
def test_gradients_pass_gradcheck(backend):
    *tensors, _, selected = make_inputs(6, 2, 3, 3, 4)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    for mask in (None, make_mask([[2, 4], [1, 2, 3]], 6, 2)):
        assert torch.autograd.gradcheck(lambda *t, m=mask: gated_attention(*t, selected, 1, m, backend), leaves)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 0.02), (torch.float16, 3e-3)])
def test_sparse_results_in_lower_precision_are_near(dtype, tolerance):
    problem = Problem((130, 2, 6, 3, 16, 2), dtype=dtype)
    assert [tensor.dtype for tensor in problem.results(CPU_SPARSE)] == [dtype] * 4 + [torch.float32]
    problem.check(CPU_SPARSE, tolerance)


@pytest.mark.parametrize("head_dim", [3, 10, 16])
@pytest.mark.parametrize("own_keys", [False, True])
def test_narrow_heads_in_single_precision_are_near(head_dim, own_keys):
    Problem((60, 2, 6, 3, head_dim, 2), dtype=torch.float32, own_keys=own_keys).check(None, 2e-6)


def test_values_of_latent_heads_keep_their_width():
    query, key, value = torch.randn(3, 5, 2, 4, 6).unbind()
    expected = dense_heads(query, key, value)[..., :3]
    torch.testing.assert_close(dense_heads(query, key, value[..., :3]), expected)


@each_backend
def test_selected_is_what_counts_and_not_a_gate_of_zero(backend):
    *tensors, upstream, selected = make_inputs(40, 1, 4, 4, 8)
    *_, dgates = with_gradients(lambda *t: gated_attention(*t, selected, backend=backend), *tensors, upstream)
    assert (dgates[~selected] == 0).all()
    assert (dgates[selected] != 0).all()  # row 13 has gates of 0
    assert (tensors[3][13] == 0).all()


@pytest.mark.parametrize("backend", [*BACKENDS.values(), FLEX], ids=[*BACKENDS, "flex"])
@torch.no_grad()
def test_later_tokens_change_nothing_and_other_rows_are_zero(backend, uncompiled_flex):
    *tensors, _, selected = make_inputs(200, 1, 4, 2, 8)
    changed = [torch.cat((t[:120], 3 * t[120:] + 50)) for t in tensors]
    other = torch.cat((selected[:120], ~selected[120:]))
    out = gated_attention(*tensors, selected, 2, backend=backend)
    assert torch.equal(gated_attention(*changed, other, 2, backend=backend)[:120], out[:120])
    assert (out[:, :, 2:][~selected[..., 2:]] == 0).all()
    assert (out[:, :, :2].norm(dim=-1) > 0).sum() == 2 * 199  # a gate of 0 in one row


def test_all_but_one_backend_work_without_triton():
    code = """
import sys
sys.modules["triton"] = None  # importing it raises ModuleNotFoundError
from moh_lm.build import BACKENDS
assert BACKENDS["triton"] is None and BACKENDS["cpu_sparse"] is not None
"""
    subprocess.run([sys.executable, "-c", code], check=True)
