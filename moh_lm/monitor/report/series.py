"""Reads what a run directory records about a run: metrics over steps, events, configuration.

Only config.json, metrics.jsonl and events.jsonl are read, so a run that is still training or was killed can be read
too.
"""

import math
import shlex
from pathlib import Path

from moh_lm.config import Config, ConfigError, flag, walk
from moh_lm.monitor.events import complete_rows
from moh_lm.monitor.report.curves import (
    ODD,
    accuracy_curves,
    evaluation_curves,
    head_curves,
    of_one_shape,
    sink_curves,
    thinned,
    training_curves,
)
from moh_lm.units import rounded

UNREAD = ("source_load", "source_gate_rms")  # figures of a row's heads that no picture shows
ENDS = ("complete", "stopped", "failed", "unsaved")
STARTS = ("resumed", "started")  # events after which later steps of earlier starts no longer count
CHANGES = (  # recorded before "resumed"
    "data changed", "routing changed", "loss changed", "training changed", "dense warm-up over",
)  # fmt: skip


class RunRecord:
    """One run. ``curves``: {name: (steps, values)}, arrays [points]; ``loads``: {layer: (steps, [points, heads])}.

    config_type: class of its configuration. progress: called for each row that is read. Raises ConfigError if
    ``directory`` is not that of a run.
    """

    def __init__(self, directory, config_type=Config, progress=lambda: None):
        self.directory = Path(directory)
        self.progress = progress
        self.name = name_of(self.directory)
        if not (self.directory / "metrics.jsonl").exists():
            raise ConfigError([f"{directory}: has no metrics.jsonl; give the directory of a run that has begun"])
        self.config = config_type.load(self.directory / "config.json")
        if self.config.run.train_iters is None:
            raise ConfigError([f"{directory}/config.json: has no train_iters; give the directory of a run"])
        self.traces = sorted((self.directory / "profile").glob("steps-*"))
        self.left_out = {}  # {file: rows that could not be read}
        self.events = self.rows_of("events.jsonl", check_event)
        rows = self.rows_of("metrics.jsonl", check_counts)
        training = [row for row in rows if "loss" in row]
        evaluations = [row for row in rows if "evaluation" in row and "loss" not in row]
        scores = [row for row in rows if "accuracy" in row and not {"loss", "evaluation"} & row.keys()]
        self.samples = self.rows_of("samples.jsonl", check_sample)
        self.curves, training = self.read(training_curves, training)
        (self.loads, self.head_figures), _ = self.read(head_curves, of_one_shape(training))
        curves, evaluations = self.read(evaluation_curves, evaluations)
        self.curves |= curves | self.read(accuracy_curves, scores)[0]
        self.head_figures |= self.read(sink_curves, [row for row in evaluations if "sink" in row])[0]
        self.step = max((row["step"] for row in [*training, *evaluations]), default=0)
        self.first_evaluation, self.last_evaluation = (evaluations[0], evaluations[-1]) if evaluations else (None, None)
        begun = self.tokens_of_parent(training)
        self.seconds, timed = training_seconds(training, begun)
        self.first_row, self.last_row = (training[0], training[-1]) if training else [{"step": 0, "tokens": 0}] * 2
        self.speed = timed / self.seconds if self.seconds else 0
        self.skipped = sum(row.get("skipped_steps", 0) for row in training)

    def rows_of(self, name, check):
        """Return the rows of a file that have a step and for which ``check`` raises none of ``ODD``."""
        found = []
        for _, row in complete_rows(self.directory / name):
            if isinstance(heads := row.get("heads"), dict):
                for key in UNREAD:  # they are three quarters of its bytes
                    heads.pop(key, None)
            found.append(row)
            self.progress()
        kept = [row for row in found if type(row["step"]) is int and 0 <= row["step"] < 2**40 and takes(check, row)]
        return self.keep(name, found, kept)

    def read(self, curves, rows):
        """Return ``curves`` of the groups of ``rows``, and the rows, without those from which no curve can be read."""
        try:
            return curves(thinned(rows)), rows
        except ODD:
            rows = self.keep("metrics.jsonl", rows, [row for row in rows if takes(curves, [[row]])])
            return curves(thinned(rows)), rows

    def keep(self, name, found, kept):
        if len(kept) < len(found):
            self.left_out[name] = self.left_out.get(name, 0) + len(found) - len(kept)
        return kept

    @property
    def started(self):
        """Return the facts of the last start (device, ranks, versions), or {} if it recorded none."""
        return next((event for event in reversed(self.events) if event["event"] == "started"), {})

    @property
    def state(self):
        """Return a text that says how the run ended."""
        turns = [event for event in self.events if event["event"] in (*ENDS, *STARTS)]
        last, of = turns[-1] if turns else None, self.config.run.train_iters
        if self.step >= of and (last is None or last["event"] in STARTS):  # the same command was run again
            return f"complete after step {self.step:,} of {of:,}"
        if last is None or last["event"] in STARTS or last["step"] < self.step:
            return f"at step {self.step:,} of {of:,}; it is still running, or was killed"
        return f"{last['event']} after step {last['step']:,} of {of:,}"

    def tokens_at(self, step):
        """Return the tokens up to ``step``, from the rows; later steps count with the current sequence length."""
        count, last = self.config.tokens_after, self.last_row
        return last["tokens"] + count(step) - count(last["step"])

    def tokens_of_parent(self, training):
        """Return the tokens that another run had read before this one started from its checkpoint."""
        first = next((event for event in self.events if event["event"] in ("started", "resumed")), {"event": "started"})
        if not training or first["event"] == "started":
            return 0
        row = training[0]
        return row["tokens"] - self.config.tokens_after(row["step"]) + self.config.tokens_after(first["step"])

    def standing_events(self):
        """Return the events, without those of steps that a later start undid; damage is why one did. A change of
        settings is undone by a later start from the same step, too."""
        standing, first, later, begun = [], math.inf, math.inf, False
        for event in reversed(self.events):
            name, step = event["event"], event["step"]
            if step < later if name in CHANGES else step <= first or name == "damaged":
                standing.append(event)
            if name in STARTS:
                if not (begun and name == "resumed"):  # a start records "resumed", then "started"
                    later = first
                first, begun = min(first, step), name == "started"
        return standing[::-1]

    def told_events(self):
        """Return all events; those that a later start undid say so."""
        standing, undone = {id(event) for event in self.standing_events()}, {"undone": "by a later start"}
        return [event if id(event) in standing else event | undone for event in self.events]

    def command(self):
        """Return the flags that differ from the defaults, as one would type them."""
        words = [f"python -m {self.config.program}"]
        for section, entry in walk(self.config):
            value = getattr(section, entry.name)
            if value not in (entry.default, list(entry.default) if isinstance(entry.default, tuple) else None):
                joint = "=" if written(value).startswith("--") else " "  # else it would be read as a flag
                words.append(f"{flag(entry.name)}{joint}{written(value, shlex.quote)}")
        return " \\\n  ".join(words)


