"""launch/slurm.sbatch with stand-ins for Slurm's commands: what the ranks are told, and which ends queue again."""

import pytest

from tests.launch.test_launch import ROOT, call_of_rank, run, trainer

SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do echo "srun $1"; shift; done
worst=0
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 "$@" &
done
for job in $(jobs -p); do
    wait "$job" || { code=$?; ((code > worst)) && worst=$code; }
done
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
[[ $1 == show ]] && echo localhost
[[ $1 == requeue ]] && echo "requeued $2"
"""

__all__ = ["trainer"]  # a fixture


@pytest.mark.parametrize("code, again", [(0, False), (75, True), (69, False), (2, False)])
def test_a_job_queues_again_only_if_its_run_was_asked_to_stop(trainer, tmp_path, code, again):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    script = ROOT / "launch" / "pretrain_llm_s.sh"
    flags = ["--exit-code", str(code), "--checkpoint-dir", "a run"]
    job = f'PATH={tmp_path / "bin"}:$PATH; exec bash {ROOT / "launch" / "slurm.sbatch"} "$@"'
    got, output, _ = run(
        ["bash", "-c", job, "sbatch", script, *flags], trainer, SLURM_JOB_NODELIST="here", SLURM_JOB_ID="123",
        SLURM_CPUS_PER_TASK="8",
    )  # fmt: skip
    assert got == code and "srun --cpus-per-task=8\n" in output, output
    assert ("requeued 123" in output) == again
    for rank in (0, 1):
        arguments = call_of_rank(trainer, rank)["arguments"]
        assert arguments[-4:] == flags and "--hidden-size" in arguments
