"""How a run is asked to stop: signals to one rank, a second Ctrl-C, a time that is over."""

import os
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

from moh_lm.checkpoint.saver import Saver, find_step
from moh_lm.supervise import stop
from moh_lm.training.engine import Engine
from moh_lm.training.text_engine import TextEngine
from tests.distributed import run_ranks
from tests.training.runs import arguments, equal, events, parameters, rows, run


@pytest.mark.parametrize(
    "signals, ends",
    [
        ([(0, "SIGINT"), (0.1, "SIGINT"), (0.2, "SIGTERM")], None),  # a terminal, and a launcher that passes it on
        ([(0, "SIGINT"), (50, "SIGTERM"), (90, "SIGUSR1")], None),
        ([(0, "SIGTERM"), (50, "SIGINT"), (50.1, "SIGINT")], None),
        ([(0, "SIGINT"), (0.1, "SIGINT"), (5, "SIGINT")], stop.INTERRUPTED),
    ],
)
def test_a_second_interrupt_ends_the_run_but_an_echo_does_not(monkeypatch, signals, ends):
    clock, left = [0.0], iter(signals)

    def read(*_):
        clock[0], name = next(left, (99, None))
        return bytes([signal.Signals[name]]) if name else b""

    def leave(code):
        raise SystemExit(code)

    with monkeypatch.context() as patch:
        patch.setattr(stop.time, "monotonic", lambda: clock[0])
        patch.setattr(os, "read", read)
        patch.setattr(os, "write", Mock(side_effect=BrokenPipeError))
        patch.setattr(os, "_exit", leave)
        if ends is None:
            stop.listen(0)
        else:
            with pytest.raises(SystemExit, match=str(ends)):
                stop.listen(0)


@pytest.mark.parametrize("before, asked", [("SIG_DFL", "True"), ("SIG_IGN", "False")])
def test_a_hangup_stops_a_run_unless_it_is_under_nohup(before, asked):
    parts = ["import signal", f"signal.signal(signal.SIGHUP, signal.{before})"]
    parts += ["from moh_lm.supervise.stop import StopRequest", "request = StopRequest()"]
    parts += ["signal.raise_signal(signal.SIGHUP)", "print(request.due())"]
    command = [sys.executable, "-c", "; ".join(parts)]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == asked


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


@pytest.mark.parametrize(
    "moment, nth, number, stopped_at",
    [
        ("step", 4, signal.SIGUSR1, 4),
        ("evaluation", 1, signal.SIGINT, 1),  # the evaluation before the first step
        ("save", 1, signal.SIGTERM, 4),  # the save of step 3: one more step
    ],
)
def test_a_signal_to_one_rank_stops_all_and_the_run_resumes(
    data_dir, tmp_path, two_rank_run, moment, nth, number, stopped_at
):
    flags = arguments(data_dir, tmp_path)
    assert run_ranks(run_with_signal, 2, flags, nth, number, moment) == [False, False]
    assert find_step(tmp_path).name == f"step-{stopped_at}"
    assert [event["step"] for event in events(tmp_path, "stopped")] == [stopped_at]
    assert run_ranks(run, 2, flags) == [True, True]
    assert rows(tmp_path) == rows(two_rank_run)
    assert equal(parameters(tmp_path), parameters(two_rank_run))


def test_the_time_of_a_run_begins_when_its_process_does():
    code = "import time; time.sleep(1); from moh_lm.supervise.stop import StopRequest as Stop; "
    code += "print(Stop(exit_after=1).due(), Stop(exit_after=600).due())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"True False\n"


def test_a_run_stops_and_saves_when_its_time_is_over(data_dir, tmp_path):
    flags = arguments(data_dir, tmp_path, "--exit-after", "1s", "--train-iters", "100000", "--warmup-iters", "2")
    assert run_ranks(run, 2, flags) == [False, False]
    (stopped,) = events(tmp_path, "stopped")
    assert find_step(tmp_path).name == f"step-{stopped['step']}"
    assert 0 < stopped["step"] < 100_000
