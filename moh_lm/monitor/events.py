"""events.jsonl, the record of what happened to a run besides its steps, and files of rows that survive a full disk.

Each event is one object: "time" (UTC), "event", "step", and facts. Events: import, started, saved, save failed,
resumed, damaged, skipped, spike, stopped, complete, failed, unsaved (it ended because it could not save), after-save
failed, data changed, routing changed, loss changed, training changed, dense warm-up over, alarm, alarm over. Lines are
only ever added, so the file also remembers that there once were checkpoints.

A log is not worth ending a run for: rows that cannot be written now are written later.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

from moh_lm.data.files import make_own
from moh_lm.monitor.console import styled
from moh_lm.parsing import open_at_once, parse_json

# Events that a terminal shows in colour.
WARNINGS = ("alarm", "damaged", "failed", "save failed", "skipped", "spike", "unsaved")


class Rows:
    """A file of JSON objects, one per line. ``add`` appends whole lines; if it fails, it tries again with the next
    ones."""

    def __init__(self, path):
        self.path = Path(path)
        self.waiting = b""

    def add(self, row):
        self.waiting += (json.dumps(row, allow_nan=False) + "\n").encode()
        try:
            with open(self.path, "ab+", buffering=0) as file:
                end = file.tell()
                is_cut = end > 0 and os.pread(file.fileno(), 1, end - 1) != b"\n"  # by a crash: it stays alone
                left = memoryview(b"\n" * is_cut + self.waiting)
                try:
                    while left:
                        left = left[file.write(left) :]
                except OSError:
                    file.truncate(end)
                    raise
        except OSError as error:
            print(f"{self.path}: {error.strerror}; will be written later", file=sys.stderr, flush=True)
            return
        self.waiting = b""


def complete_rows(path):
    """Yield (line, object) of a file of ``Rows`` with steps, none if it is missing. Lines cut off by a crash are left
    out."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(path, "rb", opener=open_at_once) as file:
        for line in file:
            if row := row_of(line):
                yield line.decode(errors="replace").strip(), row


def row_of(line):
    """Return the object with a step in the bytes of a line, or None if there is none."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        row = parse_json(line.decode(errors="replace").strip())
        return row if isinstance(row["step"], int) else None


class EventLog:
    """Rank 0 makes one with ``writes`` true: it prints and records; on the other ranks nothing happens."""

    def __init__(self, directory, writes):
        self.rows = Rows(Path(directory) / "events.jsonl")
        self.writes = writes
        if writes:
            with contextlib.suppress(OSError):  # the disk may be full
                make_own(self.rows.path)

    def add(self, event, step, text=None, **facts):
        """Record the event with its ``facts``, JSON-able, and print ``text``, if there is any."""
        if not self.writes:
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.rows.add({"time": now, "event": event, "step": step, **facts})
        if text:
            print(styled(text, "warning") if event in WARNINGS else text, flush=True)

    def last(self, event):
        """Return the last ``event`` in the file, or None."""
        found = [row for _, row in complete_rows(self.rows.path) if row.get("event") == event]
        return found[-1] if found else None
