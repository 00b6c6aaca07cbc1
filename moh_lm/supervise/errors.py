"""Reports why a rank ends: on standard error, once per node, and to torchrun, which prints it last.

It imports nothing slow, so that wrong flags are reported before the imports that take seconds.
"""

import contextlib
import json
import os
import re
import socket
import sys
import time
from pathlib import Path

from moh_lm.cli.command import import_problems

INTERRUPTED = 130  # exit code after Ctrl-C, like that of a process that SIGINT killed
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_PORT")  # read beside RANK
OF_OTHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # read where it is not set


def number_problems():
    """Return sentences for variables of launchers that are not numbers in range."""
    names = OF_RANKS if "RANK" in os.environ else OF_OTHERS
    found = {name: os.environ[name] for name in names if name in os.environ}
    remedy = "unset it, or start the ranks with torchrun or deepspeed"
    most = {"MASTER_PORT": 2**16 - 1}
    odd = [name for name, text in found.items() if not re.fullmatch(r"\d+", text) or int(text) > most.get(name, 2**31)]
    if not odd and {"RANK", "WORLD_SIZE"} <= found.keys() and int(found["RANK"]) >= int(found["WORLD_SIZE"]):
        return [f"RANK is {found['RANK']} in the environment: must be below WORLD_SIZE {found['WORLD_SIZE']}; {remedy}"]
    return [f"{name} is {found[name]!r} in the environment: must be a whole number in range; {remedy}" for name in odd]


def launch_problems():
    """Return sentences for other variables with which no run can start, and for restarts by torchrun on several nodes,
    whose agents count them apart."""
    restarts, found = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"), import_problems()
    if restarts != "0" and on_several_machines():
        apart = "after a restart the ranks of several nodes would not meet again"
        remedy = "leave it out, and repeat the command to resume, as launch/slurm.sbatch does"
        found.append(f"--max-restarts {restarts}: {apart}; {remedy}")
    return found


def on_several_machines():
    """Return whether a launcher has started ranks on other machines, too. Raises ValueError for odd variables."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", 1)))
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > here


def report_errors(problems, speaker=0, program="moh_lm.pretrain"):
    """Print what is wrong with the run of ``program`` once per node, by the node's rank ``speaker``, because a problem
    may exist on one node only. A rank whose launcher does not tell it its number prints as well, as it may be the only
    one."""
    report_to_torchrun(problems)
    rank = int(os.environ.get("RANK", 0))
    if {"RANK", "LOCAL_RANK"} <= os.environ.keys() and int(os.environ["LOCAL_RANK"]) != speaker:
        return
    where = f" on {socket.gethostname()}" if rank else ""
    for text in problems:
        print(f"{program}{where}: {text}", file=sys.stderr, flush=True)


def report_to_torchrun(problems):
    """Make torchrun, if it started this rank, name the ``problems`` as the cause at the end of its output."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and problems:
        cause = {"py_callstack": "\n".join(problems), "timestamp": str(int(time.time()))}
        text = json.dumps({"message": {"message": problems[0], "extraInfo": cause}})
        with contextlib.suppress(OSError):  # /tmp may be full; the problems were printed already
            Path(path).write_text(text, encoding="utf-8")
