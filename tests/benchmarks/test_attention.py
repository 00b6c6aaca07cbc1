"""The contestants of attention that is timed: each computes the same problem, and one that fails costs no other."""

import pytest
import torch

from benchmarks import attention

SHAPE = (64, 4, 2, 16)  # hidden size, query heads, key/value heads, head dimension
CPU = torch.device("cpu")


@pytest.mark.parametrize("contestants", [attention.core, attention.layer])
@pytest.mark.parametrize("mean", [None, 7])
def test_contestants_with_the_same_keys_compute_the_same(contestants, mean):
    documents = attention.make_documents(mean, 24, 2, CPU, torch.float32)
    found = {}
    for name, (function, inputs) in contestants(SHAPE, 50, 24, 2, CPU, torch.float32, documents).items():
        output = function(*inputs)
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        found[name] = [output, *torch.autograd.grad(output.sum(), leaves, allow_unused=True)]
    dense = found["dense, gates" if contestants is attention.core else "dense"]
    for same in {"cpu_sparse", "joined"} & found.keys():
        for sparse, expected in zip(found[same], dense, strict=True):
            torch.testing.assert_close(sparse, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found["own keys"][0], dense[0], atol=1e-3)


@pytest.mark.parametrize("kind", [RuntimeError, Exception])  # Triton's errors are of the latter
def test_a_contestant_that_cannot_run_is_said_and_left_out(kind, monkeypatch, capsys):
    def unable(x):
        raise kind("keys are left out of whole sequences only\nand more")

    def stopwatch(function, device, name):
        function()  # as on a GPU, where a graph is made of it
        return lambda: (1.0, 1.0)

    monkeypatch.setattr(attention, "stopwatch", stopwatch)
    x = [torch.ones(3, requires_grad=True)]
    functions = {"dense": (torch.exp, x), "own keys": (unable, x), "other": (torch.sin, x)}
    assert list(attention.report("core", functions, ["dense"], 1, CPU)) == [("dense", "other")]
    said = f"core: own keys does not run here: {kind.__name__} keys are left out of whole sequences only\n"
    assert said in capsys.readouterr().out
