"""How a run is stopped by a person, whether anybody hears it, who holds a run directory, and which ranks answer."""

import errno
import fcntl
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from moh_lm.cli.output import Output
from moh_lm.config import ConfigError
from moh_lm.flags import make_parser, parse_flags
from moh_lm.monitor.events import EventLog, complete_rows
from moh_lm.run import program
from moh_lm.run.text import TEXT
from moh_lm.supervise import rendezvous, run_directory, stop, watchdog
from moh_lm.supervise.liveness import LivenessCheck, describe
from moh_lm.supervise.run_directory import lock_run_directory
from moh_lm.supervise.watchdog import UNAVAILABLE, Watchdog
from tests.distributed import free_port, run_ranks
from tests.training.test_training import arguments

# --- Ctrl-C ---


@pytest.mark.parametrize(
    "signals, ends",
    [
        ([(0, "SIGINT"), (0.1, "SIGINT"), (0.2, "SIGTERM")], None),  # a terminal, and a launcher that passes it on
        ([(0, "SIGINT"), (50, "SIGTERM"), (90, "SIGUSR1")], None),
        ([(0, "SIGTERM"), (50, "SIGINT"), (50.1, "SIGINT")], None),
        ([(0, "SIGINT"), (0.1, "SIGINT"), (5, "SIGINT")], stop.INTERRUPTED),
    ],
)
def test_a_second_interrupt_ends_the_run_at_once_and_an_echo_of_the_first_does_not(monkeypatch, signals, ends):
    clock, left = [0.0], iter(signals)

    def read(*_):
        clock[0], name = next(left, (99, None))
        return bytes([signal.Signals[name]]) if name else b""

    def leave(code):
        raise SystemExit(code)

    with monkeypatch.context() as patch:
        patch.setattr(stop.time, "monotonic", lambda: clock[0])
        patch.setattr(os, "read", read)
        patch.setattr(os, "write", fails)
        patch.setattr(os, "_exit", leave)
        if ends is None:
            stop.listen(0)
        else:
            with pytest.raises(SystemExit, match=str(ends)):
                stop.listen(0)


@pytest.mark.parametrize("before, asked", [("SIG_DFL", "True"), ("SIG_IGN", "False")])
def test_a_terminal_that_hangs_up_asks_a_run_to_stop_unless_it_is_under_nohup(before, asked):
    parts = ["import signal", f"signal.signal(signal.SIGHUP, signal.{before})"]
    parts += ["from moh_lm.supervise.stop import StopRequest", "request = StopRequest()"]
    parts += ["signal.raise_signal(signal.SIGHUP)", "print(request.due())"]
    command = [sys.executable, "-c", "; ".join(parts)]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == asked


def fails(*_, **__):
    raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_the_watchdog_ends_a_rank_whose_words_nobody_reads(monkeypatch):
    left = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fails)
        patch.setattr(watchdog.tempfile, "TemporaryFile", fails)  # as on a full disk
        patch.setattr(os, "_exit", left.append)
        Watchdog.abort(SimpleNamespace(rank=0), "no progress", wait=0)
    assert left == [UNAVAILABLE]


# --- What is said ---


