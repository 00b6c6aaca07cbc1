"""Handles requests to stop a run. It ends with a checkpoint after the current step, evaluation or save.

Ctrl-C in a terminal reaches every process of the job, and launchers pass it on once more, so signals within ``SAME``
seconds count as one request. A later signal ends the rank at once, even if its main thread is inside the communication
library, because another thread receives the signal.
"""

import contextlib
import os
import signal
import threading
import time

import psutil

from moh_lm.supervise.errors import INTERRUPTED

SAME = 2  # seconds within which signals are one request
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # each asks a run to stop


class StopRequest:
    """SIGTERM, SIGUSR1, SIGINT, SIGHUP to any one rank asks the run to stop, or the end of ``exit_after`` seconds since
    this process started.

    A second SIGINT to a rank, more than ``SAME`` seconds after its first, ends it with exit code ``INTERRUPTED``.
    """

    def __init__(self, exit_after=None, program="moh_lm.pretrain"):
        self.deadline = time.monotonic() - age() + exit_after if exit_after else None
        self.reason = None
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as by nohup
                signal.signal(number, self.note)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=listen, args=(reader, program), daemon=True).start()

    def note(self, number, frame):
        self.reason = signal.Signals(number).name

    def due(self):
        """Return whether this rank was asked to stop."""
        if self.deadline and time.monotonic() >= self.deadline:
            self.reason = "--exit-after"
        return self.reason is not None


def age():
    """Return the seconds since this process started."""
    return max(0.0, time.time() - psutil.Process().create_time())


def listen(reader, program="moh_lm.pretrain"):
    """End the process at its second SIGINT; ``reader`` yields the numbers of the signals that it receives."""
    first = None
    while numbers := os.read(reader, 64):
        if signal.SIGINT not in numbers:
            continue
        first = first or time.monotonic()
        if time.monotonic() - first > SAME:
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(2, f"{program}: interrupted twice; the run ends without a checkpoint\n".encode())
            os._exit(INTERRUPTED)
