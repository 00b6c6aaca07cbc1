"""The directory of an export: the files that may be replaced, and the place where a new export is written first.

``LIST`` in an export names its other files with their hashes. Only unchanged files of that list are ever removed: files
that someone added or changed there, such as a model fine-tuned in place, stay and are named.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

from moh_lm.data.files import read_json, sha256_of, write_json
from moh_lm.units import listing

LIST = "moh_export.json"
NAMED = 3  # entries that a message names
HELD = b"held\n"  # content of a workplace's lock, once its process holds it


def output_problems(output, overwrite):
    """Sentences for what is wrong with ``output``; none if it is absent, empty, or an export that may be
    overwritten."""
    try:
        if not output.exists() or not any(output.iterdir()):
            return []
        if not (output / LIST).is_file():
            return [f"--output {output}: is not empty and not an export; give another directory"]
        if not overwrite:
            return [f"--output {output}: has an export already; add --overwrite, or give another directory"]
        written = read_json(output / LIST)["files"]
        others = sorted({Path(name).parts[0] for name in files_of(output) if not is_as_written(output, name, written)})
    except OSError as error:
        return [f"--output {output}: is not a readable directory ({error.strerror}); give another one"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return [f"--output {output}: {LIST} cannot be read ({error}); give another directory"]
    if not others:
        return []
    remedy = "move that, or give another directory"
    return [f"--output {output}: has {listing(others, NAMED)}, which no export wrote; {remedy}"]


def files_of(directory):
    """Paths below ``directory``, relative to it, of files, links, and directories that are empty."""
    for place, folders, names in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        found = [os.path.join(place, name) for name in names + links]
        yield from (os.path.relpath(path, directory) for path in found or ([] if folders else [place]))


def is_as_written(directory, name, written):
    path = directory / name
    return path.is_file() and not path.is_symlink() and (name == LIST or sha256_of(path) == written.get(name))


def write_list(directory):
    """Write ``LIST`` in a new export, as its last file."""
    write_json(directory / LIST, {"files": {name: sha256_of(directory / name) for name in sorted(files_of(directory))}})


@contextmanager
def workplace(parent, purpose="export"):
    """A new directory in ``parent`` for writing an export; it is removed at the end unless it was published.

    Leftovers of killed processes are removed as well: nobody holds their lock, whatever numbers processes have.
    purpose: begins the directory's name, so that each program removes only its own leftovers.
    """
    prefix = f"{purpose}-tmp-"  # no dots, because transformers makes a module name of it
    for left in parent.glob(f"{prefix}*"):
        with suppress(OSError), open(left / "lock", "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.read() == HELD and not left.is_symlink() and not (left / "former").exists():
                shutil.rmtree(left)
    place = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with open(place / "lock", "wb", buffering=0) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(HELD)
            (place / purpose).mkdir()
            yield place / purpose
    finally:
        shutil.rmtree(place, ignore_errors=True)


def publish(written, output):
    """Rename a finished ``workplace`` to ``output``; an earlier export is moved away first and deleted last."""
    former = written.with_name("former")
    if output.exists():
        output.rename(former)
    try:
        written.rename(output)
    except BaseException:
        if former.exists():
            former.rename(output)
        raise