@pytest.fixture
def pipe_of_python():
    """As a program of Python begins; a dry run, which another test may have made, lets the signal end it."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGPIPE, before)


def test_a_reader_that_goes_away_ends_no_work(pipe_of_python):
    reader, writer = os.pipe()
    os.close(reader)
    for unheard in ("goes on", "ends"):
        with open(os.dup(writer), "w") as file, pytest.raises(SystemExit) if unheard == "ends" else nullcontext():
            for _ in range(2):
                print("text", file=Output(file, unheard), flush=True)
    os.close(writer)


def test_a_full_disk_leaves_out_a_part_of_a_log_but_not_of_a_result():
    for is_log in (True, False):
        with open("/dev/full", "wb", buffering=0) as file, nullcontext() if is_log else pytest.raises(OSError):
            print("text", file=Output(io.TextIOWrapper(file, write_through=True), is_log=is_log), flush=True)


def test_what_is_said_to_a_closed_console_is_in_no_file_that_is_opened_later(tmp_path):
    parts = ["import os, sys", "from moh_lm.cli.output import open_closed_streams", "open_closed_streams()"]
    parts += ["file = open(sys.argv[1], 'w')", "[os.write(number, b'text') for number in (1, 2)]"]
    parts += ["print('text', flush=True)", "print('text', file=sys.__stderr__, flush=True)"]
    command = ["bash", "-c", '"$@" >&- 2>&-', "bash", sys.executable, "-c", "; ".join(parts), tmp_path / "file"]
    assert subprocess.run(command, check=False).returncode == 0
    assert (tmp_path / "file").read_text() == ""


def test_a_console_that_is_not_utf_8_gets_the_number_of_what_it_does_not_know():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print("\u00e9", file=Output(file), flush=True)
    assert file.buffer.getvalue() == b"\\xe9\n"


def run_unheard(flags):
    """The exit code of a run whose standard output and standard error nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    codes = []
    program.exit_process = lambda code, together: codes.append(code)
    program.main(parse_flags(make_parser(), ["--run-report", "false", *flags]), TEXT)
    return codes


def test_a_run_that_nobody_listens_to_any_more_goes_on_to_its_end(data_dir, tmp_path):
    assert run_ranks(run_unheard, 1, arguments(data_dir, tmp_path)) == [[0]]
    assert [row["event"] for _, row in complete_rows(tmp_path / "events.jsonl")][-1] == "complete"


def test_an_event_is_recorded_before_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=fails))
    with pytest.raises(BrokenPipeError):
        EventLog(tmp_path, writes=True).add("saved", 3, "saved step-3")
    assert EventLog(tmp_path, writes=True).last("saved")["step"] == 3


# --- The lock ---


def refused(run):
    with pytest.raises(ConfigError) as caught:
        lock_run_directory(run)
    (problem,) = caught.value.problems
    return problem


def test_a_run_directory_in_use_says_by_whom_and_how_to_tell_whether_that_is_alive(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "LOCK_SECONDS", 0)
    own, host = os.getpid(), socket.gethostname()
    with lock_run_directory(tmp_path) as lock:
        said = refused(tmp_path)
        assert f"another run is writing to it (process {own} on {host}, since 20" in said
        assert said.endswith("which is alive; end it; or give another directory")
        name = os.fsencode(tmp_path / "sleep") + b"\xff"  # not UTF-8
        os.symlink(os.fsencode(shutil.which("sleep")), name)
        sleeper = subprocess.Popen([name, "60"])
        cases = {sleeper.pid: "which is stopped; `kill -CONT", 2**22 + 1: "which is not seen here"}
        sleeper.send_signal(signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)
        holder = json.loads((tmp_path / ".lock").read_text())
        for process, words in cases.items():
            (tmp_path / ".lock").write_text(json.dumps({**holder, "process": process}))
            assert words in refused(tmp_path)
        sleeper.kill()
        sleeper.wait()
        (tmp_path / ".lock").write_text(json.dumps({**holder, "host": "node7"}))
        assert f"`ssh node7 ps -p {own}` tells whether that is alive" in refused(tmp_path)
        for content in ("", "[]", '{"host": 1}'):  # of an earlier version, or cut short
            (tmp_path / ".lock").write_text(content)
            assert "(the lock does not say which); end it" in refused(tmp_path)
        fcntl.flock(lock, fcntl.LOCK_UN)
    lock_run_directory(tmp_path).close()
    assert json.loads((tmp_path / ".lock").read_text())["process"] == own


def test_a_lock_that_cannot_be_made_is_a_sentence(tmp_path):
    (tmp_path / ".lock").mkdir()
    assert refused(tmp_path) == f"--checkpoint-dir {tmp_path}: {tmp_path}/.lock: Is a directory; mend this"


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock_run_directory(tmp_path).close()
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"warning: {tmp_path}/.lock cannot be locked (ENOLCK, No locks available)")


