"""Alarms in runs with a planted collapse, a planted dead source and a slow rank: each fires once."""

import json
import os
import re
import statistics
import time
from itertools import pairwise

import pytest
import torch

from moh_lm.data.mixture import Mixture
from moh_lm.model.router import HeadRouter
from moh_lm.training.engine import Engine
from tests.distributed import run_ranks
from tests.monitor.logged import events_of
from tests.run.harm import nan_in_the_loss, run_with
from tests.training.runs import arguments, events, run

QUICK = "--log-interval 1 --eval-interval 0 --eval-samples 1 --save-interval 0 --alarm-intervals 2".split()
QUICK += ["--alarm-slow-rank", "0"]  # two ranks of a busy machine may differ


def run_collapsed(flags, stop_after=None):
    """From the first step on, layer 1 selects its first two routed heads for every token."""
    select = HeadRouter.select

    def collapsed(router, scores, kept):
        if router.layer.index == 1:
            scores = torch.arange(scores.shape[-1], 0, -1.0).expand_as(scores)
        return select(router, scores, kept)

    HeadRouter.select = collapsed
    run(flags, stop_after)


@pytest.mark.parametrize("more", [("--tensor-parallel-size", "2", "--recompute"), ("--pipeline-parallel-size", "2")])
def test_a_planted_collapse_fires_once_across_a_resume(data_dir, tmp_path, more):
    flags = arguments(data_dir, tmp_path, *QUICK, "--save-interval", "3", "--alarm-throughput", "0", *more)
    run_ranks(run_collapsed, 2, flags, 3)
    run_ranks(run_collapsed, 2, flags)
    (event,) = events(tmp_path, "alarm")
    assert (event["step"], event["alarm"]) == (2, "routing collapse")
    assert (event["layer"], event["heads"]) == (1, [2, 3, 4, 5, 6, 7])
    board = events_of(tmp_path)
    (summary,) = [board.Tensors(tag) for tag in board.Tags()["tensors"] if tag.startswith("alarms")]
    (text,) = summary[0].tensor_proto.string_val
    assert text.decode().startswith("step 2: alarm: routing collapse in layer 1: head 2 is selected by 100.0% of")


def run_without_odd(flags):
    locate = Mixture.locate

    def without_odd(mixture, numbers):
        source, epoch, position = locate(mixture, numbers)
        return source * 0, epoch, position

    Mixture.locate = without_odd
    run(flags)


def test_a_planted_dead_source_fires_once(data_dir, tmp_path):
    run_ranks(run_without_odd, 2, arguments(data_dir, tmp_path, *QUICK, "--alarm-throughput", "0"))
    (event,) = events(tmp_path, "alarm")
    assert (event["step"], event["alarm"], event["source"]) == (1, "dead source", "odd")  # 8 samples * 2 / 7 > 2
    assert event["details"] == ["no sample among 8, although its share of the mix is 28.57%"]


def test_a_source_whose_loss_is_not_finite_fires_and_is_over(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, *QUICK, "--alarm-throughput", "0")
    assert run_ranks(run_with, 2, flags, 4, nan_in_the_loss) == [True, True]
    (skipped,) = events(tmp_path, "skipped")
    rung = events(tmp_path, "alarm")
    assert [event["source"] for event in rung] == skipped["sources"] != []
    assert all(event["step"] == 4 and event["details"] == ["not finite; steps skipped for it: 1"] for event in rung)
    assert [(event["step"], event["source"]) for event in events(tmp_path, "alarm over")] == [
        (5, source) for source in skipped["sources"]
    ]


def run_with_a_slow_device(flags, victim, stop_after=None):
    """Each forward pass of the rank ``victim`` takes a second longer, and all take longer than a busy machine's
    pauses."""
    freeze = Engine.freeze

    def slow(engine):
        seconds = 1 if os.environ["RANK"] == victim else 0.1
        engine.model.register_forward_hook(lambda *_: time.sleep(seconds))
        freeze(engine)

    Engine.freeze = slow
    run(flags, stop_after)


def test_a_rank_with_a_slow_device_is_named_again_after_a_resume(data_dir, tmp_path):
    more = "--alarm-throughput 0 --alarm-slow-rank 3 --train-iters 4 --pipeline-parallel-size 2".split()
    flags = arguments(data_dir, tmp_path, *QUICK, *more, "--save-interval", "2", "--micro-batch-size", "4")
    run_ranks(run_with_a_slow_device, 4, flags, "3", 2)
    run_ranks(run_with_a_slow_device, 4, flags, "3")
    found = [(event["step"], event["alarm"], event["rank"]) for event in events(tmp_path, "alarm")]
    assert found == [(2, "slow rank", 3), (4, "slow rank", 3)]
    for row in (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()):
        if "loss" in row:
            named = row["runtime"]["slowest_rank"]
            assert named["rank"] == 3 and named["seconds"] >= 1 > named["median"] > 0


def run_with_a_slow_rank(flags):
    """After six steps rank 1 takes 30 times as long, whatever a step takes on this machine now."""
    step, ends = Engine.step, []

    def slow(engine, batches):
        if os.environ["RANK"] == "1" and len(ends) >= 6:
            time.sleep(30 * statistics.median(end - begin for begin, end in pairwise(ends[:6])))
        result = step(engine, batches)
        ends.append(time.perf_counter())
        return result

    Engine.step = slow
    run(flags)


def test_a_planted_slow_rank_fires_once(data_dir, tmp_path):
    more = ("--train-iters", "8", "--alarm-throughput", "0.1")
    run_ranks(run_with_a_slow_rank, 2, arguments(data_dir, tmp_path, *QUICK, *more))
    (event,) = events(tmp_path, "alarm")
    assert (event["step"], event["alarm"]) == (8, "throughput")
    (detail,) = event["details"]
    rate, usual = (float(text.replace(",", "")) for text in re.findall(r"[\d,]+", detail)[:2])
    assert rate < 0.1 * usual and " after a median of " in detail
