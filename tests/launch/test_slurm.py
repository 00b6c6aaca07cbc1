"""launch/slurm.sbatch with stand-ins for Slurm's commands: what the ranks are told, and which ends queue again."""

import re
import shutil

import pytest

from tests.launch.running import call_of_rank, execute
from tests.tokenizing import ROOT

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do echo "srun $1"; shift; done
worst=0
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 "$@" &
done
for job in $(jobs -p); do
    wait "$job" || { code=$?; ((code > worst)) && worst=$code; }
done
[[ ${MADE:-} ]] && echo "{\\"step\\": $MADE}" >>"a run/metrics.jsonl"
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
[[ $1 == show ]] && echo localhost
[[ $1 == requeue ]] && echo "requeued $2"
"""


FLAGS = ["--checkpoint-dir", "a run", "--exit-code"]


@pytest.fixture
def submit(trainer, tmp_path):
    """A function that runs the job with tasks that exit with a code, after a step: -> whether it queued again."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (trainer / "a run").mkdir()
    script = ROOT / "launch" / "pretrain_llm_s.sh"
    job = f'PATH={tmp_path / "bin"}:$PATH; exec bash {ROOT / "launch" / "slurm.sbatch"} "$@"'

    def submitted(code, step="", flags=FLAGS):
        got, output, _ = execute(
            ["bash", "-c", job, "sbatch", script, *flags, str(code)], trainer, SLURM_JOB_NODELIST="here",
            SLURM_JOB_ID="123", SLURM_CPUS_PER_TASK="8", MADE=str(step),
        )  # fmt: skip
        assert got == code and "srun --cpus-per-task=8\n" in output, output
        return "requeued 123" in output

    return submitted


@pytest.mark.parametrize("code, again", [(0, False), (75, True), (69, True), (1, False), (2, False), (137, False)])
def test_a_job_queues_again_after_a_stop_or_a_hang(submit, trainer, code, again):
    assert submit(code) == again
    secrets = {call_of_rank(trainer, rank)["secret"] for rank in (0, 1)}
    assert len(secrets) == 1 and len(*secrets) == 32
    for rank in (0, 1):
        arguments = call_of_rank(trainer, rank)["arguments"]
        assert arguments[-4:] == [*FLAGS, str(code)] and "--hidden-size" in arguments


@pytest.mark.parametrize("code", [138, 143])
def test_a_job_that_a_signal_ended_before_training_queues_again_once(submit, code):
    assert submit(code) and not submit(code)


@pytest.mark.parametrize("given", ["--config llm.yaml", "--config=llm.yaml"])
@pytest.mark.parametrize("line", ["checkpoint_dir: a run # ", '{checkpoint_dir: "a run"}', "checkpoint_dir:\n a run\r"])
def test_a_job_finds_the_run_directory_of_a_file(submit, trainer, given, line):
    (trainer / "llm.yaml").write_text(f"# checkpoint_dir: no\n{line}\n")
    assert submit(69, flags=["--checkpoint-dir", "another", *given.split(), "--exit-code"])
    assert (trainer / "a run" / "restarts-123").exists()


@pytest.mark.parametrize(
    "line, found",
    [("checkpoint_dir: a run # ", "a run"), ('checkpoint_dir: "b"', "b"), ("x: 1", "of script"),
     ("checkpoint_dir: a#1\r", "a#1"), ("checkpoint_dir: null", "of script")],  # fmt: skip
)
def test_a_host_without_python_finds_it_too(tmp_path, line, found):
    function = re.search(r"^of_file\(\).*?^}", (ROOT / "launch/slurm.sbatch").read_text(), re.MULTILINE | re.DOTALL)[0]
    for program in ("sed", "tail", "tr"):
        (tmp_path / program).symlink_to(shutil.which(program))
    (tmp_path / "llm.yaml").write_text(f"# checkpoint_dir: no\n{line}\n")
    command = [shutil.which("bash"), "-c", f"run='of script'\n{function}\nof_file llm.yaml"]
    assert execute(command, tmp_path, PATH=str(tmp_path))[:2] == (0, f"{found}\n")


@pytest.mark.parametrize("code", [1, 137])
def test_a_job_queues_again_after_a_failure_only_if_steps_were_made(submit, code):
    assert submit(code, 10)
    assert not submit(code, 10)  # the same step again
    assert submit(code, 20)
    assert submit(code, 15)  # it has resumed from a checkpoint before step 15
    assert not submit(2, 30)


def test_failures_in_a_row_queue_a_job_again_five_times(submit):
    assert [submit(69, step) for step in range(7)] == [True] * 5 + [False] * 2
    assert submit(75) and submit(69)  # a stop that was asked for ends the row
    assert not submit(69) and submit(75)  # the same error twice before the first step
    assert submit(69)
    failures = enumerate((1, 74, 137, 74, 1, 74, 1), start=1)
    assert [submit(code, step) for step, code in failures] == [True] * 4 + [False] * 3


def test_a_script_that_calls_another_has_a_run_directory(tmp_path):
    found = [line for line in (ROOT / "launch/slurm.sbatch").read_text().splitlines() if line.startswith("run=")]
    for script in ("train_moh_vit_s", "train_moh_dit_xl", "pretrain_llm_b", "continue_llama3_8b_stage1"):
        path = ROOT / "launch" / f"{script}.sh"
        code, output, _ = execute(["bash", "-c", f'script={path}\n{found[0]}\necho "$run"'], tmp_path)
        assert (code, output.count("\n")) == (0, 1) and output.startswith("runs/")


def test_a_job_finds_the_run_directory_of_its_script(submit, trainer):
    (trainer / "runs" / "llm-s").mkdir(parents=True)
    assert submit(69, flags=["--exit-code"])
    assert (trainer / "runs" / "llm-s" / "restarts-123").read_text() == "exit code 69 after step 0\n"
    assert submit(69, flags=["--checkpoint-dir=a run", "--exit-code"])
    assert (trainer / "a run" / "restarts-123").exists()
