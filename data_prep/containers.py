"""Containers of input files, recognised by their first bytes and not by their names, and the bytes inside them.

    gzip       all members, and zero bytes between them
    zstd       all frames except skippable ones, with windows of up to 2 GiB
    parquet    a table, unchanged
    arrow      Arrow IPC, its file or its stream format; data_prep/documents.py reads the tables
    plain      everything else

A container is the unit of failure. If it is cut off, damaged, or not what its name says (an error page saved instead of
an archive, a pointer of Git LFS), it raises an ``InputError``, so a part of a file never passes for the whole.
"""

import io
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow
import zstandard

from data_prep.storage import state_of
from moh_lm.cli.command import Failure
from moh_lm.parsing import parse_json

READ = 1 << 18  # bytes per read
SLICE = 1 << 10  # bytes of zstandard unpacked at once, to at most 32 MB, since 4 bytes may stand for 128 KiB
LONGEST = 1 << 29  # most bytes of a document, and of data unpacked at once
BESIDE = 1 << 26  # bytes that a line may have beside its text: parsed, `{},{},...` takes 24 times its size
MAGIC = 4  # bytes that identify a gzip member or a zstandard frame
LARGEST_WINDOW = 1 << 31  # largest window of zstandard, in bytes
CONTAINER = re.compile(
    rb"(?P<gzip>\x1f\x8b)|(?P<zstd>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)"
    rb"|(?P<parquet>PAR1)|(?P<arrow>ARROW1\0\0|\xff{4})"
)
CONTROL, MOST_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]"), 0.1  # share of a text; \x1b colours terminals
FOREIGN = {
    rb"BZh[1-9]1AY&SY": "a bzip2 file; unpack it, or compress it with zstd",
    rb"\xfd7zXZ\0": "an xz file; unpack it, or compress it with zstd",
    rb"\x04\x22\x4d\x18": "an lz4 file; unpack it, or compress it with zstd",
    rb"PK\x03\x04": "a zip archive; unpack it",
    rb"(?s:.{257})ustar": "a tar archive; unpack it",
    rb"WARC/\d": "a WARC file; extract its text to JSON lines",
    rb"%PDF-": "a PDF file; extract its text",
    rb"\x93NUMPY": "a NumPy array; give the text that its numbers were made of",
    rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff|([\x01-\x7f]\0){4}|(\0[\x01-\x7f]){4}": "text in UTF-16 or UTF-32; convert it to "
    "UTF-8, for example with iconv -f UTF-16 -t UTF-8",
    rb"version https://git-lfs": "a Git LFS pointer instead of the file; fetch it with `git lfs pull`",
}
ERROR_PAGE = re.compile(rb"(?i)<(!doctype html|html|\?xml|error)")
NAMED_TABLE = re.compile(r"(?i)\.(csv|tsv|tab)(\.|$)")
SEPARATORS = {"csv": "comma", "tsv": "tab", "tab": "tab"}
CARRIAGE_RETURN = re.compile(rb"\}[ \t]*\r\s*\{")  # between objects; a string of JSON holds none
ONE_JSON_VALUE = re.compile(rb"\[\s*\{|[\[{]\s*\n")
ARCHIVE_NAME = re.compile(r"\.(gz|zst|zstd|parquet|arrow)$")
JSON_LINES_NAME = re.compile(r"(?i)\.(jsonl|json|ndjson)(\.|$)")
FOLLOWING = 8  # lines that show whether JSON lines follow a first line that is not JSON
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FAILURES = (OSError, EOFError, zlib.error, zstandard.ZstdError, pyarrow.ArrowException)
FAILURES += (ValueError, OverflowError, KeyError)  # from pyarrow: values that Python cannot hold, a column twice


class InputError(Failure):
    """An input that cannot be read to its end; the message names the file."""


@contextmanager
def reading(path: str):
    """Context in which any failure to read a file becomes an InputError that names it."""
    try:
        yield
    except FAILURES as error:
        text = getattr(error, "strerror", None) or str(error)
        text += "; make it readable" if isinstance(error, PermissionError) else ""
        raise InputError(text if text.startswith(f"{path}: ") else f"{path}: {text}") from error


