"""What a run finds in its own numbers, skips or mends, or ends for: NaN and infinity, spikes, flipped bits."""

import math
import time

import pytest
import torch

from moh_lm.compared import Differs
from moh_lm.run import loop
from tests.distributed import run_ranks
from tests.run.harm import EVERY_STEP, nan_in_the_loss, run_with
from tests.training.runs import arguments, equal, events, state, training_rows

# --- Bad numbers ---


def nan_in_the_gradient_of_a_norm(engine):
    parameter = dict(engine.model.named_parameters())["model.layers.1.input_layernorm.weight"]
    handle = parameter.register_hook(lambda grad: grad * math.nan)
    nan_in_the_gradient_of_a_norm.undo = handle.remove


def nan_in_a_hidden_gradient(engine):
    layer = engine.model.model.layers[1]
    handle = layer.register_forward_hook(lambda module, inputs, out: out.register_hook(lambda g: g * math.nan) and None)
    nan_in_a_hidden_gradient.undo = handle.remove


def nan_in_a_weight(engine):
    dict(engine.model.named_parameters())["model.layers.0.mlp.up_proj.weight"].data[3, 3] = math.nan


LAYOUTS = {
    "zero1 bf16": ("--precision", "bf16"),
    "zero2": ("--zero-stage", "2"),
    "zero3": ("--zero-stage", "3"),
    "tp": ("--tensor-parallel-size", "2"),
    "cp": ("--context-parallel-size", "2"),
}


