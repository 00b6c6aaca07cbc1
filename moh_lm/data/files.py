"""Files that exist completely or not at all, and whose bytes are checked whenever they are read.

A sidecar describes a file by its size, its SHA-256, and the CRC-32 of every block of 64 KiB, eight hexadecimal digits
each. A reader of a range reads the whole blocks around it and compares their sums. A byte that changed on the disk is
therefore found before it is used, and the error names its file and block.

Sidecars and manifests are sealed: their last entry, ``sha256``, is the hash of the file without it.
"""

import errno
import hashlib
import json
import os
import shutil
import sys
import zlib
from array import array
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from time import sleep
from typing import BinaryIO

from moh_lm.config import ConfigError
from moh_lm.parsing import naming, open_at_once, parse_json, read_json

VERSION = 3  # of the sidecar and of the manifest
REMEDY = "restore it, or run data_prep/tokenize.py again"
REPAIR = (  # of bytes, which neither command reads otherwise
    "copy it again with tools/fetch_data.py --verify, or delete its .json and run data_prep/tokenize.py again"
)
BLOCK = 1 << 16  # bytes under one CRC-32
WRITTEN = ".written_here.json"  # {name: hashes of what ``publish_own`` last wrote there}
END = b"\n}\n"  # of ``json_bytes``, before which the seal is inserted
CHUNK = 1 << 20  # bytes that a pass over a whole file handles at a time
PAUSES = (1, 2, 4, 8)  # seconds before further attempts to read; short against --hang-timeout
LASTING = {  # errors after which another attempt is in vain; None: not an error of the system
    None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG,
    errno.ENXIO,
}  # fmt: skip


class ShardError(Exception):
    """A shard or data directory that is damaged, unfinished or contradicts itself; the message names the file."""


def refuse_unreadable(error):
    """Raise ConfigError for an OSError; also for ``onerror`` of os.walk, which would skip folders silently."""
    reason = f"cannot be read ({error.strerror.lower()}); make it readable, or move it away"
    raise ConfigError([f"{error.filename}: {reason}"]) from error


def beside(prefix: str | Path, suffix: str) -> Path:
    """Return PREFIX + suffix; ``Path.with_suffix`` would cut a unit name at its last dot."""
    return Path(f"{prefix}{suffix}")


class Description:
    """Takes the bytes of a file piece by piece; ``facts`` is what the sidecar records about them."""

    def __init__(self, data: bytes = b""):
        self.num_bytes = 0
        self.sha256 = hashlib.sha256()
        self.blocks = array("L")
        self.update(data)

    def update(self, data: bytes):
        self.sha256.update(data)
        rest = memoryview(data)
        while rest:
            used = self.num_bytes % BLOCK
            if not used:
                self.blocks.append(0)
            part, rest = rest[: BLOCK - used], rest[BLOCK - used :]
            self.blocks[-1] = zlib.crc32(part, self.blocks[-1])
            self.num_bytes += len(part)

    def facts(self) -> dict:
        sums = "".join(f"{block:08x}" for block in self.blocks)
        return {"bytes": self.num_bytes, "sha256": self.sha256.hexdigest(), "crc32": sums}


