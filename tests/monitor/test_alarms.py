"""Alarms: the rules on made-up intervals, how they are told, and their state in a checkpoint."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from moh_lm.checks import config_problems
from moh_lm.config import AlarmConfig, ParallelConfig, RoutedLayer
from moh_lm.data.mixture import Mixture
from moh_lm.flags import parse_config
from moh_lm.monitor.accumulator import MetricsAccumulator
from moh_lm.monitor.alarms import AGAIN, Alarms, Announcer
from moh_lm.monitor.ranks import RankFigures, slowest_rank
from tests.monitor.intervals import interval
from tests.training.runs import arguments

LAYERS = [RoutedLayer(1, 2, 4, 1), RoutedLayer(3, 0, 2, 2)]  # one of 4 routed heads; both of 2
FAIR = [[0.25] * 4, [1.0, 1.0]]


def figures(load=None, balance_loss=(0.25, 1.0), gate_mean=(0.2, 1.0)):
    return {
        "load": [load or FAIR[0], FAIR[1]], "balance_loss": list(balance_loss), "gate_mean": list(gate_mean)
    }  # fmt: skip


def alarms(shares=(0.75, 0.25), **settings):
    return Alarms(AlarmConfig(**settings), LAYERS, dict(zip("ab", shares, strict=True)))


def ranks(*own, stages=None):
    """``RankFigures`` of ranks with these seconds of own work."""
    return [RankFigures(0.0, seconds, 0, stage) for seconds, stage in zip(own, stages or [0] * len(own), strict=True)]


def texts(found):
    return Announcer().lines(found)


def test_a_head_far_from_its_fair_load_fires_once():
    made = alarms(alarm_intervals=3)
    low = [0.02, 0.94, 0.02, 0.02]  # a tenth of 25% is 2.5%; three times it 75%
    fair = FAIR[0]
    seen = [low, low, fair, low, low, low, low, fair, fair, low, fair, fair, fair]
    rung = [made.check(interval(), figures(load)) for load in seen]
    assert [len(found) for found in rung] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1]
    (facts,), (text,) = rung[5], texts(rung[5])
    loads = enumerate(["2.0%", "94.0%"], 2)
    said = [f"head {head} is selected by {load} of the tokens; fair is 25.0%" for head, load in loads]
    assert text.startswith("alarm: routing collapse in layer 1: " + "; ".join(said))
    assert (facts["event"], facts["alarm"], facts["layer"]) == ("alarm", "routing collapse", 1)
    assert facts["heads"] == [2, 3, 4, 5]
    (facts,), (text,) = rung[12], texts(rung[12])
    assert text == "alarm over: routing collapse in layer 1: head 2; head 3; head 4; head 5"
    assert facts["event"] == "alarm over"


@pytest.mark.parametrize("load, heads", [([0.026, 0.26, 0.26, 0.454], []), ([0.024, 0.12, 0.12, 0.736], [2])])
def test_the_limits_of_a_head_are_shares_of_its_fair_load(load, heads):
    found = alarms(alarm_intervals=1).check(interval(), figures(load))
    assert [facts["heads"] for facts in found] == ([heads] if heads else [])


def test_nearly_all_heads_may_be_always_active_and_none_never():
    """With 15, 19 or 39 heads of one more; above the fair load, only what leaves its half of the rest is suspicious."""
    for number, most in ((15, 0.965), (19, 0.97), (39, 1.0)):
        made = Alarms(AlarmConfig(alarm_intervals=1), [RoutedLayer(0, 0, number + 1, number)], {})
        rest = (number - most) / number
        seen = {"load": [[most, *[rest] * number]], "balance_loss": [None], "gate_mean": [1.0]}
        assert made.check(interval(), seen) == []
        (facts,) = made.check(interval(), {**seen, "load": [[*[1.0] * number, 0.0]]})
        assert number in facts["heads"]


def test_a_layer_of_dead_heads_fires():
    made = alarms(alarm_intervals=1)
    made.layers = [layer._replace(by_sign=True) for layer in LAYERS]  # fair is the mean load
    assert not made.check(interval(), figures([0.1, 0.2, 0.2, 0.1]))
    (facts,) = made.check(interval(), figures([0.0, 0.0, 0.0, 0.0]))
    assert facts["heads"] == [2, 3, 4, 5]
    assert facts["details"][0] == "head 2 is selected by 0.0% of the tokens; fair is 0.0%"


def test_an_interval_without_a_valid_step_changes_no_alarm():
    made = alarms(alarm_intervals=2)
    low = figures([0.0, 0.5, 0.25, 0.25])
    assert not made.check(interval(), low)
    assert not made.check(interval(), None)
    assert len(made.check(interval(), low)) == 1
    assert not made.check(interval(), None)
    assert not made.check(interval(), low)
    assert not made.check(interval(), figures())
    assert not made.check(interval(), None)
    assert texts(made.check(interval(), figures())) == ["alarm over: routing collapse in layer 1: head 2"]


def test_a_low_throughput_fires_and_names_the_waiting_rank():
    made = alarms(alarm_intervals=2)
    for seconds in (1.0, 1.1, 0.9, 1.0, 1.0, 9.0, 1.0):  # a single slow interval is none
        assert not made.check(interval(seconds=seconds), figures())
    assert not made.check(interval(seconds=2.0), figures(), ranks(1.0, 1.0))
    waits = [RankFigures(data, 1.0, 0, 0) for data in (0.1, 1.5)]
    (text,) = texts(made.check(interval(seconds=2.0), figures(), waits))
    assert text == "note: throughput: 128 tokens/s after a median of 256; rank 1 waits 1.50 s per step for its data"
    for _ in range(100):  # it does not get used to it
        assert not made.check(interval(seconds=2.0), figures())
    assert not made.check(interval(), figures())
    assert texts(made.check(interval(), figures())) == ["alarm over: throughput"]


def test_a_rising_balance_loss_fires_with_its_layer():
    made = alarms(alarm_intervals=1)
    for loss in (0.25, 0.26, 0.27, 0.26, 0.25, 0.26 * 1.19):
        assert not made.check(interval(), figures(balance_loss=(loss, 1.0)))
    (text,) = texts(made.check(interval(), figures(balance_loss=(0.26 * 1.21, 1.0))))
    assert text == "alarm: balance loss in layer 1: 0.3146 after a median of 0.2600"


@pytest.mark.parametrize("gate, rings", [(0.31, True), (0.29, False), (0.14, False), (0.13, True)])
def test_a_drifting_mean_gate_fires_with_its_layer(gate, rings):
    made = alarms(alarm_intervals=1, alarm_gate_drift=1.5)
    for usual in (0.2, 0.19, math.nan, 0.21, 0.2, 0.2):  # the third of an interval whose gates are not known
        assert not made.check(interval(), figures(gate_mean=(usual, 1.0)))
    said = [f"alarm: gate drift in layer 1: mean gate {gate:.4f} after a median of 0.2000"] if rings else []
    assert texts(made.check(interval(), figures(gate_mean=(gate, 1.0)))) == said
    if rings:
        assert texts(made.check(interval(), figures())) == ["alarm over: gate drift in layer 1"]


def test_a_source_without_its_due_sample_fires():
    mixture = Mixture({"a": "11", "b": "1"}, {"a": 1000, "b": 1000}, seq_length=10, seed=0)
    made = alarms(shares=(11 / 12, 1 / 12))
    sources = mixture.locate(torch.arange(2000).numpy())[0].tolist()
    for start in range(0, 2000, 4):
        part = sources[start : start + 4]
        assert not made.check(interval(sequences=(part.count(0), part.count(1))), figures())
    silent = [made.check(interval(sequences=(4, 0)), figures()) for _ in range(8)]
    first = next(index for index, found in enumerate(silent) if found)
    assert first >= 24 // 4 - 3 and sum(map(len, silent)) == 1  # 24 samples hold one of b whatever came before
    assert texts(silent[first])[0].startswith("alarm: dead source b: no sample among 2")
    assert texts(made.check(interval(sequences=(3, 1)), figures())) == ["alarm over: dead source b"]


@pytest.mark.parametrize(
    "more, text",
    [
        ({"loss": 0.0}, "a loss of exactly 0 over 192 tokens"),
        ({"tokens": 0}, "no token of 3 sequences has a label"),
        ({"not_finite": ["a"]}, "not finite; steps skipped for it: 1"),
    ],
)
def test_a_source_with_nothing_to_learn_from_fires_at_once(more, text):
    found = alarms().check(interval(**more), figures())
    assert texts(found[:1]) == [f"alarm: dead source a: {text}"] and found[0]["source"] == "a"


@pytest.mark.parametrize(
    "own, stages, expected",
    [
        ([1.0, 1.1, 1.6, 1.0], None, (2, 1.6, 1.0)),
        ([1.0, 4.0], None, (1, 4.0, 1.0)),
        ([1.0, 1.0, 4.0, 4.0, 9.0, 9.5], [0, 0, 1, 1, 2, 2], (5, 9.5, 9.0)),
        ([3.0], None, (0, 3.0, 3.0)),
    ],
)
def test_a_rank_is_slow_beside_those_of_its_stage(own, stages, expected):
    assert slowest_rank(ranks(*own, stages=stages)) == expected


def test_the_alarm_of_a_slow_rank_names_one_that_stays_slow():
    made = alarms(alarm_intervals=2)
    seen = [(1.0, 2.0), (2.0, 1.0), (1.0, 2.0), (1.0, 2.0), (1.0, 2.0), (1.0, 1.4), (1.0, 1.4)]
    rung = [made.check(interval(), figures(), ranks(*own)) for own in seen]
    assert [len(found) for found in rung] == [0, 0, 0, 1, 0, 0, 1]
    assert texts(rung[3]) == ["alarm: slow rank 1: 2 s of own work per step; the median of ranks like it is 1"]
    assert [(facts["event"], facts["rank"]) for found in rung for facts in found] == [("alarm", 1), ("alarm over", 1)]


@pytest.mark.parametrize(
    "own, stages, slow",
    [
        ([1.0, 1.0, 2.0, 2.1, 1.0, 1.0], None, [2, 3]),  # which of the two is slower changes from interval to interval
        ([10.0, 10.0, 11.5, 1.0, 1.0, 2.0], [0, 0, 0, 1, 1, 1], [5]),  # 1.5 s are more, but a sixth of that stage
    ],
)
def test_every_rank_that_stays_slow_beside_its_stage_is_named(own, stages, slow):
    made, found = alarms(alarm_intervals=3), []
    for number in range(6):
        turned = own if number % 2 else [*own[:2], own[3], own[2], *own[4:]]
        found += made.check(interval(), figures(), ranks(*(turned if stages is None else own), stages=stages))
    assert [facts["rank"] for facts in found] == slow and {facts["event"] for facts in found} == {"alarm"}


def test_an_alarm_that_is_turned_off_does_not_fire():
    names = ("head_low", "head_high", "throughput", "balance_loss", "gate_drift", "slow_rank")
    made = alarms(alarm_intervals=1, **{f"alarm_{name}": 0.0 for name in names})
    for seconds, loss in [(1.0, 0.25)] * 8 + [(9.0, 9.0)]:
        shown = figures([0.0, 1.0, 0.0, 0.0], (loss, 1.0), (loss, 0.1))
        assert not made.check(interval(seconds=seconds), shown, ranks(1.0, loss))


def test_the_state_of_alarms_outlives_a_checkpoint():
    low, quick, slow = figures([0.0, 0.5, 0.25, 0.25], (0.25, 1.0)), interval(), interval(seconds=3.0)
    one = alarms(alarm_intervals=2)
    for seen, found in [(quick, figures())] * 5 + [(quick, low)] * 2 + [(slow, low)]:
        one.check(seen, found)
    other = alarms(alarm_intervals=2)
    other.restore(json.loads(json.dumps(one.state())), same_data=True)
    assert other.state() == one.state()
    assert texts(other.check(slow, low)) == ["note: throughput: 85 tokens/s after a median of 256"]  # and no collapse
    assert "throughput" in str(other.state())
    other.forget("throughput", "gate drift")
    left = other.state()
    assert {row[0] for part in ("streaks", "ringing") for row in left[part]} == {"routing collapse"}
    assert {row[0] for row in left["history"]} == {"balance loss"}
    changed = alarms()
    changed.restore({**one.state(), "unseen": {"old": 5}}, same_data=False)
    assert changed.unseen == {"a": 0, "b": 0} and changed.firing == one.firing


def test_alarms_of_a_kind_are_one_line_and_then_wait_their_turn():
    announcer = Announcer()
    begun = [{"event": "alarm", "alarm": "routing collapse", "layer": n, "details": [f"head {n}"]} for n in range(30)]
    over = {"event": "alarm over", "alarm": "routing collapse", "layer": 3, "details": ["head 3"]}
    slow = {"event": "alarm", "alarm": "throughput", "details": ["1 token/s"]}
    layers = "layers 0, 1, 2, 3, 4, 5, 6, 7 and 20 more"
    assert announcer.lines(begun[:28]) == [f"alarm: routing collapse in {layers}: for example head 27 (layer 27)"]
    assert announcer.lines([over, *begun[28:]]) == [] and announcer.lines([slow]) == ["note: throughput: 1 token/s"]
    assert [announcer.lines([]) for _ in range(AGAIN - 3)] == [[]] * (AGAIN - 3)
    told = ["alarm over: routing collapse in layer 3: head 3"]
    told.append("alarm: routing collapse in layers 28, 29: for example head 29 (layer 29)")
    assert announcer.lines([]) == told and announcer.lines([]) == []
    assert announcer.lines([over]) == [] and announcer.rest() == told[:1] and announcer.rest() == []


def test_thresholds_that_fire_in_a_healthy_run_are_refused(data_dir, tmp_path):
    wrong = "--alarm-intervals 0 --alarm-head-low 1 --alarm-head-high 1 --alarm-throughput 1.5 "
    wrong += "--alarm-balance-loss 0.5 --alarm-gate-drift 1 --alarm-slow-rank 1"
    problems = config_problems(parse_config(arguments(data_dir, tmp_path, *wrong.split()))[0], 1)
    assert len(problems) == 7 and all(problem.startswith("--alarm-") for problem in problems)


def test_an_interval_resumes_from_other_sums_of_routers():
    made, layout = MetricsAccumulator(["a"], LAYERS, torch.device("cpu")), ParallelConfig()
    result = SimpleNamespace(losses=torch.ones(1, 3), routers=torch.ones(1, 14), skipped=False, seconds={})
    made.restore(json.loads(json.dumps(made.state() | {"routers": [[]]})))  # saved between two intervals
    made.add(result, 0.0, 64)
    assert made.head_figures(3.0, layout)["load"] == [[1 / 64] * 4, [1 / 64] * 2]
    made.clear()
    for routers in ([[]], [[0.5, 1.5, 2, 3, 4, 5, 0.25, 2.5, 6, 7]]):  # of no layer, or without gates
        made.restore(json.loads(json.dumps(made.state() | {"routers": routers, "tokens": 64})))
        made.add(result, 0.0, 64)
        made.restore(json.loads(json.dumps(made.state())))  # stopped once more in the same interval
        assert made.tokens == 128 and made.loss() == 1 and made.head_figures(3.0, layout) is None
        made.clear()
        made.add(result, 0.0, 64)
        assert made.head_figures(3.0, layout)["load"] == [[1 / 64] * 4, [1 / 64] * 2]
        made.clear()


def test_a_layer_of_shared_heads_fires_for_gate_drift_alone():
    made = Alarms(AlarmConfig(alarm_intervals=1), [RoutedLayer(0, 8, 0, 0)], {})
    found = [made.check(interval(), {"load": [[]], "balance_loss": [None], "gate_mean": [1.0]}) for _ in range(5)]
    assert found == [[]] * 5
    found = made.check(interval(), {"load": [[]], "balance_loss": [None], "gate_mean": [1.6]})
    (facts,), (text,) = found, texts(found)
    assert text == "alarm: gate drift in layer 0: mean gate 1.6000 after a median of 1.0000" and facts["layer"] == 0


def test_an_interval_with_skipped_steps_outlives_a_checkpoint():
    one, other = interval(sequences=(3, 1), not_finite=["a"]), interval(sequences=(0, 0))
    other.restore(json.loads(json.dumps(one.state())))
    assert other.sequences() == {"a": 3, "b": 1} and other.not_finite == {"a": 1} and other.skipped_steps == 1
    assert not other.losses.any()  # whose sums were not to be trusted
