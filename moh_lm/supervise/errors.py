"""How a rank says why it ends: on standard error, once per node, and to torchrun, which prints it last.

It imports nothing slow: flags are wrong before the imports that take seconds.
"""

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path


def report_errors(problems, speaker=0, program="moh_lm.pretrain"):
    """Print what is wrong with the run of ``program`` once per node, by its rank ``speaker``: it may be wrong on one
    node only. A rank whose launcher does not say which it is speaks too: there may be no other."""
    report_to_torchrun(problems)
    rank = int(os.environ.get("RANK", 0))
    if {"RANK", "LOCAL_RANK"} <= os.environ.keys() and int(os.environ["LOCAL_RANK"]) != speaker:
        return
    where = f" on {socket.gethostname()}" if rank else ""
    for text in problems:
        print(f"{program}{where}: {text}", file=sys.stderr, flush=True)


def report_to_torchrun(problems):
    """Have torchrun, if it started this rank, name the ``problems`` as the cause at the end of all that it prints."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and problems:
        cause = {"py_callstack": "\n".join(problems), "timestamp": str(int(time.time()))}
        text = json.dumps({"message": {"message": problems[0], "extraInfo": cause}})
        with contextlib.suppress(OSError):  # /tmp is full: it is said all the same
            Path(path).write_text(text, encoding="utf-8")
