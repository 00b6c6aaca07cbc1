"""Whole small runs: losses, resumption, evaluation and logs, on one rank and on several."""

import json
import math

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from moh_lm.checkpoint.fragments import FragmentReader
from moh_lm.checkpoint.saver import find_step
from moh_lm.config import Config
from moh_lm.flags import parse_config
from moh_lm.run.loop import Run
from tests.distributed import run_ranks
from tests.training.runs import (
    SIZES,
    arguments,
    engine_of,
    equal,
    losses,
    micro_batches_of,
    parameters,
    rows,
    run,
    training_rows,
)


def test_a_run_learns_and_logs_each_interval_once(one_rank_run):
    logged = rows(one_rank_run)
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


def test_tensorboard_holds_the_same_figures(one_rank_run):
    events = EventAccumulator(str(one_rank_run / "tensorboard"))
    events.Reload()
    by_step = {row["step"]: row for row in training_rows(one_rank_run)}
    tags = {"loss": "loss/train", "load_balance_loss": "loss/load_balance"}
    tags |= {key: f"optimization/{key}" for key in ("learning_rate", "grad_norm", "skipped_steps")}
    for key, tag in tags.items():
        got = {scalar.step: scalar.value for scalar in events.Scalars(tag)}
        assert got == pytest.approx({step: row[key] for step, row in by_step.items()}, rel=1e-6)
    assert not any("load_head" in tag for tag in events.Tags()["scalars"])  # a card for each would be hundreds


def test_a_stopped_run_resumes_bit_for_bit(data_dir, tmp_path):
    more = "--precision bf16 --recompute --load-balance-scope global_batch --load-balance-bias-rate 0.02".split()
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_ranks(run, 2, arguments(data_dir, whole, *more))
    run_ranks(run, 2, arguments(data_dir, stopped, *more), 3)  # in the middle of a log interval
    assert [row["step"] for row in rows(stopped)] == [0, 2]
    with open(stopped / "metrics.jsonl", "a") as file:  # written by a run that died after its checkpoint
        file.write(json.dumps({"step": 4, "loss": 0.0}) + '\n{"step": 5, "lo')
    run_ranks(run, 2, arguments(data_dir, stopped, *more))
    assert rows(stopped) == rows(whole)
    assert equal(parameters(stopped), parameters(whole))


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads, other than those that it has made itself and what follows from them."""

    READING = ("_local_scalar_dense", "nonzero", "equal")

    def __init__(self):
        super().__init__()
        self.count, self.made = 0, WeakTensorKeyDictionary()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
        name, own = function.overloadpacket.__name__, all(part in self.made for part in given)
        if name == "lift_fresh" or (given and own):
            self.made.update((part, True) for part in tree_leaves(result) if isinstance(part, torch.Tensor))
        self.count += name in self.READING and not own
        return result


def waits_in_steps(flags):
    """How often each step of a run waited for the device: to be done, or for its numbers."""
    waits, step, tolist = [], Run.step, torch.Tensor.tolist

    def watched_step(*arguments):
        calls.clear()
        with Reads() as reads:
            step(*arguments)
        waits.append(len(calls) + reads.count)

    def to_host(tensor):
        calls.append(None)
        return tolist(tensor)

    calls, torch.Tensor.tolist = [], to_host
    get_accelerator().synchronize = torch.cpu.synchronize = lambda *_: calls.append(None)  # DeepSpeed's, and ours
    Run.step = watched_step
    run(flags)
    return waits[:-1]  # the last one writes, evaluates and saves


@pytest.mark.parametrize(
    "pipeline, more", [(1, ("--precision", "bf16", "--zero-stage", "2")), (2, ("--tie-embeddings", "true"))]
)
def test_a_step_waits_for_the_device_only_once(data_dir, tmp_path, pipeline, more):
    more += tuple(f"--{what}-interval=7" for what in ("log", "eval", "save"))
    flags = arguments(data_dir, tmp_path, "--pipeline-parallel-size", str(pipeline), *more)
    assert run_ranks(waits_in_steps, 2, flags) == [[1] * 6] * 2  # of 2 or 4 micro-batches, with weights on both ranks


def times_kept():
    """How many measurements of time DeepSpeed's engine holds after two steps of a pipeline."""
    config, _ = parse_config([*SIZES.split(), "--pipeline-parallel-size", "2"])
    engine = engine_of(config)
    tokens = torch.randint(3, 64, (8, 17), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        engine.train_step(micro_batches_of(tokens, 2), 1e-3)
    return sum(len(timer.event_timers) for timer in engine.engine.timers.get_timers().values())


def test_a_pipeline_keeps_no_times_of_its_steps():
    """On a GPU each would hold two CUDA events."""
    assert run_ranks(times_kept, 2) == [0, 0]


def test_a_checkpoint_of_one_rank_is_resumed_by_two_and_back(data_dir, one_rank_run, tmp_path):
    flags = arguments(data_dir, tmp_path / "moved")
    run_ranks(run, 1, flags, 3)
    (tmp_path / "moved" / "checkpoints" / "step-5.tmp").mkdir()  # a save that was killed
    run_ranks(run, 2, flags, 6)
    run_ranks(run, 1, flags)
    assert losses(tmp_path / "moved") == pytest.approx(losses(one_rank_run), rel=1e-6)
    steps = tmp_path / "moved" / "checkpoints"
    assert {path.name for path in steps.iterdir()} == {"latest", "step-3", "step-6", "step-7"}
    for kind in ("master", "exp_avg", "exp_avg_sq"):  # state, not only losses: a stale moment shows late
        mine = FragmentReader(steps / "step-6").read(kind, "model.layers.1.mlp.up_proj.weight")
        theirs = FragmentReader(one_rank_run / "checkpoints" / "step-6").read(kind, "model.layers.1.mlp.up_proj.weight")
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)


def test_a_finished_run_started_again_changes_nothing(data_dir, one_rank_run):
    before = rows(one_rank_run), parameters(one_rank_run)
    run_ranks(run, 1, arguments(data_dir, one_rank_run))
    assert rows(one_rank_run) == before[0]
    assert equal(parameters(one_rank_run), before[1])


def test_the_balance_loss_of_an_interval_outlives_a_resume(data_dir, one_rank_run, tmp_path):
    run_ranks(run, 1, arguments(data_dir, tmp_path), 3)  # in the middle of a log interval
    run_ranks(run, 1, arguments(data_dir, tmp_path, "--micro-batch-size", "8"))
    got, expected = ([row["load_balance_loss"] for row in training_rows(d)] for d in (tmp_path, one_rank_run))
    assert got == pytest.approx(expected, rel=1e-6)


def test_the_configuration_of_a_run_is_kept_beside_it(data_dir, one_rank_run):
    config, _ = parse_config(["--run-report", "false", *arguments(data_dir, one_rank_run)])
    assert Config.load(one_rank_run / "config.json") == config == Config.load(find_step(one_rank_run) / "config.json")
