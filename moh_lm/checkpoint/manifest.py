"""manifest.json: what a directory of files must contain, bit for bit.

    {"block_bytes": 4194304,
     "files": {NAME: {"bytes": size, "sha256": [hash of each block of the file, in order]}},
     "sha256": hash of the JSON text of "files" with sorted keys and no spaces}

Hashes of blocks show where a file is damaged. The hash of the list shows whether the list itself is damaged.
"""

import hashlib
import json
import os
import re
from pathlib import Path

from moh_lm.data.files import write_json
from moh_lm.parsing import naming, open_at_once, read_json

BLOCK_BYTES = 1 << 22
FLUSH_BYTES = 64 * BLOCK_BYTES  # written at most before they are flushed to the disk, which takes seconds
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
NO_SUCH_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)  # other errors say nothing about it


class HashedFile:
    """A new file that hashes what is written: ``with HashedFile(path) as file: file.write(data)``; then ``.entry``.

    The file is on the disk when the ``with`` block ends. ``progress`` is called after each block. Raises OSError with
    the path, such as ENOSPC.
    """

    def __init__(self, path, progress=lambda: None):
        self.path = path
        self.progress = progress
        self.hashes = []  # one for each block
        self.size = 0

    def __enter__(self):
        self.file = open(self.path, "wb", buffering=0)  # noqa: SIM115 - closed by __exit__
        return self

    def __exit__(self, kind, error, trace):
        try:
            if kind is None:
                with naming(self.path):
                    os.fsync(self.file.fileno())
        finally:
            self.file.close()
        self.entry = {"bytes": self.size, "sha256": [block.hexdigest() for block in self.hashes]}

    def write(self, data):
        """Append ``data``, any contiguous buffer."""
        view = memoryview(data).cast("B")
        while view:
            used = self.size % BLOCK_BYTES
            if not used:
                self.hashes.append(hashlib.sha256())
            with naming(self.path):
                written = self.file.write(view[: BLOCK_BYTES - used])
                self.size += written
                if self.size % FLUSH_BYTES == 0:
                    os.fsync(self.file.fileno())
            self.hashes[-1].update(view[:written])
            view = view[written:]
            self.progress()


def describe(path, progress=lambda: None):
    """Return the manifest's entry for a file as it is now. ``progress`` is called after each block.

    Raises OSError with the path.
    """
    hashes = []
    with naming(path), open(path, "rb", opener=open_at_once) as file:
        while block := file.read(BLOCK_BYTES):
            hashes.append(hashlib.sha256(block).hexdigest())
            progress()
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashes}


def write_manifest(directory, entries):
    content = {"block_bytes": BLOCK_BYTES, "files": entries, "sha256": hash_of(entries)}
    write_json(directory / "manifest.json", content)


def hash_of(entries):
    return hashlib.sha256(json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_entries(directory):
    """Return {name: entry} of ``directory``/manifest.json.

    Raises ValueError, naming it, if it is absent or damaged; OSError if it cannot be read.
    """
    path = directory / "manifest.json"
    try:
        content = read_json(path)
        entries = content["files"]
        sound = entries and content["sha256"] == hash_of(entries) and content["block_bytes"] == BLOCK_BYTES
        sound = sound and all(PLAIN_NAME.fullmatch(name) for name in entries)
    except NO_SUCH_FILE as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: is damaged ({type(error).__name__}: {error})") from error
    if not sound:
        raise ValueError(f"{path}: is damaged (it differs from its own hash)")
    return entries


def verify(directory, rank=0, world_size=1, progress=lambda: None):
    """Return sentences for whatever in ``directory`` differs from its manifest. Each of ``world_size`` ranks reads a
    share.

    A file that cannot be read is not called damaged: OSError, with the path, is raised instead.
    """
    directory = Path(directory)
    try:
        entries = read_entries(directory)
    except ValueError as error:
        return [str(error)]
    found = []
    if rank == 0:
        present = {path.name for path in directory.iterdir() if not path.name.startswith(".")}
        found += [f"{directory / name}: does not belong here" for name in sorted(present - {"manifest.json", *entries})]
    for name in sorted(entries)[rank::world_size]:
        try:
            found += difference(directory / name, entries[name], progress)
        except NO_SUCH_FILE as error:
            found.append(f"{directory / name}: cannot be read ({error.strerror})")
    return found


def is_whole(directory):
    """Return whether all files of a manifest exist with the right sizes, without reading them."""
    try:
        entries = read_entries(directory)
        return all((directory / name).stat().st_size == entry["bytes"] for name, entry in entries.items())
    except (ValueError, OSError):
        return False


def difference(path, expected, progress=lambda: None):
    """Return [a sentence that says where a file differs from its entry in the manifest], or []."""
    found = describe(path, progress)
    if found == expected:
        return []
    if found["bytes"] != expected["bytes"]:
        return [f"{path}: has {found['bytes']:,} bytes instead of {expected['bytes']:,}"]
    blocks = enumerate(zip(found["sha256"], expected["sha256"], strict=True))
    damaged = [index for index, (mine, theirs) in blocks if mine != theirs]
    first, last = damaged[0] * BLOCK_BYTES, min((damaged[0] + 1) * BLOCK_BYTES, found["bytes"])
    more = f", and {len(damaged) - 1} more blocks" if damaged[1:] else ""
    return [f"{path}: is damaged in block {damaged[0]} (bytes {first:,} to {last:,}){more}"]
