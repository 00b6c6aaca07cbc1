"""Reads input files on this machine, or at a URL that fsspec reads, such as s3://BUCKET/text.jsonl.gz.

A remote file is read in blocks, never as a whole. A block that fails, or is shorter or longer than requested, is
requested again, and in the end the file fails, so a lost connection never looks like the end of a file. A remote
file's etag or checksum serves the purpose of a local file's modification time.
"""

import errno
import io
import logging
import os
import re
import time
from contextlib import suppress
from functools import cache

import fsspec

from moh_lm.config import ConfigError
from moh_lm.data.files import ShardError

URL = re.compile(r"[a-z][a-z0-9+.-]*://")
BLOCK = 1 << 22  # bytes of a remote file that are read at once
STAMPS = ("md5Hash", "blob_id", "ETag", "etag", "mtime", "LastModified", "Last-Modified", "updated", "created")
ATTEMPTS = 4
PAUSE = 1.0  # seconds before the second attempt, and twice as many before each next one


def is_remote(path: str) -> bool:
    return URL.match(path) is not None


@cache
def file_system(url: str):
    """(fsspec's file system, path in it) of a URL. Raises ConfigError without the package that it needs."""
    try:
        files, path = fsspec.url_to_fs(url)
    except TypeError as error:  # an argument, such as a host, is in no URL
        raise ConfigError([f"{url}: lacks its host; write it as in ftp://HOST/PATH"]) from error
    except (ImportError, ValueError) as error:
        raise ConfigError([f"{url}: {error}; pip install -e '.[remote]'"]) from error
    logger = logging.getLogger(type(files).__module__.partition(".")[0])
    if not logger.isEnabledFor(logging.INFO):  # what it says then, often with tracebacks, is in its exceptions too
        logger.setLevel(logging.CRITICAL)
    return files, path


class NoRangesError(OSError):
    """A server sends a whole file for each part."""


def persistently(name, work):
    """Return what ``work()`` returns, with retries after failures. Raises OSError with the last reason."""
    for attempt in range(ATTEMPTS):
        try:
            return work()
        except (ShardError, NoRangesError):
            raise
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from error
        except Exception as error:  # each protocol has its own errors
            reason = " ".join(str(error).split()) or type(error).__name__
        time.sleep(PAUSE * 2**attempt if attempt + 1 < ATTEMPTS else 0)
    raise OSError(f"{name}: cannot be read ({reason}); check the connection and the credentials")


def read_part(files, path: str, start: int, end: int) -> bytes:
    """Return bytes ``start`` to ``end`` - 1 of a file in one of fsspec's file systems, as far as it has them."""
    # fsspec's own cat_file opens the file, which reads ahead and takes a whole file's beginning for any range.
    return files.cat_file(path, start=start, end=end, **({} if files.async_impl else {"cache_type": "none"}))


def remote_files(pattern: str) -> tuple[list[str], list[str]]:
    """The URLs of the files, and the paths of the folders, that match a pattern at a URL.

    Raises ConfigError, also for a chain of URLs, whose files have no URLs of their own, and OSError if a server does
    not tell.
    """
    if "::" in pattern:
        raise ConfigError([f"{pattern}: a chain of URLs cannot be read; unpack the archive, or give a plain URL"])
    files, path = file_system(pattern)

    def matches():
        with suppress(FileNotFoundError):
            return {path: files.info(path)}
        return files.glob(path, detail=True)

    try:
        found = persistently(pattern, matches)
    except FileNotFoundError:
        return [], []
    folders = [name for name, info in found.items() if info["type"] == "directory"]
    start = pattern.removesuffix(path)  # it has the host, which some file systems leave out of their paths
    url = files.unstrip_protocol if start == pattern else lambda name: start + name
    return [url(name) for name, info in found.items() if info["type"] != "directory"], folders


def exists(path: str) -> bool:
    """Return whether there is a file or folder at a path or URL. Raises OSError if a server does not answer."""
    if not is_remote(path):
        return os.path.exists(path)
    files, inside = file_system(path)
    with suppress(FileNotFoundError):
        return bool(persistently(path, lambda: files.info(inside)))
    return False


def state_of(path: str) -> tuple[int, int | str]:
    """Return (bytes, time of the last change in ns, or an etag that identifies a remote version). Raises OSError."""
    if not is_remote(path):
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    files, inside = file_system(path)
    files.invalidate_cache(inside)
    info = persistently(path, lambda: files.info(inside))
    if info.get("size") is None:
        raise OSError("the server does not tell its size; download it, and give the copy")
    return info["size"], next((str(info[key]) for key in STAMPS if info.get(key)), "")


def open_file(path: str, block: int = BLOCK):
    """Open the file at a path or URL for reading bytes at any place. block: bytes of a remote file that are read at
    once."""
    return io.BufferedReader(RemoteFile(path), block) if is_remote(path) else open(path, "rb")


class RemoteFile(io.RawIOBase):
    """A file at a URL, each of whose reads is one request for as many bytes."""

    def __init__(self, path):
        self.name, self.place = path, 0
        self.files, self.inside = file_system(path)
        self.size = persistently(path, lambda: self.files.info(self.inside)["size"])

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=os.SEEK_SET):
        self.place = offset + (0, self.place, self.size)[whence]
        return self.place

    def readinto(self, buffer):
        end = min(self.size, self.place + len(buffer))
        data = persistently(self.name, lambda: self.block(end)) if end > self.place else b""
        buffer[: len(data)] = data
        self.place += len(data)
        return len(data)

    def block(self, end):
        data = read_part(self.files, self.inside, self.place, end)
        if end - self.place < len(data) == self.size:
            raise NoRangesError(f"{self.name}: the server ignores range requests; download the file, and give the copy")
        if len(data) != end - self.place:
            wanted = f"bytes {self.place:,} to {end:,} of {self.size:,}"
            raise OSError(f"the server gave {len(data):,} bytes for {wanted}")
        return data
