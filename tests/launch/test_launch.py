"""The scripts in launch/: the paper's values, the three launchers, the quickstart's corpus, the environment step."""

import ast
import contextlib
import gzip
import inspect
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from json.decoder import JSONDecoder
from pydoc_data.topics import topics

import psutil
import pytest
import zstandard
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from launch.quickstart_corpus import split_docstrings
from moh_lm.checks import config_problems
from moh_lm.config import ConfigError
from moh_lm.cost.memory import parameter_counts
from moh_lm.flags import parse_config
from moh_lm.supervise.errors import report_to_torchrun
from tests.distributed import reserved_port
from tests.launch.running import call_of_rank, environment, execute, ready, script_arguments
from tests.tokenizing import ROOT

SCRIPTS = ["launch/pretrain_llm_s.sh", "launch/pretrain_llm_b.sh"]
ABBREVIATED = ["--num", "4", "--m", "1", "--no", "--s", "-h", "--"]  # options of DeepSpeed, if it may complete them
CONTINUE = ["launch/continue_llama3_8b_stage1.sh", "launch/continue_llama3_8b_stage2.sh"]

# --- The scripts as programs ---


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
            code = process.wait(25)
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


# --- The scripts as tables ---

PAPER = {
    "seq_length": 2048, "batch_tokens": 2048 * 2048, "train_tokens": 100 * 10**9, "train_iters": 23_842,
    "vocab_size": 65_536, "warmup_init_lr": 1e-7, "weight_decay": 0.1, "gradient_clipping": 1.0,
    "load_balance_coefficient": 0.01, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "precision": "bf16",
    "head_selection": "mixture", "routing": "paper", "two_stage": True,
}  # fmt: skip
LLM_S = {
    "num_layers": 12, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "head_dim": 64,
    "num_shared_heads": (6,) * 12, "num_active_routed_heads": (3,) * 12,
    "learning_rate": 3e-4, "min_learning_rate": 3e-5, "warmup_iters": 2000,
}  # fmt: skip
LLM_B = {
    "num_layers": 24, "hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 16, "head_dim": 96,
    "num_shared_heads": (8,) * 24, "num_active_routed_heads": (4,) * 24,
    "learning_rate": 5e-4, "min_learning_rate": 5e-5, "warmup_iters": 500,
}  # fmt: skip


@pytest.mark.parametrize(("script", "values", "millions"), [(SCRIPTS[0], LLM_S, 186), (SCRIPTS[1], LLM_B, 882)])
def test_script_holds_the_values_of_the_paper(script, values, millions, trainer):
    config, _ = parse_config(script_arguments(script, trainer))
    expected = PAPER | values
    assert {key: value for key, value in config.to_dict().items() if key in expected} == expected
    assert config.run.global_batch_size == 2048
    assert sum(float(weight) for _, weight in config.data.data_mix) == pytest.approx(100)
    assert round(parameter_counts(config.model)["total"] / 1e6) == millions
    assert config_problems(config, world_size=8) == []


@pytest.mark.parametrize("flags", [["--dense-warmup-iters", "100"], ["--head-selection", "gated"]])
def test_what_the_gates_of_a_script_refuse_names_a_form_that_works(flags, trainer):
    arguments = script_arguments(SCRIPTS[1], trainer, *flags)

    def problems(*more):
        try:
            return config_problems(parse_config([*arguments, *more])[0], world_size=8)
        except ConfigError as error:
            return error.problems

    (sentence,) = problems()
    assert sentence.startswith(" ".join(flags)) and "--routing paper" in sentence
    advised = [form for form in ("paper_scaled", "sigmoid") if form in sentence]
    assert advised and not any(problems("--routing", form) for form in advised)


def test_later_flags_shrink_the_model_of_a_script(trainer):
    shrink = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-shared-heads 2 --num-active-routed-heads 1"
    budget = "--train-iters 3 --batch-tokens 8K --micro-batch-size 1 --warmup-iters 1 --data-mix books=1"
    config, _ = parse_config(script_arguments(SCRIPTS[1], trainer, *shrink.split(), *budget.split()))
    assert (config.model.num_layers, config.model.head_dim, config.model.heads.num_shared_heads) == (2, 16, (2, 2))
    assert (config.run.train_iters, config.data.data_mix) == (3, (("books", "1"),))
    assert config_problems(config, world_size=2) == []


# --- The quickstart's corpus ---


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """{source: documents} as another program would read the three files."""
    directory = tmp_path_factory.mktemp("corpus")
    make_corpus(directory)
    contents = {
        "topics": (directory / "topics.jsonl").read_bytes(),
        "docstrings": zstandard.decompress((directory / "docstrings.jsonl.zst").read_bytes()),
        "library": gzip.decompress((directory / "library.json.gz").read_bytes()),
    }
    return directory, {
        source: [json.loads(line)["text"] for line in content.decode().splitlines()]
        for source, content in contents.items()
    }


