"""What is read of a run's directory: its curves, events and state, also after resumes and kills."""

import json
import shlex
import shutil
from unittest.mock import Mock

import numpy as np
import pytest

from moh_lm.flags import parse_config
from moh_lm.monitor.report import tables
from moh_lm.monitor.report.curves import POINTS
from moh_lm.monitor.report.series import RunRecord, training_seconds
from tests.monitor.reported import STEPS, SURROUNDINGS


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


def test_its_command_leads_to_the_same_configuration(runs):
    words = shlex.split(RunRecord(runs.first).command().replace("\\\n", ""))
    assert words[:3] == ["python", "-m", "moh_lm.pretrain"]
    assert parse_config(words[3:])[0].to_dict() == RunRecord(runs.first).config.to_dict()


def test_an_interval_without_a_valid_step_has_neither_seconds_nor_tokens():
    rows = [{"tokens": 100 * n, "tokens_per_second": 0 if n in (2, 3) else 50} for n in range(1, 6)]
    assert training_seconds(rows, 0) == (6, 300)
