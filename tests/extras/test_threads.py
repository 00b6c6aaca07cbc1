"""Independent pieces of work side by side, each by one thread of torch."""

import os
import signal
import threading

import pytest
import torch

from moh_lm.extras.threads import in_threads


def test_each_piece_is_done_once_by_a_thread_that_works_alone(threads):
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


def test_an_error_in_a_helper_is_raised_and_threads_are_restored(threads):
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
