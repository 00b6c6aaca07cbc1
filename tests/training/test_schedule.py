"""Learning rates, and branches of a stable run."""

import json
import math
from itertools import pairwise

import pytest

from moh_lm.checks.schedule import decay_problems
from moh_lm.config import OptimizerConfig
from moh_lm.data.files import read_json, write_json
from moh_lm.flags import parse_config
from moh_lm.training.schedule import learning_rate
from tests.distributed import run_ranks
from tests.training.runs import arguments, equal, events, left_after, losses, parameters, run
from tools import branch
from tools.branch import steps_below_the_peak


def test_the_learning_rate_at_every_corner():
    optimizer = OptimizerConfig(learning_rate=3e-4, min_learning_rate=3e-5, warmup_init_lr=1e-7, warmup_iters=2000)
    rates = [learning_rate(step, optimizer, 23_842) for step in range(23_842)]
    assert rates[0] == 1e-7
    assert rates[1] == pytest.approx(1e-7 + (3e-4 - 1e-7) / 2000, rel=1e-12)
    assert rates[2000] == max(rates) == 3e-4
    middle = (2000 + 23_842) // 2
    assert rates[middle] == pytest.approx((3e-4 + 3e-5) / 2, rel=1e-12)
    quarter = 2000 + (23_842 - 2000) / 4
    assert rates[7460] == pytest.approx(3e-5 + 2.7e-4 * (1 + math.cos(math.pi / 4 * (5460 / (quarter - 2000)))) / 2)
    assert all(a > b for a, b in pairwise(rates[2000:]))
    assert 3e-5 < rates[-1] < 3e-5 * (1 + 1e-6)
    assert learning_rate(23_842, optimizer, 23_842) == learning_rate(10**6, optimizer, 23_842) == 3e-5
    short = [learning_rate(step, optimizer, 100) for step in range(99)]
    assert short == rates[:99]  # a run that ends within its warm-up


