"""The documents of an input file, one after another, whatever they are packed in.

The container is known by its first bytes: gzip, zstandard, parquet, else plain. Inside are documents in one of three
forms:

    jsonl     a JSON object per line, the text under ``text_key``; a line is the unit of damage
    column    the parquet column ``text_key``, a document per row
    text      the whole file is one document

Text leaves as it is: nothing is normalised, trimmed or repaired. What is not a document is counted by reason; a
container that cannot be read to its end is an ``InputError``, so that a part of a file never passes for the whole.
"""

import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

import pyarrow
import pyarrow.parquet
import zstandard

READ = 1 << 18  # bytes per read of a compressed file
SAMPLE = 1 << 16  # bytes at either end of a file that tell it from others of its name
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PAR1": "parquet"}
JSON_LINES_NAME = re.compile(r"\.(jsonl|json|ndjson)(\.|$)")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class InputError(Exception):
    """An input that cannot be read to its end; the message names the file."""


@dataclass(frozen=True)
class Piece:
    """A part of a file: the lines that start in bytes ``start``..``end``, the row groups ``start``..``end``, or all."""

    path: str  # absolute
    name: str  # relative to the fixed part of the pattern that matched it
    size: int  # bytes of the file
    sample: str  # hash of the first and last bytes of the file
    container: str  # plain, gzip, zstd, parquet
    form: str  # jsonl, column, text
    start: int
    end: int
    num_bytes: int  # of this part, for progress and for the size of units


class Document(NamedTuple):
    text: str | None
    dropped: str | None  # the reason why there is no text
    num_bytes: int  # of the text, in UTF-8
    position: int  # bytes of the piece read so far, of ``Piece.num_bytes``


def inspect_file(path: str, name: str) -> Piece:
    """The whole file at ``path`` as one piece; for parquet, ``end`` counts row groups. Raises InputError."""
    with reading(path), open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        head = file.read(SAMPLE)
        file.seek(max(len(head), size - SAMPLE))
        sample = sha256(head + file.read()).hexdigest()
        container = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "plain")
        end = size
        if container == "parquet":
            form, end = "column", pyarrow.parquet.read_metadata(path).num_row_groups
        else:
            file.seek(0)
            beginning = head if container == "plain" else next(filter(None, decompressed(file, container)), b"")
            form = "jsonl" if holds_json_lines(beginning, name) else "text"
    return Piece(path, name, size, sample, container, form, 0, end, size)


def holds_json_lines(beginning: bytes, name: str) -> bool:
    """Whether the first line is a JSON object, or begins one that ``beginning`` does not end, or the name says so."""
    line, newline, _ = beginning.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        unfinished = not newline and re.match(rb'\{\s*"', line) is not None
        return unfinished or JSON_LINES_NAME.search(name) is not None


def row_group_bytes(piece: Piece, text_key: str) -> list[int]:
    """Uncompressed bytes of the text column in each row group. Raises InputError if the file has no such column."""
    with reading(piece.path):
        metadata = pyarrow.parquet.read_metadata(piece.path)
    columns = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    if text_key not in columns:
        raise InputError(f"{piece.path}: has no column {text_key!r} but {', '.join(columns)}; give --text-key")
    column = columns.index(text_key)
    return [metadata.row_group(i).column(column).total_uncompressed_size for i in range(metadata.num_row_groups)]


def documents(piece: Piece, text_key: str) -> Iterator[Document]:
    """The documents of ``piece`` in order, and in their place whatever had to be dropped. Raises InputError."""
    with reading(piece.path):
        if piece.form == "column":
            yield from column_documents(piece, text_key)
        elif piece.form == "jsonl":
            for line, position in lines(piece):
                text, dropped = text_of_line(line, text_key)
                yield document(text, dropped, position)
        else:
            with open(piece.path, "rb") as file:
                data = file.read() if piece.container == "plain" else b"".join(decompressed(file, piece.container))
            try:
                yield document(data.decode(), None, piece.num_bytes)
            except UnicodeDecodeError:
                yield document(None, "bad UTF-8", piece.num_bytes)


def document(text, dropped, position) -> Document:
    """A Document of the value found in place of the text, if it is one."""
    if dropped is None and text is None:
        dropped = "missing text"
    elif dropped is None and not isinstance(text, str):
        dropped = "text is not a string"
    elif dropped is None and not text:
        dropped = "empty text"
    if dropped is None:
        try:
            return Document(text, None, len(text.encode()), position)
        except UnicodeEncodeError:
            dropped = "lone surrogate"
    return Document(None, dropped, 0, position)


def text_of_line(line: bytes, text_key: str):
    """The value under ``text_key`` and None, or None and the reason why there is none."""
    if not line or line.isspace():
        return None, "blank line"
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        return None, "bad UTF-8"
    except (ValueError, RecursionError):
        return None, "broken JSON"
    return (record.get(text_key), None) if isinstance(record, dict) else (None, "not an object")


def lines(piece: Piece) -> Iterator[tuple[bytes, int]]:
    """The lines of ``piece`` without their newlines, and the bytes of the piece read so far.

    A line belongs to the range that it starts in, so that neighbouring ranges share no line and miss none.
    """
    with open(piece.path, "rb") as file:
        if piece.container != "plain":
            for number, line in enumerate(split_lines(decompressed(file, piece.container))):
                yield line if number else line.removeprefix(BYTE_ORDER_MARK), file.tell()
            return
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()  # the rest of a line that starts before the range
        elif file.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
            file.seek(0)
        while file.tell() < piece.end:
            line = file.readline()
            if not line:
                raise InputError(f"{piece.path}: has become shorter than {piece.size} bytes")
            yield line.removesuffix(b"\n"), file.tell() - piece.start


def decompressed(file, container: str) -> Iterator[bytes]:
    """The content of all gzip members, or zstandard frames, of an open file. Raises EOFError if the last is cut off."""
    member = None
    while data := file.read(READ):
        while data:
            if member is None and container == "gzip":
                data = data.lstrip(b"\0")  # padding between members
                member = zlib.decompressobj(wbits=31) if data else None
            elif member is None:
                member = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
            if member is not None:
                yield member.decompress(data)
                data = member.unused_data
                member = None if member.eof else member
    if member is not None:
        raise EOFError("the file is cut off")


def split_lines(chunks) -> Iterator[bytes]:
    unfinished = []  # parts of a line that may span many chunks
    for chunk in chunks:
        *complete, rest = chunk.split(b"\n")
        for line in complete:
            yield b"".join([*unfinished, line])
            unfinished.clear()
        unfinished.append(rest)
    if last := b"".join(unfinished):
        yield last


def column_documents(piece: Piece, text_key: str) -> Iterator[Document]:
    with pyarrow.parquet.ParquetFile(piece.path) as file:
        groups = range(piece.start, piece.end)
        rows = sum(file.metadata.row_group(group).num_rows for group in groups)
        done = 0
        for batch in file.iter_batches(batch_size=64, row_groups=groups, columns=[text_key]):
            for value in batch.column(0):
                done += 1
                position = piece.num_bytes * done // rows
                try:
                    yield document(value.as_py(), None, position)
                except UnicodeDecodeError:
                    yield document(None, "bad UTF-8", position)


@contextmanager
def reading(path):
    """Whatever goes wrong with a file becomes an InputError that names it."""
    try:
        yield
    except (OSError, EOFError, zlib.error, zstandard.ZstdError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
