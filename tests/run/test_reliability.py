"""What a run survives: bad numbers, spikes, flipped bits, signals, ranks that die or stand still."""

import contextlib
import ctypes
import functools
import json
import math
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d

from moh_lm.checkpoint.directory import list_steps
from moh_lm.checkpoint.fragments import FragmentReader, full_parameters
from moh_lm.checkpoint.saver import Saver, find_step
from moh_lm.config import ReliabilityConfig
from moh_lm.model.transformer import DecoderLayer
from moh_lm.run import loop, program, watchdog
from moh_lm.run.watchdog import UNAVAILABLE, Watchdog
from moh_lm.training.engine import Engine
from moh_lm.training.guard import FINE, GRADIENT, LOSS, SPIKE, BadNumbers, Guard
from tests.distributed import run_ranks
from tests.training.test_training import arguments, rows, run

EVERY_STEP = ("--save-interval", "1", "--log-interval", "1", "--async-save", "false")


def events(directory, kind):
    lines = (Path(directory) / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def state(directory, step):
    """{kind/name: whole tensor} of a checkpoint."""
    reader = FragmentReader(Path(directory) / "checkpoints" / f"step-{step}")
    kinds = ("master", "exp_avg", "exp_avg_sq")
    return {f"{kind}/{name}": reader.read(kind, name) for name in reader.shapes for kind in kinds}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def run_with(flags, step, harm, rank=1, count=1):
    """``run``, in which ``harm(engine)`` is called on ``rank`` at the beginning of ``count`` steps from ``step`` on."""
    train_step = Engine.train_step
    calls = {"step": 0}

    def harmed(engine, *others, **more):
        calls["step"] += 1
        harm.undo = None
        if step <= calls["step"] < step + count and int(os.environ["RANK"]) == rank:
            harm(engine)
        try:
            return train_step(engine, *others, **more)
        finally:
            if harm.undo:
                harm.undo()

    Engine.train_step = harmed
    try:
        return run(flags)
    except BadNumbers as error:
        return str(error)


# --- Bad numbers ---


def nan_in_the_loss(engine):
    handle = engine.model.model.register_forward_hook(lambda module, inputs, out: out * math.nan)
    nan_in_the_loss.undo = handle.remove


def inf_in_a_gradient(engine):
    parameter = dict(engine.model.named_parameters())["model.layers.1.mlp.down_proj.weight"]
    handle = parameter.register_hook(lambda grad: torch.full_like(grad, math.inf))
    inf_in_a_gradient.undo = handle.remove


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
    "zero1": (),
    "zero1 bf16": ("--precision", "bf16"),
    "zero2": ("--zero-stage", "2"),
    "zero3": ("--zero-stage", "3"),
    "tp": ("--tensor-parallel-size", "2"),
    "tp zero3": ("--tensor-parallel-size", "2", "--zero-stage", "3"),
}


