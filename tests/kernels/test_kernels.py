"""The attention backends that run anywhere, against head-by-head float64 arithmetic: outputs and every gradient."""

import itertools
import os
import runpy
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch._dynamo as dynamo
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from moh_lm.cost.summary import describe_attention
from moh_lm.flags import parse_config
from moh_lm.kernels import attention, break_even, flex, varlen
from moh_lm.kernels.attention import choose_backend, dense_heads, moh_attention
from moh_lm.kernels.compaction import compact, key_blocks, slot_blocks
from moh_lm.kernels.cpu_sparse import SelectedRows, add_up
from moh_lm.kernels.documents import boundaries, mean_keys, narrow
from moh_lm.kernels.threads import in_threads
from tests.attention_cases import (
    DOCUMENTS,
    ROUTINGS,
    assert_all_close,
    everything,
    make_boundaries,
    make_inputs,
    random_routing,
    reference,
    with_gradients,
)

SHAPES = {  # length, batch, heads, key/value heads, head dimension, shared heads
    "heads of their own keys": (150, 2, 6, 6, 16, 2),
    "groups": (97, 1, 8, 4, 8, 4),
    "shared heads end inside a group": (65, 2, 8, 2, 8, 5),
    "no shared head": (70, 1, 6, 3, 12, 0),
    "one token": (1, 2, 6, 6, 8, 2),
}
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
    monkeypatch.setattr(varlen, "varlen_attn", packed_sequences)
    monkeypatch.setattr(varlen, "MOST_SEQUENCES", most)
    *sizes, num_shared = shape
    *tensors, upstream, selected = make_inputs(*sizes, routing)
    expected = with_gradients(lambda *t: reference(*t, selected, num_shared, lengths, 0, True), *tensors, upstream)
    seen = make_boundaries(lengths, *sizes[:2], False) if lengths else None
    arguments = (selected, num_shared, seen, "varlen", True, True)
    assert_all_close(with_gradients(lambda *t: moh_attention(*t, *arguments), *tensors, upstream), expected, 1e-12)


def test_a_stock_kernel_without_windows_is_none(monkeypatch):
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", lambda query, key, value, is_causal=False: None)
    assert runpy.run_path(varlen.__file__)["varlen_attn"] is None
    monkeypatch.setattr(varlen, "varlen_attn", None)
    with pytest.raises(RuntimeError, match="no varlen_attn with window_size; choose auto"):
        attention.check_backend("varlen", torch.device("cpu"))


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


def test_a_chunk_of_rows_takes_the_keys_from_the_document_of_its_first_row_to_its_last_row():
    *_, selected = make_inputs(1024, 2, 4, 2, 8, "varying_routing")
    documents = make_boundaries([[300, 1, 200, 1000], [128] * 8], 1024, 2)
    rows = SelectedRows(selected, documents.starts)
    found = [(sequence, chunk) for _, sequence, chunks in rows.chunks(2) for chunk in chunks]
    assert sum(stop - start for _, (start, stop, _) in found) == selected.sum()
    for sequence, (start, stop, (first, *_, end)) in found:
        positions = rows.position[start:stop].tolist()
        assert first == documents.starts[sequence, positions[0]]
        assert end == positions[-1] + 1


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_threads_that_share_the_heads_compute_the_reference(shape, num_threads, threads):
    *sizes, num_shared = shape
    for routing in ROUTINGS:
        *tensors, upstream, selected = make_inputs(*sizes, routing)
        expected = with_gradients(lambda *t, s=selected: reference(*t, s, num_shared), *tensors, upstream)
        torch.set_num_threads(num_threads)
        sparse = (selected, num_shared, None, "cpu_sparse")
        got = with_gradients(lambda *t, a=sparse: moh_attention(*t, *a), *tensors, upstream)
        assert torch.get_num_threads() == num_threads
        assert_all_close(got, expected, 1e-12)


def test_pieces_of_work_are_done_once_by_several_threads_of_one_thread_each(threads):
    torch.set_num_threads(3)
    meeting, done = threading.Barrier(3, timeout=900), []

    def piece(number):
        if number < 3:
            meeting.wait()  # for two other threads
        done.append((number, threading.get_ident(), torch.get_num_threads(), torch.is_grad_enabled()))

    in_threads(piece, [(number,) for number in range(20)])
    with torch.inference_mode():
        into = torch.zeros(3, 4)
        in_threads(lambda row: (meeting.wait(), into[row].add_(row)), [(row,) for row in range(3)])
        assert into.sum(1).tolist() == [0, 4, 8]
    numbers, idents, num_threads, gradients = zip(*done, strict=True)
    assert sorted(numbers) == list(range(20))
    assert len(set(idents)) == 3
    assert (set(num_threads), set(gradients)) == ({1}, {False})
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (3, True)


