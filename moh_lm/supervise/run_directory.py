"""Ensures that a run directory can be written, and that only one run writes to it or to a data directory."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from moh_lm.checkpoint.directory import list_steps, step_around
from moh_lm.config import ConfigError
from moh_lm.parsing import read_json
from moh_lm.units import wrapped

LOCK_SECONDS = 10  # seconds to wait for a run directory that is in use
REPLACED = ("config.json", "metrics.jsonl", "samples.jsonl", "wandb.json", "report.html")  # files that a start replaces
OF_LOCK = '{"host": '  # how the content of a lock begins


def make_run_directory(path, keep=True):
    """Raise ConfigError unless ``path`` is or can become a writable directory, and holds no foreign file that a run
    would replace. keep: whether a new directory stays."""
    path = Path(path)
    if step := step_around(path):
        raise ConfigError([f"--checkpoint-dir {path}: lies in a checkpoint, {step}; give the directory of a run"])
    if path.resolve().name == "checkpoints" and list_steps(path):
        advice = f"give its directory, {path.resolve().parent}"
        raise ConfigError([f"--checkpoint-dir {path}: holds the checkpoints of a run; {advice}"])
    absent = [place for place in (path, *path.parents) if not os.path.exists(place)]
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(path, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        reason = error.strerror
    for place in () if keep else absent:
        with contextlib.suppress(OSError):
            place.rmdir()
    if reason:
        raise ConfigError([f"--checkpoint-dir {path}: cannot be written ({reason}); give another directory"])
    if name := foreign_file(path):
        raise ConfigError([f"--checkpoint-dir {path}: has a {name} that no run has written; give another directory"])


def foreign_file(path):
    """Return the name of the first file that a run would replace in a directory where none has begun, or None."""
    config = None
    with contextlib.suppress(OSError, ValueError):  # absent, or damaged
        config = read_json(path / "config.json")
    is_run = isinstance(config, dict) and "train_iters" in config
    if is_run or (config is None and list_steps(path / "checkpoints")):
        return None
    return next((name for name in REPLACED if os.path.lexists(path / name)), None)


def lock_run_directory(path, called="--checkpoint-dir"):
    """Lock the directory until this process ends, however it ends. The lock's file says who holds it.

    It is a file opened for writing, because NFS and Lustre lock a directory on one machine only.

    called: the argument that named the directory. Raises ConfigError if another run holds it, with what is known about
    that run, or if no lock is possible.
    """
    name = Path(path) / ".lock"
    try:  # not through a link, whose target would lose its content
        lock = open(name, "a+", encoding="utf-8", errors="replace", opener=open_no_link)  # noqa: SIM115 - stays open
    except OSError as error:
        reason = "is a link; remove it" if error.errno in (errno.ELOOP, errno.EMLINK) else f"{error.strerror}; fix this"
        raise ConfigError([f"{called} {path}: {name}: {reason}"]) from error
    for attempt in range(LOCK_SECONDS + 1):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(attempt < LOCK_SECONDS)  # the ranks of the run before this one may still be ending
        except OSError as error:  # a file system without locks
            reason = f"{errno.errorcode.get(error.errno, error.errno)}, {error.strerror}"
            text = f"{name} cannot be locked ({reason}): nothing keeps a second run from writing here; start only one"
            print(wrapped(f"warning: {text}", 9), flush=True)
            break
    else:
        more = describe_holder(name)
        raise ConfigError([f"{called} {path}: another run is writing to it{more}; or give another directory"])
    lock.seek(0)
    if not OF_LOCK.startswith(lock.read(len(OF_LOCK))):  # a foreign file keeps its content
        return lock
    with contextlib.suppress(OSError):  # the disk may be full; the lock holds anyway
        lock.truncate(0)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        lock.write(json.dumps({"host": socket.gethostname(), "process": os.getpid(), "since": since}) + "\n")
        lock.flush()
    return lock


def open_no_link(path, flags):
    """Open ``path``, as an ``opener`` of ``open``. Raises OSError for a link, symbolic or hard."""
    file = os.open(path, flags | os.O_NOFOLLOW, 0o666)
    found = os.fstat(file)
    if found.st_nlink > 1:
        os.close(file)
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK), path)
    if found.st_uid == os.geteuid() and found.st_size == 0:  # whoever may write to the directory may lock it
        with contextlib.suppress(OSError):  # some file systems have no permissions
            os.fchmod(file, os.stat(os.path.dirname(path)).st_mode & 0o666)
    return file


def describe_holder(name):
    """Return a text that says who holds the lock, how to check whether that process is alive, and what to do then."""
    try:
        holder = read_json(name)
        host, process, since = holder["host"], int(holder["process"]), holder["since"]
    except (OSError, ValueError, KeyError, TypeError):
        return " (the lock does not say which); end it"
    who = f" (process {process} on {host}, since {since})"
    if host != socket.gethostname():
        look = f"`ssh {host} ps -p {process}` tells whether it is alive"
        return f"{who}; {look}: end it, or, if {host} is gone for good, remove {name}"
    from moh_lm.supervise.local_ranks import process_state  # imports torch, which a command with a lock may not need

    state = process_state(process)
    if state in "Tt":
        return f"{who}, which is stopped; `kill -CONT {process}` lets it continue, `kill -KILL {process}` ends it"
    if state in "ZX":
        return f"{who}, which is not visible here; find it in other containers (`fuser {name}` may name it) and end it"
    return f"{who}, which is alive; wait until it ends, or end it"
