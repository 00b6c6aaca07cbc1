"""Runs of another machine: OUT/runs.jsonl has what a report needs of every run, and ``--recorded`` takes them over.

A line is a run: its name, hashes of its flags and of what they name (its text, and files of --config), its evaluations
and its events. A run is taken over if this machine would train it with the same flags on the same text; its files then
look as if it had been trained here, but for its checkpoints.
"""

import hashlib
import json
import math
import sys
from itertools import product
from pathlib import PurePosixPath

from moh_lm.config import Config, ConfigError
from moh_lm.data.files import write_json
from moh_lm.flags import parse_config
from moh_lm.monitor.events import complete_rows
from studies.results import factor_and_seed, final_evaluation, has_diverged, metrics
from studies.runs import CONTENT, content, inputs

DIGITS = 6  # of losses, in nats per token
OF_EVENTS = ("event", "step", "alarm", "device", "commit")  # what is kept of the events below
EVENTS = ("started", "alarm", "failed")


def recorded(out, table):
    """The content of runs.jsonl: a line for each run of ``table`` below ``out`` that is complete or has diverged.

    Lines of the present runs.jsonl stay before them: their runs are of another table, or below ``out`` no longer.
    """
    kept = {row["run"]: line for line, row in complete_rows(out / "runs.jsonl") if isinstance(row.get("run"), str)}
    lines = []
    for size, variant in product(table.sizes, table.variants):
        for directory in sorted((out / "runs" / size.name / variant.name).glob("rate-*-seed-*")):
            if factor_and_seed(directory) and has_ended(directory):
                kept.pop(str(directory.relative_to(out / "runs")), None)
                try:
                    lines.append(json.dumps(row_of(directory, out)))
                except (OSError, StopIteration, TypeError) as error:
                    print(f"left out of runs.jsonl: {directory} ({error!r})", file=sys.stderr)
    if kept:
        advice = "delete the file and write the report again to drop them"
        print(f"{out / 'runs.jsonl'}: keeps {len(kept)} runs that this report has not found; {advice}", file=sys.stderr)
    return "".join(f"{line}\n" for line in (*kept.values(), *lines)).encode()


def has_ended(directory):
    """Whether a run is complete or has diverged."""
    try:
        iterations = Config.load(directory / "config.json").run.train_iters
    except ConfigError:
        return False
    return has_diverged(directory) or final_evaluation(directory, iterations) is not None


def row_of(directory, out):
    """The line of one run. Losses that are not finite are None, as in metrics.jsonl."""
    flags, *others = directory.with_name(directory.name + ".log").read_text(errors="replace").split("\n", 5)
    rows = metrics(directory)
    events = [row for _, row in complete_rows(directory / "events.jsonl") if row.get("event") in EVENTS]
    kept = [{"step": row["step"], "evaluation": rounded(row["evaluation"])} for row in rows if "evaluation" in row]
    used = [{"step": row["step"], "heads": row["heads"]} for row in rows if "active_heads" in row.get("heads", {})]
    return {
        "step": kept[-1]["step"] if kept else 0,
        "run": str(directory.relative_to(out / "runs")),
        "flags": digest(flags),
        "tokens": next(line for line in others if line.startswith(CONTENT)).removeprefix(CONTENT),
        "events": [{key: row[key] for key in OF_EVENTS if key in row} for row in events],
        "rows": [*kept, *used[-1:]],
    }


def rounded(losses):
    return {source: loss if loss is None else round(loss, DIGITS) for source, loss in losses.items()}


def digest(flags):
    """A hash of the flags of a run, as one text, without its places, which come last."""
    return hashlib.sha256(flags.partition(" --data-dir ")[0].encode()).hexdigest()[:16]


def take_over(plan, path):
    """Write the runs of the file ``path`` that OUT of the ``Comparison`` lacks. Returns how many they are, in words.

    Raises ConfigError if the file is no runs.jsonl, or if none of its runs has the flags and the text of the plan.
    """
    found, there, other = {}, 0, 0
    lines = sum(1 for line in path.read_bytes().split(b"\n") if line.strip())
    try:
        for _, row in complete_rows(path):
            run = wanted(plan, row)
            if run is None:
                other += 1
            elif run.directory in found or run.log.exists() or run.directory.exists():
                there += 1
            elif tells_the_end(row, run.iterations):
                found[run.directory] = run, {name: lines_of(row[name]) for name in ("events", "rows")}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError([f"--recorded {path}: no study wrote it ({error!r}); give a runs.jsonl"]) from error
    without = f"{other} have other flags or read other text, {lines - len(found) - there - other} are incomplete"
    if not found and not there:
        advice = "give a runs.jsonl that this study, with these flags and this text, has written"
        raise ConfigError([f"--recorded {path}: none of its {lines} runs can be taken over: {without}; {advice}"])
    for run, texts in found.values():
        write(run, texts, path)
    return f"{path.name}: {len(found)} runs were taken over, {there} were begun or are complete here, {without}"


def lines_of(rows):
    """Lines of JSON. Raises TypeError or ValueError unless ``rows`` is a list of objects."""
    return "".join(json.dumps(dict(row.items())) + "\n" for row in rows)


def tells_the_end(row, iterations):
    """Whether a line has final losses, or a failure as its last event; all losses must be numbers or None."""
    rows, events = row["rows"], [each.get("event") for each in row["events"]]
    losses = {each["step"]: each["evaluation"] for each in rows if isinstance(each.get("evaluation"), dict)}
    values = [loss for of in losses.values() for loss in of.values() if loss is not None]
    known = all(type(loss) in (int, float) and math.isfinite(loss) for loss in values)
    return known and bool(losses.get(iterations) or events[-1:] == ["failed"])


def wanted(plan, row):
    """The ``Run`` of a line, or None if this machine would train it otherwise or not at all."""
    run = run_named(plan, row["run"])
    if run is None or row["flags"] != digest(" ".join(run.arguments)):
        return None
    return run if content(run).decode() == f"{CONTENT}{row['tokens']}\n" else None


def run_named(plan, name):
    """The ``Run`` with this name, SIZE/VARIANT/rate-FACTOR-seed-N, or None if the table has no such size or variant."""
    *folder, name = PurePosixPath(name).parts
    named = factor_and_seed(PurePosixPath(name))
    for size, variant in product(plan.table.sizes, plan.table.variants) if named else ():
        if folder == [size.name, variant.name]:
            return plan.run((size, variant, *named))
    return None


def write(run, texts, path):
    """Write the files of a run. Its log comes first: a run without the others is trained again."""
    run.directory.mkdir(parents=True)
    run.log.write_bytes(f"{' '.join(run.arguments)}\nrecorded: {path}".encode() + inputs(run) + content(run))
    write_json(run.directory / "config.json", parse_config(run.arguments)[0].to_dict())
    (run.directory / "events.jsonl").write_text(texts["events"])
    (run.directory / "metrics.jsonl").write_text(texts["rows"])
