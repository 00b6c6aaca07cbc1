"""The whole training step that is timed: on the GPU that --device names."""

import importlib.metadata
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import step
from benchmarks.flags import step_flags
from moh_lm.config import ConfigError, HeadsConfig, ModelConfig


@pytest.mark.parametrize("name, current", [("cuda:2", [torch.device("cuda:2")]), ("cuda", []), ("cpu", [])])
def test_the_gpu_that_is_named_is_current_while_a_step_is_timed(name, current, monkeypatch):
    found, made_current = [], []
    monkeypatch.setattr(step, "usable_device", lambda name: name)
    monkeypatch.setattr(step, "compare", lambda arguments, length, device: found.append(str(device)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    step.main(step_flags(["--device", name]))
    assert made_current == current and found == [name]


@pytest.mark.parametrize(
    "device, flags, words",
    [
        ("cpu", "--backend triton", "--backend triton: needs a CUDA GPU, and --device is cpu; choose auto"),
        ("cuda", "--backend cpu_sparse", "--backend cpu_sparse: needs a CPU, and --device is cuda; choose auto"),
        ("cpu", "--backend cpu_sparse --contestants dense moh-50-compiled", "cpu_sparse cannot be compiled"),
    ],
)
def test_a_backend_that_cannot_train_on_the_device_is_refused(device, flags, words):
    with pytest.raises(ConfigError, match=words):
        step.check_backend(step_flags(flags.split()), torch.device(device))


def test_several_sequences_take_a_step_of_every_contestant():
    arguments = step_flags("--shape tiny --micro-batch-size 2 --contestants dense moh-50-joined moh-25 hf".split())
    tokens = torch.randint(1024, (2, 17), generator=torch.Generator().manual_seed(0))
    losses = [step.make(name, arguments, 16, torch.device("cpu"))[0](tokens) for name in arguments.contestants]
    assert all(loss.isfinite() for loss in losses)


@pytest.mark.parametrize("installed", [True, False])
def test_a_peer_has_the_kernels_of_liger_if_they_are_installed(installed, monkeypatch, capsys):
    changed = []
    package = SimpleNamespace(apply_liger_kernel_to_llama=lambda model: changed.append(model))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "liger_kernel" and installed or None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.8")
    config = ModelConfig(1, 32, 64, 2, 2, 16, vocab_size=50, heads=HeadsConfig("all"))
    model = step.hugging_face(config, 16, compiled=False, liger=True)
    assert changed == [model] * installed
    assert capsys.readouterr().out.startswith("hf-liger: liger-kernel " + ("0.8" if installed else "is not installed"))
