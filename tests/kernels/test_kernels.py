"""The attention backends that run anywhere, against head-by-head float64 arithmetic: outputs and every gradient."""

import itertools
import subprocess
import sys

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from moh_lm.extras.cpu_sparse import SelectedRows, add_up
from moh_lm.kernels import flex, gated_attention, varlen
from moh_lm.kernels.compaction import compact
from moh_lm.kernels.gated_attention import choose_backend, dense_heads, moh_attention
from moh_lm.kernels.masks import boundaries, mean_keys, narrow
from tests.attention_cases import (
    DOCUMENTS,
    ROUTINGS,
    SHAPES,
    assert_all_close,
    make_boundaries,
    make_inputs,
    reference,
    with_gradients,
)

BACKENDS = ("dense", "cpu_sparse")


@pytest.fixture
def uncompiled_flex(monkeypatch):
    """FlexAttention as torch runs it without a compiler."""
    monkeypatch.setattr(flex, "compiled", lambda: flex_attention)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_backend_computes_the_reference_with_every_gradient(shape, routing, uncompiled_flex):
    *sizes, num_shared = shape
    *tensors, upstream, selected = make_inputs(*sizes, routing)
    expected = with_gradients(lambda *t: reference(*t, selected, num_shared), *tensors, upstream)
    for backend in BACKENDS:
        arguments = (selected, num_shared, None, backend)
        got = with_gradients(lambda *t, a=arguments: moh_attention(*t, *a), *tensors, upstream)
        assert_all_close(got, expected, 1e-12)
    with torch.no_grad():
        out = moh_attention(*tensors, selected, num_shared, backend="flex")
    torch.testing.assert_close(out, expected[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("routing", ["random_routing", "odd_routing", "varying_routing"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_no_backend_sees_beyond_a_document(lengths, shape, routing, uncompiled_flex):
    *sizes, num_shared = shape
    *tensors, upstream, selected = make_inputs(*sizes, routing)
    expected = with_gradients(lambda *t: reference(*t, selected, num_shared, lengths), *tensors, upstream)
    for backend, masked in (("dense", True), ("dense", False), ("cpu_sparse", False)):
        arguments = (selected, num_shared, make_boundaries(lengths, *sizes[:2], masked), backend)
        got = with_gradients(lambda *t, a=arguments: moh_attention(*t, *a), *tensors, upstream)
        assert_all_close(got, expected, 1e-12)
    with torch.no_grad():
        out = moh_attention(*tensors, selected, num_shared, arguments[2], "flex")
    torch.testing.assert_close(out, expected[0], rtol=0, atol=1e-12)


OWN_KEYS = {  # shape, routing, lengths of documents, window
    "heads of their own": ((150, 2, 6, 6, 16, 2), "odd_routing", None, 0),
    "documents and a window": ((97, 2, 4, 2, 8, 0), "odd_routing", DOCUMENTS["some, other ones in each sequence"], 30),
    "a window": ((150, 1, 6, 3, 12, 2), "varying_routing", None, 40),
    "short documents": ((65, 2, 8, 2, 8, 5), "varying_routing", DOCUMENTS["short ones"], 0),
    "no head": ((40, 1, 4, 4, 8, 0), "nothing", None, 0),
    "all heads": ((130, 1, 4, 2, 8, 0), "everything", None, 0),
    "one token": ((1, 2, 6, 6, 8, 2), "odd_routing", None, 0),
}


def packed_sequences(query, key, value, ends, key_ends, longest, longest_key, *, window_size):
    """What the stock kernel of a GPU computes: causal attention in each of the packed sequences."""
    assert ends.dtype == torch.int32 and ends.equal(key_ends) and ends[0] == 0 and ends[-1] == len(query)
    assert len(ends) - 1 <= varlen.MOST_SEQUENCES
    assert window_size == (-1, 0) and longest == longest_key == ends.diff().max()
    heads = [part.split(ends.diff().tolist()) for part in (query, key, value)]
    attend = torch.nn.functional.scaled_dot_product_attention
    of_each = ([part.transpose(0, 1) for part in parts] for parts in zip(*heads, strict=True))
    return torch.cat([attend(*parts, is_causal=True).transpose(0, 1) for parts in of_each])


@pytest.mark.parametrize("most", [varlen.MOST_SEQUENCES, 3])
@pytest.mark.parametrize("shape, routing, lengths, window", OWN_KEYS.values(), ids=OWN_KEYS)
def test_the_stock_kernel_gets_the_tokens_of_each_head_and_document(shape, routing, lengths, window, most, monkeypatch):
    monkeypatch.setattr(varlen, "stock_kernel", lambda: packed_sequences)
    monkeypatch.setattr(varlen, "MOST_SEQUENCES", most)
    *sizes, num_shared = shape
    *tensors, upstream, selected = make_inputs(*sizes, routing)
    expected = with_gradients(lambda *t: reference(*t, selected, num_shared, lengths, 0, True), *tensors, upstream)
    seen = make_boundaries(lengths, *sizes[:2], False) if lengths else None
    arguments = (selected, num_shared, seen, "varlen", True, True)
    assert_all_close(with_gradients(lambda *t: moh_attention(*t, *arguments), *tensors, upstream), expected, 1e-12)


def test_a_stock_kernel_without_windows_is_none(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, key, value, is_causal=False: None)
    monkeypatch.setattr(varlen, "stock_kernel", varlen.stock_kernel.__wrapped__)
    assert varlen.stock_kernel() is None
    with pytest.raises(RuntimeError, match="no varlen_attn with window_size; choose auto"):
        gated_attention.check_backend("varlen", torch.device("cpu"))


@pytest.mark.parametrize("shape, routing, lengths, window", OWN_KEYS.values(), ids=OWN_KEYS)
def test_heads_that_keep_their_own_tokens_see_no_others(shape, routing, lengths, window, uncompiled_flex):
    *sizes, num_shared = shape
    *tensors, upstream, selected = make_inputs(*sizes, routing)
    more = (num_shared, lengths, window, True)
    expected = with_gradients(lambda *t: reference(*t, selected, *more), *tensors, upstream)
    for backend in BACKENDS:
        seen = make_boundaries(lengths, *sizes[:2], backend == "dense", window) if lengths or window else None
        arguments = (selected, num_shared, seen, backend, True, True)
        got = with_gradients(lambda *t, a=arguments: moh_attention(*t, *a), *tensors, upstream)
        assert_all_close(got, expected, 1e-12)
    arguments = (selected, num_shared, seen, "flex", True, True)
    if seen is not None:
        with pytest.raises(RuntimeError, match="not of documents nor windows; choose auto"):
            moh_attention(*tensors, *arguments)
        return
    with torch.no_grad():
        torch.testing.assert_close(moh_attention(*tensors, *arguments), expected[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
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
        last[own, needle] = moh_attention(query, key, value, None, selected, 1, None, backend, True, own)[-1, 0]
    found = {case: ((heads - case[1]).abs().amax(-1) < 1e-3).tolist() for case, heads in last.items()}
    assert found[False, 7] == found[False, -7] == [True, False, True, True]  # of all keys, by the heads in use
    assert found[True, 7] == found[True, -7] == [True, False, True, False]
    assert last[True, 7][3].equal(last[True, -7][3])  # whatever the needle says


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
    *sizes, num_shared = shape
    *tensors, upstream, selected = make_inputs(*sizes, routing)
    expected = with_gradients(lambda *t: reference(*t, selected, num_shared, lengths, window), *tensors, upstream)
    for backend, masked in (("dense", True), ("dense", False), ("cpu_sparse", False)):
        arguments = (selected, num_shared, make_boundaries(lengths, *sizes[:2], masked, window), backend)
        got = with_gradients(lambda *t, a=arguments: moh_attention(*t, *a), *tensors, upstream)
        assert_all_close(got, expected, 1e-12)
    with torch.no_grad():
        out = moh_attention(*tensors, selected, num_shared, arguments[2], "flex")
    torch.testing.assert_close(out, expected[0], rtol=0, atol=1e-12)


def test_what_a_window_shows_is_counted_by_hand():
    documents = boundaries(torch.tensor([[0, 1, 2, 3, 0, 1]]), False)
    x = torch.empty(6, 1)
    starts, ends, _ = narrow(documents, 3, x, False)
    assert (starts.tolist(), ends.tolist()) == ([[0, 0, 0, 1, 4, 4]], [[3, 4, 4, 4, 6, 6]])
    starts, ends, mask = narrow(None, 2, x, True)
    assert (starts.tolist(), ends.tolist()) == ([[0, 0, 1, 2, 3, 4]], [[2, 3, 4, 5, 6, 6]])
    assert mask[0, 0].sum(-1).tolist() == [1, 2, 2, 2, 2, 2]
    assert narrow(documents, 6, x, True) is documents and narrow(None, 0, x, True) is None
    for window in (1, 3, 6, 99):
        seen = [min(t + 0.5, window) if t + 1 <= window else window for t in range(6)]  # half of the last key
        assert mean_keys(6, window) == pytest.approx(sum(seen) / 6, abs=0.1)
    assert mean_keys(8192, 0) == mean_keys(8192, 8192) == 4096 and mean_keys(8192, 2048) == 2048 - 256


def test_boundaries_are_those_of_the_documents_counted_by_hand():
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [7, 8, 0, 1, 2, 3]])  # the second window begins inside a document
    starts, ends, mask = boundaries(positions, True)
    assert starts.tolist() == [[0, 0, 0, 3, 4, 4], [0, 0, 2, 2, 2, 2]]
    assert ends.tolist() == [[3, 3, 3, 4, 6, 6], [2, 2, 6, 6, 6, 6]]
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1],
    ]  # fmt: skip
    assert boundaries(positions, False).mask is None


def test_one_document_gives_the_bits_of_none():
    *tensors, upstream, selected = make_inputs(150, 2, 6, 3, 16, dtype=torch.float32)
    one = make_boundaries([[150]], 150, 2)
    found = [
        with_gradients(lambda *t, d=documents: moh_attention(*t, selected, 0, d, "cpu_sparse"), *tensors, upstream)
        for documents in (None, one)
    ]
    assert all(map(torch.equal, *found))


def test_rows_in_bfloat16_are_added_up_in_fp32():
    generator = torch.Generator().manual_seed(0)
    rows = SelectedRows(torch.ones(4, 1, 64))
    values, weight = (torch.randn(n, m, generator=generator).bfloat16() for n, m in ((4 * 64, 8), (64 * 8, 16)))
    by_head = values.unflatten(0, (64, 4)).double()  # [heads, s, e]
    exact = torch.einsum("hse,hed->sd", by_head, weight.unflatten(0, (64, 8)).double())
    error = (add_up(values, weight, rows)[:, 0] - exact).abs().max() / exact.abs().max()
    assert error < 2e-3  # products are rounded to bf16 once; with sums in bf16 it is above 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_pass_gradcheck(backend):
    *tensors, _, selected = make_inputs(6, 2, 3, 3, 4)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    for documents in (None, make_boundaries([[2, 4], [1, 2, 3]], 6, 2)):
        assert torch.autograd.gradcheck(
            lambda *t, d=documents: moh_attention(*t, selected, 1, d, backend), leaves
        )


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 0.02), (torch.float16, 3e-3)])
def test_sparse_results_in_lower_precision_stay_near_the_reference(dtype, tolerance):
    *tensors, upstream, selected = make_inputs(130, 2, 6, 3, 16, dtype=dtype)
    tensors[3] = tensors[3].float()  # gates are fp32 whatever the precision
    wide = [tensor.double() for tensor in (*tensors, upstream)]
    expected = with_gradients(lambda *t: reference(*t, selected, 2), *wide)
    got = with_gradients(lambda *t: moh_attention(*t, selected, 2, backend="cpu_sparse"), *tensors, upstream)
    assert [tensor.dtype for tensor in got] == [dtype] * 4 + [torch.float32]
    assert_all_close(got, expected, tolerance)


