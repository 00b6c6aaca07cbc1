"""What --attention-backend auto takes, by what was measured, and what is said of a backend that cannot run."""

from dataclasses import replace

import pytest
import torch

from moh_lm import build
from moh_lm.build import layer_backends
from moh_lm.config import ConfigError
from moh_lm.cost.summary import describe_attention
from moh_lm.flags import parse_config
from moh_lm.kernels import choose, measured
from moh_lm.kernels.choose import choose_backend
from moh_lm.kernels.measured import Measurement


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch):
    """No machine is measured but the ones that a test gives to ``measured.keep``; the machine at hand is "here"."""
    monkeypatch.setattr(measured, "MEASURED", [])
    monkeypatch.setattr(measured, "machine", lambda device: "here")
    yield
    measured.measured_tiles.cache_clear()


def chosen(device, dtype, length, share, batch=1, head_dim=64, compiled=False):
    return choose.fastest(torch.device(device), dtype, (length, batch, 12, head_dim), share, compiled)


def test_auto_goes_by_the_nearest_length_and_share_measured(monkeypatch):
    rows = [[1024, 0.5, 0.98], [2048, 0.5, 0.8], [2048, 0.75, 0.95], [4096, 0.5, 0.7], [4096, 0.75, 1.1]]
    measured.keep(Measurement("there", "cpu", "float32", 2, "", 0, rows, []))
    measured.keep(Measurement("there", "cpu", "float32", 3, "", 0, [[1024, 1.0, 1.3]], []))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = {
        (512, 0.5): "dense", (1024, 0.5): "dense", (2047, 0.3): "dense", (2048, 0.3): "cpu_sparse",
        (3000, 0.7): "cpu_sparse", (3000, 0.8): "dense", (4096, 0.75): "dense", (9999, 0.5): "cpu_sparse",
    }  # fmt: skip
    for (length, share), backend in expected.items():
        assert chosen("cpu", torch.float32, length, share) == backend
    assert chosen("cpu", torch.bfloat16, 4096, 0.5) == "dense"
    measured.keep(Measurement("here", "cpu", "float32", 2, "", 0, [[4096, 0.5, 0.97]], []))
    assert chosen("cpu", torch.float32, 4096, 0.5) == "dense"  # its own figures come before those of another
    for others in (1, 3, 4):  # not measured, slower, not measured
        monkeypatch.setattr(torch, "get_num_threads", lambda number=others: number)
        assert chosen("cpu", torch.float32, 4096, 0.5) == "dense"


def test_a_gpu_goes_by_its_own_figures_from_their_size_on():
    rows, size = [[1024, 0.5, 0.9]], 1024 * 4 * 12 * 64
    measured.keep(Measurement("there", "cuda", "bfloat16", 0, "", size, rows, []))
    assert chosen("cuda", torch.bfloat16, 1024, 0.5, batch=4) == "dense"
    measured.keep(Measurement("here", "cuda", "bfloat16", 0, "", size, rows, []))
    assert chosen("cuda", torch.bfloat16, 1024, 0.5, batch=4) == "triton"
    assert chosen("cuda", torch.bfloat16, 1024, 0.5, batch=3) == "dense"
    assert chosen("cuda", torch.float16, 1024, 0.5, batch=4) == "dense"
    assert chosen("cuda", torch.bfloat16, 1024, 0.5, batch=4, head_dim=112) == "dense"  # no kernels for it
    assert chosen("cpu", torch.bfloat16, 1024, 0.5, batch=4) == "dense"


@pytest.mark.parametrize("called, replayed", [(1.2, 0.9), (0.9, 1.2), (0.9, 0.9)])
def test_a_gpu_goes_by_its_graphs_where_layers_are_compiled(called, replayed):
    rows = [[1024, 0.5, called, replayed]]
    measured.keep(Measurement("here", "cuda", "bfloat16", 0, "", 0, rows, []))
    found = [chosen("cuda", torch.bfloat16, 1024, 0.5, compiled=compiled) for compiled in (False, True)]
    assert found == ["triton" if ratio < 1 else "dense" for ratio in (called, replayed)]


def test_an_h200_leaves_out_half_of_the_heads_in_compiled_layers(monkeypatch):
    """By the entry that ships with the package, of docs/history/benchmarks.md."""
    monkeypatch.setattr(measured, "MEASURED", measured.read())
    monkeypatch.setattr(measured, "machine", lambda device: "NVIDIA H200")
    cases = {(2048, 0.5, 8, True): "triton", (2048, 0.5, 8, False): "dense", (2048, 0.75, 8, True): "dense",
             (2048, 0.5, 7, True): "dense", (512, 0.5, 32, True): "dense"}  # fmt: skip
    for (length, share, batch, compiled), backend in cases.items():
        assert chosen("cuda", torch.bfloat16, length, share, batch, compiled=compiled) == backend