def sniff(file, name: str) -> tuple[str, str]:
    """Return (container, form) of an open binary file. The form is jsonl, text, or column for parquet and Arrow.

    JSON lines are recognised by their first line, or else by ``name``. Raises InputError for any other content.
    """
    head = file.read(READ)
    match = CONTAINER.match(head)
    container = match.lastgroup if match else "plain"
    if container in ("parquet", "arrow"):
        return container, "column"
    file.seek(0)
    content = head if container == "plain" else beginning(unpacked(file, container))
    content = content.removeprefix(BYTE_ORDER_MARK).lstrip()
    holds_json, named_json = begins_with_object(content), JSON_LINES_NAME.search(name) is not None
    misnamed = ARCHIVE_NAME.search(name) if container == "plain" else None

    foreign = next((kind for pattern, kind in FOREIGN.items() if re.match(pattern, content)), None)
    problem = None
    if foreign:
        problem = foreign
    elif (named_json or misnamed) and ERROR_PAGE.match(content):
        problem = f"an error page instead of the file (it begins with {content[:40]}); download it again"
    elif container != "plain" and (inside := CONTAINER.match(content)):
        columns = inside.lastgroup in ("parquet", "arrow")
        problem = f"{f'{inside.lastgroup} inside a compressed file' if columns else 'compressed twice'}; unpack it once"
    elif not holds_json and len(CONTROL.findall(content)) > len(content) * MOST_CONTROL:
        problem = "not UTF-8 text, since it has too many control characters; convert it, or leave it out"
    elif misnamed and not holds_json and (named_json or misnamed[1] in ("parquet", "arrow") or not head):
        problem = f"not {misnamed[1]} as its name says; it {f'begins with {head[:40]}' if head else 'is empty'}"
    elif named_json and not holds_json and ONE_JSON_VALUE.match(content):
        form = ".[]" if content.startswith(b"[") else "."
        problem = f"one JSON value instead of one object per line; convert it, for example with jq -c '{form}'"
    elif (named_json or holds_json) and b"\n" not in content and CARRIAGE_RETURN.search(content):
        problem = "lines that end in carriage returns only; convert it, for example with tr '\\r' '\\n'"
    elif not (named_json or holds_json) and begins_with_another_line(content):
        problem = "JSON lines after a first line that is not JSON; fix the first line, or name the file .jsonl"
    elif (table := NAMED_TABLE.search(name)) and not holds_json:
        problem = f"a table of {SEPARATORS[table[1].lower()]}-separated values; convert it to parquet or JSON lines"
    if problem:
        raise InputError(f"{file.name}: {problem}")
    return container, "jsonl" if holds_json or named_json else "text"


def beginning(file: BinaryIO) -> bytes:
    """The beginning of a file up to the end of its first line with content, or ``READ`` bytes if that is longer."""
    content = b""
    while len(content) < READ and b"\n" not in content.lstrip() and (part := file.read1(READ - len(content))):
        content += part
    return content


def begins_with_object(content: bytes) -> bool:
    """Whether the first line is a JSON object, or begins one that ``content`` does not end."""
    line, newline, _ = content.partition(b"\n")
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return not newline and re.match(rb'\{\s*"', line) is not None


def begins_with_another_line(content: bytes) -> bool:
    """Whether the lines after the first, as far as ``content`` has them, are JSON objects: two or more."""
    following = [line for line in content.split(b"\n")[1:-1] if line.strip()][:FOLLOWING]
    return len(following) > 1 and all(begins_with_object(line + b"\n") for line in following)


def unpacked(file: BinaryIO, container: str) -> BinaryIO:
    """The content of an open file of bytes; ``file.tell()`` still counts the bytes of the file itself."""
    return file if container == "plain" else io.BufferedReader(Unpacked(file, container), READ)


class Unpacked(io.RawIOBase):
    def __init__(self, file: BinaryIO, container: str):
        self.parts = decompressed(file, container)
        self.part = memoryview(b"")

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.part and (part := next(self.parts, None)) is not None:
            self.part = memoryview(part)
        size = min(len(buffer), len(self.part))
        buffer[:size] = self.part[:size]
        self.part = self.part[size:]
        return size


def decompressed(file: BinaryIO, container: str) -> Iterator[bytes]:
    """The content of all gzip members, or zstandard frames, of an open file, in parts of at most 32 MB.

    Raises EOFError if the last one is cut off, and ValueError if other bytes follow one.
    """
    gzip = container == "gzip"
    member, data = None, b""
    while data := data or file.read(READ if gzip else SLICE):
        if member is None and gzip and not (data := data.lstrip(b"\0")):  # padding between members
            continue
        if member is None:
            data += file.read(max(0, MAGIC - len(data)))
            check_beginning(file, container, data)
            member = new_member(gzip)
        yield member.decompress(data, READ) if gzip else member.decompress(data)
        data = member.unconsumed_tail or member.unused_data
        member = None if member.eof else member
    if member is not None:
        raise EOFError("the file is cut off")


def new_member(gzip: bool):
    """The decompressor for the next gzip member or zstandard frame."""
    if gzip:
        return zlib.decompressobj(wbits=31)
    return zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()


def check_beginning(file: BinaryIO, container: str, data: bytes):
    """Raise ValueError unless ``data``, the last bytes read, begins a gzip member or a zstandard frame."""
    match = CONTAINER.match(data)
    if match is None or match.lastgroup != container:
        start = file.tell() - len(data)
        number = file.seek(0, os.SEEK_END) - start
        raise ValueError(
            f"{number:,} bytes that are not {container} follow its {container} data, which end at byte {start}; fetch "
            f"the file again, or cut them off, for example with head -c {start}"
        )


def unchanged(path: str, size: int, written: int | str):
    """Raise InputError if a file's size in bytes, or its modification time in ns (of a remote one, its etag), has
    changed since the plan was made."""
    size_now, written_now = state_of(path)
    if (size_now, written_now) != (size, written):
        raise InputError(
            f"{path}: was written to during the run: it had {size} bytes at the start and has {size_now} now; "
            "is it still being written?"
        )
