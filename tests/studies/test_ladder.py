"""The ladder: its order of runs, the branches of a rung, what is refused, and its table of losses."""

import json
import shutil
import sys

import pytest

from moh_lm.checks import config_problems
from moh_lm.config import ConfigError
from moh_lm.data.files import write_json
from moh_lm.flags import parse_config
from studies import ladder, ladder_report, rungs, runs
from tests.studies.written_runs import begin

SIZES = ("1M", "3M", "10M")


def make(out, *more):
    """({size: runs}, {directory: Config}) of a ladder of three small rungs."""
    given = [str(out), "--data-dir", "data", "--rungs", "10M", "1M", "3M", "1M", "--num-layers", "1", *more]
    flags = ladder.parse_arguments(given)
    found = rungs.rungs_of(flags, flags.rungs)
    return found, {run.directory: parse_config(run.arguments)[0] for of in found.values() for run in of}


def finish(run, config, loss=3.0):
    """Leave the directory of a complete run."""
    begin(run)
    run.directory.mkdir()
    write_json(run.directory / "config.json", config.to_dict())
    row = {"step": run.iterations, "evaluation": {"a": loss - 1, "b": loss + 1}}
    (run.directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")


def test_a_rung_waits_for_those_before_it_and_a_branch_for_its_run(tmp_path, monkeypatch):
    found, configs = make(tmp_path)
    branches, order = {}, []
    monkeypatch.setattr(rungs, "make_branch", lambda run, stable, config: branches.update({run.name: stable.name}))
    while run := rungs.next_run(found, configs, set(), {}):
        assert rungs.next_run(found, configs, {run.directory}, {}) != run
        order.append(run.name)
        finish(run, configs[run.directory])
    assert order == [f"{size}/tokens-{ratio}" for size in SIZES for ratio in ("20", "10", "5")]
    assert branches == {name: f"{name.split('/')[0]}/tokens-20" for name in order if not name.endswith("-20")}


def test_the_report_has_a_row_for_every_complete_run(tmp_path, capsys):
    found, configs = make(tmp_path)
    for size, loss in zip(SIZES, (3.0, 2.5), strict=False):  # none of 10M
        for run in found[size]:
            finish(run, configs[run.directory], loss)
    (found["3M"][0].directory / "metrics.jsonl").write_text("")  # goes on
    assert ladder.main([str(tmp_path), "--data-dir", "data", "--report"]) == 0
    lines = (tmp_path / "REPORT.md").read_text().splitlines()
    assert "\n".join(lines) in capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [row[:2] for row in rows] == [["1M", "5"], ["1M", "10"], ["1M", "20"], ["3M", "5"], ["3M", "10"]]
    assert [row[-1] for row in rows] == ["3.0000"] * 3 + ["2.5000"] * 2
    whole = found["1M"][0]
    tokens = whole.iterations * configs[whole.directory].run.tokens_per_iteration
    assert rows[2][2] == f"{tokens:,}" and int(rows[0][2].replace(",", "")) * 4 == tokens


def test_odd_folders_end_no_report(tmp_path, capsys):
    found, configs = make(tmp_path)
    whole = found["1M"][0]
    finish(whole, configs[whole.directory])
    for name in ("1M/tokens-many", "backup/tokens-20", "3M/tokens-20"):
        shutil.copytree(whole.directory, tmp_path / "runs" / name)
    (tmp_path / "runs/3M/tokens-20/config.json").write_text("{")
    ladder_report.write(tmp_path)
    rows = [line for line in (tmp_path / "REPORT.md").read_text().splitlines() if line.startswith("| 1M")]
    assert len(rows) == 1 and "| 3M" not in (tmp_path / "REPORT.md").read_text()
    assert f"left out: {tmp_path}/runs/3M/tokens-20/config.json: is not a configuration" in capsys.readouterr().err


def test_a_branch_begins_where_the_stable_run_saves(tmp_path):
    found, configs = make(tmp_path, "--vocab-size", "64")
    for whole, *branches in found.values():
        stable = configs[whole.directory]
        assert config_problems(stable, world_size=1) == []
        for run in branches:
            begins = run.iterations - configs[run.directory].optimizer.decay(run.iterations)
            assert begins % stable.reliability.save_interval == 0
            assert stable.optimizer.warmup_iters <= begins < whole.iterations - stable.optimizer.decay(whole.iterations)


def test_flags_win_over_those_of_the_ladder_or_are_refused(tmp_path):
    for config in make(tmp_path, "--warmup-iters", "7", "--eval-interval", "20")[1].values():
        assert (config.optimizer.warmup_iters, config.run.eval_interval) == (7, 20)
    file = tmp_path / "flags.yaml"
    file.write_text("preset: 1M\n")
    widths = ("--widths", "32", "64")
    for more, words in [
        (["--save-interval", "3"], "--save-interval: the ladder sets it; give none, since branches begin"),
        (["--config", str(file)], "--preset: the ladder sets it"),
        ([*widths, "--hidden-size", "64"], "--hidden-size: the ladder sets it; give --widths"),
        ([*widths, "--learning-rate", "1e-3"], "--learning-rate: the ladder sets it; give --rates"),
        (["--rates", "1e-3"], "--rates: needs --widths"),
    ]:
        with pytest.raises(ConfigError, match=words):
            make(tmp_path, *more)
    given = ladder.parse_arguments([str(tmp_path), "--data-dir", "data", *widths, "--save-interval", "3"])
    assert given.widths == [32, 64]


def test_a_warm_up_that_leaves_a_branch_no_room_is_refused(tmp_path, capsys):
    flags = [str(tmp_path), "--data-dir", "data", "--rungs", "1M", "--num-layers", "1", "--warmup-iters", "300"]
    assert ladder.main(flags) == 2
    assert "1M/tokens-5: --decay-iters 62: must be between 0 and 10" in capsys.readouterr().err


def test_a_rung_has_the_flags_of_those_that_are_there(tmp_path, capsys):
    given = [str(tmp_path), "--data-dir", "data", "--num-layers", "1", "--rungs"]
    (run, *_), *_ = rungs.rungs_of(ladder.parse_arguments([*given, "1M"]), ["1M"]).values()
    begin(run)
    run.directory.mkdir()
    assert ladder.main([*given, "3M", "--weight-decay", "0.7"]) == 2  # the table would be of both
    assert "1M/tokens-20.log: its run has other flags" in capsys.readouterr().err
    assert ladder.main([*given, "1M", "3M", "--num-key-value-heads", "4"]) == 2  # 3M has six heads
    assert "3M/tokens-20: --num-key-value-heads 4: must divide" in capsys.readouterr().err


def test_a_rung_of_a_preset_with_other_heads_is_refused(tmp_path, capsys):
    given = [str(tmp_path), "--data-dir", "data", "--rungs", "1M"]
    (run, *_), *_ = rungs.rungs_of(ladder.parse_arguments(given), ["1M"]).values()
    begin(run)
    log = run.log.read_text()
    run.log.write_text(log.replace("--num-shared-heads 1 1 1 1 1 ", "--num-shared-heads 2 2 2 2 2 "))
    assert run.log.read_text() != log and ladder.main(given) == 2
    assert "1M/tokens-20.log: its run has other flags" in capsys.readouterr().err


def test_two_commands_do_not_train_in_one_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("moh_lm.supervise.run_directory.LOCK_SECONDS", 0)
    with runs.lock_directory(tmp_path):
        assert ladder.main([str(tmp_path), "--data-dir", "data", "--rungs", "1M"]) == 2
    assert f"OUT {tmp_path}: another run is writing to it" in capsys.readouterr().err


def test_a_branch_that_cannot_be_made_ends_the_command(tmp_path, monkeypatch, capsys, programs):
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    found, configs = make(tmp_path)
    stable, branch, *_ = found["1M"]

    def train_all(*_):
        rungs.make_branch(branch, stable, configs[branch.directory])

    monkeypatch.setattr(runs, "train_all", train_all)
    given = [str(tmp_path), "--data-dir", "data", "--rungs", "1M", "--num-layers", "1"]
    assert ladder.main(given) == 1
    assert "tools/branch.py" in capsys.readouterr().err


def test_the_losses_of_widths_stand_under_their_rates(tmp_path, capsys):
    given = [str(tmp_path), "--data-dir", "data", "--widths", "32", "64", "--rates", "1e-3", "2e-3"]
    for number, run in enumerate(rungs.width_runs(ladder.parse_arguments(given))):
        finish(run, parse_config(run.arguments)[0], loss=number)
    ladder_report.write_widths(tmp_path)
    assert capsys.readouterr().out.splitlines()[2:5] == [
        "| 32 | 32 | 0.0000 | 1.0000 |", "| 64 | 32 | 2.0000 | 3.0000 |", "| 64 | 64 | 4.0000 | 5.0000 |"
    ]  # fmt: skip
