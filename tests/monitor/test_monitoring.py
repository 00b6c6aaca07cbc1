"""What a run says about itself, against the raw gates, and against figures worked out by hand."""

import errno
import importlib.util
import io
import json
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moh_lm.checks import config_problems
from moh_lm.config import HeadsConfig, ModelConfig, ParallelConfig
from moh_lm.cost.flops import flops_per_token, peak_flops
from moh_lm.data.shards import ShardWriter, write_manifest
from moh_lm.flags import parse_config
from moh_lm.model.router import HeadRouter
from moh_lm.monitor.boards import Boards
from moh_lm.monitor.head_load import head_figures
from moh_lm.monitor.head_map import CELL, LEFT, TOP, colours, head_map
from moh_lm.monitor.journal import Rows, complete_rows
from moh_lm.monitor.row import rounded
from moh_lm.training.engine import Engine
from tests.distributed import run_ranks
from tests.training.test_training import arguments, run

SHORT = "--train-iters 4 --log-interval 2 --eval-interval 0 --eval-samples 1 --save-interval 0".split()
NAMES = ("even", "odd")
ROUNDING = 0.05  # of tokens_per_second in a row


# --- Figures of heads against the raw gates ---


def run_recorded(flags):
    """Run; returns for each step ([sources [b] of each micro-batch], {layer: [(x, gates, w_routed) of each]}).

    w_routed: [0, d] of a layer without routed heads.
    """
    steps, train_step = [], Engine.train_step

    def recorded(engine, batches, *others, **more):
        steps.append(([batch.sources for batch in batches], {}))
        return train_step(engine, batches, *others, **more)

    def record(module, inputs, outputs):
        in_backward = torch._C._current_graph_task_id() != -1  # recomputation
        if isinstance(module, HeadRouter) and torch.is_grad_enabled() and not in_backward:
            weight = inputs[0].new_zeros(0, inputs[0].shape[-1]) if module.w_routed is None else module.w_routed
            call = tuple(part.detach().clone() for part in (inputs[0], outputs[0], weight))
            steps[-1][1].setdefault(module.layer.index, []).append(call)

    Engine.train_step = recorded
    torch.nn.modules.module.register_module_forward_hook(record)
    run(flags)
    return steps


def sequences_of(ranks, layout, step, layer):
    """(source, x [s, d], gates [s, h], w_routed) of every sequence of a step, from what the ranks recorded."""
    if layout in ("tensor", "context"):
        sources, calls = ranks[0][step][0], [rank[step][1][layer] for rank in ranks]
        joined = [
            (torch.cat([x for x, _, _ in parts]), torch.cat([gates for _, gates, _ in parts]), parts[0][2])
            for parts in zip(*calls, strict=True)
        ]
        recorded = [(sources, joined)]
    else:
        recorded = [(rank[step][0], rank[step][1][layer]) for rank in ranks if layer in rank[step][1]]
    for sources, calls in recorded:
        for of_batch, (x, gates, weight) in zip(sources, calls, strict=True):
            for row, source in enumerate(of_batch.tolist()):
                yield source, x[:, row].double(), gates[:, row].double(), weight.double()


