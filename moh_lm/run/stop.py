"""How a run is asked to stop: it ends after the step, evaluation or save that it is in, with a checkpoint."""

import signal
import time


class StopRequest:
    """SIGTERM or SIGUSR1 to any one rank, or the end of ``exit_after`` seconds, asks the run to stop after its step."""

    def __init__(self, exit_after=None):
        self.deadline = time.monotonic() + exit_after if exit_after else None
        self.reason = None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self.note)

    def note(self, number, frame):
        self.reason = signal.Signals(number).name

    def due(self):
        """Whether this rank was asked to stop."""
        if self.deadline and time.monotonic() >= self.deadline:
            self.reason = "--exit-after"
        return self.reason is not None
