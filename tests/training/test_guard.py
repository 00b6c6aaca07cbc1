"""Numbers that cannot come from training are found without a setting, honest ones never, and spikes if asked for."""

import json
import math
import random
import statistics

import pytest
import torch

from moh_lm.config import ReliabilityConfig
from moh_lm.training.guard import FINE, GRADIENT, LOSS, OUT_OF_RANGE, SPIKE, Guard
from tests.distributed import run_ranks
from tests.run.harm import EVERY_STEP, run_with
from tests.training.runs import arguments, events


def test_a_value_is_out_of_range_above_so_many_medians():
    guard = Guard(ReliabilityConfig(absurd_factor=1000.0, spike_window=3))
    assert guard.classify(1000.0, 1000.0) == FINE  # no step yet
    assert guard.classify(1000.1, 1.0) == OUT_OF_RANGE and guard.classify(1.0, 1000.1) == OUT_OF_RANGE
    for step, (loss, norm) in enumerate([(9.0, 0.1), (8.0, 5.0), (7.0, 3.0), (0.5, 0.2)], 1):
        guard.record(step, loss, norm, skipped=False)  # the first has left the window
    restored = Guard(guard.settings)
    restored.restore(json.loads(json.dumps(guard.state())))
    for one in (guard, restored):
        assert one.classify(7000.0, 3000.0) == FINE
        assert one.classify(7000.1, 1.0) == OUT_OF_RANGE and one.classify(1.0, 3000.1) == OUT_OF_RANGE
        assert one.out_of_range(1.0, 3e38) == ["gradient norm 3e+38 is above --absurd-factor 1000 times 3"]
    assert Guard(ReliabilityConfig(absurd_factor=0.0)).classify(1e30, 3e38) == FINE


def test_a_spike_is_so_many_deviations_above_a_full_window():
    guard = Guard(ReliabilityConfig(spike_sigmas=3.0, spike_window=4))
    window = [2.0, 2.5, 2.25, 2.75]
    for step, loss in enumerate(window, 1):
        assert guard.classify(1000.0, 1.0) == FINE  # not full yet
        guard.record(step, loss, 1.0, skipped=False)
    limit = statistics.fmean(window) + 3 * statistics.pstdev(window)
    assert guard.classify(limit, 1.0) == FINE and guard.classify(limit * (1 + 1e-12), 1.0) == SPIKE
    assert guard.classify(2.0, 1.0 + 1e-12) == SPIKE  # a norm that never varied
    assert guard.classify(math.nan, 1.0) == LOSS and guard.classify(2.0, math.inf) == GRADIENT
    guard.record(5, 9.0, 1.0, skipped=True)  # leaves the window as it is
    restored = Guard(guard.settings)
    restored.restore(json.loads(json.dumps(guard.state())))
    assert restored.state() == guard.state()
    assert restored.classify(limit * (1 + 1e-12), 1.0) == SPIKE