# --- Ranks that do not meet ---


@pytest.fixture
def meeting_place(monkeypatch):
    """Variables of rank 0 of three, at a free port."""
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    return place["MASTER_PORT"]


def test_a_port_that_another_program_has_is_a_sentence_with_the_remedy(meeting_place, monkeypatch):
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ConfigError, match=f"MASTER_PORT {port}: is taken by another program.*give another"):
            rendezvous.rendezvous_store()


def test_ranks_that_do_not_come_are_named(meeting_place, monkeypatch):
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_TIMEOUT_S", 1)
    with pytest.raises(ConfigError, match=rf"MASTER_PORT {meeting_place}: 2 of 3 ranks \(ranks 1, 2\) have not come"):
        rendezvous.rendezvous_store()


def test_a_rank_that_cannot_begin_ends_those_of_other_machines(meeting_place, monkeypatch):
    monkeypatch.setattr(rendezvous, "REFUSAL_TIMEOUT_S", 1)
    store = rendezvous.open_store(1)
    monkeypatch.setenv("RANK", "1")
    rendezvous.refuse()
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ConfigError, match=f"rank 1 on {socket.gethostname()} cannot begin"):
        rendezvous.rendezvous_store()
    del store


def test_the_ranks_of_another_run_at_the_same_port_are_not_joined(meeting_place, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    store = rendezvous.rendezvous_store()
    with pytest.raises(ConfigError, match=f"MASTER_PORT {meeting_place}: the ranks of another run meet there"):
        rendezvous.rendezvous_store()
    del store


# --- A launcher that hangs ---

LAUNCHER = """
import os, subprocess, sys
leave = '''
import os, time
from moh_lm.supervise.watchdog import end_stuck_launcher
end_stuck_launcher(0.1)
time.sleep(0.5)  # a process of much memory takes its time to end
os._exit(69)
'''
rank = subprocess.Popen([sys.executable, "-c", leave], env={**os.environ, "TORCHELASTIC_RUN_ID": "1"}, stderr=2)
if sys.argv[1] == "alive":
    code = rank.wait()
    os.close(1), os.close(2)
    sys.stdin.read()  # until the helper of the rank has ended
    sys.exit(code)
os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)  # leaves it as it is
sys.stdin.read()
"""


@pytest.mark.parametrize("state, code", [("stuck", -signal.SIGKILL), ("alive", 69)])
def test_a_torchrun_that_does_not_collect_its_dead_rank_is_ended_and_no_other(state, code):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, state], **pipes)
    limit = threading.Timer(120, launcher.kill)
    limit.start()
    said = launcher.stdout.read().decode()  # to its end: the helper has it open too
    launcher.stdin.close()
    ended = launcher.wait()
    limit.cancel()
    assert ended == code
    assert ("waits for a machine that does not answer" in said) == (state == "stuck")


# --- The roll call ---


def call(hosts):
    """What ranks 0 and 1 find one after the other; rank 2 is not there, and rank 1 stands in a collective."""
    rank = dist.get_rank()
    roll = LivenessCheck("test", hosts) if rank < 2 else None
    dist.barrier()
    first = roll.absent(1) if rank == 0 else None
    dist.barrier()
    second = roll.absent(1) if rank == 1 else None
    if roll:
        roll.end()
    if rank == 0:  # of a store whose machine is lost
        os.environ["MASTER_PORT"] = str(free_port())
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
        lost = LivenessCheck("test", hosts)
        del store
        return first, lost.absent(1)
    return second


def test_a_liveness_check_names_the_machines_that_give_no_answer():
    hosts = ["node1", "node2", "node3"]
    (first, lost), second, _ = run_ranks(call, 3, hosts)
    assert first == second == "no answer from node3 (rank 2)"
    assert lost == "no answer from the machine of rank 0 (node1)"
    assert describe([1, 2, 3], ["a", "b", "b", "c"]) == "b (ranks 1, 2), c (rank 3)"