def name_of(directory):
    """Return the name of the run or export in a directory: its last part, or OUT for a quickstart's OUT/run."""
    path = Path(directory).resolve()
    if path.parent.name == "checkpoints":
        return f"{name_of(path.parents[1])}, {path.name}"
    return path.parent.name if path.name in ("run", "hf") else path.name


def written(value, quote=str):
    """Return a value of the configuration as text. quote: a function for each word, such as shlex.quote."""
    if isinstance(value, list | tuple):
        items = ["=".join(map(str, item)) if isinstance(item, list | tuple) else str(item) for item in value]
        return " ".join(map(quote, items))
    return str(value).lower() if isinstance(value, bool) else quote(str(value))


def in_words(value):
    """Return a setting or a fact in words: "none" if it was not given."""
    return "none" if value in (None, "", [], ()) else written(value)


def takes(function, value):
    """Return whether ``function`` can read ``value``, which another version or a person may have written."""
    try:
        function(value)
    except ODD:
        return False
    return True


def check_event(row):
    if not isinstance(row["event"], str):
        raise TypeError
    if row["event"] == "started":
        row["device"] + "".join(row["versions"].values()) + row.get("commit", "")
        range(row["ranks"]), range(row.get("parameters", 0))
    rounded([value for value in row.values() if isinstance(value, dict | list)])  # fails if a row is nested too deeply


def check_counts(row):
    if "loss" in row:
        math.isfinite(row["tokens"] + row.get("skipped_steps", 0))


def check_sample(row):
    if not isinstance(row["prompt"], str) or not isinstance(row["text"], str):
        raise TypeError


def training_seconds(rows, before):
    """Return the seconds of training in the rows, their tokens over their speed, and these tokens; a row without a
    valid step has no speed. before: tokens read before the rows."""
    seconds = timed = 0.0
    for row in rows:
        if row["tokens_per_second"]:
            timed += row["tokens"] - before
            seconds += (row["tokens"] - before) / row["tokens_per_second"]
        before = row["tokens"]
    return seconds, timed