def publish(path: Path, data: bytes):
    """Write ``data`` to ``path`` such that after a crash the file has either its new or its old content, in full."""
    temporary = temporary_name(path)
    temporary.unlink(missing_ok=True)  # left by a killed process with the same number
    try:
        with naming(path), open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def make_own(path: Path):
    """Give a file that other names share, as after ``cp -al``, a content of its own: it will change in place."""
    if path.is_file() and path.stat().st_nlink > 1:
        temporary = temporary_name(path)
        try:
            shutil.copy(path, temporary)  # with its permissions
            flush(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def publish_own(directory: Path, files: dict[str, bytes]):
    """``publish`` these contents by name. Raises ConfigError rather than replace a file that it did not write."""
    known = refuse_foreign(directory, files)  # existing files stay known until they are replaced
    hashes = {name: [hashlib.sha256(data).hexdigest(), *known.get(name, [])[:1]] for name, data in files.items()}
    write_json(directory / WRITTEN, known | hashes)
    for name, data in files.items():
        publish(directory / name, data)


def refuse_foreign(directory: Path, names) -> dict:
    """Raise ConfigError if ``publish_own`` did not write one of ``names``, or if it changed. Returns {name: hashes}."""
    known = {}
    with suppress(OSError, ValueError, AttributeError):  # absent or damaged
        known = {name: of for name, of in read_json(directory / WRITTEN).items() if isinstance(of, list)}
    for path in (directory / name for name in names):
        is_plain = path.is_file() and not path.is_symlink()
        if os.path.lexists(path) and not (is_plain and sha256_of(path) in known.get(path.name, ())):
            raise ConfigError([f"{path}: was written or changed by someone else; move it, or choose another directory"])
    return known


def flush(path: str | Path):
    """Force a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not os.path.isdir(path):
            raise  # some file systems cannot flush a directory
    finally:
        os.close(descriptor)


def write_json(path: Path, value):
    """``publish`` an object as JSON text."""
    publish(path, json_bytes(value))


def temporary_name(path: Path) -> Path:
    return beside(path, f".tmp-{os.getpid()}")


def json_bytes(value) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def seal(text: bytes) -> bytes:
    """Return the ``json_bytes`` of an object with their hash added as the last entry."""
    return text.removesuffix(END) + seal_line(hashlib.sha256(text).hexdigest())


def seal_line(digest: str) -> bytes:
    return f',\n "sha256": "{digest}"\n}}\n'.encode()


@contextmanager
def opened(path: str | Path):
    """Open a file. A ShardError that names it replaces OSError."""
    try:
        with open(path, "rb", opener=open_at_once) as file:
            yield file
    except OSError as error:
        raise ShardError(f"{path}: {error.strerror or error}") from error


def patient(read):
    """Let ``read`` try again, after ``PAUSES``, where a ShardError comes from a file system that may be away for a
    moment. It says so once."""

    @wraps(read)
    def attempts(*arguments, **named):
        for pause in PAUSES:
            try:
                return read(*arguments, **named)
            except ShardError as error:
                if getattr(error.__cause__, "errno", None) in LASTING:
                    raise
                if pause == PAUSES[0]:
                    print(f"trying again for {sum(PAUSES)} s: {error}", file=sys.stderr, flush=True)
            sleep(pause)
        return read(*arguments, **named)

    return attempts


def read_facts(path: Path) -> dict:
    """Return the object in a sidecar or manifest without its seal. Raises ShardError if it is damaged."""
    with opened(path) as file:
        data = file.read()
    try:
        value = parse_json(data)
    except ValueError as error:
        raise ShardError(f"{path}: not JSON ({error}); {REMEDY}") from error
    if not isinstance(value, dict) or value.get("version") != VERSION:
        raise ShardError(f"{path}: not a file of this format, version {VERSION}; run data_prep/tokenize.py again")
    last = seal_line(value.pop("sha256", None))
    found = hashlib.sha256(memoryview(data)[: -len(last)])  # a copy would take longer than the hash
    found.update(END)
    if not data.endswith(last) or last != seal_line(found.hexdigest()):
        raise ShardError(f"{path}: is damaged: it differs from its own hash; {REMEDY}")
    return value


def check_facts(path: Path, facts, expected: dict, where: str = ""):
    """Raise ShardError unless ``facts`` is an object with the keys of ``expected``, and values of their types."""
    for key, kind in expected.items():
        value = facts.get(key) if isinstance(facts, dict) else None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ShardError(f"{path}: is damaged: {where}{key} is {value!r:.60}; {REMEDY}")


def block_sums(facts: dict) -> array:
    """Return the CRC-32 of each block, uint32, from a file's facts in its sidecar."""
    sums = array("I", bytes.fromhex(facts["crc32"]))
    if sys.byteorder == "little":  # the digits of a number begin with the largest
        sums.byteswap()
    return sums


def read_range(file: BinaryIO, start: int, stop: int, sums: array | None) -> memoryview:
    """Return bytes ``start`` to ``stop`` - 1 of an open file. Raises ShardError if the file ends earlier or the CRC-32
    of a block differs from ``sums``; None: nothing is compared."""
    first, last = (start // BLOCK, -(-stop // BLOCK)) if sums is not None else (0, 0)
    low, high = (first * BLOCK, last * BLOCK) if sums is not None else (start, stop)
    file.seek(low)
    data = memoryview(file.read(high - low))
    if len(data) < stop - low:
        raise ShardError(f"{file.name}: ends at byte {low + len(data)}, inside the bytes {start} to {stop - 1}")
    for number in range(first, last):
        if zlib.crc32(data[number * BLOCK - low :][:BLOCK]) != sums[number]:
            raise ShardError(damaged_block(file.name, number))
    return data[start - low : stop - low]


def damaged_block(path, number, more="") -> str:
    where = f"{path}: block {number}, from byte {number * BLOCK} on"
    return f"{where}, is damaged: its CRC-32 is not that of the sidecar{more}; {REPAIR}"


def sha256_of(path: str | Path, open_file=None) -> str:
    """Return the SHA-256 of a file. open_file: opens the path for reading bytes, if it is not a local path."""
    digest = hashlib.sha256()
    with open_file(path) if open_file else open(path, "rb") as file:
        while data := file.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()