def test_an_error_in_another_thread_is_raised_and_the_threads_of_torch_are_restored(threads):
    torch.set_num_threads(2)
    meeting = threading.Barrier(2, timeout=900)

    def piece(number):
        meeting.wait()
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("in a helper")

    with pytest.raises(ValueError, match="in a helper"):
        in_threads(piece, [(0,), (1,)])
    assert torch.get_num_threads() == 2


def test_a_child_process_has_threads_of_its_own(threads):
    torch.set_num_threads(2)
    in_threads(lambda number: None, [(0,), (1,)])
    child = os.fork()
    if child == 0:
        signal.alarm(900)  # instead of waiting for a thread that only the parent has
        meeting = threading.Barrier(2)
        in_threads(lambda number: meeting.wait(), [(0,), (1,)])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


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


FLEX_DOCUMENTS = [[[1000]], [[100, 300, 1000], [1, 140, 200, 1000]], [[128, 256, 1000], [127, 2, 1000]], [[3] * 200]]


def test_flex_has_a_graph_for_each_of_many_shapes(monkeypatch):
    graphs = []

    def run_as_it_is(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = flex.compiled(run_as_it_is)
    monkeypatch.setattr(flex, "compiled", lambda: compiled)
    dynamo.reset()
    for blocks in range(1, 11):
        query = torch.randn(blocks * flex.BLOCK, 1, 2, 16)
        flex.flex_heads(query, query, query, torch.ones(query.shape[:3]), torch.ones(query.shape[:3]))
    assert len(graphs) == 10


@pytest.mark.parametrize(
    "lengths, window", [(None, 0), *((lengths, 0) for lengths in FLEX_DOCUMENTS), (None, 200), (FLEX_DOCUMENTS[1], 129)]
)
@pytest.mark.parametrize("length", [128, 384, 512])
def test_flex_lists_of_blocks_are_those_that_torch_finds_by_looking_at_every_pair(length, lengths, window):
    routings = ("random_routing", "odd_routing")
    selected = torch.cat([make_inputs(length, 1, 4, 4, 8, routing)[-1] for routing in routings], dim=1)
    compaction = compact(selected)
    seen_by = make_boundaries(lengths, length, 2, window=window) if lengths or window else None
    ours = flex.block_mask(compaction, seen_by and seen_by.starts)
    count = compaction.after[..., :1]
    seen = (torch.arange(length) // flex.BLOCK < (count + flex.BLOCK - 1) // flex.BLOCK)  # blocks with selected slots
    theirs = create_block_mask(
        lambda b, h, q, k: seen[b, h, q] & ours.mask_mod(b, h, q, k), 2, 4, length, length, "cpu", flex.BLOCK
    )
    for kind in ("kv", "full_kv", "q", "full_q"):
        number, indices = getattr(ours, f"{kind}_num_blocks"), getattr(ours, f"{kind}_indices")
        assert torch.equal(number, getattr(theirs, f"{kind}_num_blocks")), kind
        live = torch.arange(indices.shape[-1]) < number.unsqueeze(-1)
        assert torch.equal(indices[live], getattr(theirs, f"{kind}_indices")[live]), kind


def area(selected, block_m, block_n, window=0):
    """Scores computed by forward and dQ, and by dK/dV, over those of a dense causal kernel with tiles of 128 x 128."""
    compaction = compact(selected)
    length, batch, heads = selected.shape
    dense = batch * heads * 128 * 128 * sum(range(1, length // 128 + 1))
    starts, ends, _ = narrow(None, window, selected, False) or (None,) * 3
    begin, _, _, end = key_blocks(compaction, block_m, block_n, starts)
    query, key = (end - begin).sum().item(), slot_blocks(compaction, block_m, block_n, ends).sum().item()
    return query * block_m * block_n / dense, key * block_m * block_n / dense


@pytest.mark.parametrize("length", [2048, 4096])
@pytest.mark.parametrize("shared, active", [(4, 4), (8, 4)])
@pytest.mark.parametrize("routing", ["random_routing", "bursty_routing"])
def test_executed_tiles_are_within_a_tenth_of_the_activation_rate(length, shared, active, routing):
    heads = 16
    selected = ROUTINGS[routing](length, 2, heads - shared, active, torch.Generator().manual_seed(0))
    rate = (shared + active) / heads
    for routed in (*area(selected, 64, 64), area(selected, 128, 64)[0]):
        assert rate < (shared + (heads - shared) * routed) / heads <= 1.10 * rate
    assert area(everything(length, 1, 1, 1, None), 128, 128) == (1, 1)
    in_window = area(selected, 64, 64, window=1024)
    share = mean_keys(length, 1024) / mean_keys(length, 0)
    for whole, windowed in zip(area(selected, 64, 64), in_window, strict=True):
        assert share * whole < windowed <= (share + 0.1) * whole  # the window and the heads both save


def test_own_keys_leave_a_third_of_the_dense_scores_at_half_of_the_heads():
    for shared, active, most in ((4, 4, 0.36), (0, 8, 0.27)):
        selected = torch.ones(2048, 1, 16)
        selected[..., shared:] = random_routing(2048, 1, 16 - shared, active, torch.Generator().manual_seed(0))
        area = {}
        for own in (True, False):
            rows = SelectedRows(selected, own_keys=own)
            chunks = [chunk for *_, chunks in rows.chunks(1) for chunk in chunks]
            area[own] = sum((stop - start) * (end - first) for start, stop, (first, *_, end) in chunks)
        dense = 16 * 64 * 64 * sum(range(1, 2048 // 64 + 1))
        assert area[True] / dense <= most < 0.5 <= area[False] / dense <= 0.53


def test_everything_but_the_triton_backend_works_where_triton_is_not_installed():
    code = """
import sys
sys.modules["triton"] = None  # importing it raises ModuleNotFoundError
from moh_lm.kernels.attention import triton_attention
import moh_lm.model.transformer
assert triton_attention is None
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_backend_that_cannot_run_says_so(monkeypatch):
    *tensors, _, selected = make_inputs(20, 1, 4, 4, 8)
    monkeypatch.setattr(attention, "triton_attention", None)
    with pytest.raises(RuntimeError, match="triton is not installed"):
        moh_attention(*tensors, selected, backend="triton")
    with pytest.raises(RuntimeError, match="flex: has no backward pass on the CPU"):
        moh_attention(*(t.requires_grad_() for t in tensors), selected, backend="flex")
    with pytest.raises(RuntimeError, match="cpu_sparse: the tensors are on meta"):
        choose_backend("cpu_sparse", torch.device("meta"), torch.float32, (64, 1, 4, 8), 0.5)
    with pytest.raises(ValueError, match="choose one of auto, dense, triton"):
        moh_attention(*tensors, selected, backend="fast")


@pytest.fixture
def measured(monkeypatch):
    """No machine is measured but the ones that a test gives to ``break_even.keep``; the machine at hand is "here"."""
    monkeypatch.setattr(break_even, "MEASURED", [])
    monkeypatch.setattr(break_even, "machine", lambda device: "here")
    yield
    break_even.measured_tiles.cache_clear()


def chosen(device, dtype, length, share, batch=1, head_dim=64):
    return break_even.fastest(torch.device(device), dtype, (length, batch, 12, head_dim), share)


def test_auto_goes_by_the_longest_length_and_the_least_activation_that_were_measured(measured, monkeypatch):
    rows = [[1024, 0.5, 0.98], [2048, 0.5, 0.8], [2048, 0.75, 0.95], [4096, 0.5, 0.7], [4096, 0.75, 1.1]]
    break_even.keep(break_even.Measurement("there", "cpu", "float32", 2, "", 0, rows, []))
    break_even.keep(break_even.Measurement("there", "cpu", "float32", 3, "", 0, [[1024, 1.0, 1.3]], []))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = {
        (512, 0.5): "dense", (1024, 0.5): "dense", (2047, 0.3): "dense", (2048, 0.3): "cpu_sparse",
        (3000, 0.7): "cpu_sparse", (3000, 0.8): "dense", (4096, 0.75): "dense", (9999, 0.5): "cpu_sparse",
    }  # fmt: skip
    for (length, share), backend in expected.items():
        assert chosen("cpu", torch.float32, length, share) == backend
    assert chosen("cpu", torch.bfloat16, 4096, 0.5) == "dense"
    break_even.keep(break_even.Measurement("here", "cpu", "float32", 2, "", 0, [[4096, 0.5, 0.97]], []))
    assert chosen("cpu", torch.float32, 4096, 0.5) == "dense"  # its own figures come before those of another
    for others in (1, 3, 4):  # not measured, slower, not measured
        monkeypatch.setattr(torch, "get_num_threads", lambda number=others: number)
        assert chosen("cpu", torch.float32, 4096, 0.5) == "dense"


def test_a_gpu_goes_by_its_own_figures_and_not_below_the_size_that_was_measured(measured):
    rows, size = [[1024, 0.5, 0.9]], 1024 * 4 * 12 * 64
    break_even.keep(break_even.Measurement("there", "cuda", "bfloat16", 0, "", size, rows, []))
    assert chosen("cuda", torch.bfloat16, 1024, 0.5, batch=4) == "dense"
    break_even.keep(break_even.Measurement("here", "cuda", "bfloat16", 0, "", size, rows, []))
    assert chosen("cuda", torch.bfloat16, 1024, 0.5, batch=4) == "triton"
    assert chosen("cuda", torch.bfloat16, 1024, 0.5, batch=3) == "dense"
    assert chosen("cuda", torch.float16, 1024, 0.5, batch=4) == "dense"
    assert chosen("cuda", torch.bfloat16, 1024, 0.5, batch=4, head_dim=112) == "dense"  # no kernels for it
    assert chosen("cpu", torch.bfloat16, 1024, 0.5, batch=4) == "dense"


def test_a_run_says_what_auto_takes_and_how_to_measure_where_it_cannot_know(measured, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = """--num-layers 2 --hidden-size 256 --num-attention-heads 8 --num-shared-heads 2 4
        --num-active-routed-heads 2 --seq-length 1024 --precision fp32""".split()
    config, _ = parse_config(flags)
    first, second = describe_attention(config)
    assert first.startswith("attention  auto: dense in 2 of 2 layers, since ")
    assert second.endswith("attention.py --levels layer --dtype float32 --threads 2 --save does that")
    rows = [[1024, 0.5, 0.9], [1024, 0.75, 0.99]]
    break_even.keep(break_even.Measurement("there", "cpu", "float32", 2, "", 0, rows, []))
    assert list(describe_attention(config)) == [
        "attention  auto: cpu_sparse in 1 of 2 layers, dense in 1 of 2 layers, by what was measured on there"
    ]
    compiled, _ = parse_config([*flags, "--compile"])
    assert [line.split(",")[0] for line in describe_attention(compiled)] == ["attention  auto: dense in every layer"]


def test_the_newest_measurement_of_a_machine_counts_at_once(measured):
    gpu = torch.device("cuda"), torch.bfloat16
    for ratio, tile in ((0.9, [64, 64, 4, 2]), (1.1, [128, 64, 8, 3])):
        rows = [[1024, 0.5, ratio]]
        break_even.keep(
            break_even.Measurement("here", "cuda", "bfloat16", 0, "", 0, rows, [["query", 512, 64, tile]])
        )
        assert break_even.measurement(*gpu).ratios == rows
        assert break_even.measured_tiles(*gpu, "query", 512, 64) == tile


def test_what_is_measured_is_written_and_read_and_replaces_what_was_measured_before(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(break_even, "FILE", tmp_path / "measured.json")
    break_even.FILE.write_text("[]")
    for ratio in (0.9, 0.7):
        tiles = [["forward", 512, 64, [64, 64, 4, 2]], ["forward", 2048, 64, [128, 64, 8, 3]]]
        rows = [[512, 0.5, ratio]]
        last = break_even.Measurement("here", "cuda", "bfloat16", 0, "when\n$ how", 5, rows, tiles)
        break_even.save(last)
    other = break_even.Measurement("here", "cpu", "float32", 1, "", 0, [], [])
    break_even.save(other)  # by a process that has not read what the others wrote
    assert break_even.read() == [other, last]
    break_even.keep(last)
    gpu = torch.device("cuda"), torch.bfloat16
    for length, tile in {1: [64, 64, 4, 2], 512: [64, 64, 4, 2], 513: [128, 64, 8, 3], 9999: [128, 64, 8, 3]}.items():
        assert break_even.measured_tiles(*gpu, "forward", length, 64) == tile
    assert break_even.measured_tiles(*gpu, "forward", 512, 96) is None
    assert break_even.measured_tiles(*gpu, "query", 512, 64) is None
