"""Reads the unpacked size of a parquet page or of a compressed Arrow record batch.

pyarrow unpacks either as a whole, however many documents it holds, and does not report its size before. The sizes are
therefore read from the file itself: from the header in front of every page (a struct in Thrift's compact protocol), and
from the first eight bytes of every buffer in a batch (whose places are in a FlatBuffer).
"""

from collections.abc import Iterator
from contextlib import suppress

import pyarrow.ipc

HEADER = (1 << 12, 1 << 16, 1 << 20, 1 << 24)  # bytes that hold the header of nearly every page, and of the others
DEEPEST = 8  # deepest nesting of structs in a header
UNPACKED, PACKED = 2, 3  # fields of the header with bytes of the page
INTEGERS, BINARY, STRUCT = (4, 5, 6), 8, 12  # kinds of values
FIXED = {1: 0, 2: 0, 3: 1, 7: 8}  # the bytes of other kinds: true, false, a byte, a double
DAMAGED = "the header of a page is damaged"
RECORD_BATCH, DICTIONARY = 3, 2  # kinds of messages


def largest_page(file, column) -> int:
    """Bytes of the largest page of a column chunk, unpacked. column: its metadata. Raises ValueError for damage."""
    at, largest = min(filter(None, (column.data_page_offset, column.dictionary_page_offset)), default=0), 0
    end = at + column.total_compressed_size
    while at < end:
        fields, length = page_header(file, at)
        if fields.get(PACKED, -1) < 0:
            raise ValueError(DAMAGED)
        largest = max(largest, fields.get(UNPACKED, 0))
        at += length + fields[PACKED]
    return largest


def page_header(file, at: int) -> tuple[dict[int, int], int]:
    """The integers of the header at a byte of the file, by their field, and how many bytes the header has."""
    for size in HEADER:
        file.seek(at)
        with suppress(IndexError):  # the header is longer than these bytes
            return read_struct(file.read(size), 0)
    raise ValueError(DAMAGED)


def read_struct(data: bytes, at: int, depth: int = 0) -> tuple[dict[int, int], int]:
    """The integers of the struct at a byte of ``data``, by their field, and where it ends. Raises IndexError there."""
    fields, field = {}, 0
    while data[at]:
        kind, step = data[at] & 15, data[at] >> 4
        field, at = (field + step, at + 1) if step else read_integer(data, at + 1)
        if kind in INTEGERS:
            fields[field], at = read_integer(data, at)
        elif kind == BINARY:
            length, at = read_varint(data, at)
            at += length
        elif kind == STRUCT and depth < DEEPEST:
            _, at = read_struct(data, at, depth + 1)
        elif kind in FIXED:
            at += FIXED[kind]
        else:
            raise ValueError(DAMAGED)
    return fields, at + 1


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):  # the most bytes of a 64-bit number
        value |= (data[at + place] & 127) << 7 * place
        if data[at + place] < 128:
            return value, at + place + 1
    raise ValueError(DAMAGED)


def read_integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = read_varint(data, at)
    return value >> 1 ^ -(value & 1), at


def largest_batch(file: pyarrow.NativeFile) -> int:
    """Bytes of the largest compressed record batch or dictionary, unpacked. file: at the first message of a stream."""
    return max(map(unpacked_bytes, messages(file)), default=0)


def messages(file) -> Iterator[pyarrow.ipc.Message]:
    """Yield the messages up to the end mark of a stream, or up to other content, such as the index of a file."""
    reader = pyarrow.ipc.MessageReader.open_stream(file)
    with suppress(StopIteration, pyarrow.ArrowInvalid):
        while True:
            yield reader.read_next_message()


def unpacked_bytes(message: pyarrow.ipc.Message) -> int:
    """Return the unpacked bytes of a message's compressed buffers."""
    data, body = memoryview(message.metadata), message.body

    def number(at, size):
        return int.from_bytes(data[at : at + size], "little", signed=True)

    def field(table, index):
        entry = table - number(table, 4)
        offset = number(entry + 4 + 2 * index, 2) if 4 + 2 * index < number(entry, 2) else 0
        return table + offset if offset else None

    def table_at(place):
        return place + number(place, 4)

    root = table_at(0)
    kind = field(root, 1)
    kind = number(kind, 1) if kind else 0
    if kind not in (RECORD_BATCH, DICTIONARY):
        return 0
    batch = table_at(field(root, 2))
    batch = table_at(field(batch, 1)) if kind == DICTIONARY else batch
    buffers = field(batch, 2)
    if field(batch, 3) is None or buffers is None:  # not compressed
        return 0
    first = table_at(buffers)
    places = range(first + 4, first + 4 + 16 * number(first, 4), 16)
    starts = [number(place, 8) for place in places if number(place + 8, 8) >= 8]
    return sum(max(0, int.from_bytes(body[start : start + 8].to_pybytes(), "little", signed=True)) for start in starts)
