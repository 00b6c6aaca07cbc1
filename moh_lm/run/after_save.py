"""--after-save: runs the user's command for every complete checkpoint, in the background, one at a time.

A command that fails or cannot be started is reported, and the run continues. It is a program of its own: the variables
by which the ranks of the run find each other are not in its environment.
"""

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress

OF_RANK = re.compile(
    r"((LOCAL|GROUP|ROLE|CROSS)_)?(RANK|WORLD_SIZE)|(LOCAL|CROSS)_SIZE|MASTER_(ADDR|PORT)|ROLE_NAME|TORCHELASTIC_.*"
)
MOST_READ = 4096  # bytes read from the end of a command's standard error


class AfterSave:
    """Runs ``command`` for steps, which only rank 0 adds: a line for the shell with {path} for the step directory.

    command: "" for none. event_log: ``EventLog`` for failures. patience: seconds that ``close`` waits for the remaining
    commands.
    """

    def __init__(self, command, event_log, patience):
        self.command = command
        self.event_log = event_log
        self.patience = patience
        self.waiting = deque()  # (step, directory) of checkpoints whose command has not begun
        self.running = None  # (step, process, file of its standard error)

    def add(self, step, path):
        """Queue the command for a complete checkpoint."""
        if self.command:
            self.waiting.append((step, path))
            self.poll()

    def poll(self):
        """Report the command that has ended, if one has, and start the next one."""
        if self.running and self.running[1].poll() is not None:
            self.report()
        while self.waiting and not self.running:
            self.start(*self.waiting.popleft())

    def start(self, step, path):
        text = self.command.replace("{path}", shlex.quote(str(path)))
        try:
            errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by ``report``
            process = subprocess.Popen(
                ["sh", "-c", text],
                env={name: value for name, value in os.environ.items() if not OF_RANK.fullmatch(name)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # Ctrl-C stops the run, not the command
            )
        except OSError as error:
            self.fail(step, str(error))
        else:
            self.running = step, process, errors

    def report(self):
        (step, process, errors), self.running = self.running, None
        with errors:
            errors.seek(-min(errors.seek(0, os.SEEK_END), MOST_READ), os.SEEK_END)
            said = errors.read().decode(errors="replace").splitlines()
        if process.returncode:
            last = next((line for line in reversed(said) if line.strip()), "it wrote nothing to standard error")
            self.fail(step, f"exit code {process.returncode}: {last[:300]}")

    def fail(self, step, reason):
        print(f"--after-save failed for step-{step}: {reason}", file=sys.stderr, flush=True)
        self.event_log.add("after-save failed", step, reason=reason)

    def close(self, progress, most=lambda: math.inf):
        """Wait for the remaining commands, and end those that take longer than ``patience``, or than ``most()`` seconds
        from the moment on when this is finite. progress: called meanwhile."""
        begun = time.monotonic()
        deadline = begun + self.patience
        self.poll()
        while self.running and time.monotonic() < (deadline := min(deadline, time.monotonic() + most())):
            progress()
            time.sleep(0.05)
            self.poll()
        if self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.running[1].pid, signal.SIGKILL)
            self.running[1].wait()
            left = [self.running[0], *(step for step, _ in self.waiting)]
            self.running = None
            waited = round(time.monotonic() - begun)
            self.fail(left[0], f"not done {waited} s after the run; steps left: {', '.join(map(str, left))}")
