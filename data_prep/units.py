"""Units of work: how the inputs of a source are divided into shards.

A unit is one input file, a byte range of a large plain JSON-lines file, a range of parquet row groups, or a group of
small plain files. It becomes one shard of the same name, whatever the number of workers. The name holds a hash of all
that determines the shard's bytes, so a shard that exists under the name of a unit is that unit, finished.
"""

import glob
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise

from data_prep.documents import InputError, Piece, inspect_file, row_group_bytes
from moh_lm.config import ConfigError

SMALL = 16  # plain files below this fraction of the unit size are grouped
SUFFIXES = re.compile(r"(\.(jsonl|json|ndjson|txt|parquet|gz|zst|zstd))+$")


@dataclass(frozen=True)
class Unit:
    source: str
    name: str  # of the shard
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self):
        return sum(piece.num_bytes for piece in self.pieces)


def inputs(option: str, patterns: Iterable[str]) -> list[tuple[str, str]]:
    """(absolute path, name) of the files that match any of ``patterns``, sorted by name.

    The name is relative to the part of the pattern without wildcards: it does not change when a directory tree moves.
    Raises ConfigError for a pattern without a match; ``option`` is what patterns follow on the command line.
    """
    files, problems = {}, []
    for pattern in map(os.path.expanduser, patterns):
        root = os.path.dirname(pattern)
        while glob.has_magic(root):
            root = os.path.dirname(root)
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        found = [path for path in matches if os.path.isfile(path)]
        if not found:
            remedy = f"for the files of a directory write '{pattern}/*'" if matches else "check the path"
            problems.append(f"{option}{pattern}: matches no file; {remedy}")
        files.update((os.path.abspath(path), os.path.relpath(path, root or ".")) for path in found)
    if problems:
        raise ConfigError(problems)
    return sorted(files.items(), key=lambda item: (item[1], item[0]))


def plan_units(option, source, patterns, *, text_key, unit_size, identity) -> tuple[list[Unit], list[str]]:
    """The units of a source, in order, and sentences for inputs that cannot be read.

    ``unit_size``: bytes of input that a unit aims at. ``identity``: JSON-able; what else determines the bytes of the
    shards. Raises ConfigError for a pattern without a match, and for inputs that cannot be told apart.
    """
    parts, unreadable = [], []
    small, small_bytes = [], 0
    for path, name in inputs(option, patterns):
        try:
            piece = inspect_file(path, name)
            if piece.container != "plain" or piece.size >= unit_size // SMALL:
                parts += [[part] for part in split(piece, text_key, unit_size)]
                continue
            if not small or small_bytes + piece.size > unit_size // SMALL:
                small, small_bytes = [], 0
                parts.append(small)
            small.append(piece)
            small_bytes += piece.size
        except InputError as error:
            unreadable.append(str(error))

    units = {}
    for pieces in parts:
        unit = Unit(source, unit_name(pieces, identity), tuple(pieces))
        same = units.setdefault(unit.name, unit)
        if same is not unit:
            raise ConfigError([
                f"{option}: {same.pieces[0].path} and {pieces[0].path} have the same name, size, first and last "
                "bytes: leave out the duplicate, or give different files different names"
            ])
    return list(units.values()), unreadable


def split(piece: Piece, text_key: str, unit_size: int) -> list[Piece]:
    """Cut a large file into ranges of about ``unit_size`` bytes, where its form allows it."""
    if piece.container == "parquet":
        sizes = row_group_bytes(piece, text_key)
        bounds, total = [0], 0
        for group, size in enumerate(sizes):
            if total and total + size > unit_size:
                bounds.append(group)
                total = 0
            total += size
        bounds.append(len(sizes))
        ranges = [(start, end, sum(sizes[start:end])) for start, end in pairwise(bounds)]
    elif piece.container == "plain" and piece.form == "jsonl":
        count = max(1, -(-piece.size // unit_size))
        bounds = [piece.size * i // count for i in range(count + 1)]
        ranges = [(start, end, end - start) for start, end in pairwise(bounds)]
    else:
        return [piece]
    return [replace(piece, start=start, end=end, num_bytes=size) for start, end, size in ranges]


def unit_name(pieces, identity) -> str:
    content = [[piece.name, piece.size, piece.sample, piece.start, piece.end] for piece in pieces]
    key = sha256(json.dumps([content, identity]).encode()).hexdigest()[:16]
    stem = SUFFIXES.sub("", os.path.basename(pieces[0].name))
    stem = re.sub(r"[^A-Za-z0-9_.-]", "_", stem).lstrip(".")[:64] or "unit"
    return f"{stem}-and-{len(pieces) - 1}-more-{key}" if len(pieces) > 1 else f"{stem}-{key}"
