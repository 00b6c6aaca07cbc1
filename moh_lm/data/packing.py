"""Rows of whole documents, for --packing best_fit: which documents a row holds is a function of its number.

The tokens of a source are cut into blocks of ``ROWS`` rows. Each block is packed by itself, from nothing but the
lengths of its documents, so any row is found by packing one block and nothing is stored. Within a block

1. a document longer than a row fills whole rows, and what is left of it is packed like a short one;
2. the longest piece comes first, and goes to the row that it fills best (best-fit decreasing);
3. pieces that fit into no row are cut into what the others have left free.

A block of ``ROWS`` rows of S tokens holds exactly that many tokens, so each token is in one row and no row is padded.
Documents that cross the end of a block are cut there.
"""

import math
from bisect import bisect_left, insort
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from moh_lm.config import ConfigError
from moh_lm.data.files import ShardError

ROWS = 64  # in a block
CACHED = 2**25  # tokens of the blocks that are kept in memory; each document among them takes about 200 bytes
COUNTED = 32  # blocks of a source that ``counts`` examines


class Piece(NamedTuple):
    """``count`` tokens from position ``first`` on. starts: offsets, 1 to count, at which further documents begin;
    ``count`` means that the last token ends a document."""

    first: int
    count: int
    starts: tuple[int, ...] = ()


class Counts(NamedTuple):
    """documents: documents in the examined blocks that would fit into a row. cut: how many of these are in several
    rows, and cut_by_windows with --packing concatenate. tokens: tokens of all documents. apart: how many of these
    would fit into a row with the beginning of their document but are in another."""

    documents: int
    cut: int
    cut_by_windows: int
    tokens: int
    apart: int


class Packer:
    """The rows of the sources of a mixture. streams: ``Stream`` of each source, in the order of the mixture."""

    def __init__(self, mixture, streams):
        self.mixture = mixture
        self.streams = streams
        self.block = lru_cache(max(4, CACHED // (ROWS * mixture.seq_length)))(self.packed_block)

    def row(self, source, epoch, position):
        """Return the ``Piece``s of the row that replaces the window at ``position`` (``Mixture.locate``)."""
        phase = self.mixture.phase(source, epoch)
        number, place = divmod((position - phase) // self.mixture.seq_length, ROWS)
        return self.block(source, phase, number)[place]

    def packed_block(self, source, phase, number):
        """Return the rows of a block. phase: where the first block begins."""
        first, starts, rows = self.documents(source, phase, number)
        packed = pack(starts, rows, self.mixture.seq_length)
        return [[piece._replace(first=first + piece.first) for piece in row] for row in packed]

    def documents(self, source, phase, number, beyond=0):
        """Return (first token of a block, offsets at which documents begin in it and ``beyond`` it, its rows)."""
        length = self.mixture.seq_length
        rows = min(ROWS, int(self.mixture.windows[source]) - number * ROWS)
        first, stream = phase + number * ROWS * length, self.streams[source]
        return first, stream.document_starts(first, min(rows * length + 1 + beyond, stream.num_tokens - first)), rows

    def counts(self, source):
        """Return the ``Counts`` of some blocks, spread over the first epoch of a source."""
        phase, blocks = self.mixture.phase(source, 0), -(-int(self.mixture.windows[source]) // ROWS)
        step = -(-blocks // COUNTED)
        found = []
        for number in range(0, blocks, step):
            first, starts, rows = self.documents(source, phase, number, self.mixture.seq_length)
            end = self.streams[source].num_tokens - first
            found.append(count_cuts(starts, rows, self.mixture.seq_length, end))
        return Counts(*map(sum, zip(*found, strict=True)))

    def describe(self, names):
        """Yield lines about cut documents in these sources. Raises ConfigError if one is damaged."""
        yield "packing    best_fit, without padding: documents that would fit into a sequence but are cut"
        width = max(map(len, names))
        for source, name in enumerate(names):
            try:
                found = self.counts(source)
            except ShardError as error:
                raise ConfigError([f"source {name}: {error}; restore the file"]) from error
            cut, before = (number / max(1, found.documents) for number in (found.cut, found.cut_by_windows))
            tokens = f"{found.apart / found.tokens:.2%} of the tokens"
            yield f"  {name:<{width}}  {cut:.2%} with {tokens} after the cut; {before:.2%} with concatenate"


def pack(starts, rows, length):
    """Return ``rows`` lists of ``Piece``s, each of ``length`` tokens in all. starts: offsets at which documents begin,
    1 to rows * length; another begins at 0."""
    total = rows * length
    ends, begins = set(starts), {0, *starts}
    bounds = [0, *(start for start in starts if start < total), total]
    packed, short = [], []
    for begin, end in pairwise(bounds):
        whole = (end - begin) // length * length
        packed += [[(first, length)] for first in range(begin, begin + whole, length)]
        if begin + whole < end:
            short.append((begin + whole, end - begin - whole))
    short.sort(key=lambda piece: (-piece[1], piece[0]))
    packed += [[] for _ in range(rows - len(packed))]
    gaps = [(length, row) for row in range(rows) if not packed[row]]  # ascending
    left = []
    for first, count in short:
        place = bisect_left(gaps, (count, 0))
        if place == len(gaps):
            left.append((first, count))
            continue
        space, row = gaps.pop(place)
        packed[row].append((first, count))
        if space > count:
            insort(gaps, (space - count, row))
    fill(packed, gaps, left)
    return [
        [
            Piece(first, count, (count,) if first + count in ends else ())
            for first, count in sorted(row, key=lambda piece: piece[0] not in begins)  # documents before parts of some
        ]
        for row in packed
    ]


def count_cuts(starts, rows, length, text_end=math.inf):
    """Return the ``Counts`` of the documents that begin in a block. starts: up to ``length`` tokens beyond it.
    text_end: the offset at which the text ends."""
    total = rows * length
    row_of = {}  # {position where a piece begins: its row}
    for number, row in enumerate(pack([start for start in starts if start <= total], rows, length)):
        row_of |= {piece.first: number for piece in row}
    places, documents, cut, cut_by_windows, apart = sorted(row_of), 0, 0, 0, 0
    for begin, end in zip(starts, [*starts[1:], min(total + length + 1, text_end)], strict=False):
        stop = min(end, total)
        if begin >= total or end - begin > length:
            continue
        pieces = places[bisect_left(places, begin) : bisect_left(places, stop)]
        rest = pieces[1] if len(pieces) > 1 else stop
        documents += 1
        cut += rest < stop or end > total
        cut_by_windows += begin // length != (stop - 1) // length or end > total
        apart += stop - rest
    return Counts(documents, cut, cut_by_windows, total, apart)


def fill(packed, gaps, left):
    """Cut the pieces that are ``left`` into the ``gaps`` of the rows, the largest first."""
    for first, count in left:
        while count:
            space, row = gaps.pop()
            taken = min(space, count)
            packed[row].append((first, taken))
            first, count = first + taken, count - taken
            if space > taken:
                insort(gaps, (space - taken, row))
