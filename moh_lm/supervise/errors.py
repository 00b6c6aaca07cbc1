"""Reports why a rank ends: on standard error, once per node, and to torchrun, which prints it last.

It imports nothing slow, so that wrong flags are reported before the imports that take seconds.
"""

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path


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