def by_hand(ranks, layout, steps, layer, shared):
    """The figures of a layer over ``steps``."""
    count, tokens, a1, losses, used = {0: 0, 1: 0}, {0: 0, 1: 0}, 0.0, [], {0: [], 1: []}
    for step in steps:
        for source, x, gates, weight in sequences_of(ranks, layout, step, layer):
            selected = (gates[:, shared:] > 0).double()
            count[source] = count[source] + selected.sum(0)
            tokens[source] += len(x)
            used[source] += gates[gates > 0].tolist()
            a1 += gates[:, :shared].sum().item()  # a1 times a softmax
            losses.append((selected.mean(0) * torch.softmax(x @ weight.T, -1).mean(0)).sum().item())
    counts, total = count[0] + count[1], tokens[0] + tokens[1]
    share = [n / counts.sum().item() for n in counts.tolist() if n]
    return {
        "load": (counts / total).tolist(),
        "entropy": -sum(p * math.log(p) for p in share) / math.log(len(counts)),
        "unused": sum(n == 0 for n in counts.tolist()) / len(counts),
        "overused": sum(n / total > 0.95 for n in counts.tolist()) / len(counts),
        "a1": a1 / total,
        "balance_loss": sum(losses) / len(losses),
        "gate_mean": sum(used[0] + used[1]) / len(used[0] + used[1]),
        "gate_rms": math.sqrt(sum(gate**2 for gate in used[0] + used[1]) / len(used[0] + used[1])),
        "even_rms": math.sqrt(sum(gate**2 for gate in used[0]) / len(used[0])),
        "odd_rms": math.sqrt(sum(gate**2 for gate in used[1]) / len(used[1])),
        "even": (count[0] / tokens[0]).tolist(),
        "odd": (count[1] / tokens[1]).tolist(),
        f"{layout}_parallel_imbalance": max(counts[:2].sum(), counts[2:].sum()).item() / (counts.sum().item() / 2),
    }


@pytest.mark.parametrize(
    "layout, world_size, more",
    [
        ("data", 1, ()),
        ("data", 2, ("--micro-batch-size", "1", "--recompute")),
        ("tensor", 2, ("--tensor-parallel-size", "2")),
        ("context", 2, ("--context-parallel-size", "2")),
        ("pipeline", 2, ("--pipeline-parallel-size", "2", "--recompute")),
    ],
)
def test_figures_of_heads_are_those_of_the_raw_gates(data_dir, tmp_path, layout, world_size, more):
    uneven = "--learning-rate", "0.3", "--routing", "paper"  # the rate is large, so that heads are used unevenly
    ranks = run_ranks(run_recorded, world_size, arguments(data_dir, tmp_path, *SHORT, *uneven, *more))
    logged = {row["step"]: row for row in read_rows(tmp_path) if "loss" in row}
    board = events_of(tmp_path)
    for last in (2, 4):
        heads = logged[last]["heads"]
        assert heads["layer"] == [0, 1]
        for layer in range(2):
            expected = by_hand(ranks, layout, (last - 2, last - 1), layer, shared=4)
            got = {key: values[layer] for key, values in heads.items() if not key.startswith(("layer", "source"))}
            got |= {name: heads["source_load"][name][layer] for name in NAMES}
            got |= {f"{name}_rms": heads["source_gate_rms"][name][layer] for name in NAMES}
            if layout not in ("tensor", "context"):
                expected.pop(f"{layout}_parallel_imbalance")
            assert got.keys() == expected.keys()
            for key, value in expected.items():
                assert got[key] == pytest.approx(value, rel=1e-4, abs=1e-6), (last, layer, key)
            tag = f"routed_heads/layer_{layer:02d}"
            shown = {f"{tag}/load_head_{head:02d}": load for head, load in enumerate(expected["load"], 4)}
            shown |= {f"{tag}/{key}": expected[key] for key in expected if not key.startswith(("load", "even", "odd"))}
            for name, value in shown.items():
                (scalar,) = [scalar for scalar in board.Scalars(name) if scalar.step == last]
                assert scalar.value == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert max(abs(a - b) for a, b in zip(expected["even"], expected["odd"], strict=True)) > 0.01  # they differ at all


