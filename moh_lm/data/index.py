"""The index of a shard: where its documents begin.

    9 bytes    magic "MMIDIDX\\0\\0"
    u64        version, 1
    u8         dtype of .bin: 4 int32, 8 uint16 (1 uint8, 2 int8, 3 int16, 5 int64 are read too)
    u64, u64   n sequences, m document bounds
    int32[n]   tokens of each sequence
    int64[n]   byte offset of each sequence in .bin
    int64[m]   first sequence of each document, and n at the end

Numbers are little-endian. A sequence is a document here; other tools may split documents into several. An index is
never read in full to find a document: the offsets ascend, so a binary search reads a few blocks of them.
"""

import os
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from moh_lm.data.files import BLOCK, ShardError, read_range

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document bounds
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
NEAR = 2**10  # documents searched on either side of a guess
SEQUENCES = 2**20  # sequences that a check of the whole index handles at a time


class Counts(NamedTuple):
    dtype: np.dtype
    sequences: int
    documents: int
    tokens: int


def token_code(vocab_size: int) -> int:
    """Return the dtype code of the index: uint16 holds the ids 0..65,535 of exactly 65,536 pieces."""
    return 8 if vocab_size <= 2**16 else 4


def index_bytes(lengths: np.ndarray, code: int) -> bytes:
    """Return the index of documents of ``lengths`` tokens, int32 [n]."""
    pointers = np.zeros(len(lengths), "<i8")
    np.cumsum(lengths[:-1], out=pointers[1:])
    pointers *= np.dtype(DTYPES[code]).itemsize
    header = HEADER.pack(MAGIC, 1, code, len(lengths), len(lengths) + 1)
    return b"".join([header, lengths, pointers, np.arange(len(lengths) + 1, dtype="<i8")])


def read_counts(file: BinaryIO) -> Counts:
    """Return the counts in an open index. Raises ShardError if its size contradicts them."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise ShardError(f"{file.name}: {len(header)} bytes are less than the header of an index")
    magic, version, code, sequences, bounds = HEADER.unpack(header)
    if magic != MAGIC or version != 1:
        raise ShardError(f"{file.name}: not an index of Megatron's IndexedDataset, version 1")
    if code not in DTYPES:
        raise ShardError(f"{file.name}: dtype code {code} is none of the integer types {sorted(DTYPES)}")
    size, expected = file.seek(0, os.SEEK_END), HEADER.size + 12 * sequences + 8 * bounds
    if size != expected or bounds < 1:
        raise ShardError(f"{file.name}: {size} bytes, but {sequences} sequences and {bounds} bounds take {expected}")
    dtype, tokens = np.dtype(DTYPES[code]), 0
    if sequences:
        file.seek(HEADER.size + 4 * (sequences - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(HEADER.size + 12 * sequences - 8)
        (pointer,) = struct.unpack("<q", file.read(8))
        tokens = pointer // dtype.itemsize + length
    return Counts(dtype, sequences, bounds - 1, tokens)


class DocumentStarts(Sequence):
    """The first token of each document, in ascending order; an open index is only read where needed.

    sums: CRC-32 of the blocks of the index, or None. Raises ShardError for unreadable or impossible entries.
    """

    def __init__(self, file: BinaryIO, counts: Counts, sums: array | None):
        self.file, self.counts, self.sums = file, counts, sums
        self.pointers = HEADER.size + 4 * counts.sequences
        self.bounds = HEADER.size + 12 * counts.sequences
        self.size = self.bounds + 8 * (counts.documents + 1)
        self.blocks = {}

    def __len__(self):
        return self.counts.documents

    def __getitem__(self, document):
        if not 0 <= document < len(self):
            raise IndexError(document)
        sequence = self.entry(self.bounds, document)
        if sequence == self.counts.sequences:  # after the last one: an empty document
            return self.counts.tokens
        if not 0 <= sequence < self.counts.sequences:
            raise ShardError(f"{self.file.name}: document {document} begins with sequence {sequence}, which is absent")
        return self.entry(self.pointers, sequence) // self.counts.dtype.itemsize

    def inside(self, first: int, end: int) -> list[int]:
        """Return the document starts from token ``first`` to ``end`` - 1."""
        document, found = bisect_left(self, first, *self.bracket(first)), []
        while document < len(self) and (start := self[document]) < end:
            found.append(start)
            document += 1
        return found

    def number(self, position: int) -> int:
        """Return the number of the document that contains the token ``position``."""
        return max(0, bisect_right(self, position, *self.bracket(position)) - 1)

    def cut(self, fraction: float) -> int:
        """Return the token position from which the tail of the shard is held out.

        It is the start of the document in which the last ``fraction`` of the tokens begins, or that very position if
        the whole document would more than double the tail.
        """
        tokens = self.counts.tokens
        held_out = int(tokens * fraction)
        position = tokens - held_out
        if not held_out:
            return position
        start = self[self.number(position)]
        return start if tokens - start <= 2 * held_out else position

    def bracket(self, position):
        """Return bounds for a search, close to where ``position`` would be if all documents were equally long."""
        guess = position * len(self) // max(1, self.counts.tokens)
        low, high, step = max(0, guess - NEAR), min(len(self), guess + NEAR), NEAR
        while low and self[low - 1] >= position:
            low, step = max(0, low - step), 2 * step
        while high < len(self) and self[high] <= position:
            high, step = min(len(self), high + step), 2 * step
        return low, high

    def entry(self, array, index):
        """Return number ``index`` of the int64 ``array`` in the file."""
        number, at = divmod(array + 8 * index, BLOCK)
        data = self.block(number)[at : at + 8]
        if len(data) < 8:
            data = bytes(data) + self.block(number + 1)[: 8 - len(data)]
        return int.from_bytes(data, "little", signed=True)

    def block(self, number):
        if number not in self.blocks:
            stop = min((number + 1) * BLOCK, self.size)
            self.blocks[number] = read_range(self.file, number * BLOCK, stop, self.sums)
        return self.blocks[number]


def verify_arrays(name: str, itemsize: int, lengths: np.ndarray, pointers: np.ndarray, bounds: np.ndarray):
    """Raise ShardError unless offsets follow the lengths and the document bounds cover the sequences."""
    end = 0
    for start in range(0, len(lengths), SEQUENCES):
        part = lengths[start : start + SEQUENCES].astype(np.int64)
        ends = end + np.cumsum(part) * itemsize
        if part.min() < 0 or not np.array_equal(pointers[start : start + SEQUENCES], ends - part * itemsize):
            raise ShardError(f"{name}: byte offsets do not follow the lengths of the sequences")
        end = int(ends[-1])
    if bounds[0] != 0 or bounds[-1] != len(lengths) or (np.diff(bounds) < 0).any():
        raise ShardError(f"{name}: document bounds do not cover the {len(lengths)} sequences")
