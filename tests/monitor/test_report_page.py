"""The page of a run: what it says, what odd rows cost it, and which files it does not replace."""

import json
import re
import shutil
import xml.etree.ElementTree as xml
from types import SimpleNamespace

import numpy as np
import pytest

from moh_lm.config import ConfigError
from moh_lm.flags import parse_config
from moh_lm.monitor.report import page, tables
from moh_lm.monitor.report.series import RunRecord
from tests.monitor.reported import FLAGS, training_record
from tests.vision.cases import parsed
from tools import run_report


def test_the_page_needs_nothing_else_and_is_well_formed(runs):
    assert run_report.main([str(runs.first), "--png", "--output", str(runs.first / "rate-0.5")]) == 0
    text = (runs.first / "rate-0.5").read_text()
    assert "<td>305</td><td>skipped</td><td>why: &lt;i&gt;</td>" in text and "<td>saved</td>" not in text
    settings = dict(re.findall("<tr><td>([a-z_]+)</td><td>(.*?)</td></tr>", text.partition("Configuration</s")[2]))
    assert settings["profile"] == settings["head_dims"] == settings["exit_after"] == "none"
    assert not {"", "None"} & {*settings.values()}
    assert "<td>&lt;b&gt;</td>" not in text and "<b>" not in text and "<i>" not in text
    for attribute in ("src=", "http-equiv", "@import", "<script"):
        assert attribute not in text
    pictures = text.split("<svg")[1:]
    ids = []
    for picture in pictures:
        root = xml.fromstring("<svg" + picture.partition("</svg>")[0] + "</svg>")
        ids += [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids)) and len(pictures) == len(list(runs.first.glob("rate-0.5.*.png"))) >= 8


