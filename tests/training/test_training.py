"""Whole small runs: losses, resumption, evaluation and logs, on one rank and on several."""

import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moh_lm import pretrain
from moh_lm.checkpoint.fragments import FragmentReader, full_parameters
from moh_lm.checkpoint.saver import find_step
from moh_lm.config import Config
from moh_lm.flags import parse_config
from moh_lm.monitor.log import RunLog
from moh_lm.run.loop import Run
from moh_lm.run.text import TEXT
from moh_lm.supervise import processes
from moh_lm.training.engine import Engine
from tests.distributed import run_ranks
from tests.running import rows, train_here

SIZES = """
    --num-layers 2 --hidden-size 32 --intermediate-size 64 --num-attention-heads 8 --vocab-size 64
    --seq-length 16 --batch-tokens 128 --micro-batch-size 2 --train-iters 7 --warmup-iters 2 --precision fp32
    --learning-rate 1e-2 --min-learning-rate 1e-3 --data-mix even=2.5 odd=1 --validation-fraction 0.1
    --log-interval 2 --save-interval 3 --eval-interval 4 --eval-samples 5
"""



def arguments(data_dir, directory, *more):
    return [*SIZES.split(), "--data-dir", str(data_dir), "--checkpoint-dir", str(directory), *more]


def run(flags, stop_after=None):
    """``train_here`` without the page of the run, whose pictures take two seconds."""
    return train_here(TEXT, parse_config(["--run-report", "false", *flags])[0], stop_after)


def losses(directory):
    return [row["loss"] for row in rows(directory) if "loss" in row]


def parameters(directory):
    return dict(full_parameters(find_step(directory)))


@pytest.fixture(scope="module")
def straight(data_dir, tmp_path_factory):
    """The run directory of an uninterrupted run on one rank."""
    directory = tmp_path_factory.mktemp("straight")
    run_ranks(run, 1, arguments(data_dir, directory))
    return directory


def test_a_run_learns_and_logs_every_interval_and_evaluation_once(straight):
    logged = rows(straight)
    assert [row["step"] for row in logged if "loss" in row] == [2, 4, 6, 7]
    evaluations = {row["step"]: row["evaluation"] for row in logged if "evaluation" in row}
    assert sorted(evaluations) == [0, 4, 7]
    for source in ("even", "odd"):
        assert evaluations[0][source] == pytest.approx(math.log(64), rel=0.02)  # untrained
        assert evaluations[7][source] < evaluations[0][source] - 0.5
    first = logged[1]
    assert first["consumed_samples"] == 16 and first["tokens"] == 256
    # 16 samples of 5:2: 11 or 12 of the first source.
    weighted = [sum(first["source_loss"][s] * n for s, n in (("even", k), ("odd", 16 - k))) / 16 for k in (11, 12)]
    assert min(abs(first["loss"] - value) for value in weighted) < 1e-12


def test_tensorboard_holds_the_same_figures_and_the_head_load(straight):
    events = EventAccumulator(str(straight / "tensorboard"))
    events.Reload()
    by_step = {row["step"]: row for row in rows(straight) if "loss" in row}
    tags = {"loss": "loss/train", "load_balance_loss": "loss/load_balance"}
    tags |= {key: f"optimization/{key}" for key in ("learning_rate", "grad_norm", "skipped_steps")}
    for key, tag in tags.items():
        got = {scalar.step: scalar.value for scalar in events.Scalars(tag)}
        assert got == pytest.approx({step: row[key] for step, row in by_step.items()}, rel=1e-6)
    for layer in range(2):
        tag = f"routed_heads/layer_{layer:02d}/load_head"
        loads = [events.Scalars(f"{tag}_{head:02d}")[0].value for head in range(4, 8)]
        assert sum(loads) == pytest.approx(2, rel=1e-6)  # K of the routed heads for every token


@pytest.mark.parametrize("world_size, more", [(1, ()), (2, ()), (2, ("--precision", "bf16")), (1, ("--recompute",))])
def test_a_stopped_run_resumes_bit_for_bit(data_dir, tmp_path, world_size, more):
    more = (*more, "--load-balance-scope", "global_batch", "--load-balance-bias-rate", "0.02")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_ranks(run, world_size, arguments(data_dir, whole, *more))
    run_ranks(run, world_size, arguments(data_dir, stopped, *more), 3)  # in the middle of a log interval
    assert [row["step"] for row in rows(stopped)] == [0, 2]
    with open(stopped / "metrics.jsonl", "a") as file:  # written by a run that died after its checkpoint
        file.write(json.dumps({"step": 4, "loss": 0.0}) + '\n{"step": 5, "lo')
    run_ranks(run, world_size, arguments(data_dir, stopped, *more))
    assert rows(stopped) == rows(whole)
    for name, value in parameters(whole).items():
        assert torch.equal(parameters(stopped)[name], value), name


def waits_in_steps(flags):
    """How often each training step of a run waited until the device had done all that it was given."""
    calls, waits, train_step = [], [], Engine.train_step

    def watched_step(*arguments, **more):
        before = len(calls)
        result = train_step(*arguments, **more)
        waits.append(len(calls) - before)
        return result

    get_accelerator().synchronize = lambda *_: calls.append(None)
    Engine.train_step = watched_step
    run(flags)
    return waits


@pytest.mark.parametrize("pipeline, more", [(1, ("--precision", "bf16", "--zero-stage", "2")), (2, ())])
def test_a_step_waits_for_the_device_only_at_its_end(data_dir, tmp_path, pipeline, more):
    flags = arguments(data_dir, tmp_path, "--pipeline-parallel-size", str(pipeline), *more)
    assert run_ranks(waits_in_steps, pipeline, flags) == [[1] * 7] * pipeline  # of 4 micro-batches


