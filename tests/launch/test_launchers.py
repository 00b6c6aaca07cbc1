"""The scripts in launch/ as programs: how they start their ranks, pass on flags and signals, and end."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from moh_lm.supervise.errors import report_to_torchrun
from tests.distributed import reserved_port
from tests.launch.running import SCRIPTS, call_of_rank, environment, execute, ready
from tests.tokenizing import ROOT

ABBREVIATED = ["--num", "4", "--m", "1", "--no", "--s", "-h", "--"]  # options of DeepSpeed, if it may complete them
CONTINUE = ["launch/continue_llama3_8b_stage1.sh", "launch/continue_llama3_8b_stage2.sh"]


@pytest.mark.parametrize("script", [*SCRIPTS, *CONTINUE])
def test_script_is_valid_bash_and_valid_python(script, tmp_path):
    code, output, _ = execute(["bash", "-n", ROOT / script], tmp_path)
    assert (code, output) == (0, "")
    compile((ROOT / script).read_text(), script, "exec")


@pytest.mark.parametrize("script", [*SCRIPTS, *CONTINUE])
def test_a_rank_keeps_its_process_and_exit_code(script, trainer):
    """With one process there is nothing in between that could lose a signal."""
    code, output, process = execute([sys.executable, ROOT / script, "--exit-code", "7"], trainer)
    assert code == 7, output
    assert call_of_rank(trainer, 0)["process"] == process


def test_bash_starts_deepspeed_on_the_script_itself(trainer, programs):
    flags = ["--train-iters", "10", "--data-dir", "my data", *ABBREVIATED, "--exit-code", "2"]
    code, output, _ = execute(["bash", ROOT / SCRIPTS[1], *flags], trainer, **ready(programs))
    assert (code, output) == (2, "")
    call = call_of_rank(trainer, 0)
    assert call["arguments"][-len(flags):] == flags and call["port"] != "29500"  # of which there is one on a machine


def test_ctrl_c_and_a_hang_up_are_for_the_ranks(trainer):
    command = ["bash", ROOT / SCRIPTS[0], "--wait"]
    with subprocess.Popen(
        command, cwd=trainer, env=environment(MASTER_PORT="29512"), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            for file, number in (("rank-0.json", signal.SIGHUP), ("hung-up", signal.SIGINT)):
                while process.poll() is None and not (trainer / file).exists():
                    time.sleep(0.1)
                time.sleep(0.5)  # until it waits
                os.killpg(process.pid, number)
            output, _ = process.communicate(timeout=25)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert (process.returncode, output) == (75, "")
    assert call_of_rank(trainer, 0)["port"] == "29512"


@pytest.mark.parametrize("moment, hosts", [("import", {}), ("launch", {}), ("wait", {}), ("wait", "this one")])
def test_a_signal_to_the_launcher_alone_is_for_the_ranks(trainer, moment, hosts):
    """Process 1 of a container gets SIGTERM, and nothing happens unless it handles it."""
    command = ["bash", ROOT / SCRIPTS[0], "--wait"]
    variables = environment() | (hosts and one_node(trainer, os.environ["PATH"]))
    with subprocess.Popen(command, cwd=trainer, env=variables, start_new_session=True) as process:
        reached = {
            "import": lambda: "ranks.py" in " ".join(psutil.Process(process.pid).cmdline()),
            "launch": lambda: psutil.Process(process.pid).children(),  # which has no ranks yet
            "wait": (trainer / "rank-0.json").exists,
        }
        try:
            while process.poll() is None and not reached[moment]():
                time.sleep(0.05)
            time.sleep(0.5)
            process.terminate()
            code = process.wait(60)
            ended = (trainer / "ended").exists()  # a rank, after the signal
            assert code == 75 if ended else code > 0
            assert ended == (moment == "wait") or moment == "launch"  # by then a rank may be there or not
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def one_node(trainer, path):
    """Variables for a host file of this machine, with two ranks."""
    ssh = trainer / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text("#!/bin/sh\necho 127.0.0.1\n")
    ssh.chmod(0o755)
    (trainer / "my hosts").write_text("localhost slots=2\n")
    return {"PATH": f"{ssh.parent}{os.pathsep}{path}", "HOSTFILE": "my hosts"}


def test_bash_starts_a_rank_for_each_slot_of_the_hostfile(trainer, programs):
    command, killed = ["bash", ROOT / SCRIPTS[0], "--exit-code", "247"], 256 - signal.SIGKILL
    code, output, _ = execute(command, trainer, **one_node(trainer, ready(programs)["PATH"]))
    assert code == killed, output
    assert output.count("\n") == 1 and "SIGKILL ended a rank" in output
    assert all((trainer / f"rank-{rank}.json").exists() for rank in (0, 1))


def two_nodes(trainer, programs, pdsh):
    """Variables for a host file of two nodes, with these lines of sh as pdsh."""
    for name, text in (("ssh", "echo 127.0.0.1"), ("pdsh", pdsh)):
        path = trainer / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    (trainer / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    return {"PATH": f"{path.parent}{os.pathsep}{ready(programs)['PATH']}", "HOSTFILE": "hosts"}


@pytest.mark.skipif(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, reason="nohup keeps everything from hanging up")
def test_a_hang_up_ends_the_ranks_on_other_nodes_too(trainer, programs):
    pdsh = "case $6 in pkill*) exec touch told;; esac\ntouch started\nexec sleep 60"
    command, variables = ["bash", ROOT / SCRIPTS[0]], environment(**two_nodes(trainer, programs, pdsh))
    with subprocess.Popen(command, cwd=trainer, env=variables, start_new_session=True) as process:
        while process.poll() is None and not (trainer / "started").exists():
            time.sleep(0.1)
        time.sleep(0.5)  # until it waits
        os.killpg(process.pid, signal.SIGHUP)
    assert (trainer / "told").exists()


# Stands for pdsh -S -f FANOUT -w NODES COMMAND and the shell of the first node, in another directory.
FIRST_NODE = """
case $6 in pkill*) exit;; esac
shift 5
cd / && exec sh -c "$(printf '%s' "$*" | sed 's/%%/\\x01/g; s/%n/0/g; s/\\x01/%/g')"
"""
WORDS = [
    "It costs $HOME and `touch x`", "f(x)=1;echo", "a  b", "", "*", "~", "100% %h %n %%", "don't \"say\"",
    "back\\slash", "# no comment", "<a>", "two\nlines", "&& false", "!!", "{a,b}", "é",
]  # fmt: skip


def test_a_flag_reaches_the_shell_of_a_node_as_it_was_given(trainer, programs):
    variables = two_nodes(trainer, programs, FIRST_NODE) | {"PYTHONPATH": "/a b/$HOME:/c"}
    flags = [*ABBREVIATED, "--sample-prompts", *WORDS]
    code, output, _ = execute(["bash", ROOT / SCRIPTS[0], *flags], trainer, **variables)
    assert code == 0, output
    call = call_of_rank(trainer, 0)
    assert call["arguments"][-len(flags):] == flags
    assert call["path"].endswith("/a b/$HOME:/c") and len(call["secret"]) == 32


def test_nodes_meet_at_the_address_that_the_user_gives(trainer, programs):
    variables = two_nodes(trainer, programs, FIRST_NODE) | {"MASTER_ADDR": "10.1.2.3"}
    code, output, _ = execute(["bash", ROOT / SCRIPTS[0]], trainer, **variables)
    assert (code, call_of_rank(trainer, 0)["address"]) == (0, "10.1.2.3"), output


OTHER_LAUNCHERS = """
import json, subprocess, sys, types
from launch import ranks
sys.executable, ranks.runner.PDSHRunner = "/a b/$HOME/python", ranks.PDSHRunner
subprocess.Popen = lambda command, **_: print(json.dumps(command)) or types.SimpleNamespace(wait=int, returncode=0)
for name in ("openmpi", "mpich", "impi", "slurm", "mvapich", "pdsh"):
    ranks.runner.LAUNCHER_CLASSES[name].backend_exists = ranks.PDSHRunner.backend_exists = lambda self: True
    ranks.runner.main([*"--hostfile hosts --no_ssh_check --master_addr node1 --launcher".split(), name, *sys.argv[1:]])