def make_corpus(directory, **variables):
    command = [sys.executable, ROOT / "launch" / "quickstart_corpus.py", directory]
    code, output, _ = execute(command, directory, **variables)
    assert code == 0, output


def test_corpus_has_the_same_bytes_each_time(corpus, tmp_path):
    first, _ = corpus
    make_corpus(tmp_path, PYTHONHASHSEED="7")
    names = sorted(path.name for path in tmp_path.glob("[!.]*"))
    assert names == ["docstrings.jsonl.zst", "library.json.gz", "topics.jsonl"]
    assert all((first / name).read_bytes() == (tmp_path / name).read_bytes() for name in names)


def test_corpus_holds_the_texts_of_this_python_once(corpus):
    _, documents = corpus
    docstring = inspect.getdoc(JSONDecoder)
    code = next(line for line in inspect.getsource(JSONDecoder.decode).splitlines() if "raw_decode" in line)
    assert sorted(documents["topics"]) == sorted(topics.values())
    assert [sum(docstring in text for text in documents[source]) for source in ("docstrings", "library")] == [1, 0]
    assert [sum(code in text for text in documents[source]) for source in ("docstrings", "library")] == [0, 1]


def test_code_without_its_docstrings_is_otherwise_unchanged():
    source = textwrap.dedent('''
        """Module, with a form feed \x0c inside."""
        def function():
            "é on one line"  # é in a comment
            return "not a docstring"
        class C:
            """A class
            on two lines."""
            async def method(self):
                """Method."""
                "not a docstring either"
    ''')
    docstrings, code = split_docstrings(source)
    assert docstrings == ["Module, with a form feed \x0c inside.", "é on one line", "A class\non two lines.", "Method."]
    assert "# é in a comment" in code
    without = ast.parse(source)
    for node in ast.walk(without):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            del node.body[0]
    assert ast.dump(ast.parse(code)) == ast.dump(without)


# --- The environment step ---

# Stands for the Python of an active environment: pip's calls are noted, and fail while the file `offline` is there.
PYTHON = """#!/bin/sh
case "$*" in
    "-m pip "*) echo "$*" >>"{directory}/calls"; test ! -e "{directory}/offline" || {{ echo "no network"; exit 1; }} ;;
    *import*deepspeed*) ;;
    "-c import pip") test ! -e "{directory}/without pip" ;;
    "-m ensurepip") test -e "{directory}/ensurepip" ;;
    *) exec "{python}" "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout and an active environment, both with a space in their paths."""
    directory = tmp_path / "a b"
    (directory / "launch").mkdir(parents=True)
    (directory / "venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", directory)
    shutil.copy(ROOT / "launch" / "environment.sh", directory / "launch")
    python = directory / "venv" / "bin" / "python"
    python.write_text(PYTHON.format(directory=directory, python=sys.executable))
    python.chmod(0o755)
    return directory


def prepare(checkout, extra, **variables):
    """(exit code, output, calls of pip for a package other than pip itself) of the environment step."""
    variables = variables or {"VIRTUAL_ENV": str(checkout / "venv")}
    (checkout / "calls").write_text("")
    command = ["bash", "-c", 'set -e; source launch/environment.sh "$1"; command -v python', "bash", extra]
    code, output, _ = execute(command, checkout, CDPATH=".", **variables)  # with which cd prints
    calls = (checkout / "calls").read_text().splitlines()
    return code, output, [call for call in calls if not call.endswith(" pip>=21.3")]


def test_environment_step_keeps_the_torch_of_an_active_environment(checkout):
    code, output, calls = prepare(checkout, "test")
    assert code == 0, output
    assert output.splitlines()[-1] == str(checkout / "venv" / "bin" / "python")
    assert len(calls) == 1 and calls[0].endswith("--editable .[test]") and "--constraint" in calls[0]


@pytest.mark.parametrize("extra", ["--help", "tset", "moh_lm.kernels", ""])
def test_environment_step_takes_no_other_word_for_an_extra(checkout, extra):
    code, output, calls = prepare(checkout, extra)
    assert code == 1 and "is not in setup.py" in output and not calls


def test_environment_step_installs_only_what_has_changed(checkout):
    assert [len(prepare(checkout, extra)[2]) for extra in ("test", "test", "hf", "test", "hf")] == [1, 0, 1, 0, 0]
    with open(checkout / "setup.py", "a") as file:
        file.write("\n")
    assert [len(prepare(checkout, extra)[2]) for extra in ("test", "test", "hf")] == [1, 0, 1]