def test_data_parallel_size_changes_nothing(data_dir, straight, tmp_path):
    run_ranks(run, 2, arguments(data_dir, tmp_path / "two"))
    run_ranks(run, 1, arguments(data_dir, tmp_path / "accumulate", "--micro-batch-size", "8"))
    for other in ("two", "accumulate"):
        assert losses(tmp_path / other) == pytest.approx(losses(straight), rel=1e-6)
        for row, expected in zip(rows(tmp_path / other), rows(straight), strict=True):
            assert row["step"] == expected["step"]
            if "evaluation" in row:
                assert row["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-6)
            else:
                assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
                assert row["load_balance_loss"] == pytest.approx(expected["load_balance_loss"], rel=1e-6)


def test_a_checkpoint_of_one_rank_is_resumed_by_two_and_back(data_dir, straight, tmp_path):
    flags = arguments(data_dir, tmp_path / "moved")
    run_ranks(run, 1, flags, 3)
    (tmp_path / "moved" / "checkpoints" / "step-5.tmp").mkdir()  # a save that was killed
    run_ranks(run, 2, flags, 6)
    run_ranks(run, 1, flags)
    assert losses(tmp_path / "moved") == pytest.approx(losses(straight), rel=1e-6)
    steps = tmp_path / "moved" / "checkpoints"
    assert {path.name for path in steps.iterdir()} == {"latest", "step-3", "step-6", "step-7"}
    for kind in ("master", "exp_avg", "exp_avg_sq"):  # state, not only losses: a stale moment shows late
        mine = FragmentReader(steps / "step-6").read(kind, "model.layers.1.mlp.up_proj.weight")
        theirs = FragmentReader(straight / "checkpoints" / "step-6").read(kind, "model.layers.1.mlp.up_proj.weight")
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)


def test_a_finished_run_started_again_changes_nothing(data_dir, straight):
    before = rows(straight), parameters(straight)
    run_ranks(run, 1, arguments(data_dir, straight))
    assert rows(straight) == before[0]
    assert all(torch.equal(value, before[1][name]) for name, value in parameters(straight).items())


def test_nodes_that_see_other_directories_or_data_are_refused_by_all_ranks(data_dir, tmp_path):
    with pytest.raises(AssertionError, match="rank 1 on .* does not see that of rank 0"):
        run_ranks(run_on_own_directory, 2, arguments(data_dir, tmp_path))
    with pytest.raises(AssertionError, match="rank 1 on .* has another seed than rank 0"):
        run_ranks(run_with_own_seed, 2, arguments(data_dir, tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_rank_without_a_gpu_of_its_own_says_so(data_dir, tmp_path, monkeypatch, capsys):
    gpu = SimpleNamespace(device_name=lambda: "cuda", device_count=lambda: 1)
    monkeypatch.setattr(processes, "get_accelerator", lambda: gpu)
    monkeypatch.setattr("sys.argv", ["pretrain", *arguments(data_dir, tmp_path)])
    place = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, value in {**place, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit, match="2"):
        pretrain.main()
    assert capsys.readouterr().err.endswith("LOCAL_RANK 1: GPUs that this process sees: 1; start one rank for each\n")


def run_on_own_directory(flags):
    own = Path(flags[-1]) / os.environ["RANK"]
    own.mkdir(parents=True, exist_ok=True)
    run([*flags, "--checkpoint-dir", str(own)])


def run_with_own_seed(flags):
    run([*flags, "--seed", os.environ["RANK"]])


def test_the_balance_loss_of_an_interval_does_not_depend_on_a_change_of_micro_batch(data_dir, straight, tmp_path):
    run_ranks(run, 1, arguments(data_dir, tmp_path), 3)  # in the middle of a log interval
    run_ranks(run, 1, arguments(data_dir, tmp_path, "--micro-batch-size", "8"))
    got, expected = ([row["load_balance_loss"] for row in rows(d) if "loss" in row] for d in (tmp_path, straight))
    assert got == pytest.approx(expected, rel=1e-6)


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


def test_the_time_left_does_not_count_the_evaluation_before_the_first_step(data_dir, tmp_path):
    ((evaluated, began),) = run_ranks(run_with_clocks, 1, arguments(data_dir, tmp_path))
    assert evaluated <= began


def test_numbers_that_json_cannot_hold_are_written_as_null(tmp_path):
    log = RunLog(tmp_path, 0, Config())
    log.write({"step": 1, "grad_norm": math.inf, "source_loss": {"a": math.nan, "b": 1.5}})
    log.close()
    assert rows(tmp_path) == [{"step": 1, "grad_norm": None, "source_loss": {"a": None, "b": 1.5}}]


@pytest.mark.parametrize(
    "change, named",
    [
        (["--num-active-routed-heads", "3"], "num_active_routed_heads was .*2, 2.* and is .*3, 3"),
        (["--seed", "9"], "--seed was 1234 and is 9"),
        (["--batch-tokens", "256"], "--batch-tokens 256"),
    ],
)
def test_a_changed_model_or_sample_order_is_refused_by_name(data_dir, straight, change, named):
    with pytest.raises(AssertionError, match=named):
        run_ranks(run, 1, arguments(data_dir, straight, *change))


def test_the_configuration_of_a_run_is_kept_beside_it(data_dir, straight):
    config, _ = parse_config(["--run-report", "false", *arguments(data_dir, straight)])
    assert Config.load(straight / "config.json") == config == Config.load(find_step(straight) / "config.json")
