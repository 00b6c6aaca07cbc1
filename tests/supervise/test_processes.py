"""How a rank joins the others."""

import importlib
import os
import resource
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from moh_lm import pretrain
from moh_lm.config import ConfigError
from moh_lm.supervise import errors, processes, rendezvous
from moh_lm.training.deepspeed import start
from tests.distributed import reserved_port, run_ranks
from tests.training.runs import arguments


@pytest.mark.parametrize(
    "gpus, remedy",
    [
        (1, "make all GPUs of the node visible to each task (Slurm's --gpus-per-node), or start one rank for each"),
        (2, "start one rank for each"),
    ],
)
def test_a_rank_without_a_gpu_of_its_own_says_so(gpus, remedy, data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(start, "visible_gpus", lambda: gpus)
    monkeypatch.setattr("sys.argv", ["pretrain", *arguments(data_dir, tmp_path)])
    place = {"RANK": str(gpus), "LOCAL_RANK": str(gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, value in {**place, "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit, match="2"):
        pretrain.main()
    assert capsys.readouterr().err.endswith(f"LOCAL_RANK {gpus}: GPUs that this process sees: {gpus}; {remedy}\n")


@pytest.mark.parametrize(
    "variable, value, refused",
    [
        (None, None, True),
        ("CUDA_VISIBLE_DEVICES", "0", True),
        ("CUDA_VISIBLE_DEVICES", "", False),
        ("CUDA_VISIBLE_DEVICES", "-1", False),
        ("CUDA_VISIBLE_DEVICES", "NoDevFiles", False),  # Slurm's, for a job without GPUs
        ("DS_ACCELERATOR", "cpu", False),
        ("GPUS", "no-device-[0-9]", False),  # a container that was given none
    ],
)
def test_a_gpu_that_torch_cannot_use_is_no_run_on_a_cpu(variable, value, refused, tmp_path, monkeypatch):
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27\nGCC version: 9.3.0\n")
    monkeypatch.setattr(processes, "DRIVER", driver)
    (tmp_path / "nvidia3").touch()
    monkeypatch.setattr(processes, "GPUS", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(start, "visible_gpus", lambda: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    if variable == "GPUS":
        monkeypatch.setattr(processes, variable, str(tmp_path / value))
    elif variable:
        monkeypatch.setenv(variable, value)
    if refused:
        said = r"driver 470.82.01, but torch \S+, built for CUDA 13.0, finds no GPU.*; update .* DS_ACCELERATOR=cpu"
        with pytest.raises(ConfigError, match=said):
            processes.own_device()
    else:
        assert processes.own_device() == torch.device("cpu")


def refusal_beside_a_gpu(port, meeting):
    """What this rank says of a start in which only rank 1 has a GPU."""
    dist.destroy_process_group()
    os.environ.update(MASTER_PORT=str(port), LOCAL_WORLD_SIZE="2")
    if os.environ["RANK"] == "1":
        processes.own_device = lambda: torch.device("cuda", 1)
    with pytest.raises(ConfigError) as error:
        processes.start_process_group(5)
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.FileStore(meeting, 2), rank=int(os.environ["RANK"]), world_size=2)
    return error.value.problems


def open_files_of_a_rank():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))  # shells allow 1,024 files at first
    processes.raise_file_limit()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft - min(4096 + 16, hard)


def test_a_rank_may_open_enough_files():
    """Rank 0 keeps three connections of every other one."""
    assert run_ranks(open_files_of_a_rank, 2) == [0, 0]


def test_a_rank_without_a_gpu_beside_others_ends_all(tmp_path):
    with reserved_port() as port:
        one, other = run_ranks(refusal_beside_a_gpu, 2, port, str(tmp_path / "meeting"))
    said = f"{socket.gethostname()} (rank 0): no GPU there, but other ranks have one; repair"
    assert one == other and one[0].startswith(said)


@pytest.mark.parametrize(
    "found, said",
    [
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many' in the environment"),
        ({"PMI_SIZE": ""}, "PMI_SIZE is '' in the environment"),
        ({"RANK": "-1", "WORLD_SIZE": "1"}, "RANK is '-1' in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 in the environment: must be below WORLD_SIZE 2"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "65536"}, "MASTER_PORT is '65536' in the environment"),
        ({"DS_ACCELERATOR": "xyz"}, "DS_ACCELERATOR is 'xyz' in the environment: must be cuda or cpu; change it"),
        ({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_MAX_RESTARTS": "3"},
         "--max-restarts 3: after a restart the ranks of several nodes would not meet again; leave it out"),
        ({"DEEPSPEED_TIMEOUT": "1h"}, "DEEPSPEED_TIMEOUT is '1h' in the environment: must be a number of minutes"),
        ({"TORCH_DISTRIBUTED_DEBUG": ""}, "TORCH_DISTRIBUTED_DEBUG is '' in the environment: must be OFF, INFO or"),
    ],
)
def test_what_a_launcher_did_not_write_is_named(found, said, monkeypatch, capsys):
    for name in {*errors.OF_RANKS, *errors.OF_OTHERS}:
        monkeypatch.delenv(name, raising=False)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        pretrain.main(["--dry-run"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"moh_lm.pretrain: {said}")


def test_a_package_that_is_not_installed_is_named(monkeypatch, capsys):
    """As where the environment of the checkout is not active."""
    monkeypatch.setitem(sys.modules, "moh_lm.run.text", None)
    with pytest.raises(ModuleNotFoundError):
        pretrain.main(["--dry-run"])
    monkeypatch.setattr(pretrain.pkgutil, "resolve_name", lambda _: importlib.import_module("no_such_package"))
    with pytest.raises(SystemExit, match="2"):
        pretrain.main(["--dry-run"])
    said = "moh_lm.pretrain: the package no_such_package is not installed: source .venv/bin/activate, or pip install -e"
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)


def test_the_command_line_is_read_without_packages_and_a_file_names_yaml(tmp_path):
    (tmp_path / "a.yaml").write_text("num_layers: 2\n")
    packages = "yaml", "psutil", "numpy", "torch"
    without = f"import sys; sys.modules.update(dict.fromkeys({packages})); from moh_lm import pretrain; pretrain.main()"
    absent = "the package yaml is not installed"
    saves = ["--dry-run", "--save-config", "b.yaml"]
    for given, code, said in (["--help"], 0, ""), (["--config", "a.yaml"], 2, absent), (saves, 2, absent):
        command = [sys.executable, "-c", without, *given]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == code and said in result.stderr and result.stderr.count("\n") == code // 2


def test_a_wrong_variable_is_named_once_per_node(monkeypatch, capsys):
    variables = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "DS_ACCELERATOR": "xyz"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "refuse", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        pretrain.main(["--dry-run"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("flags, more", [("--bogus", {}), ("--dry-run", {"DS_ACCELERATOR": "xyz"})])
def test_a_rank_that_cannot_begin_tells_the_others(flags, more, monkeypatch, capsys):
    """They wait on other machines, and would call the network broken."""
    told = []
    monkeypatch.setattr(rendezvous, "refuse", lambda: told.append(True))
    for name, value in ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"} | more).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="2"):
        pretrain.main([flags])
    assert told == [True] and capsys.readouterr().err.count("\n") == 1
