"""Who holds a run directory."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess

import pytest

from moh_lm.config import ConfigError
from moh_lm.supervise import run_directory
from moh_lm.supervise.run_directory import lock_run_directory, make_run_directory


def refused(run):
    with pytest.raises(ConfigError) as caught:
        lock_run_directory(run)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(tmp_path, link):
    (tmp_path / "mine").write_text("keep")
    link(tmp_path / "mine", tmp_path / ".lock")
    assert refused(tmp_path).endswith(".lock: is a link; remove it")
    assert (tmp_path / "mine").read_text() == "keep"


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o777])
def test_whoever_may_write_to_a_directory_may_lock_it(tmp_path, mode):
    tmp_path.chmod(mode)
    before = os.umask(0o077)
    lock_run_directory(tmp_path).close()
    os.umask(before)
    assert (tmp_path / ".lock").stat().st_mode & 0o777 == mode & 0o666


def test_a_foreign_lock_file_keeps_its_content(tmp_path):
    (tmp_path / ".lock").write_bytes(b"\xffkeep")
    lock_run_directory(tmp_path).close()
    assert (tmp_path / ".lock").read_bytes() == b"\xffkeep"


@pytest.mark.parametrize("content", ['{"architectures": ["LlamaForCausalLM"]}', "[]", "no JSON"])
def test_a_directory_with_a_foreign_config_is_no_run_directory(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match="has a config.json that no run has written; give another directory"):
        make_run_directory(tmp_path)


def test_foreign_metrics_are_refused_where_no_run_has_begun(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}')
    with pytest.raises(ConfigError, match="has a metrics.jsonl that no run has written"):
        make_run_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"train_iters": 5}')  # of a run, whose rows they are then
    make_run_directory(tmp_path)


def test_the_checkpoints_of_a_run_are_no_run_directory(tmp_path):
    (step := tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    for path, said in (
        (step, f"lies in a checkpoint, {step}; give the directory of a run"),
        (step / "new", f"lies in a checkpoint, {step}"),
        (step.parent, f"holds the checkpoints of a run; give its directory, {tmp_path}"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"--checkpoint-dir {path}: {said}")):
            make_run_directory(path)
    assert not list(step.iterdir())


def test_a_run_directory_in_use_names_its_holder(tmp_path, monkeypatch):
    monkeypatch.setattr(run_directory, "LOCK_SECONDS", 0)
    own, host = os.getpid(), socket.gethostname()
    with lock_run_directory(tmp_path) as lock:
        said = refused(tmp_path)
        assert f"another run is writing to it (process {own} on {host}, since 20" in said
        assert said.endswith("which is alive; wait until it ends, or end it; or give another directory")
        name = os.fsencode(tmp_path / "sleep") + b"\xff"  # not UTF-8
        os.symlink(os.fsencode(shutil.which("sleep")), name)
        sleeper = subprocess.Popen([name, "60"])
        cases = {sleeper.pid: "which is stopped; `kill -CONT", 2**22 + 1: "which is not visible here"}
        sleeper.send_signal(signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)
        holder = json.loads((tmp_path / ".lock").read_text())
        for process, words in cases.items():
            (tmp_path / ".lock").write_text(json.dumps({**holder, "process": process}))
            assert words in refused(tmp_path)
        sleeper.kill()
        sleeper.wait()
        (tmp_path / ".lock").write_text(json.dumps({**holder, "host": "node7"}))
        assert f"`ssh node7 ps -p {own}` tells whether it is alive" in refused(tmp_path)
        for content in ("", "[]", '{"host": 1}'):  # of an earlier version, or cut short
            (tmp_path / ".lock").write_text(content)
            assert "(the lock does not say which); end it" in refused(tmp_path)
        fcntl.flock(lock, fcntl.LOCK_UN)
    lock_run_directory(tmp_path).close()
    assert json.loads((tmp_path / ".lock").read_text())["process"] == own


def test_a_lock_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / ".lock").mkdir()
    assert refused(tmp_path) == f"--checkpoint-dir {tmp_path}: {tmp_path}/.lock: Is a directory; fix this"


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock_run_directory(tmp_path).close()
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"warning: {tmp_path}/.lock cannot be locked (ENOLCK, No locks available)")
