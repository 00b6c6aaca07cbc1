"""Timing on a GPU, with a stand-in for it: what waits for the device is not captured, but has figures too."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from benchmarks import timing


@pytest.fixture
def gpu(monkeypatch):
    """What of torch.cuda a graph takes; ``pools`` has one for each graph, ``mode`` is that of synchronising calls."""
    state = SimpleNamespace(pools=[], mode="default")

    @contextlib.contextmanager
    def graph(_, pool, capture_error_mode):
        state.pools.append(pool)
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    stand_ins = {
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: "replayed", pool=lambda: "shared"),
        "graph": graph,
        "set_sync_debug_mode": lambda mode: setattr(state, "mode", mode),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(timing, "seconds", lambda function, device: (function(),))
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    timing.first_graph.cache_clear()
    yield state
    timing.first_graph.cache_clear()


def test_what_waits_for_the_gpu_is_never_captured(gpu, capsys):
    def call():
        if gpu.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return "eager"

    assert timing.stopwatch(call, torch.device("cuda"), "core, forward")() == ("eager", "eager")
    assert "shared" not in gpu.pools and gpu.mode == "default"
    assert capsys.readouterr().out.startswith("core, forward: waits for the GPU")


def test_what_does_not_wait_is_timed_by_its_graph_too(gpu, capsys):
    """All graphs share the memory of one that is never freed; torch accepts no other pool again and again."""
    for _ in range(2):
        assert timing.stopwatch(lambda: "eager", torch.device("cuda"), "core")() == ("replayed", "eager")
    assert gpu.pools == [None, "shared", "shared"] and gpu.mode == "default" and not capsys.readouterr().out


def test_another_failure_is_told_as_it_is(gpu):
    def call():
        if gpu.mode == "error":
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        timing.stopwatch(call, torch.device("cuda"), "core")
    assert "shared" not in gpu.pools and gpu.mode == "default"