@pytest.mark.parametrize(
    "shape, middle", [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", (1 + math.cos(math.pi / 2)) / 2)]
)
def test_wsd_is_stable_between_warm_up_and_decay(shape, middle):
    optimizer = OptimizerConfig(1e-3, 1e-4, 0.0, 10, schedule="wsd", decay_iters=20, decay_shape=shape)
    rates = [learning_rate(step, optimizer, 100) for step in range(101)]
    assert rates[:11] == pytest.approx([step * 1e-4 for step in range(11)])
    assert set(rates[10:81]) == {1e-3}
    assert rates[90] == pytest.approx(1e-4 + 9e-4 * middle) and rates[100] == 1e-4
    assert all(a > b for a, b in pairwise(rates[80:]))
    tenth = OptimizerConfig(1e-3, 1e-4, 0.0, 10, schedule="wsd")
    assert learning_rate(90, tenth, 100) == 1e-3 > learning_rate(91, tenth, 100)


WSD = "--schedule wsd --warmup-iters 1 --save-interval 1 --eval-interval 0 --log-interval 1".split()
FIRST, THEN = ("--data-mix", "even=1"), ("--decay-mix", "odd=1")
FOUR_STEPS = ("--train-iters", "4", "--decay-iters", "2")


@pytest.fixture(scope="module")
def decayed(data_dir, tmp_path_factory):
    """The directory of a run of four steps, the last two of which read another source than the first two."""
    directory = tmp_path_factory.mktemp("decayed")
    run_ranks(run, 1, arguments(data_dir, directory, *WSD, *FIRST, *THEN, *FOUR_STEPS))
    return directory


@pytest.mark.parametrize("step", [1, 3], ids=["before the decay", "in the decay"])
def test_a_run_whose_decay_swaps_sources_resumes(step, decayed, data_dir, tmp_path):
    left_after(step, decayed, tmp_path)
    run_ranks(run, 1, arguments(data_dir, tmp_path, *WSD, *FIRST, *THEN, *FOUR_STEPS))
    assert events(tmp_path, "resumed")[-1]["step"] == step
    assert equal(parameters(tmp_path), parameters(decayed))
    assert losses(tmp_path) == losses(decayed)


def test_a_branch_is_the_run_that_was_to_end_there(decayed, data_dir, tmp_path, capsys):
    """The stable run is meant for eight steps; its branch at step 2 decays over two, with another source."""
    stable, made = tmp_path / "stable", tmp_path / "branch"
    run_ranks(run, 1, arguments(data_dir, stable, *WSD, *FIRST, "--train-iters", "8", "--decay-iters", "2"), 3)
    (made / "checkpoints" / "copy-step-2.tmp").mkdir(parents=True)  # of a command that was killed
    assert branch.main([str(stable), "--at", "2", "--decay-iters", "2", "--output", str(made)]) == 0
    flags = capsys.readouterr().out.splitlines()[-1].split()
    assert flags[0] == "--checkpoint-dir" and flags[-2:] == ["--warmup-iters", "1"]  # which a preset would lengthen
    run_ranks(run, 1, arguments(data_dir, *flags[1:2], *WSD, *FIRST, *THEN, *flags[2:]))
    assert equal(parameters(made), parameters(decayed))
    assert losses(made) == losses(decayed)[2:]
    states = [read_json(directory / "checkpoints" / "step-4" / "state.json") for directory in (made, decayed)]
    guards = [state["guard"] for state in states]
    assert guards[0] == guards[1] and len(guards[0]["history"]["loss"]) == 2  # a loss of the other mix is no spike
    known = [[row for row in state["alarms"]["history"] if row[0] != "throughput"] for state in states]
    assert known[0] == known[1] and {len(values) for *_, values in known[0]} == {2}  # nor is a gate that moves a drift


@pytest.mark.parametrize(
    "schedule, at, decay, output, problem",
    [
        ("wsd", 1, 2, "branch", "--at 1: the learning rate is constant from step 2 to 6 only"),
        ("wsd", 7, 2, "branch", "--at 7: the learning rate is constant from step 2 to 6 only"),
        ("wsd", 5, 2, "branch", "checkpoints has no such step; its steps are 1, 4, 6, 7"),
        ("wsd", 6, 2, "branch", "--at 6: the learning rate had already decayed at step 5; give an earlier step"),
        ("wsd", 4, 0, "branch", "--decay-iters 0: must be 1 or above"),
        ("wsd", 4, 2, "checkpoints/branch", "checkpoints/branch: lies among the checkpoints of RUN"),
        ("wsd", 4, 2, "checkpoints", "checkpoints: lies among the checkpoints of RUN"),
        ("wsd --dense-warmup-iters 5", 4, 1, "branch", "the branch would end in the run's --dense-warmup-iters 5"),
        ("cosine", 4, 2, "branch", "was trained with --schedule cosine; only runs with wsd can branch"),
    ],
)
def test_a_branch_that_cannot_be_is_refused(schedule, at, decay, output, problem, tmp_path, capsys):
    flags = f"--data-dir data --checkpoint-dir run --train-iters 8 --warmup-iters 2 --schedule {schedule}"
    more = " --decay-iters 2" if schedule.startswith("wsd") else ""
    for step in (1, 4, 6, 7):
        place = tmp_path / "checkpoints" / f"step-{step}"
        place.mkdir(parents=True)
        write_json(place / "config.json", parse_config((flags + more).split())[0].to_dict())
    rates = {1: 1e-4, 3: 3e-4, 4: 3e-4, 5: 1e-4, 6: 3e-4}  # decayed at 5, and then extended
    log = [{"step": step, "learning_rate": rate} for step, rate in rates.items()] + [{"step": 4, "evaluation": {}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    given = ["--at", at, "--decay-iters", decay, "--output", tmp_path / output]
    assert branch.main([str(text) for text in (tmp_path, *given)]) == 2
    assert problem in capsys.readouterr().err


def test_a_run_that_went_on_with_a_higher_peak_has_not_decayed(tmp_path):
    optimizer = parse_config("--schedule wsd --warmup-iters 2 --learning-rate 3e-4".split())[0].optimizer
    for rates, below in (([1e-4, 1e-4, 3e-4], []), ([2e-4, 1e-4, 3e-4], [4])):
        log = [{"step": step, "learning_rate": rate} for step, rate in enumerate(rates, 3)]
        (tmp_path / "log").write_text("".join(json.dumps(row) + "\n" for row in log))
        assert steps_below_the_peak(tmp_path / "log", optimizer, 5) == below

def test_a_run_within_its_warm_up_needs_no_decay():
    assert decay_problems(OptimizerConfig(schedule="wsd", decay_iters=0, warmup_iters=20), 10) == []
