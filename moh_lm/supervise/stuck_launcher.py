"""Ends a torchrun that hangs although its ranks have already exited.

If the machine of the rendezvous freezes, torchrun waits in a read without a time limit and ignores signals. It does not
even collect its dead ranks, and the job would hold its machines forever.
"""

import contextlib
import os
import subprocess

LAUNCHER_TIMEOUT_S = 30  # seconds that a launcher may take to collect a rank that has exited


def end_stuck_launcher(patience=LAUNCHER_TIMEOUT_S):
    """Make sure that torchrun ends too; to be called before the rank exits.

    A separate process waits until this one is dead, and ``patience`` seconds more. If torchrun has not collected this
    one by then, the separate process kills torchrun.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher, own = os.getppid(), f'"$(cat /proc/{os.getpid()}/stat 2>&1)"'
    script = (
        f'while case {own} in *") Z "*) false;; *") "?" {launcher} "*) true;; *) false;; esac; do sleep 0.2; done; '
        f'sleep {patience}; case {own} in *") Z {launcher} "*) '
        f"echo torchrun, process {launcher}, waits for a machine that does not answer: "
        f"it is ended >&2; kill -KILL {launcher};; esac"
    )
    with contextlib.suppress(OSError):
        subprocess.Popen(["sh", "-c", script], start_new_session=True, stdin=subprocess.DEVNULL)
