"""The directory of a run's checkpoints: which steps are in it, which may go, and the pointer to the newest.

A run saves its first step after an iteration. Step 0 was put there by tools/import_hf.py: the model that the run begins
with, which it reads and never removes.

A step directory is complete or has another name: it gets the name ``step-N`` by a rename when it is complete, and
loses it by a rename before it is removed.
"""

import re
import shutil
from pathlib import Path

from moh_lm.checkpoint.manifest import HashedFile, describe, read_entries
from moh_lm.config import Config, ConfigError
from moh_lm.data.files import flush

STEP_NAME = re.compile(r"step-(0|[1-9]\d*)")


def list_steps(directory):
    """The step directories in the order in which a run would go on from them: the newest first."""
    numbers = {}
    for entry in Path(directory).iterdir() if Path(directory).is_dir() else ():
        match = STEP_NAME.fullmatch(entry.name)
        if match and entry.is_dir():
            numbers[int(match[1])] = entry
    return [numbers[number] for number in sorted(numbers, reverse=True)]


def newest_model(run):
    """(step directory, ModelConfig) of the newest step of the run directory ``run``; (None, None) without a sound one.

    Only config.json is compared with the manifest.
    """
    for step in list_steps(Path(run) / "checkpoints"):
        try:
            if describe(step / "config.json") == read_entries(step).get("config.json"):
                return step, Config.load(step / "config.json").model
        except (ConfigError, ValueError, OSError):
            continue  # a resume says so
    return None, None


def outdated(steps, verified, keep_last, keep_every):
    """The numbers among ``steps`` that may go: those before the ``keep_last``-th newest of the ``verified`` ones."""
    counted = sorted(set(steps) & set(verified), reverse=True)[:keep_last]
    if not keep_last or len(counted) < keep_last:
        return []
    return [step for step in steps if 0 < step < counted[-1] and not (keep_every and step % keep_every == 0)]


def discard(step):
    """Take the name of a step from a directory that is to be removed; returns the directory."""
    doomed = step.with_name(f"{step.name}.old.tmp")
    shutil.rmtree(doomed, ignore_errors=True)
    step.rename(doomed)
    return doomed


def remove_leftovers(directory):
    """Remove what a save or a removal that a crash cut short has left. Rank 0 only."""
    for leftover in Path(directory).glob("step-*.tmp"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def point_latest(step):
    """Make ``latest`` name ``step``."""
    pointer = step.with_name("latest.tmp")
    with HashedFile(pointer) as file:
        file.write(f"{step.name}\n".encode())
    if step.with_name("latest").is_dir():
        shutil.rmtree(step.with_name("latest"))
    pointer.replace(step.with_name("latest"))
    flush(step.parent)