def norms_of_a_run(generator, steps):
    """Gradient norms as of a run that begins at 30, learns, and has its learning rate raised again in the middle.

    Each is multiplied by a Pareto number of index 1, whose mean is infinite: one in a thousand is above 1,000.
    """
    for step in range(steps):
        since = step % (steps // 2)
        level = 30 / (1 + since) + 0.3 * (1 - step / steps) + 0.001
        yield level * generator.paretovariate(1)


@pytest.mark.parametrize("seed", range(3))
def test_10_000_honest_steps_with_heavy_tails_are_all_taken(seed):
    generator = random.Random(seed)
    guard = Guard(ReliabilityConfig())
    largest = 0.0
    for step, norm in enumerate(norms_of_a_run(generator, 10_000), 1):
        largest = max(largest, norm)
        loss = 11 * generator.paretovariate(2)
        assert guard.classify(loss, norm) == FINE, (step, loss, norm)
        guard.record(step, loss, norm, skipped=False)
    assert largest > 100  # the tails are there


def element_of_1e30(engine):
    parameter = dict(engine.model.named_parameters())["model.layers.1.mlp.down_proj.weight"]

    def spoil(grad):
        grad = grad.clone()
        grad[3, 3] = 1e30
        return grad

    element_of_1e30.undo = parameter.register_hook(spoil).remove


def test_an_out_of_range_gradient_is_skipped_and_recorded(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, *EVERY_STEP)
    assert run_ranks(run_with, 1, flags, 4, element_of_1e30, 0) == [True]
    (event,) = events(tmp_path, "skipped")
    assert event["step"] == 4 and event["reason"] == "too large to come from training"
    assert event["details"][0].startswith("gradient norm 4e+30 is above --absurd-factor 1e+06 times 1")


def element_of_1e30_after_3_million_steps(engine):
    for _, steps in engine.named_biases():
        steps[0] = 3_000_000
    element_of_1e30(engine)
    element_of_1e30_after_3_million_steps.undo = element_of_1e30.undo


def test_large_counts_of_a_bias_do_not_end_the_run(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, *EVERY_STEP, "--load-balance-bias-rate", "0.02")
    assert run_ranks(run_with, 1, flags, 4, element_of_1e30_after_3_million_steps, 0) == [True]
    assert [event["step"] for event in events(tmp_path, "skipped")] == [4]


def flip_the_exponent_of_a_master(engine):
    """Of the first element that this rank owns of some matrix: from a few hundredths to 1e36."""
    owned = {fragment.name: fragment.tensors["master"] for fragment in engine.fragments()}
    name = max(name for name in owned if name.endswith("up_proj.weight"))
    owned[name].detach().view(torch.int32)[0] ^= 1 << 30


@pytest.mark.parametrize("precision, zero, offload", [("fp32", 1, False), ("bf16", 2, True), ("bf16", 3, False)])
def test_an_out_of_range_master_weight_ends_the_run(data_dir, tmp_path, precision, zero, offload):
    more = ("--precision", precision, "--zero-stage", str(zero), "--offload-optimizer", str(offload))
    flags = arguments(data_dir, tmp_path, *EVERY_STEP, *more)
    one, other = run_ranks(run_with, 2, flags, 5, flip_the_exponent_of_a_master)
    assert one == other and one.startswith("step 5: model.layers.")
    assert "up_proj.weight holds" in one and "in its fp32 master, which cannot come from training" in one
    assert one.endswith(f"the last checkpoint is {tmp_path}/checkpoints/step-4")


def flip_the_exponent_of_a_frozen_weight(engine):
    """In memory: the fp32 master of a bf16 weight, which is saved, stays as it was."""
    weight = dict(engine.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    bits = getattr(weight, "ds_tensor", weight).detach().view(-1)[:1]
    bits.view(torch.int16)[-1] ^= 1 << 14  # in both formats the highest bit of the exponent


@pytest.mark.parametrize("zero, ranks", [("1", 1), ("1", 2), ("3", 2)])  # without shards, in another rank's part
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_an_out_of_range_frozen_weight_is_repaired_or_ends_the_run(data_dir, tmp_path, precision, zero, ranks):
    more = ("--precision", precision, "--zero-stage", zero, "--train-only", "router")
    flags = arguments(data_dir, tmp_path, *EVERY_STEP, *more, "--replica-check-interval", "0")
    said = run_ranks(run_with, ranks, flags, 4, flip_the_exponent_of_a_frozen_weight, ranks - 1)
    if precision == "bf16":
        assert said == [True] * ranks and [event["step"] for event in events(tmp_path, "skipped")] == [4]
        return
    assert len(set(said)) == 1 and said[0].startswith("step 4: model.layers.1.mlp.up_proj.weight holds")
    assert ("and is frozen" if (zero, ranks) == ("1", 2) else "in its fp32 master") in said[0]


def infinity_in_a_second_moment(engine):
    """Its weight is not updated any more, so no loss, gradient or weight shows it."""
    owned = {fragment.name: fragment.tensors["exp_avg_sq"] for fragment in engine.fragments()}
    owned[max(owned)].view(-1)[0] = math.inf


def test_a_state_that_cannot_be_saved_is_recorded_as_the_end_of_the_run(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, *EVERY_STEP)
    one, other = run_ranks(run_with, 2, flags, 4, infinity_in_a_second_moment)
    assert one == other and one.startswith("step 4 is not saved: exp_avg_sq of ")
    assert [event["step"] for event in events(tmp_path, "failed")] == [4]