def test_a_failed_installation_is_reported_and_repeated(checkout):
    (checkout / "offline").touch()
    code, output, _ = prepare(checkout, "test")
    assert code == 1
    assert "no network" in output and "[environment] error: pip failed" in output.splitlines()[-1]
    (checkout / "offline").unlink()
    assert [len(prepare(checkout, "test")[2]) for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("place", ["active", "a .venv of the user"])
def test_a_failure_of_pip_costs_nothing_that_is_installed(checkout, place):
    """Only what a killed pip has left is removed."""
    variables = {}
    if place != "active":
        (checkout / "venv").rename(checkout / ".venv")
        variables = {"VIRTUAL_ENV": ""}
    else:
        assert prepare(checkout, "hf")[0] == 0
    (checkout / "offline").touch()
    assert [prepare(checkout, "test", **variables)[0] for _ in range(2)] == [1, 1]
    if place != "active":
        assert (checkout / ".venv" / "bin" / "python").exists()
    else:
        assert prepare(checkout, "hf")[::2] == (0, [])
    (checkout / "offline").unlink()
    assert prepare(checkout, "test", **variables)[0] == 0


def test_an_environment_without_pip_gets_it_or_says_so(checkout):
    (checkout / "without pip").touch()
    code, output, calls = prepare(checkout, "test")
    assert (code, calls) == (1, []) and "has no pip: install it there" in output.splitlines()[-1]
    (checkout / "ensurepip").touch()
    assert len(prepare(checkout, "test")[2]) == 1


def test_an_unwritable_environment_is_reported_with_the_remedy(checkout):
    (checkout / "venv" / "moh_lm.stamp").mkdir()
    code, output, calls = prepare(checkout, "test")
    assert (code, calls) == (1, []) and "venv cannot be written: fix this, or activate" in output.splitlines()[-1]


def test_threads_are_counted_also_where_there_is_no_nproc():
    script = "set -eu; source launch/quickstart_functions.sh; nproc() { return 127; }; set_threads"
    code, output, _ = execute(["bash", "-c", script], ROOT)
    assert code == 0 and output.rstrip().endswith(" threads")


def test_a_quickstart_keeps_to_cuda_visible_devices():
    for name in ("quickstart", "quickstart_continue", "quickstart_vision"):
        text = (ROOT / "launch" / f"{name}.sh").read_text()
        assert "run python -m moh_lm." in text and "--num_gpus" not in text  # with which deepspeed takes GPU 0


@pytest.mark.parametrize("name", ["quickstart", "quickstart_continue", "ablation", "atlas", "ladder", "study"])
def test_help_of_a_script_is_its_opening_comment(name, tmp_path):
    script = ROOT / "launch" / f"{name}.sh"
    for flags in (["--help"], [str(tmp_path / "out"), "--help"]):
        shown = subprocess.run(["bash", script, *flags], capture_output=True, text=True, timeout=60, check=True).stdout
        assert f"bash launch/{name}.sh" in shown and "set -euo" not in shown and not (tmp_path / "out").exists()
        assert len(shown.splitlines()) >= 5


@pytest.mark.parametrize("name", ["quickstart", "quickstart_continue", "quickstart_real", "quickstart_vision"])
def test_every_quickstart_says_so(name, tmp_path):
    at = ["1"] if name in ("quickstart_continue", "quickstart_real") else []
    code, output, _ = execute(["bash", f"launch/{name}.sh", tmp_path / "out", *at, "--dry-run"], ROOT)
    assert code == 2 and "--dry-run: this script trains in OUT" in output and not (tmp_path / "out").exists(), output


def test_flags_of_a_comparison_name_files_where_it_was_started():
    flags = ["--data-dir", "a b", "--config=c.yaml", "--eval-tasks", "d", "--eval-tasks=/e", "--seed", "d"]
    script = 'source launch/quickstart_functions.sh; from_here "$@"; printf "%s\\n" "$root" "${given[@]}"'
    code, output, _ = execute(["bash", "-c", script, "bash", *flags], ROOT, CDPATH=".")  # with which cd prints
    places = ["--data-dir", f"{ROOT}/a b", f"--config={ROOT}/c.yaml", "--eval-tasks", f"{ROOT}/d", "--eval-tasks=/e"]
    assert (code, output.splitlines()) == (0, [str(ROOT), *places, "--seed", "d"])


@pytest.mark.parametrize("flag", ["--dry-run", "--checkpoint-dir=runs/x"])
def test_a_quickstart_refuses_flags_with_which_it_would_export_nothing(flag):
    script = 'source launch/quickstart_functions.sh; from_here "$@"; trains_in_out; echo accepted'
    code, output, _ = execute(["bash", "-c", script, "quickstart.sh", "--seed", "1", flag], ROOT)
    assert (code, output.split(":")[:2]) == (2, ["quickstart.sh", f" {flag.partition('=')[0]}"]), output


@pytest.mark.parametrize("name", ["ablation", "atlas", "ladder", "study"])
def test_a_comparison_tells_a_wrong_flag_before_it_makes_anything(name, tmp_path):
    script = ROOT / "launch" / f"{name}.sh"
    command = ["bash", script, tmp_path / "out", "--lr", "1", "--hidden-size", "wide"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and not done.stdout and not list((tmp_path / "out").iterdir())
    assert done.stderr.splitlines() == [
        f"{name}: flag --lr is unknown: did you mean --learning-rate?",
        f"{name}: --hidden-size wide: write a whole number",
    ]
