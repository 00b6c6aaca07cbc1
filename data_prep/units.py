"""Units of work: how the inputs of a source are divided into shards.

A unit is one input file, a byte range of a large plain JSON-lines file, a range of parquet row groups, or, if a source
has more than ``MANY`` small files, a group of them (``MANY_TEXTS`` for files that are one document each). It
becomes one shard of the same name, whatever the number of workers. The name holds a hash of all that determines the
shard's bytes, so an existing shard with the name of a unit is the finished unit.

Files that are added later do not change groups, because the groups of a source are recorded before the work begins
(data_prep/output.py). If files of a group are removed, the others stay together. A small file that already has a shard
of its own joins no group.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise

from data_prep.containers import InputError
from data_prep.documents import STDIN, Piece
from data_prep.inputs import Source, named_source
from data_prep.tables import row_group_bytes
from moh_lm.config import ConfigError

SMALL = 16  # files below this fraction of the unit size are small
MANY = 1024  # number of small files up to which each is a unit by itself
MANY_TEXTS = 16  # the same for whole texts in a folder: validation would take the end of each
SUFFIXES = re.compile(r"(\.(jsonl|json|ndjson|txt|parquet|gz|zst|zstd))+$")


@dataclass(frozen=True)
class Unit:
    source: str
    name: str  # name of the shard
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self):
        return sum(piece.num_bytes for piece in self.pieces)


def plan_units(option, source, patterns, *, text_key, unit_size) -> list[Unit]:
    """The units of the files that match ``patterns``, to be sampled.

    Raises ConfigError for a pattern without a match, InputError for a file that cannot be read; ``option`` is what
    patterns follow on the command line.
    """
    files = named_source(option, patterns)
    files.arrange()
    units = divide(source, files, text_key=text_key, unit_size=unit_size, identity=None)
    if files.unreadable:
        raise InputError(files.unreadable[0])
    return units


def divide(
    name: str,
    source: Source,
    *,
    text_key: str,
    unit_size: int,
    identity: object,
    groups: Iterable[list[str]] = (),
    finished: Callable[[Unit], bool] = lambda unit: False,
    many_texts: int = MANY,
) -> list[Unit]:
    """The units of a source, in order; a file that cannot be divided is added to ``source.unreadable``.

    ``unit_size``: target size of a unit in bytes of input. ``identity``: JSON-able; whatever else determines the bytes
    of the shards. ``groups``: names of the small files that earlier runs grouped; ``finished``: a function that says
    whether a unit has a shard of an earlier run; ``many_texts``: up to this many are not grouped. Raises ConfigError
    for inputs that cannot be distinguished.
    """
    parts, small = [], []
    for piece in source.pieces:
        try:
            ranges = split(piece, text_key, unit_size)
        except InputError as error:
            source.unreadable.append(str(error))
            continue
        # Standard input cannot be read again, and a group is made again when one of its files has changed.
        if len(ranges) == 1 and piece.name != STDIN and piece.size < unit_size // SMALL:
            small += ranges
        else:
            parts += [[part] for part in ranges]

    def has_shard(pieces):
        return finished(make_unit(name, pieces, identity))

    def put_together(files, many):
        if len(files) <= many:
            return []
        new = [piece for piece in files if not has_shard([piece])]
        if len(new) <= many:
            return []
        alike = len({piece.name for piece in new}) < len(new)
        return [
            part[start:end]
            for part in (by_folder(new) if alike else [new])
            for start, end in gathered([piece.size for piece in part], unit_size)
        ]

    kept = grouped_before(groups, small, has_shard)
    single = without(small, kept)
    formed = put_together(single, MANY)
    if not formed:
        texts = by_folder(piece for piece in single if piece.form == "text")
        formed = [group for files in texts for group in put_together(files, many_texts)]
    parts += kept + formed + [[piece] for piece in without(single, formed)]

    units = {}
    for pieces in sorted(parts, key=lambda pieces: (pieces[0].name, pieces[0].path, pieces[0].start)):
        unit = make_unit(name, pieces, identity)
        same = units.setdefault(unit.name, unit)
        if same is not unit:
            raise ConfigError([
                f"source {name}: {same.pieces[0].path} and {pieces[0].path} have the same name, size, first and last "
                "bytes: leave out the duplicate, or give different files different names"
            ])
    return list(units.values())


def by_folder(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Divide ``pieces`` by the folder in which their names begin: names may be equal in several, and are recorded."""
    folders = {}
    for piece in pieces:
        folders.setdefault(piece.path.removesuffix(piece.name), []).append(piece)
    return list(folders.values())


def without(pieces: list[Piece], groups: list[list[Piece]]) -> list[Piece]:
    taken = {piece for group in groups for piece in group}
    return [piece for piece in pieces if piece not in taken]


def grouped_before(
    groups: Iterable[list[str]], small: list[Piece], has_shard: Callable[[list[Piece]], bool]
) -> list[list[Piece]]:
    """Return the existing files of ``groups``, lists of names; names that several folders have count in each of them.

    A file is in one group, preferably in one that has a shard, then in one without missing files.
    """
    named, found, taken, kept = {}, [], set(), []
    for piece in small:
        named.setdefault(piece.name, []).append(piece)
    for group in groups:
        there = [piece for name in group for piece in named.get(name, ())]
        alike = [there] if len({piece.name for piece in there}) == len(there) else by_folder(there)
        if len(set(group)) == len(group):  # else files in several folders have equal names
            found += [(not has_shard(pieces), len(pieces) < len(group), pieces) for pieces in alike if pieces]
    for *_, pieces in sorted(found, key=lambda item: item[:2]):
        left = [piece for piece in pieces if piece not in taken]
        if len(left) > 1:
            kept.append(left)
            taken.update(left)
    return kept


def gathered(sizes: list[int], unit_size: int) -> Iterator[tuple[int, int]]:
    """Return ranges of ``sizes`` that add up to at most ``unit_size``, or have one item."""
    bounds, total = [0], 0
    for index, size in enumerate(sizes):
        if total and total + size > unit_size:
            bounds.append(index)
            total = 0
        total += size
    return pairwise([*bounds, len(sizes)])


def split(piece: Piece, text_key: str, unit_size: int) -> list[Piece]:
    """Cut a large file into ranges of about ``unit_size`` bytes, where its form allows it."""
    if piece.container == "parquet":
        sizes = row_group_bytes(piece, text_key)
        ranges = [(start, end, sum(sizes[start:end])) for start, end in gathered(sizes, unit_size)]
    elif piece.container == "plain" and piece.form == "jsonl":
        count = max(1, -(-piece.size // unit_size))
        bounds = [piece.size * i // count for i in range(count + 1)]
        ranges = [(start, end, end - start) for start, end in pairwise(bounds)]
    else:
        return [piece]
    return [replace(piece, start=start, end=end, num_bytes=size) for start, end, size in ranges]


def make_unit(source: str, pieces: list[Piece], identity) -> Unit:
    content = [
        [piece.name, piece.size, piece.version or piece.sample, piece.start, piece.end, piece.source]
        for piece in pieces
    ]
    key = sha256(json.dumps([content, identity]).encode()).hexdigest()[:16]
    stem = SUFFIXES.sub("", os.path.basename(pieces[0].name))
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", stem).lstrip(".")[:64] or "unit"
    more = f"and-{len(pieces) - 1}-more-" if len(pieces) > 1 else ""
    return Unit(source, f"{stem}-{more}{key}", tuple(pieces))
