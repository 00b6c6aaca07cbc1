"""The page of a run: what it says of a run that was resumed, that skipped steps and that was killed."""

import json
import re
import shlex
import shutil
import xml.etree.ElementTree as xml
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from moh_lm.config import ConfigError
from moh_lm.flags import parse_config
from moh_lm.monitor.report import page, pictures, tables
from moh_lm.monitor.report.series import POINTS, RunRecord, training_seconds
from tests.vision.cases import parsed
from tools import run_report

FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 8 --num-shared-heads 2 3 --num-active-routed-heads 2
    --data-mix web=2.5 <b>=1 --batch-tokens 4K --seq-length 64 --train-iters 100000 --learning-rate 1e-3 --data-dir d"""
STEPS = 1001  # rows; the last one is not complete
EVENTS = (("started", 0), ("saved", 100), ("skipped", 305), ("resumed", 400), ("alarm", 700))
SURROUNDINGS = {"device": "cpu", "ranks": 1, "versions": {}}  # of a start
SINK = {"web": [0.2, None], "<b>": [0.4, 0.1]}


def training_record(step):
    return {
        "step": step, "loss": 3 + 1 / step, "learning_rate": 1e-3, "grad_norm": 1.0 if step != 500 else None,
        "tokens": 4096 * step, "source_loss": {"web": 3 + 1 / step, "<b>": 4.0}, "tokens_per_second": 2048.0,
        "source_bits_per_byte": {"web": 1.0}, "skipped_steps": int(step == 305),
        "heads": {"layer": [0, 1], "load": [[0.25] * 6, [0.5] * 5], "a1": [0.5, None], "entropy": [1.0, 0.5]}
        if step < 9 else {  # an older version left out layers whose heads are all shared, and gates
            "layer": [0, 1, 3], "load": [[0.25] * 6, [0.5] * 5, []], "a1": [0.5, None, None],
            "entropy": [1.0, 0.5, None], "gate_rms": [0.2, 0.3, 1.5],
        },
        "runtime": {"seconds": {"data": 0.5, "forward_backward": 1.0}},
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two run directories: one as above, killed; a second one with another rate, complete."""
    found = SimpleNamespace(folder=tmp_path_factory.mktemp("runs"))
    for name, more in (("first", []), ("second", ["--learning-rate", "2e-3", "--train-iters", str(STEPS - 1)])):
        run = found.folder / name
        run.mkdir()
        config, _ = parse_config([*FLAGS.split(), *more])
        (run / "config.json").write_text(json.dumps(config.to_dict()))
        rows = [json.dumps(training_record(step)) for step in range(1, STEPS)]
        rows.insert(800, json.dumps({"step": 800, "evaluation": {"web": 3.5}, "evaluation_mean": 3.5, "sink": SINK}))
        (run / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 1001, "lo')
        events = [*EVENTS, ("complete", STEPS - 1)] if more else EVENTS
        times = "2026-01-01T00:00:00Z"
        facts = {"started": SURROUNDINGS}
        lines = [
            json.dumps({"time": times, "event": event, "step": step, **facts.get(event, {"why": "<i>"})})
            for event, step in events
        ]
        (run / "events.jsonl").write_text("\n".join(lines) + "\n")
        setattr(found, name, run)
    return found


def test_a_curve_has_the_means_of_neighbouring_rows(runs):
    record = RunRecord(runs.first)
    steps, values = record.curves["loss"]
    ends = np.linspace(0, STEPS - 1, POINTS + 1).astype(int)
    assert steps.tolist() == ends[1:].tolist()
    expected = [np.mean([3 + 1 / step for step in range(a + 1, b + 1)]) for a, b in zip(ends, ends[1:], strict=False)]
    np.testing.assert_allclose(values, expected, rtol=1e-12)
    assert record.seconds == pytest.approx(2 * (STEPS - 1)) and record.skipped == 1


def test_reading_a_long_log_reports_progress(runs):
    progress = Mock()
    RunRecord(runs.second, progress=progress)
    assert progress.call_count >= STEPS - 1


def test_a_branch_begins_where_it_left_its_parent(runs, tmp_path):
    shutil.copytree(runs.first, tmp_path / "run")
    rows = (runs.first / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(rows[609:]))  # from step 610 on
    for first, steps in (("resumed", 400), ("started", STEPS - 1)):  # or this run itself, whose first save is unknown
        events = [json.dumps({"event": event, "step": 600, **SURROUNDINGS}) + "\n" for event in (first, "resumed")]
        (tmp_path / "run" / "events.jsonl").write_text("".join(events))
        assert RunRecord(tmp_path / "run").seconds == pytest.approx(2 * steps)


def test_figures_of_heads_are_those_of_their_layers(runs):
    record = RunRecord(runs.first)
    assert {layer: values[-1].tolist() for layer, (_, values) in record.loads.items()} == {0: [0.25] * 6, 1: [0.5] * 5}
    last = {key: {layer: values[-1] for layer, (_, values) in of.items()} for key, of in record.head_figures.items()}
    assert last["gate_rms"] == pytest.approx({0: 0.2, 1: 0.3, 3: 1.5}) and last["entropy"] == {0: 1.0, 1: 0.5}
    assert last["sink"] == pytest.approx({0: 0.3, 1: 0.1})  # means over sources


def test_it_says_how_a_run_stands(runs):
    assert RunRecord(runs.first).state == "at step 1,000 of 100,000; it is still running, or was killed"
    assert RunRecord(runs.second).state == "complete after step 1,000 of 1,000"


def test_an_end_that_a_resume_undid_is_no_end(runs, tmp_path):
    shutil.copytree(runs.first, tmp_path / "run")
    for step, event in ((1200, "failed"), (900, "resumed")):
        with open(tmp_path / "run" / "events.jsonl", "a") as file:
            file.write(json.dumps({"time": "2026-01-01T00:00:00Z", "event": event, "step": step}) + "\n")
    assert RunRecord(tmp_path / "run").state.startswith("at step 1,000 of")


def test_a_complete_run_that_is_restarted_stays_complete(runs, tmp_path):
    shutil.copytree(runs.second, tmp_path / "run")
    with open(tmp_path / "run" / "events.jsonl", "a") as file:
        file.write(json.dumps({"time": "2026-01-01T00:00:00Z", "event": "resumed", "step": STEPS - 1}) + "\n")
    assert RunRecord(tmp_path / "run").state == "complete after step 1,000 of 1,000"


def test_tokens_count_both_lengths_after_a_resume_changed_it(runs, tmp_path):
    shutil.copytree(runs.first, tmp_path / "run")
    config, _ = parse_config([*FLAGS.split(), "--seq-length", "128", "--batch-tokens", "8K", "--train-iters", "2000"])
    (tmp_path / "run" / "config.json").write_text(json.dumps(config.to_dict()))
    assert dict(tables.summary(RunRecord(tmp_path / "run")))["tokens"] == "4M of 12M"


def test_a_start_without_a_checkpoint_undoes_what_was_before(runs, tmp_path):
    shutil.copytree(runs.first, tmp_path / "run")
    with open(tmp_path / "run" / "events.jsonl", "w") as file:
        for step, event in ((0, "started"), (35, "skipped"), (1200, "failed"), (0, "started"), (35, "skipped")):
            facts = {"device": "cpu", "ranks": 1, "versions": {}} if event == "started" else {}
            file.write(json.dumps({"time": "2026-01-01T00:00:00Z", "event": event, "step": step, **facts}) + "\n")
    record = RunRecord(tmp_path / "run")
    assert record.state.startswith("at step 1,000 of 100,000; it is still running")
    assert [event["event"] for event in record.standing_events()] == ["started", "started", "skipped"]


def test_events_that_a_resume_undid_are_not_marked(runs, tmp_path):
    shutil.copytree(runs.first, tmp_path / "run")
    more = [("skipped", 901), ("skipped", 990), ("resumed", 900), ("skipped", 950), ("skipped", 951)]
    with open(tmp_path / "run" / "events.jsonl", "a") as file:
        file.writelines(json.dumps({"time": f"t{step}", "event": event, "step": step}) + "\n" for event, step in more)
    record = RunRecord(tmp_path / "run")
    skipped = [event["step"] for event in record.standing_events() if event["event"] == "skipped"]
    assert skipped == [305, 950, 951]
    rows = tables.event_rows(record.told_events())[-3:]
    assert [row[:3] for row in rows] == [("t901", 901, "skipped"), ("t900", 900, "resumed"), ("t950", 950, "skipped")]
    assert rows[0][3].startswith("2 steps up to step 990; the last: ") and "undone: by a later start" in rows[0][3]
    assert rows[2][3].startswith("2 steps up to step 951; the last: ") and "undone" not in rows[2][3]


def test_a_setting_that_a_killed_start_tried_is_not_shown_as_the_runs(runs, tmp_path):
    """Of three starts from step 900 the first and the last change the rate; a fourth goes on from step 950."""
    shutil.copytree(runs.first, tmp_path / "run")
    tried, kept = {"learning_rate": [1e-3, 0.5]}, {"learning_rate": [1e-3, 2e-3]}
    starts = [(900, tried), (900, None), (900, kept), (950, {"weight_decay": [0.1, 0.2]})]
    facts = {"device": "cpu", "ranks": 1, "versions": {}}
    with open(tmp_path / "run" / "events.jsonl", "a") as file:
        for step, changes in starts:
            change = [("training changed", {"changes": changes})] * bool(changes)
            for event, more in (*change, ("resumed", {}), ("started", facts)):
                file.write(json.dumps({"time": "t", "event": event, "step": step, **more}) + "\n")
    record = RunRecord(tmp_path / "run")
    changed = [event["changes"] for event in record.standing_events() if event["event"] == "training changed"]
    assert changed[-2:] == [kept, starts[-1][1]] and tried not in changed
    rows = [row[3] for row in tables.event_rows(record.told_events()) if row[2] == "training changed"]
    assert ["0.5" in row for row in rows[-3:]] == ["undone: by a later start" in row for row in rows[-3:]]
    assert "0.5" in rows[-3]


def test_damage_that_a_resume_found_is_marked(runs, tmp_path):
    shutil.copytree(runs.first, tmp_path / "run")
    with open(tmp_path / "run" / "events.jsonl", "a") as file:
        for step, event in ((900, "damaged"), (800, "resumed")):
            file.write(json.dumps({"time": "t", "event": event, "step": step}) + "\n")
    assert [event["event"] for event in RunRecord(tmp_path / "run").standing_events()][-2:] == ["damaged", "resumed"]


def test_the_facts_of_an_event_name_layer_0_too():
    event = {"time": "t", "event": "alarm over", "step": 3, "alarm": "gate drift", "layer": 0, "source": None}
    assert tables.facts_of(event) == "alarm: gate drift; layer: 0"


def test_a_page_that_cannot_be_written_is_one_line(runs, capsys):
    assert run_report.main([str(runs.first), "--output", "/proc/x.html"]) == 2
    assert capsys.readouterr().err.startswith("run_report: --output /proc/x.html: cannot be written")


def test_its_command_leads_to_the_same_configuration(runs):
    words = shlex.split(RunRecord(runs.first).command().replace("\\\n", ""))
    assert words[:3] == ["python", "-m", "moh_lm.pretrain"]
    assert parse_config(words[3:])[0].to_dict() == RunRecord(runs.first).config.to_dict()


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


def test_a_file_that_is_no_page_is_not_replaced(runs, capsys):
    rows = (runs.first / "metrics.jsonl").read_bytes()
    assert run_report.main([str(runs.first), "--output", str(runs.first / "metrics.jsonl")]) == 2
    assert "metrics.jsonl: is not a file of this program" in capsys.readouterr().err
    assert (runs.first / "metrics.jsonl").read_bytes() == rows


def test_an_interval_without_a_valid_step_has_neither_seconds_nor_tokens():
    rows = [{"tokens": 100 * n, "tokens_per_second": 0 if n in (2, 3) else 50} for n in range(1, 6)]
    assert training_seconds(rows, 0) == (6, 300)


def test_times_are_means_over_steps():
    """Of 12 steps, five took 1 s each, five 2 s and two 8 s; rows are means of intervals."""
    curves = dict.fromkeys((f"seconds/{part}" for part in tables.PARTS), (np.array([]), np.array([])))
    curves["seconds/data"] = np.array([5, 10, 12]), np.array([1.0, 2.0, 8.0])
    run = SimpleNamespace(curves=curves, config=SimpleNamespace(run=SimpleNamespace(log_interval=5)))
    assert tables.time_rows(run) == [[tables.PARTS["data"], f"{31 / 12:.4f}", "100.0%"]]


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


def test_the_axis_leaves_out_what_was_before_the_training():
    steps, values = np.arange(0, 101, 10), np.array([9.0, *np.linspace(4, 3, 10)])
    curves = {"training": (steps, values, {}), "held out": (steps[:1], values[:1], {})}
    (axis,) = pictures.lines(curves, "loss").axes
    assert axis.get_ylim() == pytest.approx((2.95, 4.05))
    (axis,) = pictures.lines({"held out": curves["held out"]}, "loss").axes  # a run that has only just begun
    assert axis.get_ylim()[0] < 9 < axis.get_ylim()[1]


def test_a_logarithmic_axis_has_more_than_one_label():
    steps = np.arange(100)
    for values, scale in ((np.linspace(0.5, 2, 100), "linear"), (np.geomspace(0.3, 9, 100), "log")):
        figure = pictures.lines({"norm": (steps, values, {})}, "norm", logarithmic=True)
        figure.draw_without_rendering()
        (axis,) = figure.axes
        low, high = axis.get_ylim()
        inside = [tick for tick in axis.get_yticks() if low <= tick <= high]
        assert axis.get_yscale() == scale and len(inside) >= 3


def test_of_many_layers_a_few_are_named():
    of_layers = {layer: (np.arange(3), np.full(3, layer)) for layer in range(24)}
    (axis,) = pictures.lines(page.layer_lines(of_layers), "load").axes
    named = [line.get_label() for line in axis.lines if not line.get_label().startswith("_")]
    assert len(axis.lines) == 24 and len(named) == 8 and {named[0], named[-1]} == {"layer 0", "layer 23"}


def test_the_map_of_loads_has_each_interval_at_its_steps():
    steps, values = np.array([60, 80, 100, 400]), np.array([[0.1], [0.2], [0.3], [0.4]])  # after a dense warm-up
    axis, *_ = pictures.load_map({0: (steps, values)}).axes
    (image,) = axis.images
    left, right, *_ = image.get_extent()
    row = np.ma.filled(image.get_array(), np.nan)[0]
    places = left + (np.arange(len(row)) + 0.5) * (right - left) / len(row)
    assert (left, right) == (0, 400)
    for step, load in ((20, np.nan), (50, 0.1), (70, 0.2), (90, 0.3), (110, 0.4), (250, 0.4), (390, 0.4)):
        np.testing.assert_equal(row[np.abs(places - step).argmin()], load)


def test_events_of_a_kind_are_one_line_of_a_picture_however_many():
    marks = {kind: range(30_000) for kind in ("skipped", "alarm")}
    curve = {"loss": (np.arange(1, 30_001), np.ones(30_000), {})}
    (axis,) = pictures.lines(curve, "loss", marks).axes
    assert [line.get_label() for line in axis.lines] == ["loss", "skipped (30000)", "alarm (30000)"]
    places = axis.lines[1].get_xdata()
    assert 700 < len(set(places)) <= pictures.COLUMNS and places.min() == 0 and places.max() > 29_900


def test_many_alarms_of_a_kind_are_one_row_of_the_table():
    events = [{"event": "alarm", "alarm": "collapse", "step": n // 3, "layer": n % 3} for n in range(30)]
    said = "30 events up to step 9; the last: alarm: collapse; layer: 2"
    assert tables.event_rows(events) == [("", 0, "alarm", said)]
    several = [{"event": "alarm", "alarm": str(n % 2), "step": n} for n in range(1000)]
    assert [row[1] for row in tables.event_rows(several)] == list(range(700, 1000))


def test_many_sources_have_their_own_colours_and_leave_room_for_the_curves():
    heights = []
    for count in (2, 30):
        names = [f"dolma-common-crawl-{number:02d}" for number in range(count)]
        curves = {f"loss/{name}": (np.arange(3), np.ones(3)) for name in names}
        curves |= {"held/" + name: (np.arange(3), np.ones(3)) for name in [*names, "of-the-decay"]}
        series = page.by_source(SimpleNamespace(curves=curves), "loss/", "held/")
        figure = pictures.lines(series, "loss")
        (axis,) = figure.axes
        labels = [line.get_label() for line in axis.lines if line.get_label() != "_"]
        assert labels == [*names, "of-the-decay, held out"]
        assert len({str(line.get_color()) for line in axis.lines}) == count + 1
        figure.draw_without_rendering()
        heights.append(axis.get_position().height * figure.get_figheight())
    assert heights[1] > 0.8 * heights[0]


def test_a_name_with_bytes_that_are_no_text_has_a_picture():
    assert "a? run" in pictures.svg(pictures.lines({"a\udc80 run": (np.arange(3), np.ones(3), {})}, "loss"), "loss")


@pytest.mark.parametrize("name", ["_hidden", "a$b$c", "cost_$5", "x^2", r"\frac{1}{2}", "$\\nosuch$", "100%", "<&>"])
def test_the_name_of_a_source_is_text(name):
    series = {name: (np.arange(3), np.ones(3), {}), f"{name}, held out": (np.arange(3), np.ones(3), {})}
    root = xml.fromstring(pictures.svg(pictures.lines(series, "loss"), "loss").replace("xlink:href", "href"))
    texts = ["".join(element.itertext()).strip() for element in root.iter() if element.tag.endswith("text")]
    assert name in [text.lstrip("\u200b") for text in texts]


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
