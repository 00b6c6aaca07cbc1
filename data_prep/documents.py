"""The documents of an input file, one after another, whatever they are packed in (data_prep/containers.py).

    jsonl     a JSON object per line, the text under ``text_key``; a line is the unit of damage
    column    the column ``text_key`` of parquet or Arrow, a document per row
    text      the whole file is one document

Text leaves as it is. What is not a document is dropped with a reason (docs/data.md lists them), so that the documents
and the counts of what was dropped add up to the lines, rows or texts of the input. A file that mixes several sources
(data_prep/corpora.py) is read for one source at a time: ``Piece.source``.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

import pyarrow.ipc
import pyarrow.parquet

from data_prep.containers import BYTE_ORDER_MARK, READ, InputError, reading, sniff, unchanged, unpacked
from data_prep.corpora import SET_COLUMNS, source_of_line, source_of_record

SAMPLE = 1 << 16  # bytes at either end of a file that tell it from others
LONGEST = 1 << 29  # bytes of a line, or of a text
ARROW_FILE, END_OF_STREAM = b"ARROW1\0\0", b"\xff\xff\xff\xff\0\0\0\0"
BATCH = 1 << 24  # bytes of text that are read from a row group at once
EXCERPT = 200  # bytes of what was dropped
STDIN = "/dev/stdin"  # the name of a piece that was standard input
HARMLESS = frozenset({"blank line", "empty text", "of another set"})


@dataclass(frozen=True)
class Piece:
    """A part of a file: the lines that start in bytes ``start``..``end``, the row groups ``start``..``end``, or all."""

    path: str  # absolute
    name: str  # relative to the fixed part of the pattern that matched it
    size: int  # bytes of the file
    written: int  # when it was last written to, in ns
    sample: str  # hash of the first and last bytes of the file, of all of standard input
    container: str  # plain, gzip, zstd, parquet, arrow
    form: str  # jsonl, column, text
    start: int
    end: int
    num_bytes: int  # of this part, for progress and for the size of units
    source: str = ""  # of a file that mixes sources, the one that this piece is read for

    @property
    def origin(self) -> str:
        """What a sidecar calls the file."""
        return f"standard input, SHA-256 {self.sample}" if self.name == STDIN else self.path


class Document(NamedTuple):
    text: str | None
    dropped: str | None  # the reason why there is no text
    num_bytes: int  # of the text, in UTF-8
    position: int  # bytes of the piece read so far, of ``Piece.num_bytes``
    offset: int  # where it is: the byte in the unpacked file, or the row of the table
    excerpt: bytes  # the beginning of what was dropped


def inspect_file(path: str, name: str) -> Piece:
    """The whole file at ``path`` as one piece; for parquet, ``end`` counts row groups. Raises InputError."""
    with reading(path), open(path, "rb") as file:
        status = os.fstat(file.fileno())
        size = status.st_size
        head = file.read(SAMPLE)
        file.seek(max(len(head), size - SAMPLE))
        sample = sha256(head + file.read()).hexdigest()
        file.seek(0)
        container, form = sniff(file, name)
        end = pyarrow.parquet.read_metadata(file).num_row_groups if container == "parquet" else size
    return Piece(path, name, size, status.st_mtime_ns, sample, container, form, 0, end, size)


def documents(piece: Piece, text_key: str) -> Iterator[Document]:
    """The documents of ``piece`` in order, and in their place whatever had to be dropped. Raises InputError."""
    read = {"jsonl": line_documents, "column": column_documents, "text": text_documents}[piece.form]
    with reading("standard input" if piece.name == STDIN else piece.path):
        unchanged(piece.path, piece.size, piece.written)
        yield from read(piece, text_key)
        unchanged(piece.path, piece.size, piece.written)


def document(text, dropped, position, offset, raw) -> Document:
    """A Document of the value found in place of the text, if it is one; ``raw``: what it was found in, if bytes."""
    num_bytes = 0
    if dropped is None and text is None:
        dropped = "missing text"
    elif dropped is None and not isinstance(text, str):
        dropped = "text is not a string"
    elif dropped is None and not text:
        dropped = "empty text"
    elif dropped is None:
        try:
            num_bytes = len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError:
            dropped = "lone surrogate"
    if dropped is None:
        return Document(text, None, num_bytes, position, offset, b"")
    raw = repr(text).encode(errors="backslashreplace") if raw is None else raw
    return Document(None, dropped, 0, position, offset, raw[:EXCERPT])


def line_documents(piece, text_key):
    for line, offset, position in lines(piece):
        if line is None:
            yield document(None, "too long", position, offset, b"")
        elif piece.source and (source_of_line(line) or piece.source) != piece.source:
            yield document(None, "of another set", position, offset, b"")  # most lines, and parsing is slow
        else:
            text, dropped = text_of_line(line, text_key, piece.source)
            yield document(text, dropped, position, offset, line)


def text_of_line(line: bytes, text_key: str, source: str):
    """The value under ``text_key`` and None, or None and the reason why there is none."""
    if not line or line.isspace():
        return None, "blank line"
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        return None, "bad UTF-8"
    except (ValueError, RecursionError):
        return None, "broken JSON"
    if not isinstance(record, dict):
        return None, "not an object"
    return record.get(text_key), other_set(record, source)


def other_set(record: dict, source: str) -> str | None:
    """Why a record is not read for ``source``, the empty string for all of the file."""
    found = source_of_record(record) if source else ""
    return None if found == source else "of another set" if found else "of no known set"


def lines(piece: Piece) -> Iterator[tuple[bytes | None, int, int]]:
    """(line, or None if it is too long; its offset; bytes of the piece read so far). A newline at its end may stay.

    A line belongs to the range that it starts in, so that neighbouring ranges share no line and miss none. Files that
    begin with a byte order mark may have been joined: it is removed from the beginning of every line.
    """
    with open(piece.path, "rb") as file:
        content = unpacked(file, piece.container)
        offset, end = piece.start, piece.end if piece.container == "plain" else math.inf
        if piece.start:
            content.seek(piece.start - 1)
            offset += skip_line(content) - 1  # the rest of a line that starts before the range
        while offset < end and (line := content.readline(LONGEST + 1)):
            start = offset
            offset += len(line)
            if len(line) > LONGEST and not line.endswith(b"\n"):
                offset += skip_line(content)
                line = None
            position = min(file.tell() - piece.start, piece.num_bytes)
            yield line and line.removeprefix(BYTE_ORDER_MARK), start, position


def skip_line(file) -> int:
    """Read to the end of the line; returns the number of bytes."""
    skipped = 0
    while part := file.readline(READ):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def row_group_bytes(piece: Piece, text_key: str) -> list[int]:
    """Uncompressed bytes of the text column in each row group. Raises InputError if the file has no such column."""
    with reading(piece.path), open(piece.path, "rb") as file:
        metadata = pyarrow.parquet.read_metadata(file)
        require_column(piece, text_key, metadata.schema.to_arrow_schema().names)
    leaves = [metadata.schema.column(i).path for i in range(metadata.num_columns)]  # of what is nested: a.b
    column = next(i for i, leaf in enumerate(leaves) if f"{leaf}.".startswith(f"{text_key}."))
    return [metadata.row_group(i).column(column).total_uncompressed_size for i in range(metadata.num_row_groups)]


def require_column(piece: Piece, text_key: str, columns: list[str]):
    if text_key not in columns:
        raise InputError(f"{piece.path}: has no column {text_key!r} but {', '.join(columns)}; give --text-key")


def column_documents(piece, text_key):
    read = parquet_batches if piece.container == "parquet" else arrow_batches
    for batch, row, position in read(piece, text_key):
        columns = SET_COLUMNS if piece.source else ()
        sets = [(name, batch.column(name)) for name in columns if name in batch.schema.names]
        for i, value in enumerate(batch.column(text_key)):
            text, dropped = text_of_row(value, {name: column[i] for name, column in sets}, piece.source)
            yield document(text, dropped, position, row + i, None)


def parquet_batches(piece, text_key) -> Iterator[tuple[pyarrow.RecordBatch, int, int]]:
    """(some rows, the number of the first, the bytes of the piece read with them) of its row groups."""
    sizes = row_group_bytes(piece, text_key)
    # Without a buffer size, pyarrow would unpack a whole column of a row group at once.
    # ParquetFile takes no path that is not UTF-8, OSFile takes its bytes.
    with pyarrow.OSFile(os.fsencode(piece.path)) as raw:
        file = pyarrow.parquet.ParquetFile(raw, buffer_size=READ, pre_buffer=False)
        columns = [text_key, *(name for name in SET_COLUMNS if piece.source and name in file.schema_arrow.names)]
        rows = [file.metadata.row_group(group).num_rows for group in range(len(sizes))]
        row = first = sum(rows[: piece.start])
        total = sum(rows[piece.start : piece.end])
        for group in range(piece.start, piece.end):
            batch_size = max(1, min(1024, BATCH * rows[group] // max(1, sizes[group])))
            for batch in file.iter_batches(batch_size, row_groups=[group], columns=columns):
                yield batch, row, piece.num_bytes * (row + len(batch) - first) // total
                row += len(batch)


def arrow_batches(piece, text_key=None) -> Iterator[tuple[pyarrow.RecordBatch, int, int]]:
    """The same of the record batches of an Arrow file; ``text_key`` None asks for no column."""
    with pyarrow.memory_map(os.fsencode(piece.path)) as file:
        if file.read(len(ARROW_FILE)) == ARROW_FILE:
            reader = pyarrow.ipc.open_file(file)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            file.seek(piece.size - len(END_OF_STREAM))
            if file.read() != END_OF_STREAM:  # pyarrow takes a stream that is cut between batches
                raise EOFError("the file is cut off")
            file.seek(0)
            batches = reader = pyarrow.ipc.open_stream(file)
        if text_key is not None:
            require_column(piece, text_key, reader.schema.names)
        row = 0
        for batch in batches:
            yield batch, row, file.tell()
            row += len(batch)
        if batches is reader and file.tell() < piece.size:
            raise InputError(f"{piece.path}: several Arrow streams, one after another; give each a file of its own")


def first_row(piece: Piece, text_key: str) -> dict | None:
    """The first row of a table, in parquet without the text itself; None if there is no row."""
    if piece.container == "arrow":
        batch = next((batch for batch, _, _ in arrow_batches(piece) if len(batch)), None)
        return batch.slice(0, 1).to_pylist()[0] if batch else None
    with open(piece.path, "rb") as raw:
        file = pyarrow.parquet.ParquetFile(raw)
        names = file.schema_arrow.names
        batch = next(file.iter_batches(1, columns=[name for name in names if name != text_key]), None)
        return {**dict.fromkeys(names), **batch.to_pylist()[0]} if batch else None


def text_of_row(value, record, source):
    """``text_of_line`` of the value of the text column and those that tell the set, as pyarrow's scalars."""
    try:
        text, record = value.as_py(), {name: scalar.as_py() for name, scalar in record.items()}
        return text.decode() if isinstance(text, bytes) else text, other_set(record, source)
    except UnicodeDecodeError:
        return None, "bad UTF-8"


def text_documents(piece, text_key):
    """The one document of the file; a byte order mark tells its encoding and is not part of it."""
    parts, length = [], 0
    with open(piece.path, "rb") as file:
        content = unpacked(file, piece.container)
        while part := content.read(READ):
            length += len(part)
            if length <= LONGEST:
                parts.append(part)
            else:
                parts.clear()
    data = b"".join(parts).removeprefix(BYTE_ORDER_MARK)
    text, dropped = None, "too long" if length > LONGEST else None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        dropped = "bad UTF-8"
    yield document(text, dropped, piece.num_bytes, 0, data)
