"""The ladder: its order of runs, its law against losses that follow one, and predictions that come before the runs."""

import json

import numpy as np
import pytest

from launch.ladder import parse_arguments
from launch.work import ladder, ladder_report
from moh_lm.checks import config_problems
from moh_lm.data.files import write_json
from moh_lm.flags import parse_config

LAW = (1.7, 6.0, 0.15, -0.05)  # E, a, alpha, s


def make(out, *more):
    """(flags, {size: runs}, {directory: Config}) of a ladder of three small rungs."""
    given = [str(out), "--data-dir", "data", "--rungs", "10M", "1M", "3M", "1M", "--num-layers", "1", *more]
    flags = parse_arguments(given)
    rungs = ladder.rungs_of(flags, flags.others)
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


def test_the_interval_holds_losses_that_follow_the_law_nine_times_of_ten():
    random, compute = np.random.default_rng(1), np.geomspace(1e12, 1e15, 4).repeat(3)
    ratio, held = np.tile([5.0, 10.0, 20.0], 4), []
    for _ in range(60):
        losses = law(compute * ratio, ratio) + random.normal(0, 0.01, 12)
        points = [ladder_report.Point("1M", *row) for row in zip(ratio, compute * ratio, losses, strict=True)]
        ((_, low, high),) = ladder_report.predicted(points, [ladder_report.Point("3M", 10.0, 1e17)])
        held.append(low <= law(1e17, 10.0) + random.normal(0, 0.01) <= high)
    assert np.mean(held) >= 0.75