def test_the_estimate_is_near_what_was_measured():
    """Layers of LLM-S on the H200 of measured.json, half of whose heads are shared at 75%, and a quarter at 50%."""
    (entry,) = (one for one in measured.read() if one.machine == "NVIDIA H200")
    for length, share, _, ratio in entry.ratios:
        found = choose.estimated_ratio(length * 768, 4 * 768 * 768, share - 0.25, 0.25)
        assert found == pytest.approx(ratio, abs=0.05)


LLM_S = """--num-layers 2 --hidden-size 768 --num-attention-heads 12 --num-shared-heads 3 --num-active-routed-heads 3
    --seq-length 2048 --micro-batch-size 8 --precision bf16"""


@pytest.mark.parametrize("flags, capability, backend", [
    ("--compile", (9, 0), "triton"), ("--cuda-graph", (8, 0), "triton"), ("", (9, 0), "dense"),
    ("--compile --micro-batch-size 7", (9, 0), "dense"), ("--compile --head-selection all", (9, 0), "dense"),
    ("--compile --seq-length 512 --micro-batch-size 32", (9, 0), "dense"),
    ("--compile --seq-length 1024 --micro-batch-size 16", (9, 0), "dense"),
    ("--compile --num-active-routed-heads 6", (9, 0), "dense"), ("--compile", (8, 9), "dense"),
    ("--compile --precision fp32", (9, 0), "dense"), ("--compile --head-dim 56", (9, 0), "dense"),
])  # fmt: skip
def test_a_gpu_without_measurements_goes_by_an_estimate(monkeypatch, flags, capability, backend):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(choose, "TRITON", "installed")
    monkeypatch.setattr(choose, "missing_for_triton", lambda: None)
    config, _ = parse_config([*LLM_S.split(), *flags.split()])
    assert set(layer_backends(config, torch.device("cuda"))) == {backend}
    measured.keep(Measurement("here", "cuda", "bfloat16", 0, "", 0, [[512, 1.0, 1.1, 1.1]], []))
    assert set(layer_backends(config, torch.device("cuda"))) == {"dense"}  # its own figures come first


def test_windows_that_move_do_not_change_what_a_resume_chooses(monkeypatch):
    monkeypatch.setattr(build, "choose_backend", lambda *given, **facts: (given[-1], facts["estimate"]))
    config, _ = parse_config([*LLM_S.split(), "--window-strategy", "entropy"])
    moved = replace(config, model=replace(config.model, window=(64, 512)))
    assert layer_backends(moved, torch.device("cpu")) == layer_backends(config, torch.device("cpu"))


IN_GROUPS = LLM_S + " --precision fp32 --num-key-value-heads 3 --routing-unit head_in_group"


@pytest.mark.parametrize("flags, device, backend", [
    ("", "cpu", "cpu_sparse"), ("--seq-length 256", "cpu", "groups"), ("--compile", "cpu", "groups"),
    ("", "cuda", "groups"), ("--compile", "cuda", "groups"), ("--position cope", "cpu", "dense"),
    ("--num-active-routed-heads 6", "cpu", "groups"), ("--num-active-routed-heads 6 --window 256", "cpu", "cpu_sparse"),
    ("--attention-backend groups", "cpu", "groups"), ("--attention-backend dense", "cpu", "dense"),
])  # fmt: skip
def test_heads_in_groups_leave_ordinary_attention_where_a_cpu_computes_rows_faster(monkeypatch, flags, device, backend):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    rows = [[512, 0.5, 0.87], [2048, 0.5, 0.75], [2048, 0.75, 0.94]]
    measured.keep(Measurement("here", "cpu", "float32", 2, "", 0, rows, []))
    config, _ = parse_config([*IN_GROUPS.split(), *flags.split()])
    assert set(layer_backends(config, torch.device(device))) == {backend}
    if device == "cpu" and not flags:
        assert list(describe_attention(config)) == ["attention  auto: cpu_sparse in 2 of 2 layers, as measured on here"]