"""


def test_other_launchers_get_words_and_paths_as_they_are(tmp_path, programs):
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    command = [programs / "python", "-c", OTHER_LAUNCHERS, "a.sh", *WORDS]
    code, output, _ = execute(command, tmp_path, PYTHONPATH=str(ROOT))
    commands = [json.loads(line) for line in output.splitlines() if line.startswith('["')]
    assert code == 0 and len(commands) == 6, output
    assert all(words[-len(WORDS):] == WORDS for words in commands[:5])
    commands[5] = shlex.split(" ".join(commands[5]))  # pdsh has a shell
    assert all("/a b/$HOME/python" in words for words in commands)


def test_an_ssh_that_fails_is_not_taken_for_a_signal(trainer, programs):
    code, output, _ = execute(["bash", ROOT / SCRIPTS[0]], trainer, **two_nodes(trainer, programs, "exit 255"))
    assert (code, output.count("\n")) == (255, 1) and "ssh to a node failed or broke" in output


def test_a_launcher_that_a_signal_ended_is_no_success(programs):
    killed = "lambda _: ranks.subprocess.Popen(['sh', '-c', 'kill -KILL $$']).wait()"
    code = f"import sys; from launch import ranks; ranks.runner.main = {killed}; sys.exit(ranks.main('a.sh'))"
    done = execute([programs / "python", "-c", code], ROOT)
    assert done[0] == 128 + signal.SIGKILL and "a.sh: SIGKILL ended the launcher" in done[1]


def test_what_the_launcher_lacks_is_named_with_a_remedy(programs):
    ends = "iter((RuntimeError(\"launcher 'pdsh' not installed.\"), IndexError('list index out of range')))"
    fails = f"ends = {ends}\ndef main(_): raise next(ends)\nranks.runner.main = main"
    code = f"import sys; from launch import ranks\n{fails}\nsys.exit(ranks.main('a.sh') + ranks.main('a.sh'))"
    code, output, _ = execute([programs / "python", "-c", code], ROOT)
    assert (code, output.count("\n")) == (4, 2) and "Install pdsh" in output and "`hostname -I` prints none" in output


def test_a_first_node_that_cannot_be_asked_is_named_with_a_remedy(programs, tmp_path):
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    ends = "iter((FileNotFoundError(2, 'No such file', 'ssh'), subprocess.CalledProcessError(1, ['ssh', 'node1'])))"
    fails = f"ends = {ends}\ndef main(_): raise next(ends)\nranks.runner.main = main"
    twice = "sys.exit(ranks.main('a.sh') + ranks.main('a.sh'))"
    code = f"import subprocess, sys; from launch import ranks\n{fails}\n{twice}"
    code, output, _ = execute([programs / "python", "-c", code], ROOT, HOSTFILE=str(tmp_path / "hosts"))
    assert (code, output.count("ssh must reach the first node")) == (4, 2), output


def test_bash_does_not_go_on_without_its_hostfile(trainer, programs):
    code, output, _ = execute(["bash", ROOT / SCRIPTS[0]], trainer, **ready(programs), HOSTFILE="my hosts")
    assert (code, output.count("\n")) == (2, 1) and "HOSTFILE my hosts: there is no such file" in output
    (trainer / "options").write_text("node1 slots=1\n -oProxyCommand=id slots=1\n")
    code, output, _ = execute(["bash", ROOT / SCRIPTS[0]], trainer, **ready(programs), HOSTFILE="options")
    assert (code, output.count("\n")) == (2, 1) and "-oProxyCommand=id: is an option of ssh" in output
    assert not (trainer / "rank-0.json").exists()


def test_the_launcher_names_a_hostfile_only_if_there_is_one(trainer):
    nothing = {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    code, output, _ = execute(["bash", ROOT / SCRIPTS[0]], trainer, **nothing)
    assert (code, output.count("\n")) == (2, 1) and "no GPU" in output and "HOSTFILE" not in output


def test_an_accelerator_that_deepspeed_does_not_know_is_named(trainer):
    code, output, _ = execute(["bash", ROOT / SCRIPTS[0]], trainer, DS_ACCELERATOR="xyz")
    assert (code, output.count("\n")) == (2, 1) and "DS_ACCELERATOR is 'xyz'" in output and "cuda or cpu" in output


def test_a_dry_run_for_other_devices_needs_none_here(trainer):
    flags = ["--dry-run", "--devices=64", "--device-name", "H100"]
    variables = {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    code, output, _ = execute(["bash", ROOT / SCRIPTS[1], *flags], trainer, **variables)
    assert (code, output) == (0, "")
    assert call_of_rank(trainer, 0)["arguments"][-4:] == flags


def test_devices_that_the_launcher_cannot_read_are_named(trainer, programs):
    code, output, _ = execute(["bash", ROOT / SCRIPTS[0]], trainer, **ready(programs), CUDA_VISIBLE_DEVICES="GPU-8f6a")
    assert (code, output.count("\n")) == (2, 1)
    assert "CUDA_VISIBLE_DEVICES GPU-8f6a: write numbers, such as 0,1" in output


@pytest.mark.parametrize("start", ["deepspeed --num_gpus 2 --master_port", "torchrun --nproc-per-node 2 --master-port"])
def test_a_launcher_runs_the_script_on_two_ranks(start, trainer, programs):
    with reserved_port() as port:
        command = [*start.split(), port, ROOT / SCRIPTS[0], "--data-dir", "my data"]
        code, output, _ = execute(command, trainer, **ready(programs))
    assert code == 0, output
    assert [call_of_rank(trainer, rank)["arguments"][-2:] for rank in (0, 1)] == [["--data-dir", "my data"]] * 2


def test_torchrun_ends_with_what_a_rank_found_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    report_to_torchrun(["--nosuch: no flag", "--seed banana: no number"])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/dev/full")
    report_to_torchrun(["a full disk does not keep it from the console"])
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    lines = str(ChildFailedError("script", {0: failure})).splitlines()
    assert [line.split(" : ")[-1].strip() for line in lines[-3:-1]] == ["--nosuch: no flag", "--seed banana: no number"]
