"""What a run says about itself, in its log, on the console and to Weights & Biases, against figures by hand."""

import errno
import importlib.util
import io
import json
import math
import os
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.summary.writer.record_writer import RecordWriter

from moh_lm.checks import config_problems
from moh_lm.cli.output import Output
from moh_lm.config import Config
from moh_lm.cost.flops import flops_per_token, peak_flops
from moh_lm.data.shards import ShardWriter, write_manifest
from moh_lm.flags import parse_config
from moh_lm.monitor import events
from moh_lm.monitor.console import show_progress, styled
from moh_lm.monitor.events import EventLog, Rows, complete_rows
from moh_lm.monitor.head_map import colours
from moh_lm.monitor.log import RunLog
from moh_lm.monitor.record import keep_rows
from moh_lm.monitor.writers import Writers
from moh_lm.run.loop import Run
from moh_lm.run.resume import tidy
from moh_lm.units import rounded
from tests.distributed import run_ranks
from tests.monitor.logged import NAMES, ROUNDING, SHORT, cells, events_of, read_rows
from tests.training.runs import arguments, rows, run


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


def test_bits_per_byte_are_loss_over_ln_2_and_bytes_per_token(two_ranks):
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


def test_the_mfu_is_the_flops_over_the_peak_of_all_ranks(two_ranks):
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
    [
        ("A100-SXM4-80GB", 312), ("NVIDIA GH200 480GB", 989), ("NVIDIA RTX A1000", None), ("NVIDIA RTX A4000", None),
        ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835), ("NVIDIA H800", 989), ("NVIDIA H800 PCIe", 756),
    ],  # fmt: skip
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


def test_the_parts_of_a_step_make_up_its_time(two_ranks):
    config, rows, _ = two_ranks
    for row in (row for row in rows if "loss" in row):
        seconds = row["runtime"]["seconds"]
        step = sum(seconds[part] for part in ("data", "forward_backward", "optimizer", "log"))
        assert 128 / step == pytest.approx(row["tokens_per_second"], rel=1e-4, abs=ROUNDING)
        assert min(seconds["forward_backward"], seconds["optimizer"]) > 0
        assert row["runtime"]["slowest_data"]["seconds"] >= seconds["data"]
        memory = row["runtime"]["memory"]
        assert memory["rank"] in (0, 1) and 0.1 < memory["gib"] < 8
    assert rows[-2]["runtime"]["seconds"]["save"] > 0  # the save of step 3
    assert rows[-2]["runtime"]["seconds"]["log"] > 0  # the line of step 2


def test_head_maps_of_all_and_of_each_source_are_in_tensorboard(two_ranks):
    _, rows, board = two_ranks
    heads = {row["step"]: row["heads"] for row in rows if "loss" in row}
    loads = {"load/all": "load", "load_of_source/even": "even", "load_of_source/odd": "odd"}
    for tag, name in loads.items():
        tag = f"routed_heads_{tag}"
        for image in board.Images(tag):
            expected = heads[image.step].get(name) or heads[image.step]["source_load"][name]
            picture = cells(np.asarray(Image.open(io.BytesIO(image.encoded_image_string))), 2, 8)
            assert (picture[:, 2:] == colours(np.array(expected))).all()
            assert (picture[:, :2] == 204).all()
        assert [image.step for image in board.Images(tag)] == [4]


