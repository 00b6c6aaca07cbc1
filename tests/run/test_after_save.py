"""--after-save: the command gets every complete checkpoint, and nothing that it does changes the run."""

import itertools
import math
import os
import time
from types import SimpleNamespace

import pytest

from moh_lm.checkpoint.manifest import verify
from moh_lm.run.after_save import AfterSave
from tests.distributed import run_ranks
from tests.run.harm import run_and_suffer
from tests.running import rows
from tests.training.runs import arguments, events, parameters, run

SHORT = "--train-iters 4 --eval-interval 0 --eval-samples 1 --log-interval 1 --save-interval 1".split()


class Recorded:
    """Stands for an ``EventLog``."""

    def __init__(self):
        self.rows = []

    def add(self, event, step, **facts):
        self.rows.append((event, step, facts["reason"]))


def test_every_checkpoint_is_copied_whole_through_a_resume(data_dir, tmp_path):
    more = (*SHORT, "--pipeline-parallel-size", "2")
    plain, copying, copies = tmp_path / "plain", tmp_path / "a run", tmp_path / "copies"
    copies.mkdir()
    run_ranks(run, 2, arguments(data_dir, plain, *more))
    flags = arguments(data_dir, copying, *more, "--after-save", f"sleep 0.2; cp -r {{path}} {copies}")
    run_ranks(run, 2, flags, 2)  # killed after step 2: its copy may be there or not
    deadline = time.monotonic() + 60
    while not (copies / "step-1" / "manifest.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    run_ranks(run, 2, flags)
    assert {"step-1", "step-3", "step-4"} <= {path.name for path in copies.iterdir()}
    assert not any(verify(copies / f"step-{number}") for number in (1, 3, 4))
    assert rows(copying) == rows(plain) and not events(copying, "after-save failed")
    assert all(value.equal(parameters(plain)[name]) for name, value in parameters(copying).items())


def test_a_command_that_fails_is_reported_and_the_run_goes_on(data_dir, tmp_path):
    command = "echo first >&2; echo no bucket >&2; exit 3"
    run_ranks(run, 1, arguments(data_dir, tmp_path, *SHORT, "--after-save", command))
    found = [(event["step"], event["reason"]) for event in events(tmp_path, "after-save failed")]
    assert found == [(step, "exit code 3: no bucket") for step in (1, 2, 3, 4)]
    assert rows(tmp_path)[-1]["step"] == 4 and len(events(tmp_path, "complete")) == 1


def fail():
    raise OSError("no memory")


def test_an_error_leaves_the_commands_their_time(data_dir, tmp_path):
    """The ranks wait for none of them at a step: each takes longer than a step."""
    (tmp_path / "copies").mkdir()
    command = f"sleep 1; cp -r {{path}} {tmp_path}/copies"
    flags = arguments(data_dir, tmp_path / "run", *SHORT, "--async-save", "false", "--after-save", command)
    with pytest.raises(AssertionError, match=r"exit codes \[1\]"):
        run_ranks(run_and_suffer, 1, flags, 4, fail, tmp_path / "output", 0)
    assert "OSError: no memory" in (tmp_path / "output-0").read_text()
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == ["step-1", "step-2", "step-3"]
    assert not any(verify(path) for path in (tmp_path / "copies").iterdir())


def test_commands_run_one_after_the_other(tmp_path):
    log = Recorded()
    command = f"cd {tmp_path} && mkdir busy && sleep 0.1 && rmdir busy && basename {{path}} >> order"
    after_save = AfterSave(command, log, 60)
    for step in range(5):
        after_save.add(step, tmp_path / f"step-{step}")
    after_save.close(lambda: None)
    assert (tmp_path / "order").read_text().split() == [f"step-{step}" for step in range(5)] and not log.rows


SOON = itertools.chain([math.inf] * 5, itertools.repeat(1))


@pytest.mark.parametrize("limit, asked_to_stop", [(1, ()), (900, (lambda: 1,)), (900, (lambda: next(SOON),))])
def test_a_command_that_never_ends_is_ended_after_the_run(limit, asked_to_stop, tmp_path):
    """Sooner if the run was asked to stop, before or meanwhile."""
    log, progress = Recorded(), SimpleNamespace(calls=0)
    after_save = AfterSave(f"echo $$ > {tmp_path}/pid; sleep 1000", log, limit)
    for step in (1, 2):
        after_save.add(step, tmp_path)
    after_save.close(lambda: setattr(progress, "calls", progress.calls + 1), *asked_to_stop)
    assert log.rows == [("after-save failed", 1, "not done 1 s after the run; steps left: 1, 2")] and progress.calls
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_shell_that_cannot_start_is_reported(tmp_path, monkeypatch):
    log = Recorded()
    monkeypatch.setenv("PATH", str(tmp_path))
    AfterSave("true {path}", log, 1).add(7, tmp_path)
    assert log.rows[0][:2] == ("after-save failed", 7)


def test_the_command_is_no_rank_of_the_run(tmp_path, monkeypatch):
    ours = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node-0"}
    ours |= {"MASTER_PORT": "29500", "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "1"}
    for name, value in {**ours, "HF_TOKEN": "kept", "PSEUDORANK": "kept", "SIZE": "kept"}.items():
        monkeypatch.setenv(name, value)
    commands = AfterSave(f"env > {tmp_path}/env-of-{{path}}", Recorded(), patience=60)
    commands.add(1, "step")
    commands.close(lambda: None)
    found = dict(line.split("=", 1) for line in (tmp_path / "env-of-step").read_text().splitlines() if "=" in line)
    assert not ours.keys() & found.keys()
    assert found["HF_TOKEN"] == found["PSEUDORANK"] == found["SIZE"] == "kept"
