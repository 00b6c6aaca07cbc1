"""What --attention-backend auto takes: by what was measured on this machine, or says how to measure it."""

import pytest
import torch

from moh_lm.cost.summary import describe_attention
from moh_lm.flags import parse_config
from moh_lm.kernels import choose, measured


@pytest.fixture
def measured(monkeypatch):
    """No machine is measured but the ones that a test gives to ``measured.keep``; the machine at hand is "here"."""
    monkeypatch.setattr(choose, "MEASURED", [])
    monkeypatch.setattr(choose, "machine", lambda device: "here")
    yield
    measured.measured_tiles.cache_clear()


def chosen(device, dtype, length, share, batch=1, head_dim=64, compiled=False):
    return choose.fastest(torch.device(device), dtype, (length, batch, 12, head_dim), share, compiled)


def test_auto_goes_by_the_longest_length_and_the_least_activation_that_were_measured(measured, monkeypatch):
    rows = [[1024, 0.5, 0.98], [2048, 0.5, 0.8], [2048, 0.75, 0.95], [4096, 0.5, 0.7], [4096, 0.75, 1.1]]
    measured.keep(measured.Measurement("there", "cpu", "float32", 2, "", 0, rows, []))
    measured.keep(measured.Measurement("there", "cpu", "float32", 3, "", 0, [[1024, 1.0, 1.3]], []))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = {
        (512, 0.5): "dense", (1024, 0.5): "dense", (2047, 0.3): "dense", (2048, 0.3): "cpu_sparse",
        (3000, 0.7): "cpu_sparse", (3000, 0.8): "dense", (4096, 0.75): "dense", (9999, 0.5): "cpu_sparse",
    }  # fmt: skip
    for (length, share), backend in expected.items():
        assert chosen("cpu", torch.float32, length, share) == backend
    assert chosen("cpu", torch.bfloat16, 4096, 0.5) == "dense"
    measured.keep(measured.Measurement("here", "cpu", "float32", 2, "", 0, [[4096, 0.5, 0.97]], []))
    assert chosen("cpu", torch.float32, 4096, 0.5) == "dense"  # its own figures come before those of another
    for others in (1, 3, 4):  # not measured, slower, not measured
        monkeypatch.setattr(torch, "get_num_threads", lambda number=others: number)
        assert chosen("cpu", torch.float32, 4096, 0.5) == "dense"


def test_a_gpu_goes_by_its_own_figures_and_not_below_the_size_that_was_measured(measured):
    rows, size = [[1024, 0.5, 0.9]], 1024 * 4 * 12 * 64
    measured.keep(measured.Measurement("there", "cuda", "bfloat16", 0, "", size, rows, []))
    assert chosen("cuda", torch.bfloat16, 1024, 0.5, batch=4) == "dense"
    measured.keep(measured.Measurement("here", "cuda", "bfloat16", 0, "", size, rows, []))
    assert chosen("cuda", torch.bfloat16, 1024, 0.5, batch=4) == "triton"
    assert chosen("cuda", torch.bfloat16, 1024, 0.5, batch=3) == "dense"
    assert chosen("cuda", torch.float16, 1024, 0.5, batch=4) == "dense"
    assert chosen("cuda", torch.bfloat16, 1024, 0.5, batch=4, head_dim=112) == "dense"  # no kernels for it
    assert chosen("cpu", torch.bfloat16, 1024, 0.5, batch=4) == "dense"


@pytest.mark.parametrize("called, replayed", [(1.2, 0.9), (0.9, 1.2), (0.9, 0.9)])
def test_a_gpu_goes_by_its_graphs_where_layers_are_compiled_and_by_calls_elsewhere(measured, called, replayed):
    rows = [[1024, 0.5, called, replayed]]
    measured.keep(measured.Measurement("here", "cuda", "bfloat16", 0, "", 0, rows, []))
    found = [chosen("cuda", torch.bfloat16, 1024, 0.5, compiled=compiled) for compiled in (False, True)]
    assert found == ["triton" if ratio < 1 else "dense" for ratio in (called, replayed)]


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
    measured.keep(measured.Measurement("there", "cpu", "float32", 2, "", 0, rows, []))
    assert list(describe_attention(config)) == [
        "attention  auto: cpu_sparse in 1 of 2 layers, dense in 1 of 2 layers, by what was measured on there"
    ]
    compiled, _ = parse_config([*flags, "--compile"])
    assert [line.split(",")[0] for line in describe_attention(compiled)] == ["attention  auto: dense in every layer"]


def test_the_newest_measurement_of_a_machine_counts_at_once(measured):
    gpu = torch.device("cuda"), torch.bfloat16
    for ratio, tile in ((0.9, [64, 64, 4, 2]), (1.1, [128, 64, 8, 3])):
        rows = [[1024, 0.5, ratio]]
        measured.keep(
            measured.Measurement("here", "cuda", "bfloat16", 0, "", 0, rows, [["query", 512, 64, tile]])
        )
        assert measured.measurement(*gpu).ratios == rows
        assert measured.measured_tiles(*gpu, "query", 512, 64) == tile


def test_what_is_measured_is_written_and_read_and_replaces_what_was_measured_before(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(choose, "FILE", tmp_path / "measured.json")
    measured.FILE.write_text("[]")
    for ratio in (0.9, 0.7):
        tiles = [["forward", 512, 64, [64, 64, 4, 2]], ["forward", 2048, 64, [128, 64, 8, 3]]]
        rows = [[512, 0.5, ratio]]
        last = measured.Measurement("here", "cuda", "bfloat16", 0, "when\n$ how", 5, rows, tiles)
        measured.save(last)
    other = measured.Measurement("here", "cpu", "float32", 1, "", 0, [], [])
    measured.save(other)  # by a process that has not read what the others wrote
    assert measured.read() == [other, last]
    measured.keep(last)
    gpu = torch.device("cuda"), torch.bfloat16
    for length, tile in {1: [64, 64, 4, 2], 512: [64, 64, 4, 2], 513: [128, 64, 8, 3], 9999: [128, 64, 8, 3]}.items():
        assert measured.measured_tiles(*gpu, "forward", length, 64) == tile
    assert measured.measured_tiles(*gpu, "forward", 512, 96) is None
    assert measured.measured_tiles(*gpu, "query", 512, 64) is None