@pytest.mark.parametrize(
    "layout, more",
    [
        ("tensor", ("--head-selection", "gated", "--tensor-parallel-size", "2")),
        ("context", ("--head-selection", "gated", "--context-parallel-size", "2", "--recompute")),
        ("pipeline", ("--num-shared-heads", "8", "4", "--num-active-routed-heads", "0", "2",
                      "--pipeline-parallel-size", "2", "--routing", "paper", "--routing-top-p", "0.6")),
        ("queries", ("--num-shared-heads", "8", "--num-active-routed-heads", "0", "--routing", "query_norm",
                     "--tensor-parallel-size", "2")),
    ],
)  # fmt: skip
def test_gates_of_layers_whose_heads_are_all_shared_are_logged_too(data_dir, tmp_path, layout, more):
    flags = arguments(data_dir, tmp_path, *SHORT, "--learning-rate", "0.3", "--num-attention-heads", "8", *more)
    ranks = run_ranks(run_recorded, 2, flags)
    row = [row for row in read_rows(tmp_path) if "loss" in row][-1]
    heads, board = row["heads"], events_of(tmp_path)
    assert heads["layer"] == [0, 1]
    if layout == "queries":  # every rank has the gates of all tokens, each of them 1
        assert heads["gate_mean"] == heads["gate_rms"] == heads["source_gate_rms"]["odd"] == [1, 1]
        return
    gates = {0: [], 1: []}
    for step in (2, 3):
        for source, _, of_sequence, _ in sequences_of(ranks, layout, step, 0):
            gates[source] += of_sequence.flatten().tolist()
    both = gates[0] + gates[1]
    expected = {"gate_mean": sum(both) / len(both), "gate_rms": math.sqrt(sum(gate**2 for gate in both) / len(both))}
    for key, value in expected.items():
        assert heads[key][0] == pytest.approx(value, rel=1e-4), key
        assert board.Scalars(f"routed_heads/layer_00/{key}")[-1].value == pytest.approx(value, rel=1e-4)
    for name, of_source in zip(NAMES, gates.values(), strict=True):
        rms = math.sqrt(sum(gate**2 for gate in of_source) / len(of_source))
        assert heads["source_gate_rms"][name][0] == pytest.approx(rms, rel=1e-4), name
        assert heads["source_load"][name][0] == []
    unknown = ("entropy", "unused", "overused", "balance_loss", "a1")
    assert heads["load"][0] == [] and [heads[key][0] for key in unknown] == [None] * 5
    if layout == "pipeline":
        assert len(heads["load"][1]) == 4 and rounded(row["load_balance_loss"]) == heads["balance_loss"][1]
        assert heads["active_heads"][0] == 8 and heads["active_heads"][1] < 6
    else:
        assert row["load_balance_loss"] == 0 and len(set(heads["gate_rms"])) == 2


def test_a_head_that_is_never_selected_and_one_that_always_is():
    model = ModelConfig(num_layers=1)  # 6 shared heads, 3 of 6 routed ones
    sums = np.array([[0.0, 5.0, 45, 90, 10, 9, 8, 3, 0, 0], [0.0, 5.0, 45, 0, 10, 10, 10, 0, 0, 0]])
    figures = head_figures(model.routed_layers(), sums, NAMES, [2, 2], 5, 3.0, ParallelConfig())
    assert figures["load"] == [[1, 0.95, 0.9, 0.15, 0, 0]]
    assert figures["unused"] == [2 / 6] and figures["overused"] == [1 / 6]  # 0.95 is the limit itself
    unlimited = head_figures(model.routed_layers(), sums, NAMES, [2, 2], 5, 0.0, ParallelConfig())
    assert unlimited == {**figures, "overused": [0]}
    assert figures["source_load"]["odd"] == [[1, 1, 1, 0, 0, 0]]
    assert figures["gate_mean"] == [0.5] and figures["gate_rms"] == [pytest.approx(0.5**0.5)]
    collapsed = head_figures(model.routed_layers(), sums[1:], ["odd"], [2], 5, 3.0, ParallelConfig())
    assert collapsed["entropy"] == [pytest.approx(math.log(3) / math.log(6))]


@pytest.mark.filterwarnings("error")
def test_a_layer_that_no_token_uses_has_no_mean_gate_and_no_warning():
    model = ModelConfig(num_layers=1, num_attention_heads=4, heads=HeadsConfig("mixture", (0,), (2,), routing="relu"))
    sums = np.zeros((1, 8))
    figures = head_figures(model.routed_layers(), sums, ["even"], [2], 5, 3.0, ParallelConfig(tensor_parallel_size=2))
    assert figures["load"] == [[0, 0, 0, 0]] and figures["unused"] == [1]
    gates = figures["gate_mean"] + figures["gate_rms"] + figures["source_gate_rms"]["even"]
    assert np.isnan([*gates, *figures["tensor_parallel_imbalance"]]).all()