def test_a_run_says_what_auto_takes_or_how_to_measure_it(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    flags = """--num-layers 2 --hidden-size 256 --num-attention-heads 8 --num-shared-heads 2 4
        --num-active-routed-heads 2 --seq-length 1024 --precision fp32""".split()
    config, _ = parse_config(flags)
    first, second = describe_attention(config)
    assert first.startswith("attention  auto: dense in 2 of 2 layers, because ")
    assert second.endswith("attention.py --levels layer --dtype float32 --threads 2 --save")
    rows = [[1024, 0.5, 0.9], [1024, 0.75, 0.99]]
    measured.keep(Measurement("there", "cpu", "float32", 2, "", 0, rows, []))
    assert list(describe_attention(config)) == [
        "attention  auto: cpu_sparse in 1 of 2 layers, dense in 1 of 2 layers, as measured on there"
    ]
    compiled, _ = parse_config([*flags, "--compile"])
    assert [line.split(",")[0] for line in describe_attention(compiled)] == ["attention  auto: dense in every layer"]


def test_the_newest_measurement_of_a_machine_counts_at_once():
    gpu = torch.device("cuda"), torch.bfloat16
    for ratio, tile in ((0.9, [64, 64, 4, 2]), (1.1, [128, 64, 8, 3])):
        rows = [[1024, 0.5, ratio]]
        measured.keep(Measurement("here", "cuda", "bfloat16", 0, "", 0, rows, [["query", 512, 64, tile]]))
        assert measured.measurement(*gpu).ratios == rows
        assert measured.measured_tiles(*gpu, "query", 512, 64) == tile


def test_what_is_written_replaces_what_was_measured_before(monkeypatch, tmp_path):
    monkeypatch.setattr(measured, "FILE", tmp_path / "measured.json")
    measured.FILE.write_text("[]")
    for ratio in (0.9, 0.7):
        tiles = [["forward", 512, 64, [64, 64, 4, 2]], ["forward", 2048, 64, [128, 64, 8, 3]]]
        rows = [[512, 0.5, ratio]]
        last = Measurement("here", "cuda", "bfloat16", 0, "when\n$ how", 5, rows, tiles)
        measured.save(last)
    other = Measurement("here", "cpu", "float32", 1, "", 0, [], [])
    measured.save(other)  # by a process that has not read what the others wrote
    assert measured.read() == [other, last]
    measured.keep(last)
    gpu = torch.device("cuda"), torch.bfloat16
    for length, tile in {1: [64, 64, 4, 2], 512: [64, 64, 4, 2], 513: [128, 64, 8, 3], 9999: [128, 64, 8, 3]}.items():
        assert measured.measured_tiles(*gpu, "forward", length, 64) == tile
    assert measured.measured_tiles(*gpu, "forward", 512, 96) is None
    assert measured.measured_tiles(*gpu, "query", 512, 64) is None


def test_a_backend_that_cannot_run_says_so(monkeypatch):
    given = torch.float32, (64, 1, 4, 64), 0.5
    with pytest.raises(RuntimeError, match="cpu_sparse: the tensors are on meta; choose auto"):
        choose_backend("cpu_sparse", torch.device("meta"), *given)
    monkeypatch.setattr(choose, "TRITON", None)
    with pytest.raises(RuntimeError, match="triton is not installed; install it, or choose auto"):
        choose_backend("triton", torch.device("cuda"), *given)


def test_auto_is_dense_where_the_faster_backend_cannot_compute(monkeypatch):
    cuda, given = torch.device("cuda"), (torch.float32, (64, 1, 4, 64), 0.5)
    measured.keep(Measurement("here", "cuda", "float32", 0, "", 0, [[64, 0.5, 0.5]], []))
    monkeypatch.setattr(choose, "TRITON", "installed")
    monkeypatch.setattr(choose, "missing_for_triton", lambda: None)
    assert choose_backend("auto", cuda, *given) == "triton"
    assert choose_backend("auto", cuda, *given, own_keys=True) == "dense"
    assert choose_backend("auto", cuda, *given, dense_only=True) == "dense"
    with monkeypatch.context() as patch:
        patch.setattr(choose, "missing_for_triton", lambda: "a C compiler")
        assert choose_backend("auto", cuda, *given) == "dense"
    monkeypatch.setattr(choose, "TRITON", None)
    assert choose_backend("auto", cuda, *given) == "dense"


@pytest.mark.parametrize("text", ["", "5", "[1]", '[{"machine": "x"}]', "<<<<<<< HEAD\n[]", "[" * 100_000])
def test_damaged_measurements_are_named(tmp_path, monkeypatch, text):
    (tmp_path / "measured.json").write_text(text)
    monkeypatch.setattr(measured, "FILE", tmp_path / "measured.json")
    with pytest.raises(ConfigError, match="measured.json: cannot be read .*; restore it"):
        measured.read()
