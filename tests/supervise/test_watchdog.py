"""Ranks that die, stand still or take long: which of them end a run, and what the others say."""

import contextlib
import ctypes
import functools
import os
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from moh_lm.checkpoint.directory import list_steps
from moh_lm.model.transformer import DecoderLayer
from moh_lm.run.loop import Run
from moh_lm.supervise import watchdog
from moh_lm.supervise.watchdog import UNAVAILABLE, Watchdog
from moh_lm.training.deepspeed.process_groups import open_groups
from moh_lm.training.engine import Engine
from tests.distributed import run_ranks
from tests.run.harm import run_and_suffer
from tests.training.runs import arguments, run


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
    assert re.search(r"rank 1 \(process \d+\) died; rank 0 cannot continue", Path(f"{output}-0").read_text())
    assert list_steps(tmp_path / "checkpoints")


def run_on_another_machine_and_suffer(*arguments):
    """``run_and_suffer`` where no rank can look up the processes of the others."""
    watchdog.local_ranks = lambda ranks: {}
    return run_and_suffer(*arguments)


def freeze():
    """Stand still, as with a whole machine, until long after the others have left."""
    subprocess.Popen(["sh", "-c", f"sleep 12; kill -KILL {os.getpid()}"])
    stand_still()


@pytest.mark.parametrize("harm, said", [(die, "; rank 0 cannot continue"), (freeze, "; the run ends")])
def test_a_lost_rank_on_another_machine_is_named(data_dir, tmp_path, harm, said):
    output, flags = tmp_path / "output", arguments(data_dir, tmp_path, "--hang-timeout", "6")
    with pytest.raises(AssertionError, match=rf"exit codes \[{UNAVAILABLE}, -9\]"):
        run_ranks(run_on_another_machine_and_suffer, 2, flags, 5, harm, output)
    heard = Path(f"{output}-0").read_text()
    assert f"no answer from {socket.gethostname()} (rank 1){said}" in heard
    assert "Traceback" not in heard


def test_a_stopped_rank_ends_the_run_with_the_stacks_of_all(data_dir, tmp_path):
    output, flags = tmp_path / "output", arguments(data_dir, tmp_path, "--hang-timeout", "6")
    with pytest.raises(AssertionError, match=r"exit codes \[|rank 1:"):  # a woken rank may go on until rank 0 leaves
        run_ranks(run_and_suffer, 2, flags, 5, stand_still, output)
    said = [Path(f"{output}-{rank}").read_text() for rank in (0, 1)]
    assert re.search(r"no progress for \d+ s \(--hang-timeout 6\); rank 1 \(process \d+\) had been stopped", said[0])
    assert all("in run_steps" in text for text in said)  # a woken rank may have moved on from where it stood


def test_a_rank_that_holds_the_interpreter_is_ended(data_dir, tmp_path):
    output, flags = tmp_path / "output", arguments(data_dir, tmp_path, "--hang-timeout", "6")
    with pytest.raises(AssertionError, match=rf"exit codes \[{UNAVAILABLE}, 1\]"):
        run_ranks(run_and_suffer, 2, flags, 5, hold_the_interpreter, output)
    assert "in hold_the_interpreter" in Path(f"{output}-1").read_text()


def test_the_watchdog_ends_a_rank_that_cannot_print(monkeypatch):
    left = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", Mock(side_effect=BrokenPipeError))
        patch.setattr(watchdog.tempfile, "TemporaryFile", Mock(side_effect=OSError))  # as on a full disk
        patch.setattr(os, "_exit", left.append)
        Watchdog.abort(SimpleNamespace(rank=0), "no progress", wait=0)
    assert left == [UNAVAILABLE]


@pytest.mark.parametrize("number, fate", [(signal.SIGABRT, "aborted, as by NCCL when"), (signal.SIGKILL, "died")])
def test_a_lost_machine_is_named_before_a_local_rank(number, fate, monkeypatch):
    said, watched = [], Watchdog.__new__(Watchdog)
    watched.timeout, watched.last, watched.done, watched.aborted = 60, time.monotonic(), threading.Event(), set()
    lost = Mock(hosts=["here", "here", "node2"], unresponsive=lambda seconds, known: f"no answer but from {[*known]}")
    watched.liveness, watched.abort = lost, lambda reason, wait: (said.append(reason), watched.done.set())
    monkeypatch.setattr(watchdog, "GRACE_S", -1)
    with subprocess.Popen(["sh", "-c", f"kill -{number} $$"]) as local:
        watched.local_ranks = {1: local.pid}
        watched.watch()
    assert len(said) == 1 and said[0].startswith(f"no answer but from [1]; rank 1 (process {local.pid}) {fate}")


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
def test_an_evaluation_reports_progress_per_micro_batch(data_dir, tmp_path, stages):
    """Else one that takes long would be taken for a hang."""
    flags = arguments(data_dir, tmp_path, "--pipeline-parallel-size", str(stages), "--hang-timeout", "1h")
    for seen in run_ranks(events_of_an_evaluation, stages, flags):
        assert re.fullmatch(f"(l{{{2 // stages}}}p){{4,}}", seen), seen


def limits_now():
    """The time-outs of all process groups, seconds."""
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in open_groups()]


def time_limits(flags):
    """``limits_now`` as the first step begins."""
    limits = []

    def look(engine, *others, **more):
        limits.extend(limits_now())
        raise KeyboardInterrupt

    Engine.train_step = look
    with contextlib.suppress(KeyboardInterrupt):
        run(flags)
    return limits


def test_every_process_group_has_the_time_limit(data_dir, tmp_path):
    more = ("--hang-timeout", "40s", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")
    for limits in run_ranks(time_limits, 4, arguments(data_dir, tmp_path, *more)):
        assert len(limits) > 4 and set(limits) == {100.0}  # a minute more than the watchdog


def limits_at_the_end(flags):
    run(flags)
    return limits_now()


def test_the_ranks_wait_for_what_rank_0_does_at_the_end(data_dir, tmp_path):
    """The command of --after-save may take as long as a hang, and the report follows it."""
    flags = arguments(data_dir, tmp_path, "--train-iters", "1", "--warmup-iters", "0", "--hang-timeout", "10m")
    (limits,) = run_ranks(limits_at_the_end, 1, flags)
    assert min(limits) > 2 * 600
