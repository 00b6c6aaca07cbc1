"""events.jsonl: what happened to a run besides its steps.

One object per event: "time" (UTC), "event", "step", and facts. Events: saved, resumed, damaged, skipped, spike,
stopped, complete. Lines are only ever added, so the file also remembers that there once were checkpoints.
"""

import json
import time
from pathlib import Path


class Journal:
    """Rank 0 makes one with ``writes`` true: it prints and records; on the other ranks nothing happens."""

    def __init__(self, directory, writes):
        self.path = Path(directory) / "events.jsonl"
        self.writes = writes

    def add(self, event, step, text, **facts):
        """Print ``text`` and record the event with its ``facts``, JSON-able."""
        if not self.writes:
            return
        print(text, flush=True)
        row = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event, "step": step, **facts}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def last(self, event):
        """The last ``event`` in the file, or None. A line that a crash cut short is passed over."""
        found = None
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines() if self.path.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and row.get("event") == event:
                found = row
        return found
