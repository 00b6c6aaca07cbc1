"""Rows of the CPU kernel: cut into chunks and shared by threads."""

import os
import signal
import threading

import pytest
import torch

from moh_lm.extras.cpu_sparse import SelectedRows
from moh_lm.extras.threads import in_threads
from moh_lm.kernels.gated_attention import moh_attention
from tests.attention_cases import (
    ROUTINGS,
    SHAPES,
    assert_all_close,
    make_boundaries,
    make_inputs,
    reference,
    with_gradients,
)


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
