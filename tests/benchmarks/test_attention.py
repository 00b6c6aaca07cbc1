"""The contestants of attention that is timed: each computes the same problem, and one that fails costs no other."""

import pytest
import torch

from benchmarks import attention
from benchmarks.flags import attention_flags


@pytest.mark.parametrize("window, names", [("0", ["dense", "own keys, varlen"]), ("4", ["dense"])])
def test_packed_sequences_are_left_out_with_a_window(window, names, monkeypatch):
    timed = []
    monkeypatch.setattr(attention, "set_up", lambda options: (torch.device("cpu"), torch.float32))
    monkeypatch.setattr(attention, "core", lambda *_: {"dense": None, "own keys, varlen": None})
    monkeypatch.setattr(attention, "report", lambda title, functions, *_: timed.extend(functions))
    flags = f"--window {window} --levels core --shapes llm-s --lengths 8 --active 50"
    attention.main(attention_flags(flags.split()))
    assert timed == names