@pytest.mark.parametrize("head_dim", [3, 10, 16])
@pytest.mark.parametrize("own_keys", [False, True])
def test_narrow_heads_in_single_precision_stay_near_the_reference(head_dim, own_keys):
    *tensors, upstream, selected = make_inputs(60, 2, 6, 3, head_dim, dtype=torch.float32)
    wide = [tensor.double() for tensor in (*tensors, upstream)]
    expected = with_gradients(lambda *t: reference(*t, selected, 2, own_keys=own_keys), *wide)
    got = with_gradients(lambda *t: moh_attention(*t, selected, 2, own_keys=own_keys), *tensors, upstream)
    assert_all_close(got, expected, 2e-6)


def test_values_of_latent_heads_keep_their_width():
    query, key, value = torch.randn(3, 5, 2, 4, 6).unbind()
    expected = dense_heads(query, key, value)[..., :3]
    torch.testing.assert_close(dense_heads(query, key, value[..., :3]), expected)


def test_selected_is_what_counts_and_not_a_gate_of_zero():
    *tensors, upstream, selected = make_inputs(40, 1, 4, 4, 8)
    for backend in BACKENDS:
        *_, dgates = with_gradients(lambda *t, b=backend: moh_attention(*t, selected, backend=b), *tensors, upstream)
        assert (dgates[~selected] == 0).all()
        assert (dgates[selected] != 0).all()  # row 13 has gates of 0
        assert (tensors[3][13] == 0).all()