def test_a_head_map_has_a_square_for_every_head():
    model = ModelConfig(num_layers=3, num_attention_heads=4)  # 2 shared heads, 1 of 2 routed ones
    loads = [[0.0, 1.0], [0.25, 0.75], [0.5, 0.5]]
    picture = cells(head_map(model.routed_layers(), loads, 3, 4), 3, 4)
    assert np.abs(picture[:, 2:] / 255 - cividis(loads)).max() < 0.005
    assert (picture[:, :2] == 204).all()  # shared heads


def test_the_colours_of_a_head_map_are_those_of_the_page_of_a_run():
    picture = head_map(ModelConfig(num_layers=1).routed_layers(), [np.linspace(0, 1, 6)], 1, 12)
    bar = picture[-18, 120:220]
    assert np.abs(bar / 255 - cividis(np.linspace(0, 1, 100))).max() < 0.1


def cividis(shares):
    return pytest.importorskip("matplotlib").colormaps["cividis"](np.array(shares))[..., :3]


def cells(picture, layers, heads):
    """The colour in the middle of each square."""
    rows = slice(TOP + CELL // 2, TOP + layers * CELL, CELL)
    return picture[rows, LEFT + CELL // 2 : LEFT + heads * CELL : CELL]


# --- The other figures ---


def read_rows(directory):
    return [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]


def events_of(directory):
    board = EventAccumulator(str(Path(directory) / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    board.Reload()
    return board


@pytest.fixture(scope="module")
def weighed_dir(tmp_path_factory):
    """Two sources that know the bytes of their text: "even" 3 per token, "odd" 5 per token over two shards."""
    directory = tmp_path_factory.mktemp("weighed")
    generator = np.random.default_rng(0)
    for source, unit, text_bytes in (("even", "a", 12_000), ("odd", "a", 16_000), ("odd", "b", 24_000)):
        (directory / source).mkdir(exist_ok=True)
        with ShardWriter(directory / source / unit, 64) as shard:
            for _ in range(40):
                shard.add([*generator.integers(3, 64, 99).tolist(), 2])
            tokenizer = {"sha256": "none", "vocab_size": 64, "eos_id": 2}
            shard.commit({"tokenizer": tokenizer, "inputs": [], "text_bytes": text_bytes})
    write_manifest(directory)
    return directory


@pytest.fixture(scope="module")
def two_ranks(weighed_dir, tmp_path_factory):
    """A run on two ranks: its configuration, its rows and its TensorBoard."""
    directory = tmp_path_factory.mktemp("two")
    flags = arguments(weighed_dir, directory, *SHORT, "--peak-tflops", "0.001", "--save-interval", "1")
    run_ranks(run, 2, flags)
    return parse_config(flags)[0], read_rows(directory), events_of(directory)


def test_bits_per_byte_are_the_loss_over_ln_2_and_the_bytes_per_token(two_ranks):
    _, rows, board = two_ranks
    bytes_per_token = {"even": 3.0, "odd": 5.0}
    for row in rows:
        losses = row.get("source_loss", row.get("evaluation"))
        bits = row.get("source_bits_per_byte", row.get("evaluation_bits_per_byte"))
        assert bits == pytest.approx({name: losses[name] / math.log(2) / bytes_per_token[name] for name in NAMES})
        kind = "train" if "loss" in row else "validation"
        for name in NAMES:
            shown = {scalar.step: scalar.value for scalar in board.Scalars(f"loss_{kind}_bits_per_byte/{name}")}
            assert shown[row["step"]] == pytest.approx(bits[name], rel=1e-6)


def test_the_mfu_is_the_flops_of_the_tokens_over_the_peak_of_all_ranks(two_ranks):
    config, rows, board = two_ranks
    flops = flops_per_token(config.model, 16)
    for row in (row for row in rows if "loss" in row):
        speed = row["tokens_per_second"]
        expected = {kind: speed * flops[kind] / (2 * 1e9) for kind in ("dense", "active")}
        assert row["runtime"]["mfu"] == pytest.approx(expected, rel=1e-4 + ROUNDING / speed)
        shown = {scalar.step: scalar.value for scalar in board.Scalars("runtime/mfu_active")}
        assert shown[row["step"]] == pytest.approx(row["runtime"]["mfu"]["active"])


@pytest.mark.parametrize(
    "name, tflops",
    [("A100-SXM4-80GB", 312), ("NVIDIA GH200 480GB", 989), ("NVIDIA RTX A1000", None), ("NVIDIA RTX A4000", None)],
)
def test_the_peak_is_that_of_a_whole_name(name, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(parse_config([])[0].run, torch.device("cuda")) == (tflops and tflops * 1e12)


def test_the_peak_is_known_of_a_gpu_in_bf16_only(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    run_config = parse_config(["--precision", "bf16"])[0].run
    assert peak_flops(run_config, torch.device("cuda")) == 989e12
    assert peak_flops(run_config, torch.device("cpu")) is None
    assert peak_flops(parse_config(["--precision", "fp32"])[0].run, torch.device("cuda")) is None


def test_the_parts_of_a_step_make_up_its_time_and_memory_is_that_of_a_rank(two_ranks):
    config, rows, _ = two_ranks
    for row in (row for row in rows if "loss" in row):
        seconds = row["runtime"]["seconds"]
        step = sum(seconds[part] for part in ("data", "forward_backward", "optimizer"))
        assert 128 / step == pytest.approx(row["tokens_per_second"], rel=1e-4, abs=ROUNDING)
        assert min(seconds["forward_backward"], seconds["optimizer"]) > 0
        assert row["runtime"]["slowest_data"]["seconds"] >= seconds["data"]
        memory = row["runtime"]["memory"]
        assert memory["rank"] in (0, 1) and 0.1 < memory["gib"] < 8
    assert rows[-2]["runtime"]["seconds"]["save"] > 0  # the save of step 3


def test_head_maps_of_all_and_of_each_source_are_in_tensorboard(two_ranks):
    _, rows, board = two_ranks
    heads = {row["step"]: row["heads"] for row in rows if "loss" in row}
    loads = {"load/all": "load", "load_of_source/even": "even", "load_of_source/odd": "odd"}
    for tag, name in loads.items():
        tag = f"routed_heads_{tag}"
        for image in board.Images(tag):
            expected = heads[image.step].get(name) or heads[image.step]["source_load"][name]
            picture = cells(np.asarray(Image.open(io.BytesIO(image.encoded_image_string))), 2, 8)
            assert (picture[:, 4:] == colours(np.array(expected))).all()
            assert (picture[:, :4] == 204).all()
        assert [image.step for image in board.Images(tag)] == [2, 4]


def test_the_console_has_one_line_per_interval_of_80_columns_at_most(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, *SHORT, "--peak-tflops", "1e-3")
    (text,) = run_ranks(run_and_read_output, 1, flags, tmp_path)
    head, *lines = [line for line in text.splitlines() if line.split()[0] == "step" or "/4 " in line]
    rows = [row for row in read_rows(tmp_path) if "loss" in row]
    assert len(lines) == len(rows) == 2
    for line, row in zip(lines, rows, strict=True):
        shown = dict(zip(head.split(), line.split(maxsplit=8), strict=True))
        assert shown["step"] == f"{row['step']}/4" and "left" in shown
        assert shown["loss"] == f"{row['loss']:.4f}" and shown["balance"] == f"{row['load_balance_loss']:.4f}"
        for name, key in (("lr", "learning_rate"), ("norm", "grad_norm")):
            assert float(shown[name]) == pytest.approx(row[key], rel=5e-3)
        assert float(shown["tokens/s"].replace(",", "")) == pytest.approx(row["tokens_per_second"], abs=0.6)
        assert float(shown["MFU"].strip("%")) == pytest.approx(100 * row["runtime"]["mfu"]["dense"], abs=0.51)
        assert "\r" not in line and "\x1b" not in line
    assert max(len(line.replace(str(tmp_path), "")) for line in text.splitlines()) <= 80


def run_and_read_output(flags, directory):
    with open(directory / "output", "w") as file:
        stdout, sys.stdout = sys.stdout, file
        run(flags)
        sys.stdout = stdout
    return (directory / "output").read_text()


def test_the_page_names_every_figure(two_ranks):
    _, rows, board = two_ranks
    page = (Path(__file__).resolve().parents[2] / "docs" / "monitoring.md").read_text()
    words = set(re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)*", page))
    tags = board.Tags()["scalars"] + board.Tags()["images"]
    shown = {re.sub(r"(/layer_\d+)?/(even|odd)$|layer_\d+/|_\d+$", "", tag) for tag in tags}
    assert {word for tag in shown for word in tag.split("/")} <= words
    inner = [row[key] for row in rows for key in ("heads", "runtime") if key in row]
    inner += [row["runtime"][key] for row in rows if "runtime" in row for key in ("seconds", "mfu")]
    assert {key for part in (*rows, *inner) for key in part} <= words


def test_numbers_are_rounded_to_five_digits():
    assert rounded({"a": [0.123456789, 12345.678], "b": 7}) == {"a": [0.12346, 12346.0], "b": 7}


def test_a_row_after_one_that_a_crash_cut_is_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "eve')
    for step in (3, 4):
        Rows(path).add({"step": step})
    assert [row["step"] for _, row in complete_rows(path)] == [1, 3, 4]


def test_a_drawing_that_cannot_be_closed_ends_no_run(tmp_path, capsys):
    boards = Boards(tmp_path, 0)

    def full_disk():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    boards.tensorboard.close()
    boards.tensorboard.close = full_disk
    boards.close()
    assert "tensorboard: No space left on device" in capsys.readouterr().err


# --- Weights & Biases ---

STAND_IN = '''
import json, os
from types import SimpleNamespace

def note(kind, *arguments, **more):
    with open(os.environ["WANDB_NOTES"], "a") as file:
        file.write(json.dumps([kind, arguments, more]) + "\\n")

def init(**settings):
    note("init", **settings)
    kinds = ("log", "alert", "finish")
    return SimpleNamespace(**{kind: lambda *a, kind=kind, **m: note(kind, *a, **m) for kind in kinds})
'''


def run_with_wandb(flags, folder, stop_after=None):
    os.environ["WANDB_NOTES"] = str(folder / "notes")
    sys.path.insert(0, str(folder))
    run(flags, stop_after)


def test_wandb_gets_the_figures_of_tensorboard_and_the_same_run_after_a_stop(data_dir, tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "wandb.py").write_text(STAND_IN)
    flags = arguments(data_dir, tmp_path / "run", *SHORT, "--save-interval", "3", "--wandb", "heads")
    run_ranks(run_with_wandb, 1, flags, folder, 3)
    run_ranks(run_with_wandb, 1, flags, folder)
    notes = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    first, second = [settings for kind, _, settings in notes if kind == "init"]
    assert first == second and first["project"] == "heads" and first["resume"] == "allow"
    assert first["id"] == json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
    assert first["config"]["num_layers"] == 2
    board = events_of(tmp_path / "run")
    shown = {(tag, s.step): s.value for tag in board.Tags()["scalars"] for s in board.Scalars(tag)}
    logged = {}
    for kind, arguments_, more in notes:
        if kind == "log":
            logged |= {(tag, more["step"]): value for tag, value in arguments_[0].items()}
    assert logged == pytest.approx(shown, rel=1e-6, nan_ok=True)


def test_wandb_that_is_not_installed_is_said_before_the_start(monkeypatch, data_dir, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = parse_config(arguments(data_dir, tmp_path, "--wandb", "heads"))[0]
    assert "wandb is not installed; pip install wandb" in "\n".join(config_problems(config, 1))
