"""The runs that a comparison starts: their speeds, their devices and threads, and how they ended."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from moh_lm.checks import config_problems
from moh_lm.flags import parse_config
from studies import atlas as command
from studies import comparison, runs, times
from studies.atlas_forms import VARIANTS
from tests.studies.planned import make, rows_of_steps, write_rows

# --- Times ---


@pytest.mark.parametrize(
    "given, sizes",
    [
        ("--ranks 2 --tensor-parallel-size 2 --schedule wsd --decay-iters 100 --warmup-iters 50 --sizes s", "s"),
        ("--micro-batch-size 16 --rates 0.5 --sizes m l", "ml"),  # s has half as many sequences in a batch
        ("--sizes l", "sl"),  # rates are tuned at s
    ],
)
def test_first_steps_have_the_layout_of_the_runs_and_a_schedule(given, sizes, tmp_path, monkeypatch):
    flags = [str(tmp_path), "--data-dir", "data", "--variants", "dense", *given.split()]
    plan, started = comparison.Comparison(command.parse_arguments(flags)), []

    def trained(next_run, jobs, ranks=1):
        while run := next_run(set(), {}):
            started.append(run.name.split("/")[2:])
            assert config_problems(parse_config(run.arguments)[0], ranks) == []
        return {}

    monkeypatch.setattr(times, "train_all", trained)
    times.measure(plan, plan.trained, VARIANTS[:1], 1)
    assert started == [[size, "dense", "round-1"] for size in sizes] and not plan.refused


def test_a_variant_is_timed_in_turns_with_the_dense_model(tmp_path, monkeypatch):
    """Rounds that an estimate or another command left are none of its own."""
    flags = [str(tmp_path), "--data-dir", "data", "--sizes", "s", "--rates", "1", "--variants", "dense", "gated-50"]
    plan, started = comparison.Comparison(command.parse_arguments(flags)), []

    def trained(next_run, jobs, ranks):
        while run := next_run(set(), {}):
            started.append("/".join(run.name.split("/")[-2:]))
            write_rows(run.directory, *rows_of_steps(100))
        return {}

    monkeypatch.setattr(times, "train_all", trained)
    dense, gated = plan.variants
    for variants, rounds, expected in (
        ([dense], 1, ["dense/round-1"]),
        ([gated], 2, ["dense/round-2", "gated-50/round-2", "dense/round-3", "gated-50/round-3"]),
        ([dense, gated], 2, []),
        ([dense], 3, []),
        ([dense, gated], 3, ["dense/round-4", "gated-50/round-4"]),
    ):
        times.measure(plan, plan.trained, variants, rounds)
        assert started == expected
        started.clear()
    assert {name: len(of) for of in times.read_times(tmp_path, "s", "dense").values() for name, of in of.items()} == {
        "dense": 4, "gated-50": 3
    }  # fmt: skip


def test_what_slows_most_of_a_round_changes_no_table_of_times(tmp_path):
    plan = make(tmp_path, "--sizes", "s")
    place = times.short_run(plan, plan.sizes[0], VARIANTS[0], 1).directory
    rows = rows_of_steps(500)
    for row in rows[5:]:
        row["tokens_per_second"] = 300
    write_rows(place.parents[1] / "dense/round-1", *rows_of_steps(1000))
    write_rows(place.parents[1] / "gated-50/round-1", *rows)
    (found,) = times.read_times(tmp_path, "s", "dense").values()
    assert found == {"dense": [1.0], "gated-50": [2.0]}


def test_odd_rounds_and_rows_end_no_table_of_times(tmp_path):
    plan = make(tmp_path, "--sizes", "s")
    place = times.short_run(plan, plan.sizes[0], VARIANTS[0], 1).directory
    odd = [0, None, "fast", True, math.nan]
    rows = rows_of_steps(500)
    for row, speed in zip(rows[4:], odd, strict=False):  # one interval is left
        row["tokens_per_second"] = speed
    write_rows(place.parents[1] / "gated-50/round-1", *rows)
    write_rows(place.parents[1] / "static-50/round-1", *rows[:-1], rows[-1] | {"tokens_per_second": 0})
    for name in ("round-1 (copy)", "round-", "round-x", "round-0"):
        write_rows(place.with_name(name), *rows_of_steps(7))
    place.with_name("round-9").write_text("a file")
    (found,) = times.read_times(tmp_path, "s", "dense").values()
    assert found == {"dense": [1.0], "gated-50": [2.0]}
    assert times.numbers_of_rounds(plan, plan.sizes[0]) == [1]


def test_speeds_are_measured_as_the_runs_are_trained(tmp_path, monkeypatch):
    program = tmp_path / "program"
    rows = "\n".join(map(json.dumps, rows_of_steps(9)))
    text = 'for last; do :; done; mkdir -p "$last"; echo "$OMP_NUM_THREADS" >> "$0.threads"\n'
    program.write_text(f"#!/bin/sh\n{text}echo '{rows}' > \"$last/metrics.jsonl\"\n")
    program.chmod(0o755)
    monkeypatch.setattr(runs.sys, "executable", str(program))
    monkeypatch.setattr(runs.torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given, used = [str(tmp_path / "out"), "--data-dir", "data", "--variants", "dense", "--sizes", "s"], []
    for flags, threads in (
        ("--jobs 2", ["1"]), ("--jobs 2", []), ("--jobs 2 --micro-batch-size 4", ["1"]),
        ("--micro-batch-size 4", [""]), ("--micro-batch-size 4 --ranks 2", [""]),
    ):  # fmt: skip
        plan = comparison.Comparison(command.parse_arguments([*given, *flags.split()]))
        times.measure(plan, plan.trained, VARIANTS[:1], 1)
        used += threads
        assert Path(f"{program}.threads").read_text().splitlines() == used
    assert plan.speed(plan.sizes[0]) == pytest.approx(9)


# --- Processes ---


def test_a_process_that_a_run_left_behind_is_none_of_the_runs(tmp_path, monkeypatch):
    coming = iter([runs.Run("one", tmp_path / "one", 1, [])])
    left = subprocess.Popen(["true"])
    os.waitid(os.P_PID, left.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(runs, "start", lambda run, ranks, share: subprocess.Popen(["sleep", "0.2"]))
    assert runs.train_all(lambda busy, codes: next(coming, None), 1) == {tmp_path / "one": 0}
    left.returncode = 0  # it was collected above


@pytest.mark.parametrize("last, code", [("failed", 70), ("stopped", 75), ("resumed", 1), (None, 1)])
def test_the_last_event_tells_how_a_run_of_several_ranks_ended(last, code, tmp_path, monkeypatch):
    path = tmp_path / "one" / "events.jsonl"
    path.parent.mkdir()
    path.write_text('{"step": 1, "event": "stopped"}\n')  # of an earlier start
    line = json.dumps({"step": 2, "event": last}) if last else ""
    monkeypatch.setattr(
        runs, "start", lambda *_: subprocess.Popen(["sh", "-c", 'echo "$1" >> "$2"; exit 1', "sh", line, path])
    )
    for ranks, expected in ((2, code), (1, 1)):
        coming = iter([runs.Run("one", path.parent, 1, [])])
        codes = runs.train_all(lambda busy, codes, coming=coming: next(coming, None), 1, ranks)
        assert codes == {path.parent: expected}


def test_runs_at_the_same_time_have_gpus_of_their_own(tmp_path, monkeypatch):
    shows = tmp_path / "shows"
    shows.write_text('#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES" >> "$0.all"\nsleep 0.5\n')
    shows.chmod(0o755)
    monkeypatch.setattr(runs.sys, "executable", str(shows))
    monkeypatch.setattr(runs.torch.cuda, "device_count", lambda: 5)
    for visible, names in ((None, ["0,1", "2,3"]), ("7,6,5,MIG-a,1", ["7,6", "5,MIG-a"])):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        flags = command.parse_arguments([str(tmp_path), "--data-dir", "data", "--ranks", "2"])
        assert runs.jobs_of(flags) == 2
        coming = [runs.Run(name, tmp_path / name, 1, []) for name in "abcd"]
        left = iter(coming)
        runs.train_all(lambda busy, codes, left=left: next(left, None), runs.jobs_of(flags), ranks=2)
        used = Path(f"{shows}.all").read_text().split()
        assert sorted(used[:2]) == sorted(used[2:]) == sorted(names)
        Path(f"{shows}.all").unlink()
    of_three = [share["CUDA_VISIBLE_DEVICES"] for share in runs.shares(3, ranks=2)]
    assert of_three == ["7,6", "5,MIG-a", "7,6"] and runs.shares(1, ranks=2) == [{}]


def test_runs_at_the_same_time_on_a_cpu_have_a_thread_each(monkeypatch):
    monkeypatch.setattr(runs.torch.cuda, "device_count", lambda: 0)
    for given, threads in ((None, "1"), ("3", "3")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert runs.shares(2, ranks=1) == [{"OMP_NUM_THREADS": threads}] * 2 and runs.shares(1, ranks=1) == [{}]
