"""How a run ends before its last step: signals, time limits, ranks that die or stand still."""

import contextlib
import ctypes
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d

from moh_lm.checkpoint.directory import list_steps
from moh_lm.checkpoint.fragments import full_parameters
from moh_lm.checkpoint.saver import Saver, find_step
from moh_lm.model.transformer import DecoderLayer
from moh_lm.run.loop import Run
from moh_lm.supervise import watchdog
from moh_lm.supervise.watchdog import UNAVAILABLE, Watchdog
from moh_lm.training.engine import Engine
from moh_lm.training.text_engine import TextEngine
from tests.distributed import run_ranks
from tests.run.harm import equal, events
from tests.training.test_training import arguments, rows, run

# --- Signals and time limits ---


def run_with_signal(flags, step, number, moment):
    """``run``, in which rank 1 gets the signal ``number`` in a step, or as it begins to evaluate or to save."""
    places = {"step": (Engine, "step"), "evaluation": (TextEngine, "evaluate"), "save": (Saver, "save")}
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
    events, forward, evaluate = [], DecoderLayer.forward, Run.evaluate

    def evaluated(run):
        events.clear()
        evaluate(run)
        raise KeyboardInterrupt

    DecoderLayer.forward = lambda *inputs: (events.append("l"), forward(*inputs))[1]
    Watchdog.progress = lambda *_, **more: events.append("p")
    Run.evaluate = evaluated
    with contextlib.suppress(KeyboardInterrupt):
        run(flags)
    return "".join(events)


@pytest.mark.parametrize("stages", [1, 2])
def test_an_evaluation_reports_progress_after_every_micro_batch_of_every_stage(data_dir, tmp_path, stages):
    """Else one that takes long would be taken for a hang."""
    flags = arguments(data_dir, tmp_path, "--pipeline-parallel-size", str(stages), "--hang-timeout", "1h")
    for seen in run_ranks(events_of_an_evaluation, stages, flags):
        assert re.fullmatch(f"(l{{{2 // stages}}}p){{4,}}", seen), seen


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
