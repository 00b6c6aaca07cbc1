"""The ladder: its order of runs, its law against losses that follow one, and predictions that come before the runs."""

import json

import numpy as np
import pytest

from launch import ladder as command
from launch.ladder import parse_arguments
from launch.work import ladder, ladder_report, runs
from moh_lm.checks import config_problems
from moh_lm.config import ConfigError
from moh_lm.data.files import write_json
from moh_lm.flags import parse_config

LAW = (1.7, 6.0, 0.15, -0.05)  # E, a, alpha, s


def make(out, *more):
    """(flags, {size: runs}, {directory: Config}) of a ladder of three small rungs."""
    given = [str(out), "--data-dir", "data", "--rungs", "10M", "1M", "3M", "1M", "--num-layers", "1", *more]
    flags = parse_arguments(given)
    rungs = ladder.rungs_of(flags)
    return flags, rungs, {run.directory: parse_config(run.arguments)[0] for runs in rungs.values() for run in runs}


def finish(run, config):
    """Leave the directory of a complete run, whose loss follows the law."""
    run.directory.mkdir(parents=True)
    run.log.write_text(" ".join(run.arguments))
    write_json(run.directory / "config.json", config.to_dict())
    point = ladder_report.point_of(config, run.directory)
    row = {"step": run.iterations, "evaluation": {"a": law(point.compute, point.ratio)}}
    (run.directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")


def law(compute, ratio):
    floor, a, alpha, s = LAW
    return floor + np.exp(a - alpha * np.log(compute) + s * np.log(ratio))


def test_each_rung_waits_for_those_before_it_and_is_predicted_before_it_begins(tmp_path, monkeypatch):
    flags, rungs, configs = make(tmp_path)
    branches, order = {}, []
    monkeypatch.setattr(ladder, "make_branch", lambda run, stable, config: branches.update({run.name: stable.name}))
    while run := ladder.next_run(rungs, configs, flags, set(), {}):
        assert ladder.next_run(rungs, configs, flags, {run.directory}, {}) != run
        assert (tmp_path / "predictions/10M.json").exists() == run.name.startswith("10M")
        order.append(run.name)
        finish(run, configs[run.directory])
    ratios = ("20", "10", "5")
    assert order == [f"{size}/tokens-{ratio}" for size in ("1M", "3M", "10M") for ratio in ratios]
    assert branches == {name: f"{name.split('/')[0]}/tokens-20" for name in order if not name.endswith("-20")}
    ladder_report.write(tmp_path)
    for row in ladder_report.predictions(tmp_path).values():
        assert row["loss"] == pytest.approx(law(row["flops"], row["tokens_per_parameter"]), abs=0.02)
    assert (tmp_path / "REPORT.md").read_text().count("+00:00") == 3
    assert (tmp_path / "predictions/30M.json").exists()


def test_a_branch_begins_where_the_stable_run_saves_and_after_its_warm_up(tmp_path):
    _, rungs, configs = make(tmp_path, "--vocab-size", "64")
    for whole, *branches in rungs.values():
        stable = configs[whole.directory]
        assert config_problems(stable, world_size=1) == []
        for run in branches:
            begins = run.iterations - configs[run.directory].optimizer.decay(run.iterations)
            assert begins % stable.reliability.save_interval == 0
            assert stable.optimizer.warmup_iters <= begins < whole.iterations - stable.optimizer.decay(whole.iterations)


def test_flags_win_over_those_of_the_ladder_or_are_refused(tmp_path):
    _, rungs, configs = make(tmp_path, "--warmup-iters", "7", "--eval-interval", "20")
    for config in configs.values():
        assert (config.optimizer.warmup_iters, config.run.eval_interval) == (7, 20)
    file = tmp_path / "flags.yaml"
    file.write_text("preset: 1M\n")
    widths = ("--widths", "32", "64")
    for more, words in [
        (["--save-interval", "3"], "--save-interval: the ladder sets it; give none, since branches begin"),
        (["--config", str(file)], "--preset: the ladder sets it"),
        ([*widths, "--hidden-size", "64"], "--hidden-size: the ladder sets it; give --widths"),
        ([*widths, "--learning-rate", "1e-3"], "--learning-rate: the ladder sets it; give --rates"),
        (["--rates", "1e-3"], "--rates: are those of --widths"),
    ]:
        with pytest.raises(ConfigError, match=words):
            make(tmp_path, *more)
    assert parse_arguments([str(tmp_path), "--data-dir", "data", *widths, "--save-interval", "3"]).widths == [32, 64]


def test_a_warm_up_that_leaves_a_branch_no_room_is_told_before_anything_is_trained(tmp_path, capsys):
    flags = [str(tmp_path), "--data-dir", "data", "--rungs", "1M", "--num-layers", "1", "--warmup-iters", "300"]
    assert command.main(flags) == 2
    assert "1M/tokens-5: --decay-iters 62: must be between 0 and 10" in capsys.readouterr().err


def test_runs_with_the_gates_of_a_former_preset_are_not_continued_with_others(tmp_path, monkeypatch, capsys):
    model = parse_config("--preset 1M --num-layers 1 --routing paper_scaled".split())[0].model
    monkeypatch.setattr(
        "moh_lm.flags.newest_model", lambda run, kind: (run, model if "/1M/" in str(run) else None)
    )
    flags = [str(tmp_path), "--data-dir", "data", "--num-layers", "1", "--rungs", "1M"]
    assert command.main([*flags, "3M"]) == 2
    assert f"{tmp_path}: its runs would have the gates of paper_scaled and of sigmoid" in capsys.readouterr().err
    monkeypatch.setattr(ladder, "train_all", lambda *_: {})
    assert command.main(flags) == 0  # all that is there is of one form


def test_a_rung_begins_with_the_flags_of_all_that_are_there_and_with_none_that_a_later_one_refuses(tmp_path, capsys):
    given = [str(tmp_path), "--data-dir", "data", "--num-layers", "1", "--rungs"]
    (run, *_), *_ = ladder.rungs_of(parse_arguments([*given, "1M"])).values()
    run.directory.mkdir(parents=True)
    run.log.write_text(" ".join(run.arguments) + "\n")
    assert command.main([*given, "3M", "--weight-decay", "0.7"]) == 2  # the law would be of both
    assert "1M/tokens-20.log: its run has other flags" in capsys.readouterr().err
    assert command.main([*given, "1M", "3M", "--num-key-value-heads", "4"]) == 2  # 3M has six heads
    assert "3M/tokens-20: --num-key-value-heads 4: must divide" in capsys.readouterr().err


def test_two_commands_do_not_train_in_one_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("moh_lm.supervise.run_directory.LOCK_SECONDS", 0)
    with runs.lock_directory(tmp_path):
        assert command.main([str(tmp_path), "--data-dir", "data", "--rungs", "1M"]) == 2
    assert f"OUT {tmp_path}: another run is writing to it" in capsys.readouterr().err


def test_a_branch_that_cannot_be_made_ends_the_command(tmp_path, monkeypatch, capsys):
    flags, rungs, configs = make(tmp_path)
    stable, branch, *_ = rungs["1M"]

    def train_all(*_):
        ladder.make_branch(branch, stable, configs[branch.directory])

    monkeypatch.setattr(ladder, "train_all", train_all)
    given = [str(tmp_path), "--data-dir", "data", "--rungs", "1M", "--num-layers", "1"]
    assert command.main(given) == 1
    assert "tools/branch.py" in capsys.readouterr().err


def test_the_interval_holds_losses_that_follow_the_law_nine_times_of_ten():
    random, compute = np.random.default_rng(1), np.geomspace(1e12, 1e15, 4).repeat(3)
    ratio, held = np.tile([5.0, 10.0, 20.0], 4), []
    for _ in range(60):
        losses = law(compute * ratio, ratio) + random.normal(0, 0.01, 12)
        points = [ladder_report.Point("1M", *row) for row in zip(ratio, compute * ratio, losses, strict=True)]
        ((_, low, high),) = ladder_report.predicted(points, [ladder_report.Point("3M", 10.0, 1e17)])
        held.append(low <= law(1e17, 10.0) + random.normal(0, 0.01) <= high)
    assert np.mean(held) >= 0.75