@pytest.mark.parametrize(
    "layout, harm, located",
    [
        ("zero1 bf16", nan_in_a_hidden_gradient, True),
        ("zero2", nan_in_a_weight, True),
        ("zero3", nan_in_the_loss, True),
        ("tp", nan_in_the_loss, True),
        ("cp", nan_in_the_loss, True),
        ("tp", nan_in_the_gradient_of_a_norm, False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_bad_number_on_one_rank_is_recorded_and_skipped(
    data_dir, tmp_path, layout, harm, located
):
    flags = arguments(data_dir, tmp_path, *EVERY_STEP, *LAYOUTS[layout])
    assert run_ranks(run_with, 2, flags, 4, harm) == [True, True]
    assert equal(state(tmp_path, 4), state(tmp_path, 3))
    assert not equal(state(tmp_path, 5), state(tmp_path, 4))
    assert all(tensor.isfinite().all() for tensor in state(tmp_path, 5).values())
    (event,) = events(tmp_path, "skipped")
    assert event["step"] == 4 and event["step_samples"] == [24, 31]
    assert event["reason"] in ("loss not finite", "gradient not finite")
    if located:
        shared = layout in ("tp", "cp")  # such ranks share their samples
        assert event["ranks"] == ([0, 1] if shared else [1])
        assert set(event["samples"]) <= set(range(24, 32) if shared else range(28, 32)) and event["samples"]
        assert set(event["sources"]) <= {"even", "odd"} and event["sources"]
    logged = {row["step"]: row for row in training_rows(tmp_path)}
    assert [logged[step]["skipped_steps"] for step in range(1, 6)] == [0, 0, 0, 1, 0]
    assert logged[4]["loss"] is None and logged[5]["loss"] > 0
    # Schedule and data go on as if nothing had happened.
    assert [logged[step]["consumed_samples"] for step in range(1, 6)] == [8 * step for step in range(1, 6)]


def stage_nan_in_the_loss(engine):
    """The last stage computes the loss; the harness harms rank 1, which is it."""
    handle = engine.model.forward_funcs[-1].register_forward_hook(lambda module, inputs, out: out * math.nan)
    stage_nan_in_the_loss.undo = handle.remove


def test_all_stages_of_a_pipeline_skip_a_step_together(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, *EVERY_STEP, "--pipeline-parallel-size", "2")
    assert run_ranks(run_with, 2, flags, 4, stage_nan_in_the_loss) == [True, True]
    assert equal(state(tmp_path, 4), state(tmp_path, 3))
    assert not equal(state(tmp_path, 5), state(tmp_path, 4))
    (event,) = events(tmp_path, "skipped")
    assert event["step"] == 4 and set(event["ranks"]) == {0, 1} and event["samples"] == list(range(24, 32))


def stage_nan_in_the_gradient_of_a_norm(engine):
    parameter = dict(engine.named_parameters())["model.layers.0.input_layernorm.weight"]
    handle = parameter.register_hook(lambda grad: grad * math.nan)
    stage_nan_in_the_gradient_of_a_norm.undo = handle.remove


def test_a_copy_outside_every_norm_is_examined_too(data_dir, tmp_path):
    more = ("--pipeline-parallel-size", "2", "--tensor-parallel-size", "2", "--precision", "bf16")
    flags = arguments(data_dir, tmp_path, *EVERY_STEP, *more)
    assert run_ranks(run_with, 4, flags, 4, stage_nan_in_the_gradient_of_a_norm) == [True] * 4
    assert equal(state(tmp_path, 4), state(tmp_path, 3))
    (event,) = events(tmp_path, "skipped")
    assert event["step"] == 4


def test_too_many_skipped_steps_end_the_run(data_dir, tmp_path):
    more = ("--save-interval", "2", "--train-iters", "7", "--max-skipped-steps", "2", "--run-report")
    flags = arguments(data_dir, tmp_path, *EVERY_STEP[2:], *more)
    messages = run_ranks(run_with, 2, flags, 3, nan_in_the_loss, 1, 5)
    assert messages[0] == messages[1]
    assert "3 of the last 128 steps were skipped" in messages[0]
    assert messages[0].endswith(f"the last checkpoint is {tmp_path}/checkpoints/step-4")
    assert [event["step"] for event in events(tmp_path, "skipped")] == [3, 4, 5]
    pytest.importorskip("matplotlib")
    assert "<td>failed after step 5 of 7</td>" in (tmp_path / "report.html").read_text()


def run_with_a_slow_page(flags, page):
    """``run_with`` bad numbers, whose page takes a second; whether it was there when this rank knew that all ends."""
    def report_run(*_):
        time.sleep(1)
        page.touch()

    loop.report_run = report_run
    run_with(flags, 3, nan_in_the_loss, 1, 5)
    return page.exists()


def test_the_ranks_of_a_failed_run_wait_for_its_report(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path / "run", *EVERY_STEP[2:], "--max-skipped-steps", "0", "--run-report")
    assert run_ranks(run_with_a_slow_page, 2, flags, tmp_path / "page") == [True, True]


def record_another_graph(engine):
    raise Differs("a captured micro-batch differs")


def test_a_graph_that_differs_loses_no_save_in_the_background(data_dir, tmp_path):
    more = ("--async-save", "true", "--run-report")
    (told,) = run_ranks(run_with, 1, arguments(data_dir, tmp_path, *EVERY_STEP, *more), 4, record_another_graph, 0)
    assert told == f"step 4: a captured micro-batch differs; the last checkpoint is {tmp_path}/checkpoints/step-3"
    assert [event["step"] for event in events(tmp_path, "failed")] == [4]


# --- Spikes ---


@pytest.mark.parametrize("on_spike", ["skip", "report"])
def test_a_spike_is_skipped_or_reported(data_dir, tmp_path, on_spike):
    flags = arguments(data_dir, tmp_path, *EVERY_STEP, "--spike-sigmas", "50", "--spike-window", "3")
    assert run_ranks(run_with, 1, [*flags, "--on-spike", on_spike], 5, large_gradient, 0) == [True]
    (event,) = events(tmp_path, "skipped" if on_spike == "skip" else "spike")
    assert event["step"] == 5 and event["reason"] == "spike" and "gradient norm" in event["details"][0]
    assert equal(state(tmp_path, 5), state(tmp_path, 4)) == (on_spike == "skip")


def large_gradient(engine):
    parameter = dict(engine.model.named_parameters())["model.layers.1.mlp.down_proj.weight"]
    handle = parameter.register_hook(lambda grad: grad + 1e3)
    large_gradient.undo = handle.remove


# --- Flipped bits ---


def flip_a_bit_of_a_weight(engine):
    weight = dict(engine.model.named_parameters())["model.layers.1.self_attn.k_proj.weight"]
    bits = weight.data.view(torch.int16 if weight.dtype == torch.bfloat16 else torch.int32)
    bits.view(-1)[77] ^= 1  # the lowest bit: no loss would show it


@pytest.mark.parametrize(
    "more",
    [
        ("--precision", "bf16", "--zero-stage", "2"),
        ("--micro-batch-size", "1"),
        ("--precision", "bf16", "--train-only", "router"),  # where the weight is frozen
        ("--precision", "bf16", "--context-parallel-size", "2"),
    ],
)
def test_a_flipped_bit_in_a_copy_of_a_weight_is_repaired(data_dir, tmp_path, more):
    flags = arguments(data_dir, tmp_path, *EVERY_STEP, "--replica-check-interval", "1", *more)
    assert run_ranks(run_with, 2, flags, 4, flip_a_bit_of_a_weight) == [True, True]
    (event,) = events(tmp_path, "skipped")
    assert event["step"] == 4 and event["reason"] == "weights differ between ranks"
    assert event["details"] == ["ranks 0 and 1 differ in model.layers.1.self_attn.k_proj.weight"]
    assert equal(state(tmp_path, 4), state(tmp_path, 3))


MASTERS = "which cannot be repaired"


def test_a_flipped_bit_in_a_frozen_weight_without_a_master_ends_the_run(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, *EVERY_STEP, "--replica-check-interval", "1", "--train-only", "router")
    one, other = run_ranks(run_with, 2, flags, 4, flip_a_bit_of_a_weight)
    assert one == other and "differ in model.layers.1.self_attn.k_proj.weight" in one and MASTERS in one


def flip_a_bit_of_a_master(engine):
    """Of a norm, or of a tied embedding in the last pipeline stage."""
    owned = {fragment.name: fragment for fragment in engine.fragments()}
    fragment = owned.get("model.layers.0.input_layernorm.weight") or owned["model.embed_tokens.weight"]
    fragment.tensors["master"].view(torch.int32)[3] ^= 1 << 20


@pytest.mark.parametrize(
    "more",
    [
        ("--tensor-parallel-size", "2"),
        ("--tensor-parallel-size", "2", "--zero-stage", "3"),
        ("--pipeline-parallel-size", "2", "--tie-embeddings", "true"),
    ],
)
def test_a_master_that_drifts_from_its_copy_ends_the_run(data_dir, tmp_path, more):
    more = (*EVERY_STEP, *more)
    one, other = run_ranks(run_with, 2, arguments(data_dir, tmp_path, *more), 3, flip_a_bit_of_a_master)
    assert one == other and "step 4: ranks 0 and 1 differ in model." in one and MASTERS in one
    assert one.endswith(f"the last checkpoint is {tmp_path}/checkpoints/step-3")


def flip_a_bit_of_a_bias(engine):
    dict(engine.named_biases())["model.layers.1.self_attn.router.bias_steps"][2] ^= 1


@pytest.mark.parametrize("zero", ["1", "3"])
def test_a_bias_that_differs_between_ranks_ends_the_run(data_dir, tmp_path, zero):
    more = (*EVERY_STEP, "--zero-stage", zero, "--load-balance-bias-rate", "0.02")
    one, other = run_ranks(run_with, 2, arguments(data_dir, tmp_path, *more), 3, flip_a_bit_of_a_bias)
    assert one == other and one.startswith(
        "step 3: ranks 0 and 1 differ in model.layers.1.self_attn.router.bias_steps, which cannot be repaired"
    )
