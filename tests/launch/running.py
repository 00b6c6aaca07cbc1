"""What the tests of scripts share: stand-ins, commands without a launcher's variables, and what ranks were told."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.tokenizing import ROOT

SCRIPTS = ["launch/pretrain_llm_s.sh", "launch/pretrain_llm_b.sh"]
LAUNCHER_VARIABLES = {
    "RANK", "LOCAL_RANK", "LOCAL_SIZE", "WORLD_SIZE", "RANK_PYTHON", "HOSTFILE", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip

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


def environment(**variables):
    """This environment without what a launcher sets, with the programs of this Python first."""
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "DS_ACCELERATOR": "cpu", **variables}


def execute(command, directory, seconds=900, **variables):
    """(exit code, output, process id) of a command; its whole process group is ended when it takes too long."""
    with subprocess.Popen(
        [str(word) for word in command], cwd=directory, env=environment(**variables), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output, process.pid


def ready(programs):
    """The variable PATH with these programs first."""
    return {"PATH": f"{programs}{os.pathsep}{environment()['PATH']}"}


def call_of_rank(directory, rank):
    return json.loads((directory / f"rank-{rank}.json").read_text())


def script_arguments(script, directory, *flags):
    """The trainer's arguments when ``script`` runs on one rank."""
    code, output, _ = execute([sys.executable, ROOT / script, *flags], directory)
    assert code == 0, output
    return call_of_rank(directory, 0)["arguments"]
