"""The documents of an input file, one after another, in any container (data_prep/containers.py).

    jsonl     a JSON object per line, the text under ``text_key``; a line is the unit of damage
    column    the column ``text_key`` of parquet or Arrow, a document per row
    text      the whole file is one document

Text is not changed. Lines, rows or files that are not documents are dropped with a reason (docs/data.md lists the
reasons), so that documents and drops add up to the lines, rows or texts of the input. A file that mixes several sources
(data_prep/corpora.py) is read for one source at a time: ``Piece.source``.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

import pyarrow.parquet

from data_prep.containers import BESIDE, BYTE_ORDER_MARK, LONGEST, READ, reading, sniff, unchanged, unpacked
from data_prep.corpora import SET_COLUMNS, source_of_line, source_of_record
from data_prep.storage import is_remote, open_file, state_of
from data_prep.tables import arrow_batches, parquet_batches, without_lists
from moh_lm.parsing import BeyondLimits, parse_json

SAMPLE = 1 << 16  # bytes at either end of a file that identify it
EXCERPT = 200  # bytes shown of a dropped record
STDIN = "/dev/stdin"  # the name of a piece that was standard input,
STREAM = "standard input, SHA-256 "  # and the beginning of what its sidecars call it
QUOTES = re.compile(rb'(?<!\\)\\*"')  # quotes with the backslashes before them
KEYS = 100  # nested objects may have the key of the text too
HARMLESS = frozenset({"blank line", "empty text", "of another set"})


@dataclass(frozen=True)
class Piece:
    """A part of a file: the lines that start in bytes ``start``..``end``, the row groups ``start``..``end``, or all."""

    path: str  # absolute, or a URL
    name: str  # relative to the fixed part of the pattern that matched it
    size: int  # bytes of the file
    written: int | str  # when it was last written to, in ns; of a remote file its etag
    sample: str  # hash of the first and last bytes of the file; of all of standard input
    container: str  # plain, gzip, zstd, parquet, arrow
    form: str  # jsonl, column, text
    start: int
    end: int
    num_bytes: int  # of this part, for progress and for the size of units
    source: str = ""  # of a file that mixes sources, the one that this piece is read for
    version: str = ""  # hash of the sample and the etag of a remote file, which names its units

    @property
    def origin(self) -> str:
        """What a sidecar calls the file."""
        return f"{STREAM}{self.sample}" if self.name == STDIN else self.path


class Document(NamedTuple):
    text: str | None
    dropped: str | None  # the reason why there is no text
    num_bytes: int  # bytes of the text in UTF-8
    position: int  # bytes of the piece read so far, of ``Piece.num_bytes``
    offset: int  # the byte in the unpacked file, or the row of the table
    excerpt: bytes  # the beginning of a dropped record


def inspect_file(path: str, name: str) -> Piece:
    """Return the whole file at ``path`` as one piece; for parquet, ``end`` counts row groups. Raises InputError."""
    with reading(path):
        size, written = state_of(path)
    with reading(path), open_file(path, READ) as file:
        head = file.read(SAMPLE)
        file.seek(max(len(head), size - SAMPLE))
        ends = head + file.read(SAMPLE)
        sample = sha256(ends).hexdigest()
        version = sha256(ends + written.encode()).hexdigest() if is_remote(path) else ""
        file.seek(0)
        container, form = sniff(file, name)
        end = pyarrow.parquet.read_metadata(file).num_row_groups if container == "parquet" else size
    return Piece(path, name, size, written, sample, container, form, 0, end, size, version=version)


def documents(piece: Piece, text_key: str) -> Iterator[Document]:
    """The documents of ``piece`` in order, with drops where a document could not be read. Raises InputError."""
    read = {"jsonl": line_documents, "column": column_documents, "text": text_documents}[piece.form]
    with reading("standard input" if piece.name == STDIN else piece.path):
        unchanged(piece.path, piece.size, piece.written)
        yield from read(piece, text_key)
        unchanged(piece.path, piece.size, piece.written)


def document(text, dropped, position, offset, raw) -> Document:
    """Return a Document for the value under the text key, or a drop if it is not a text. raw: the record's bytes, if
    known."""
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
            dropped = "too long" if num_bytes > LONGEST else None
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
    if len(line) > BESIDE and len(line) - length_of_text(line, text_key) > BESIDE:
        return None, "too long beside its text"
    try:
        record = parse_json(line.decode())
    except UnicodeDecodeError:
        return None, "bad UTF-8"
    except BeyondLimits as error:
        return None, str(error)
    except ValueError:
        return None, "broken JSON"
    if not isinstance(record, dict):
        return None, "not an object"
    return record.get(text_key), other_set(record, source)


def length_of_text(line: bytes, text_key: str) -> int:
    """Return the bytes of the longest of the first ``KEYS`` strings under ``text_key`` in an unparsed line, or 0."""
    key = re.escape(json.dumps(text_key, ensure_ascii=False).encode())
    longest = 0
    for found in islice(re.finditer(key + rb'\s*:\s*"', line), KEYS):
        begin = found.end()
        ends = (quote.end() for quote in QUOTES.finditer(line, begin) if len(quote[0]) % 2)  # it is not escaped
        longest = max(longest, next(ends, begin) - begin)
    return longest


def other_set(record: dict, source: str) -> str | None:
    """The reason why a record is not read for ``source``; the empty string means that the whole file is read."""
    found = source_of_record(record) if source else ""
    return None if found == source else "of another set" if found else "of no known set"


def lines(piece: Piece) -> Iterator[tuple[bytes | None, int, int]]:
    """Yield (line, or None if it is too long; its offset; bytes of the piece read so far), perhaps with its newline.

    A line belongs to the range in which it starts, so that neighbouring ranges share no line and miss none. Files that
    begin with a byte order mark may have been joined, so the mark is removed from the beginning of every line.
    """
    with open_file(piece.path) as file:
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


def column_documents(piece, text_key):
    read = parquet_batches if piece.container == "parquet" else arrow_batches
    for batch, row, position in read(piece, text_key):
        columns = SET_COLUMNS if piece.source else ()
        sets = [(name, batch.column(name)) for name in columns if name in batch.schema.names]
        for i, value in enumerate(batch.column(text_key)):
            text, dropped = text_of_row(value, {name: column[i] for name, column in sets}, piece.source)
            yield document(text, dropped, position, row + i, None)


def text_of_row(value, record, source):
    """Do the same as ``text_of_line`` for the text column and the columns that identify the set, pyarrow scalars."""
    try:
        text, record = value.as_py(), {name: without_lists(scalar) for name, scalar in record.items()}
        return text.decode() if isinstance(text, bytes) else text, other_set(record, source)
    except UnicodeDecodeError:
        return None, "bad UTF-8"


def text_documents(piece, text_key):
    """The one document of the file; a byte order mark tells its encoding and is not part of it."""
    parts, length = [], 0
    with open_file(piece.path) as file:
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
