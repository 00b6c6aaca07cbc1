"""Reading a shard: some checks are made when it is opened, others on every byte that is used."""

import hashlib
import os
import re
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moh_lm.data import files
from moh_lm.data.files import ShardError
from moh_lm.data.index import HEADER, Counts, DocumentStarts, read_counts, verify_arrays

SIDECAR = {
    "dtype": str, "documents": int, "tokens": int, "largest_id": int, "tokenizer": dict, "inputs": list,
    "bin": dict, "idx": dict,
}  # fmt: skip
FILE = {"bytes": int, "sha256": str, "crc32": str}


class Sums(NamedTuple):
    """The CRC-32 of the blocks of both files, uint32; None for a shard without a sidecar."""

    bin: array | None
    idx: array | None


@dataclass(eq=False, slots=True)
class Shard:
    """An opened shard. Its files are open only while they are read, so that there can be thousands.

    Without a sidecar there is no ``largest_id`` and no ``content``, a hash of both files. A shard from a manifest has
    no ``sidecar``, and no ``sums`` until it is first read.
    """

    prefix: str | Path
    dtype: np.dtype
    num_sequences: int
    num_documents: int
    num_tokens: int
    largest_id: int | None = None
    content: str | None = None
    sidecar: dict | None = None
    sums: Sums | None = None

    @files.patient
    def read(self, first: int, count: int) -> np.ndarray:
        """Return ``count`` token ids from position ``first`` on. Raises ShardError if any is absent or damaged."""
        self.check_content()
        size = self.dtype.itemsize
        with files.opened(f"{self.prefix}.bin") as file:
            part = files.read_range(file, first * size, (first + count) * size, self.sums.bin)
            return np.frombuffer(part, self.dtype)

    @contextmanager
    def document_starts(self) -> Iterator[DocumentStarts]:
        """Provide the ``DocumentStarts`` of the open index. Raises ShardError, also inside the context."""
        self.check_content()
        with files.opened(f"{self.prefix}.idx") as file:
            yield DocumentStarts(file, self.counts(), self.sums.idx)

    def counts(self) -> Counts:
        return Counts(self.dtype, self.num_sequences, self.num_documents, self.num_tokens)

    def check_content(self):
        """At the first read, check that the files of a shard from a manifest are those that it describes."""
        if self.sums is not None:
            return
        shard = open_shard(self.prefix)
        if shard.content != self.content:
            raise ShardError(
                f"{self.prefix}.json: its checksums differ from those in manifest.json; run data_prep/tokenize.py again"
            )
        self.sums = shard.sums

    def index(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Map the index into memory: sequence lengths int32 [n], byte offsets int64 [n], document bounds int64 [m]."""
        content = np.memmap(files.beside(self.prefix, ".idx"), mode="r", offset=HEADER.size)
        lengths, pointers, bounds = np.split(content, [4 * self.num_sequences, 12 * self.num_sequences])
        return lengths.view("<i4"), pointers.view("<i8"), bounds.view("<i8")


def open_shard(prefix: str | Path, *, foreign: bool = False) -> Shard:
    """Open PREFIX.{bin,idx,json} as a ``Shard`` after checking sizes and counts, whatever the number of documents.

    ``foreign`` accepts a pair without a sidecar, written by another tool. Raises ShardError.
    """
    bin_path, idx_path, json_path = (files.beside(prefix, suffix) for suffix in (".bin", ".idx", ".json"))
    try:
        sidecar = read_sidecar(json_path)
    except ShardError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        if not foreign:
            unfinished = "the shard is unfinished; run data_prep/tokenize.py again"
            raise ShardError(f"{json_path} is missing: {unfinished}") from None
        sidecar = None
    with files.opened(idx_path) as file:
        counts, idx_bytes = read_counts(file), os.fstat(file.fileno()).st_size
    with files.opened(bin_path) as file:
        bin_bytes = os.fstat(file.fileno()).st_size
    if bin_bytes != counts.tokens * counts.dtype.itemsize:
        expected = counts.tokens * counts.dtype.itemsize
        raise ShardError(f"{bin_path}: {bin_bytes} bytes, but its index describes {expected}")
    shard = Shard(Path(prefix), *counts, sums=Sums(None, None))
    if sidecar is not None:
        for what, recorded, actual in (
            ("dtype", sidecar["dtype"], counts.dtype.name),
            ("documents", sidecar["documents"], counts.documents),
            ("tokens", sidecar["tokens"], counts.tokens),
            ("size of .bin", sidecar["bin"]["bytes"], bin_bytes),
            ("size of .idx", sidecar["idx"]["bytes"], idx_bytes),
        ):
            if recorded != actual:
                raise ShardError(f"{json_path}: {what} is recorded as {recorded}, but is {actual}")
        shard.largest_id, shard.sidecar = sidecar["largest_id"], sidecar
        shard.content = content_of(sidecar)
        shard.sums = Sums(files.block_sums(sidecar["bin"]), files.block_sums(sidecar["idx"]))
    return shard


def content_of(sidecar: dict) -> str:
    """Return a hash of the contents of the two files that a sidecar describes."""
    return hashlib.sha256((sidecar["bin"]["sha256"] + sidecar["idx"]["sha256"]).encode()).hexdigest()


def verify_shard(shard: Shard, report: Callable[[int], None] = lambda num_bytes: None) -> Iterator[str]:
    """Yield a sentence for each problem of an opened shard, after reading all of it.

    Compares both files with the checksums of their sidecar, names damaged blocks, and checks the index for consistency.
    report: called with the number of bytes read since the last call.
    """
    sound = True
    for key in ("bin", "idx"):
        path, actual = f"{shard.prefix}.{key}", files.Description()
        with files.opened(path) as file:
            while data := file.read(files.CHUNK):
                actual.update(data)
                report(len(data))
        recorded = shard.sidecar[key] if shard.sidecar else actual.facts()
        if actual.facts() != recorded:
            sound = False
            yield damaged_file(path, files.block_sums(recorded), files.block_sums(actual.facts()))
    if sound:
        try:
            verify_arrays(f"{shard.prefix}.idx", shard.dtype.itemsize, *shard.index())
        except ShardError as error:
            yield str(error)


def damaged_file(path, recorded, actual) -> str:
    if len(actual) != len(recorded):
        count = f"{len(actual)} blocks of {files.BLOCK} bytes"
        return f"{path}: {count}, but its sidecar has checksums for {len(recorded)}"
    differ = np.flatnonzero(np.not_equal(recorded, actual))
    if not len(differ):
        return f"{path}: its SHA-256 differs from that in the sidecar, although the CRC-32 of every block agrees"
    more = f"; {len(differ) - 1} more blocks are damaged" if len(differ) > 1 else ""
    return files.damaged_block(path, int(differ[0]), more)


def read_sidecar(path: Path) -> dict:
    """Return the sidecar at ``path``. Raises ShardError if it is damaged or of another version."""
    sidecar = files.read_facts(path)
    files.check_facts(path, sidecar, SIDECAR)
    files.check_facts(path, sidecar["tokenizer"], {"sha256": str}, "tokenizer ")
    for key in ("bin", "idx"):
        files.check_facts(path, sidecar[key], FILE, f"{key} ")
        blocks = -(-sidecar[key]["bytes"] // files.BLOCK)
        if not re.fullmatch(rf"([0-9a-f]{{8}}){{{blocks}}}", sidecar[key]["crc32"]):
            raise ShardError(f"{path}: is damaged: {key} crc32 does not hold {blocks} checksums; {files.REMEDY}")
    return sidecar