def test_a_run_that_stopped_before_its_first_interval_has_a_page(runs, tmp_path):
    (tmp_path / "config.json").write_bytes((runs.first / "config.json").read_bytes())
    rows = [{"step": step, "evaluation": {"web": 8.3}, "evaluation_mean": 8.3} for step in (0, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stopped = {"time": "2026-01-01T00:00:00Z", "event": "stopped", "step": 1}
    (tmp_path / "events.jsonl").write_text(json.dumps(stopped) + "\n")
    assert run_report.main([str(tmp_path)]) == 0
    assert "8.3" in (tmp_path / "report.html").read_text()


def test_runs_are_compared_by_what_differs(runs, tmp_path):
    assert run_report.main([str(runs.first), str(runs.second), "--output", str(tmp_path / "new" / "both.html")]) == 0
    text = (tmp_path / "new" / "both.html").read_text()
    assert "<td>learning_rate</td><td>0.001</td><td>0.002</td>" in text
    assert "<td>hidden_size</td>" not in text


def test_the_page_says_what_ran_where(runs, tmp_path):
    shutil.copytree(runs.first, tmp_path / "tiny" / "run")
    started = {"step": 0, "event": "started", "device": "H200", "ranks": 2, "parameters": 4_600_000}
    started |= {"versions": {"torch": "2.9"}, "commit": "ab1"}
    odd = [{**started, "versions": 3}, {**started, "parameters": "4M"}]  # which are left out
    with open(tmp_path / "tiny" / "run" / "events.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in (started, *odd))
    record = RunRecord(tmp_path / "tiny" / "run")
    assert tables.title(record) == "tiny: MoH with 4.6M parameters, 100,000 steps"
    told = dict(tables.summary(record))
    assert told["machine"] == "2 x H200" and told["software"] == "torch 2.9, commit ab1"
    assert told["first started"] == "2026-01-01T00:00:00Z" and told["speed"] == "2,048 tokens/s"
    assert told["held-out loss"] == "3.5000 after step 800 (nats per token)"


@pytest.mark.parametrize(
    "kind, flags, title, model",
    [
        ("vit", "--hidden-sizes 8 16 16 32 --depths 1 1 1 1 --num-attention-heads 2 4 4 8 --num-shared-heads 2 2 1 2 "
         "--num-active-routed-heads 0 1 2 3", "small: ViT, MoH, 9 steps", "4 layers of 2 to 8 heads, width 8-16-16-32"),
        ("dit", "--hidden-size 32 --num-layers 2 --num-attention-heads 4 --head-selection all",
         "small: DiT, dense attention, 9 steps", "2 layers of 4 heads, width 32"),
    ],
)  # fmt: skip
def test_an_image_model_has_a_page_too(kind, flags, title, model, tmp_path):
    run = tmp_path / "small" / "run"
    run.mkdir(parents=True)
    config = parsed(kind, f"--train-iters 9 --batch-size 8 {flags}".split())
    (run / "config.json").write_text(json.dumps(config.to_dict()))
    rows = [training_record(step) | {"source_bits_per_byte": {}} for step in range(1, 10)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_report.main([str(run)]) == 0
    text = (run / "report.html").read_text()
    assert f"<h1>{title}</h1>" in text and f"<td>{model}</td>" in text


# --- Its tables ---


@pytest.mark.parametrize(
    "flags, form",
    [
        ("--head-selection static --num-shared-heads 2", "static heads"), ("--head-selection all", "dense attention"),
        ("--head-selection gated", "gated heads"),
    ],
)  # fmt: skip
def test_the_title_names_the_form_of_attention(flags, form, runs, tmp_path):
    shutil.copytree(runs.first, tmp_path / "tiny" / "run")
    config, _ = parse_config([*FLAGS.split(), "--train-iters", "2000", *flags.split()])
    (tmp_path / "tiny" / "run" / "config.json").write_text(json.dumps(config.to_dict()))
    assert tables.title(RunRecord(tmp_path / "tiny" / "run")) == f"tiny: {form}, 2,000 steps"


def test_tokens_count_both_lengths_after_a_resume_changed_it(runs, tmp_path):
    shutil.copytree(runs.first, tmp_path / "run")
    config, _ = parse_config([*FLAGS.split(), "--seq-length", "128", "--batch-tokens", "8K", "--train-iters", "2000"])
    (tmp_path / "run" / "config.json").write_text(json.dumps(config.to_dict()))
    assert dict(tables.summary(RunRecord(tmp_path / "run")))["tokens"] == "4M of 12M"


def test_the_facts_of_an_event_name_layer_0_too():
    event = {"time": "t", "event": "alarm over", "step": 3, "alarm": "gate drift", "layer": 0, "source": None}
    assert tables.facts_of(event) == "alarm: gate drift; layer: 0"


@pytest.mark.parametrize("ends, means", [([5, 10, 12], [1.0, 2.0, 8.0]), ([10, 12], [1.5, 8.0])])
def test_times_are_means_over_steps(ends, means):
    """Of 12 steps, five took 1 s each, five 2 s and two 8 s; points are means of intervals, or of several."""
    curves = dict.fromkeys((f"seconds/{part}" for part in tables.PARTS), (np.array([]), np.array([])))
    curves["seconds/data"] = np.array(ends), np.array(means)
    config = SimpleNamespace(run=SimpleNamespace(log_interval=5))
    run = SimpleNamespace(curves=curves, config=config, first_row={"step": 5})
    assert tables.time_rows(run) == [[tables.PARTS["data"], f"{31 / 12:.4f}", "100.0%"]]


def test_many_alarms_of_a_kind_are_one_row_of_the_table():
    events = [{"event": "alarm", "alarm": "collapse", "step": n // 3, "layer": n % 3} for n in range(30)]
    said = "30 events up to step 9; the last: alarm: collapse; layer: 2"
    assert tables.event_rows(events) == [("", 0, "alarm", said)]
    several = [{"event": "alarm", "alarm": str(n % 2), "step": n} for n in range(1000)]
    assert [row[1] for row in tables.event_rows(several)] == list(range(700, 1000))


# --- What it cannot read or write ---

ODD = {
    "events.jsonl": [
        "[]", '{"step": 5}', '{"step": 5, "event": ["alarm"]}', '{"step": 1e99, "event": "alarm"}', "[" * 100_000,
        '{"step": -3, "event": "alarm"}', '{"step": 5, "event": "alarm", "a": ' + "[" * 490 + "]" * 490 + "}",
        '{"step": true, "event": "resumed"}', '{"step": 99999999999999999999, "event": "alarm"}',
    ],
    "metrics.jsonl": [
        {"loss": "high"}, {"source_loss": None}, {"source_loss": ["web"]}, {"learning_rate": {}}, {"tokens": "many"},
        {"runtime": 3}, {"tokens_per_second": "2"}, {"skipped_steps": "x"}, {"heads": 7}, {"step": 2**70},
        {"heads": {"layer": [0, 1], "load": [[0.1], ["x"]]}},
        {"heads": {"layer": [0, 1], "load": [[0.25] * 6, [None] * 5]}},
    ],
    "samples.jsonl": [
        '{"step": 5}', '{"step": 5, "prompt": 3, "text": "b"}', '{"step": 5, "prompt": "a", "text": null}',
    ],
}  # fmt: skip
EVALUATION = {"step": 500, "evaluation": {"web": 3.5}, "evaluation_mean": 3.5}
ODD["metrics.jsonl"] = [json.dumps(training_record(500) | row) for row in ODD["metrics.jsonl"]] + [
    json.dumps(EVALUATION | row)
    for row in ({"evaluation": [3.5]}, {"evaluation": {"web": "x"}}, {"evaluation_mean": "x"}, {"sink": {"web": 3}})
]


@pytest.mark.parametrize("name", ODD)
def test_an_odd_row_costs_that_row_and_not_the_page(name, runs, tmp_path):
    shutil.copytree(runs.first, tmp_path / "run")
    samples = [{"step": 4, "prompt": "a", "text": "b"}, {"step": 9, "prompt": "_$", "text": "$_"}]
    (tmp_path / "run" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    before = RunRecord(tmp_path / "run")
    lines = (tmp_path / "run" / name).read_text().splitlines()
    (tmp_path / "run" / name).write_text("\n".join([*lines[:1], *ODD[name], *lines[1:]]))
    page.write_page([tmp_path / "run"], tmp_path / "page.html")
    after, text = RunRecord(tmp_path / "run"), (tmp_path / "page.html").read_text()
    assert after.events == before.events and after.samples == before.samples and after.state == before.state
    assert after.seconds == before.seconds and after.last_evaluation == before.last_evaluation
    assert after.curves.keys() == before.curves.keys() and after.skipped == before.skipped
    for layer, of in before.loads.items():
        np.testing.assert_array_equal(after.loads[layer][1], of[1])
    assert "<td>_$</td>" in text and f"left out: {tmp_path / 'run' / name}: " in text


def test_a_directory_without_a_run_is_refused(tmp_path, capsys):
    assert run_report.main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    with pytest.raises(ConfigError):
        RunRecord(tmp_path)


def test_a_file_of_a_run_that_cannot_be_read_is_not_taken_for_the_page(runs, tmp_path, capsys):
    shutil.copy(runs.first / "config.json", tmp_path)
    (tmp_path / "metrics.jsonl").mkdir()
    assert run_report.main([str(tmp_path)]) == 2
    said = f"{tmp_path}/metrics.jsonl: cannot be read (Is a directory); make it readable"
    assert capsys.readouterr().err == f"run_report: {said}\n"


def test_a_report_that_takes_too_long_is_not_called_unreadable(runs, tmp_path):
    def late():
        raise TimeoutError("it takes longer than a second")

    with pytest.raises(TimeoutError, match="longer than a second"):
        page.write_page([runs.first], tmp_path / "report.html", progress=late)


def test_a_list_that_does_not_fit_the_layers_is_one_line(runs, tmp_path, capsys):
    shutil.copytree(runs.first, tmp_path, dirs_exist_ok=True)
    values = json.loads((runs.first / "config.json").read_text())
    layers = values["num_layers"] + 1
    (tmp_path / "config.json").write_text(json.dumps(values | {"num_layers": layers}))
    assert run_report.main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/config.json: window has {layers - 1} entries, not {layers}; restore the file" in said


def test_a_page_that_cannot_be_written_is_one_line(runs, capsys):
    assert run_report.main([str(runs.first), "--output", "/proc/x.html"]) == 2
    assert capsys.readouterr().err.startswith("run_report: --output /proc/x.html: cannot be written")


def test_a_file_that_is_no_page_is_not_replaced(runs, capsys):
    rows = (runs.first / "metrics.jsonl").read_bytes()
    assert run_report.main([str(runs.first), "--output", str(runs.first / "metrics.jsonl")]) == 2
    assert "metrics.jsonl: is not a file of this program" in capsys.readouterr().err
    assert (runs.first / "metrics.jsonl").read_bytes() == rows


def test_a_page_that_somebody_else_wrote_is_not_replaced(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    foreign = tmp_path / "report.html"
    foreign.write_text("<!doctype html><title>mine</title>")
    assert run_report.main([str(runs.first), str(runs.second)]) == 2
    assert "report.html: is not a file of this program" in capsys.readouterr().err
    assert foreign.read_text() == "<!doctype html><title>mine</title>"
    foreign.unlink()
    (picture := tmp_path / "report.loss.png").write_bytes(b"mine")
    assert run_report.main([str(runs.first), str(runs.second), "--png"]) == 2
    assert picture.read_bytes() == b"mine" and not foreign.exists()
    picture.unlink()
    assert [run_report.main([str(runs.first), str(runs.second), "--png"]) for _ in range(2)] == [0, 0]