@pytest.mark.parametrize("backend", [*BACKENDS, "flex"])
def test_no_result_depends_on_later_tokens_and_unselected_rows_are_zero(backend, uncompiled_flex):
    *tensors, _, selected = make_inputs(200, 1, 4, 2, 8)
    changed = [torch.cat((t[:120], 3 * t[120:] + 50)) for t in tensors]
    other = torch.cat((selected[:120], ~selected[120:]))
    with torch.no_grad():
        out = moh_attention(*tensors, selected, 2, backend=backend)
        assert torch.equal(moh_attention(*changed, other, 2, backend=backend)[:120], out[:120])
    assert (out[:, :, 2:][~selected[..., 2:]] == 0).all()
    assert (out[:, :, :2].norm(dim=-1) > 0).sum() == 2 * 199  # a gate of 0 in one row


def test_slots_are_the_selected_tokens_from_the_last_one_back_and_then_the_others():
    for routing in ROUTINGS:
        *_, selected = make_inputs(75, 2, 4, 4, 8, routing)
        positions, after = compact(selected)
        for b in range(2):
            for h in range(4):
                chosen = [t for t in range(75) if selected[t, b, h]]
                assert positions[b, h].tolist() == chosen[::-1] + [t for t in range(75) if t not in chosen]
                assert after[b, h].tolist() == [sum(c >= t for c in chosen) for t in range(76)]


def test_everything_but_the_triton_backend_works_where_triton_is_not_installed():
    code = """
import sys
sys.modules["triton"] = None  # importing it raises ModuleNotFoundError
from moh_lm.kernels.gated_attention import triton_attention
import moh_lm.model.transformer
assert triton_attention is None
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_backend_that_cannot_run_says_so(monkeypatch):
    *tensors, _, selected = make_inputs(20, 1, 4, 4, 8)
    monkeypatch.setattr(gated_attention, "triton_attention", None)
    with pytest.raises(RuntimeError, match="triton is not installed"):
        moh_attention(*tensors, selected, backend="triton")
    with pytest.raises(RuntimeError, match="flex: has no backward pass on the CPU"):
        moh_attention(*(t.requires_grad_() for t in tensors), selected, backend="flex")
    with pytest.raises(RuntimeError, match="cpu_sparse: the tensors are on meta"):
        choose_backend("cpu_sparse", torch.device("meta"), torch.float32, (64, 1, 4, 8), 0.5)
    with pytest.raises(ValueError, match="choose one of auto, dense, triton"):
        moh_attention(*tensors, selected, backend="fast")
