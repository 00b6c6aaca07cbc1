"""The directory of a run's checkpoints: its steps, which of them may be removed, and the pointer to the newest.

A run saves its first step after an iteration. Step 0 comes from tools/import_hf.py or tools/import_vision.py: it is the
model with which the run begins, and the run never removes it.

A directory named ``step-N`` is always complete: it is renamed to this once complete, and renamed again before it is
removed.
"""

import errno
import os
import re
import shutil
import sys
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path

from moh_lm.checkpoint.manifest import NO_SUCH_FILE, describe, read_entries
from moh_lm.config import Config, ConfigError
from moh_lm.data.files import publish

STEP_NAME = re.compile(r"step-(0|[1-9]\d*)")
LEFTOVER = re.compile(rf"{STEP_NAME.pattern}(\.old)?\.tmp")


def step_number(path):
    """Return the number N of the step directory step-N."""
    return int(STEP_NAME.fullmatch(path.name)[1])


def list_steps(directory):
    """Return the step directories, newest first: the order in which a run would try to resume from them.

    A missing directory holds none. Raises OSError if it cannot be read.
    """
    try:
        with os.scandir(directory) as entries:
            steps = [Path(entry) for entry in entries if STEP_NAME.fullmatch(entry.name) and entry.is_dir()]
    except NO_SUCH_FILE:
        return []
    return sorted(steps, key=step_number, reverse=True)


@contextmanager
def reading(step):
    """Context that reads the directory of a ``step``. If that is gone when it fails, it raises a ConfigError that says
    so: the run that the step belongs to may have removed it meanwhile."""
    try:
        yield
    except Exception as error:
        if step.is_dir():
            raise
        remedy = "repeat the command, or let the run keep more steps with --keep-last"
        raise ConfigError([f"{step}: was removed while it was read, probably by its run; {remedy}"]) from error


def refuse_dangling(directory, newest=None):
    """Raise ConfigError if a link step-N in ``directory`` leads to what is not there and is newer than the step
    ``newest``, by default the newest there."""
    try:
        with os.scandir(directory) as entries:
            links = [Path(entry) for entry in entries if STEP_NAME.fullmatch(entry.name) and entry.is_symlink()]
    except OSError:
        return  # ``list_steps`` says so
    link = max((step for step in links if not step.exists()), key=step_number, default=None)
    newest = newest or next(iter(list_steps(directory)), None)
    if link and (newest is None or step_number(newest) < step_number(link)):
        raise ConfigError([f"{link}: is a link whose target does not exist; mount its disk, or remove the link"])


def no_checkpoint(path):
    """Return a ConfigError for a ``path`` without checkpoints, which names a run in it or around it."""
    near = [path] if path.name == "checkpoints" else sorted(path.glob("*/checkpoints"))
    advice = f"did you mean {near[0].parent}?" if near else "give a run directory, or its checkpoints/step-N"
    return ConfigError([f"{path}: no checkpoint here; {advice}"])


def step_around(path):
    """Return the step directory that ``path`` is or lies in, or None."""
    for place in (path := Path(os.path.realpath(path)), *path.parents):
        is_step = all(os.path.exists(place / name) for name in ("manifest.json", "state.json"))
        if is_step or (place.parent.name == "checkpoints" and STEP_NAME.fullmatch(place.name)):
            return place
    return None


def newest_model(run, config_type=Config):
    """Return (step directory, model of its configuration) of the newest step of a run, or (None, None) if no step is
    intact, or if no directory was given.

    Only config.json is compared with the manifest. Raises ConfigError if the directory of the steps cannot be read.
    """
    if not run:
        return None, None
    try:
        steps = list_steps(Path(run) / "checkpoints")
    except OSError as error:
        raise ConfigError([f"{error.filename}: cannot be read ({error.strerror}); make it readable"]) from error
    for step in steps:
        try:
            if describe(step / "config.json") == read_entries(step).get("config.json"):
                return step, config_type.load(step / "config.json").model
        except (ConfigError, ValueError, OSError):
            continue  # a resume says so
    return None, None


def outdated(steps, verified, keep_last, keep_every):
    """Return the numbers among ``steps`` that may be removed: those before the ``keep_last``-th newest verified one."""
    counted = sorted(set(steps) & set(verified), reverse=True)[:keep_last]
    if not keep_last or len(counted) < keep_last:
        return []
    return [step for step in steps if 0 < step < counted[-1] and not (keep_every and step % keep_every == 0)]


def discard(step):
    """Rename a directory, or a link to one, that is to be removed; returns the new path. Raises OSError, also for a
    directory that could be renamed but not emptied, such as another user's."""
    if step.is_dir() and not step.is_symlink() and not os.access(step, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(step))
    doomed = step.with_name(f"{step.name}.old.tmp")
    remove_entry(doomed)
    step.rename(doomed)
    return doomed


def remove_entry(path):
    """Remove a directory and its contents, a file, or a link but not its target.

    Entries that cannot be removed are only named on standard error, because they do no harm except to take up space.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path):
            path.unlink(missing_ok=True)
    except OSError as error:
        print(f"{error.filename or path}: cannot be removed ({error.strerror})", file=sys.stderr, flush=True)


def remove_leftovers(directory):
    """Remove what a crash left behind during a save or a removal. Rank 0 only."""
    for leftover in Path(directory).glob("step-*.tmp"):
        if LEFTOVER.fullmatch(leftover.name):
            remove_entry(leftover)


def point_latest(step):
    latest, name = step.with_name("latest"), f"{step.name}\n".encode()
    if latest.is_file() and latest.read_bytes() == name:
        return
    if latest.is_dir() and not latest.is_symlink():
        set_aside(latest)
    publish(latest, name)


def set_aside(path):
    """Rename ``path`` to damaged-NAME, or the first free damaged-NAME-N, which no run reads; returns the new path."""
    names = chain([""], (f"-{number}" for number in count(2)))
    paths = (path.with_name(f"damaged-{path.name}{end}") for end in names)
    return path.rename(next(free for free in paths if not os.path.lexists(free)))