@pytest.mark.parametrize(
    "layout, harm, located",
    [
        ("zero1", nan_in_the_loss, True),
        ("zero1 bf16", nan_in_a_hidden_gradient, True),
        ("zero1", inf_in_a_gradient, False),
        ("zero1 bf16", nan_in_a_weight, True),
        ("zero2", nan_in_a_weight, True),
        ("zero3", nan_in_the_loss, True),
        ("zero3", inf_in_a_gradient, False),
        ("tp", nan_in_the_loss, True),
        ("tp", inf_in_a_gradient, False),
        ("tp", nan_in_the_gradient_of_a_norm, False),
        ("tp zero3", nan_in_the_gradient_of_a_norm, False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_step_with_a_bad_number_on_one_rank_changes_no_state_and_is_recorded(
    data_dir, tmp_path, layout, harm, located
):
    flags = arguments(data_dir, tmp_path, *EVERY_STEP, *LAYOUTS[layout])
    assert run_ranks(run_with, 2, flags, 4, harm) == [True, True]
    assert equal(state(tmp_path, 4), state(tmp_path, 3))
    assert not equal(state(tmp_path, 5), state(tmp_path, 4))
    assert all(tensor.isfinite().all() for tensor in state(tmp_path, 7).values())
    (event,) = events(tmp_path, "skipped")
    assert event["step"] == 4 and event["step_samples"] == [24, 31]
    assert event["reason"] in ("loss not finite", "gradient not finite")
    if located:
        assert event["ranks"] == ([0, 1] if layout == "tp" else [1])  # tensor-parallel ranks share their samples
        assert set(event["samples"]) <= set(range(24, 32) if layout == "tp" else range(28, 32)) and event["samples"]
        assert set(event["sources"]) <= {"even", "odd"} and event["sources"]
    logged = {row["step"]: row for row in rows(tmp_path) if "loss" in row}
    assert [logged[step]["skipped_steps"] for step in range(1, 8)] == [0, 0, 0, 1, 0, 0, 0]
    assert logged[4]["loss"] is None and logged[5]["loss"] > 0
    # Schedule and data go on as if nothing had happened.
    assert [logged[step]["consumed_samples"] for step in range(1, 8)] == [8 * step for step in range(1, 8)]


def stage_nan_in_the_loss(engine):
    """The last stage computes the loss; the harness harms rank 1, which is it."""
    handle = engine.model.forward_funcs[-1].register_forward_hook(lambda module, inputs, out: out * math.nan)
    stage_nan_in_the_loss.undo = handle.remove


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_stages_of_a_pipeline_skip_a_step_together(data_dir, tmp_path, precision):
    more = ("--pipeline-parallel-size", "2", "--precision", precision)
    flags = arguments(data_dir, tmp_path, *EVERY_STEP, *more)
    assert run_ranks(run_with, 2, flags, 4, stage_nan_in_the_loss) == [True, True]
    assert equal(state(tmp_path, 4), state(tmp_path, 3))
    assert not equal(state(tmp_path, 5), state(tmp_path, 4))
    (event,) = events(tmp_path, "skipped")
    assert event["step"] == 4 and set(event["ranks"]) == {0, 1} and event["samples"] == list(range(24, 32))


def stage_nan_in_the_gradient_of_a_norm(engine):
    parameter = dict(engine.named_parameters())["model.layers.0.input_layernorm.weight"]
    handle = parameter.register_hook(lambda grad: grad * math.nan)
    stage_nan_in_the_gradient_of_a_norm.undo = handle.remove


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_copy_in_a_pipeline_that_is_in_no_norm_is_looked_at_too(data_dir, tmp_path, precision):
    more = ("--pipeline-parallel-size", "2", "--tensor-parallel-size", "2", "--precision", precision)
    flags = arguments(data_dir, tmp_path, *EVERY_STEP, *more)
    assert run_ranks(run_with, 4, flags, 4, stage_nan_in_the_gradient_of_a_norm) == [True] * 4
    assert equal(state(tmp_path, 4), state(tmp_path, 3))
    (event,) = events(tmp_path, "skipped")
    assert event["step"] == 4


def test_too_many_skipped_steps_end_the_run_and_the_last_checkpoint_is_named(data_dir, tmp_path):
    more = ("--save-interval", "2", "--max-skipped-steps", "2", "--run-report")
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


def test_a_run_that_fails_is_left_by_all_ranks_when_its_page_is_written(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path / "run", *EVERY_STEP[2:], "--max-skipped-steps", "0", "--run-report")
    assert run_ranks(run_with_a_slow_page, 2, flags, tmp_path / "page") == [True, True]


# --- Spikes ---


def test_the_guard_finds_what_is_so_many_deviations_above_the_mean_of_a_full_window():
    guard = Guard(ReliabilityConfig(spike_sigmas=3.0, spike_window=4))
    window = [2.0, 2.5, 2.25, 2.75]
    for step, loss in enumerate(window, 1):
        assert guard.judge(1000.0, 1.0) == FINE  # not full yet
        guard.record(step, loss, 1.0, skipped=False)
    limit = statistics.fmean(window) + 3 * statistics.pstdev(window)
    assert guard.judge(limit, 1.0) == FINE and guard.judge(limit * (1 + 1e-12), 1.0) == SPIKE
    assert guard.judge(2.0, 1.0 + 1e-12) == SPIKE  # a norm that never varied
    assert guard.judge(math.nan, 1.0) == LOSS and guard.judge(2.0, math.inf) == GRADIENT
    guard.record(5, 9.0, 1.0, skipped=True)  # leaves the window as it is
    restored = Guard(guard.settings)
    restored.restore(json.loads(json.dumps(guard.state())))
    assert restored.state() == guard.state()
    assert restored.judge(limit * (1 + 1e-12), 1.0) == SPIKE


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


@pytest.mark.parametrize("more", [(), ("--precision", "bf16", "--zero-stage", "2"), ("--micro-batch-size", "1")])
def test_a_flipped_bit_in_one_copy_of_a_weight_is_found_and_mended(data_dir, tmp_path, more):
    flags = arguments(data_dir, tmp_path, *EVERY_STEP, "--replica-check-interval", "1", *more)
    assert run_ranks(run_with, 2, flags, 4, flip_a_bit_of_a_weight) == [True, True]
    (event,) = events(tmp_path, "skipped")
    assert event["step"] == 4 and event["reason"] == "weights differ between ranks"
    assert event["details"] == ["ranks 0 and 1 differ in model.layers.1.self_attn.k_proj.weight"]
    assert equal(state(tmp_path, 4), state(tmp_path, 3))


MASTERS = "still so after weights were written from their fp32 masters again"


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
        "step 3: ranks 0 and 1 differ in model.layers.1.self_attn.router.bias_steps; still so after"
    )


# --- Signals and time limits ---


def run_with_signal(flags, step, number, moment):
    """``run``, in which rank 1 gets the signal ``number`` in a step, or as it begins to evaluate or to save."""
    places = {"step": (Engine, "step"), "evaluation": (Engine, "evaluate"), "save": (Saver, "save")}
    owner, name = places[moment]
    original = getattr(owner, name)
    calls = {"number": 0}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite may be under nohup

    def signalled(*arguments):
        calls["number"] += 1
        if calls["number"] == step and os.environ["RANK"] == "1":
            os.kill(os.getpid(), number)
        return original(*arguments)

    setattr(owner, name, signalled)
    return run(flags)


@pytest.fixture(scope="module")
def whole(data_dir, tmp_path_factory):
    """The directory of a run of two ranks that nobody stops."""
    directory = tmp_path_factory.mktemp("whole")
    run_ranks(run, 2, arguments(data_dir, directory))
    return directory


@pytest.mark.parametrize(
    "moment, nth, number, stopped_at",
    [
        ("step", 5, signal.SIGTERM, 5),
        ("step", 4, signal.SIGUSR1, 4),
        ("evaluation", 1, signal.SIGINT, 1),  # the evaluation before the first step
        ("evaluation", 4, signal.SIGHUP, 4),
        ("save", 1, signal.SIGTERM, 4),  # the save of step 3: one more step
    ],
)
def test_a_signal_to_one_rank_saves_and_stops_all_and_the_run_goes_on_to_the_bit(
    data_dir, tmp_path, whole, moment, nth, number, stopped_at
):
    flags = arguments(data_dir, tmp_path)
    assert run_ranks(run_with_signal, 2, flags, nth, number, moment) == [False, False]
    assert find_step(tmp_path).name == f"step-{stopped_at}"
    assert [event["step"] for event in events(tmp_path, "stopped")] == [stopped_at]
    assert run_ranks(run, 2, flags) == [True, True]
    assert rows(tmp_path) == rows(whole)
    mine, theirs = (dict(full_parameters(find_step(directory))) for directory in (tmp_path, whole))
    assert equal(mine, theirs)


def test_a_run_stops_and_saves_when_its_time_is_over(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, "--exit-after", "1s", "--train-iters", "100000", "--warmup-iters", "2")
    assert run_ranks(run, 2, flags) == [False, False]
    (stopped,) = events(tmp_path, "stopped")
    assert find_step(tmp_path).name == f"step-{stopped['step']}"
    assert 0 < stopped["step"] < 100_000


# --- Ranks that die or stand still ---


def run_and_suffer(flags, step, harm, output):
    """``run``, in which rank 1 calls ``harm()`` as the given step begins; what the ranks say goes to files."""
    os.dup2(os.open(f"{output}-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT), 2)
    train_step = Engine.train_step
    calls = {"step": 0}

    def harmed(engine, *others, **more):
        calls["step"] += 1
        if calls["step"] == step and os.environ["RANK"] == "1":
            harm()
        return train_step(engine, *others, **more)

    Engine.train_step = harmed
    return run(flags)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_after_a_save(directory):
    """Die once there is a checkpoint. The rank goes on until then: a save ends while later steps are done."""

    def wait_and_die():
        while not list_steps(directory):
            time.sleep(0.05)
        die()

    threading.Thread(target=wait_and_die, daemon=True).start()


def stand_still():
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_interpreter():
    """Sleep with the interpreter's lock: none of the rank's Python threads can run."""
    ctypes.PyDLL(None).sleep(60)


def test_a_rank_that_dies_ends_the_others_with_its_name(data_dir, tmp_path):
    output, harm = tmp_path / "output", functools.partial(die_after_a_save, tmp_path / "checkpoints")
    with pytest.raises(AssertionError, match=rf"exit codes \[{UNAVAILABLE}, -9\]"):
        run_ranks(run_and_suffer, 2, arguments(data_dir, tmp_path, "--train-iters", "3000"), 5, harm, output)
    assert re.search(r"rank 1 \(process \d+\) died; rank 0 cannot go on", Path(f"{output}-0").read_text())
    assert list_steps(tmp_path / "checkpoints")


def run_on_another_machine_and_suffer(*arguments):
    """``run_and_suffer`` where no rank can look up the processes of the others."""
    watchdog.neighbours = lambda ranks: {}
    return run_and_suffer(*arguments)


def freeze():
    """Stand still, as with a whole machine, until long after the others have left."""
    subprocess.Popen(["sh", "-c", f"sleep 12; kill -KILL {os.getpid()}"])
    stand_still()


@pytest.mark.parametrize("harm, said", [(die, "; rank 0 cannot go on"), (freeze, "; the run ends")])
def test_a_rank_on_another_machine_that_dies_or_freezes_is_named_in_place_of_a_trace(data_dir, tmp_path, harm, said):
    output, flags = tmp_path / "output", arguments(data_dir, tmp_path, "--hang-timeout", "6")
    with pytest.raises(AssertionError, match=rf"exit codes \[{UNAVAILABLE}, -9\]"):
        run_ranks(run_on_another_machine_and_suffer, 2, flags, 5, harm, output)
    heard = Path(f"{output}-0").read_text()
    assert f"no answer from {socket.gethostname()} (rank 1){said}" in heard
    assert "Traceback" not in heard


def zero_the_shards(directory):
    for path in directory.glob("*/*.bin"):
        path.write_bytes(bytes(path.stat().st_size))


def test_a_damaged_shard_ends_the_run_in_one_line_with_its_name(data_dir, tmp_path):
    output, data = tmp_path / "output", tmp_path / "data"
    shutil.copytree(data_dir, data)
    harm = functools.partial(zero_the_shards, data)
    with pytest.raises(AssertionError, match=r"exit codes \["):
        run_ranks(run_and_suffer, 2, arguments(data, tmp_path / "run"), 3, harm, output)
    said = "".join(Path(f"{output}-{rank}").read_text() for rank in (0, 1))
    assert re.search(r"moh_lm.pretrain: rank \d: .*unit-\d.bin: block 0, .* is damaged.*; restore the file", said)


def test_a_rank_that_stands_still_ends_the_run_and_all_ranks_say_where_they_were(data_dir, tmp_path):
    output, flags = tmp_path / "output", arguments(data_dir, tmp_path, "--hang-timeout", "6")
    with pytest.raises(AssertionError, match=r"exit codes \[|rank 1:"):  # a woken rank may go on until rank 0 leaves
        run_ranks(run_and_suffer, 2, flags, 5, stand_still, output)
    said = [Path(f"{output}-{rank}").read_text() for rank in (0, 1)]
    assert re.search(r"no progress for \d+ s \(--hang-timeout 6\); rank 1 \(process \d+\) had been stopped", said[0])
    assert all("in run_steps" in text for text in said)  # a woken rank may have moved on from where it stood


def test_a_rank_that_holds_the_interpreter_says_where_and_is_ended_too(data_dir, tmp_path):
    output, flags = tmp_path / "output", arguments(data_dir, tmp_path, "--hang-timeout", "6")
    with pytest.raises(AssertionError, match=rf"exit codes \[{UNAVAILABLE}, 1\]"):
        run_ranks(run_and_suffer, 2, flags, 5, hold_the_interpreter, output)
    assert "in hold_the_interpreter" in Path(f"{output}-1").read_text()


def events_of_an_evaluation(flags):
    """What happens on this rank in the first evaluation, in order: l for a layer, p for a report of progress."""
    events, forward, evaluate = [], DecoderLayer.forward, program.Run.evaluate

    def evaluated(run):
        events.clear()
        evaluate(run)
        raise KeyboardInterrupt

    DecoderLayer.forward = lambda *inputs: (events.append("l"), forward(*inputs))[1]
    Watchdog.progress = lambda *_, **more: events.append("p")
    program.Run.evaluate = evaluated
    with contextlib.suppress(KeyboardInterrupt):
        run(flags)
    return "".join(events)


@pytest.mark.parametrize("stages", [1, 2])
def test_an_evaluation_reports_progress_after_every_micro_batch_of_every_stage(data_dir, tmp_path, stages):
    """Else one that takes long would be taken for a hang."""
    flags = arguments(data_dir, tmp_path, "--pipeline-parallel-size", str(stages), "--hang-timeout", "1h")
    for events in run_ranks(events_of_an_evaluation, stages, flags):
        assert re.fullmatch(f"(l{{{2 // stages}}}p){{4,}}", events), events


def time_limits(flags):
    """The time-outs of all process groups as the first step begins, seconds."""
    limits = []

    def look(engine, *others, **more):
        for group in distributed_c10d._world.pg_map:
            options = group._get_backend(torch.device("cpu")).options
            limits.append(options._timeout.total_seconds())
        raise KeyboardInterrupt

    Engine.train_step = look
    with contextlib.suppress(KeyboardInterrupt):
        run(flags)
    return limits


def test_every_process_group_has_the_time_limit(data_dir, tmp_path):
    more = ("--hang-timeout", "40s", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")
    for limits in run_ranks(time_limits, 4, arguments(data_dir, tmp_path, *more)):
        assert len(limits) > 4 and set(limits) == {100.0}  # a minute more than the watchdog