def test_the_console_has_one_line_per_interval(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, *SHORT, "--peak-tflops", "1e-3")
    (text,) = run_ranks(run_and_read_output, 1, flags, tmp_path)
    assert text.startswith("device     cpu: ")  # below what describes the run
    steps = [line for line in text.splitlines() if line.split()[0] == "step" or "/4 " in line]
    head, *lines = [line for line in steps if "validation" not in line]
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


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_colours_unless_no_color_is_set(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert styled("alarm", "warning") == "\x1b[33malarm\x1b[0m"
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert styled("alarm", "warning") == "alarm"
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert styled("alarm", "warning") == "alarm"


@pytest.mark.parametrize("stream, quiet, shown", [(Terminal, 11, True), (Terminal, 9, False), (io.StringIO, 11, False)])
def test_a_quiet_terminal_shows_the_time_left(stream, quiet, shown, monkeypatch):
    output = Output(stream())
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(output, "quiet_seconds", lambda: quiet)
    show_progress(30, 100, 10, 60.0, "4h 00m")  # as the log says: later steps may take longer
    bar = output.getvalue()
    assert ("30/100" in bar and "<4h 00m" in bar) == shown == bool(bar)


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
    assert sorted({word for tag in shown for word in tag.split("/")} - words) == []
    inner = [row[key] for row in rows for key in ("heads", "runtime") if key in row]
    inner += [row["runtime"][key] for row in rows if "runtime" in row for key in ("seconds", "mfu")]
    assert sorted({key for part in (*rows, *inner) for key in part} - words) == []


def test_numbers_are_rounded_to_five_digits():
    assert rounded({"a": [0.123456789, 12345.678], "b": 7}) == {"a": [0.12346, 12346.0], "b": 7}


def test_a_row_after_one_that_a_crash_cut_is_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "eve')
    for step in (3, 4):
        Rows(path).add({"step": step})
    assert [row["step"] for _, row in complete_rows(path)] == [1, 3, 4]


def test_a_resumed_run_cuts_its_rows_and_reads_only_those(tmp_path, monkeypatch):
    path, parse = tmp_path / "metrics.jsonl", Mock(wraps=events.parse_json)
    monkeypatch.setattr(events, "parse_json", parse)
    kept = "".join(f'{{"step": {step}}}\n' for step in [*range(1, 1000), 999])
    path.write_text(kept + '{"step": 1000}\nodd\n{"step": 1001}\n{"step": 1002, "lo')
    keep_rows(path, 999)
    assert path.read_text() == kept and parse.call_count == 5


def test_a_full_disk_costs_a_line_and_the_drawings(tmp_path, monkeypatch, capsys):
    def full_disk(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    unsaid = Mock()
    monkeypatch.setattr(threading, "excepthook", unsaid)
    monkeypatch.setattr(threading, "__excepthook__", unsaid)  # which would print a traceback
    begun = Writers(tmp_path / "begun", 0)
    monkeypatch.setattr(RecordWriter, "write", full_disk)
    for writers in (begun, None):
        writers = writers or Writers(tmp_path / "full", 0)
        for step in range(2000):
            writers.scalars({"loss": 1.0}, step)
        writers.close()
        said = "tensorboard: No space left on device; it gets no more until the run is restarted\n"
        assert capsys.readouterr().err == said and not unsaid.called


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


def test_wandb_gets_the_figures_of_tensorboard(data_dir, tmp_path):
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


def test_a_copy_of_a_run_by_hard_links_leaves_the_original_its_id(tmp_path, monkeypatch):
    module = SimpleNamespace(init=lambda **settings: SimpleNamespace(finish=lambda **_: None))
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("original", "copy"):
        (tmp_path / name).mkdir()
    original, copy = (tmp_path / name / "wandb.json" for name in ("original", "copy"))
    Writers(tmp_path / "original", 0, "heads").close()
    kept = original.read_text()
    os.link(original, copy)
    Writers(tmp_path / "copy", 0, "heads").close()
    assert original.read_text() == kept and json.loads(copy.read_text())["id"] != json.loads(kept)["id"]
    (tmp_path / "copy" / "wandb.json.tmp-7").touch()  # of a start that was killed
    tidy(tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["tensorboard", "wandb.json"]


def test_wandb_that_is_not_installed_is_said_before_the_start(monkeypatch, data_dir, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = parse_config(arguments(data_dir, tmp_path, "--wandb", "heads"))[0]
    assert "wandb is not installed; pip install wandb" in "\n".join(config_problems(config, 1))


def run_with_clocks(flags):
    """(when the evaluation before the first step ended, when the clock of the time left began)."""
    found, evaluate, lines = [], Run.evaluate, RunLog.lines

    def evaluate_and_note(run):
        evaluate(run)
        found.append(time.perf_counter())

    def note_and_write(log, row):
        found.append(log.started)
        return lines(log, row)

    Run.evaluate, RunLog.lines = evaluate_and_note, note_and_write
    run(flags)
    return found[:2]


def test_the_time_left_ignores_the_first_evaluation(data_dir, tmp_path):
    ((evaluated, began),) = run_ranks(run_with_clocks, 1, arguments(data_dir, tmp_path))
    assert evaluated <= began


def test_numbers_that_json_cannot_hold_are_written_as_null(tmp_path):
    log = RunLog(tmp_path, 0, Config())
    log.write({"step": 1, "grad_norm": math.inf, "source_loss": {"a": math.nan, "b": 1.5}})
    log.close()
    assert rows(tmp_path) == [{"step": 1, "grad_norm": None, "source_loss": {"a": None, "b": 1.5}}]


def test_rows_are_cut_before_the_new_configuration_is_written(tmp_path, monkeypatch):
    """Else a start that dies between the two leaves old rows beside a save interval that they contradict."""
    monkeypatch.setattr("moh_lm.monitor.log.keep_rows", Mock(side_effect=OSError))
    with pytest.raises(OSError):
        RunLog(tmp_path, 0, Config())
    assert not (tmp_path / "config.json").exists()


def test_an_event_is_recorded_before_it_is_printed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=Mock(side_effect=BrokenPipeError)))
    with pytest.raises(BrokenPipeError):
        EventLog(tmp_path, writes=True).add("saved", 3, "saved step-3")
    assert EventLog(tmp_path, writes=True).last("saved")["step"] == 3


@pytest.mark.parametrize(
    "last, is_evaluated",
    [({}, False), ({"metrics.jsonl": {"evaluation": {"even": 1.0}}}, True), ({"samples.jsonl": {"text": "a"}}, True)],
)
def test_a_resumed_log_knows_whether_its_step_was_evaluated(last, is_evaluated, tmp_path):
    """Without held-out text, samples are all that an evaluation writes."""
    rows = {"metrics.jsonl": [{"step": 2, "evaluation": {"even": 2.0}}, {"step": 4, "loss": 1.0}], "samples.jsonl": []}
    for name, row in last.items():
        rows[name].append({"step": 4, **row})
    for name, found in rows.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in [*found, {"step": 5, "text": ""}]))
    log = RunLog(tmp_path, 4, Config())
    log.close()
    assert log.is_evaluated == is_evaluated
