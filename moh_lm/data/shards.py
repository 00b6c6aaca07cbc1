"""Token shards and the directory that holds them: the formats, their writer and their reader.

A shard is the two files of Megatron-LM's IndexedDataset, byte for byte, and a JSON sidecar. Numbers are little-endian.

    PREFIX.bin    token ids of all documents, end to end: uint16 for up to 65,536 pieces, else int32
    PREFIX.idx    9 bytes    magic "MMIDIDX\\0\\0"
                  u64        version, 1
                  u8         dtype of .bin: 4 int32, 8 uint16 (1 uint8, 2 int8, 3 int16, 5 int64 are read too)
                  u64, u64   n sequences, m document bounds
                  int32[n]   tokens of each sequence
                  int64[n]   byte offset of each sequence in .bin
                  int64[m]   first sequence of each document, and n at the end
    PREFIX.json   counts, largest id, tokenizer, inputs, options, and the size and SHA-256 of the other two files

A sequence is a document here; other tools may split documents into several. The sidecar is written last: a shard
without one is unfinished. A data directory holds a directory of shards for each source, a manifest and the tokenizer:

    DATA_DIR/SOURCE/UNIT.{bin,idx,json}    DATA_DIR/manifest.json    DATA_DIR/tokenizer.model
"""

import hashlib
import json
import mmap
import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document bounds
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
LONGEST_DOCUMENT = 2**31 - 1  # lengths are int32
VERSION = 1  # of the sidecar and of the manifest
CHUNK = 1 << 20  # sequences, or bytes, that a check handles at a time


class ShardError(Exception):
    """A shard or data directory that is damaged, unfinished or contradicts itself; the message names the file."""


def beside(prefix: str | Path, suffix: str) -> Path:
    """PREFIX + suffix; ``Path.with_suffix`` would cut a unit name at its last dot."""
    return Path(f"{prefix}{suffix}")


# --- Writing ---


def token_code(vocab_size: int) -> int:
    """The dtype code of the index: uint16 holds the ids 0..65,535 of exactly 65,536 pieces."""
    return 8 if vocab_size <= 2**16 else 4


class ShardWriter:
    """Writes one shard: ``with ShardWriter(prefix, vocab_size) as shard: shard.add(ids); ...; shard.commit(facts)``.

    Nothing appears under a final name before ``commit``; leaving the block without it leaves no file. An older sidecar
    is removed first, so that at no moment a sidecar describes other bytes.
    """

    def __init__(self, prefix: str | Path, vocab_size: int):
        self.prefix = Path(prefix)
        self.vocab_size = vocab_size
        self.dtype = np.dtype(DTYPES[token_code(vocab_size)])
        self.lengths = array("i")
        self.largest_id = -1
        self.digest = hashlib.sha256()

    def __enter__(self):
        beside(self.prefix, ".json").unlink(missing_ok=True)
        self.temporary = temporary_name(beside(self.prefix, ".bin"))
        self.file = open(self.temporary, "wb")  # noqa: SIM115 (closed by __exit__)
        return self

    def __exit__(self, *exception):
        self.file.close()
        self.temporary.unlink(missing_ok=True)

    def add(self, document: Sequence[int] | np.ndarray):
        """Append one document: a 1-d sequence of ids, its end-of-sequence token included.

        Raises ShardError if it is empty, too long for the format, or holds an id outside the vocabulary.
        """
        ids = np.asarray(document)
        if not 1 <= len(ids) <= LONGEST_DOCUMENT:
            raise ShardError(f"{self.prefix}: document of {len(ids):,} tokens; allowed are 1 to {LONGEST_DOCUMENT:,}")
        smallest, largest = int(ids.min()), int(ids.max())
        if smallest < 0 or largest >= self.vocab_size:  # before narrowing, which would wrap silently
            raise ShardError(f"{self.prefix}: ids {smallest}..{largest} exceed the vocabulary 0..{self.vocab_size - 1}")
        data = ids.astype(self.dtype).tobytes()
        self.file.write(data)
        self.digest.update(data)
        self.lengths.append(len(ids))
        self.largest_id = max(self.largest_id, largest)

    def commit(self, facts: dict) -> dict:
        """Publish .bin, .idx and, last, the sidecar; returns the sidecar. ``facts`` are further entries for it."""
        lengths = np.array(self.lengths, dtype="<i4")
        ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
        header = HEADER.pack(MAGIC, 1, token_code(self.vocab_size), len(lengths), len(lengths) + 1)
        pointers = np.concatenate([np.zeros(1, "<i8"), ends])[: len(lengths)]
        index = header + lengths.tobytes() + pointers.tobytes() + np.arange(len(lengths) + 1, dtype="<i8").tobytes()

        self.file.flush()
        os.fsync(self.file.fileno())
        sidecar = {
            "version": VERSION,
            "dtype": self.dtype.name,
            "documents": len(lengths),
            "tokens": int(lengths.sum(dtype=np.int64)),
            "largest_id": self.largest_id,
            **facts,
            "bin": {"bytes": self.file.tell(), "sha256": self.digest.hexdigest()},
            "idx": {"bytes": len(index), "sha256": hashlib.sha256(index).hexdigest()},
        }
        os.replace(self.temporary, beside(self.prefix, ".bin"))
        publish(beside(self.prefix, ".idx"), index)
        publish(beside(self.prefix, ".json"), json_bytes(sidecar))
        return sidecar


def publish(path: Path, data: bytes):
    """Write ``data`` to ``path`` so that after a crash the file is there in full, or as it was before."""
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def temporary_name(path: Path) -> Path:
    return beside(path, f".tmp-{os.getpid()}")


def json_bytes(value: dict) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


# --- Reading ---


@dataclass(frozen=True, eq=False)
class Shard:
    """An opened shard: its sizes. The files themselves are only read on demand, so that thousands can be open."""

    prefix: Path
    dtype: np.dtype
    num_sequences: int
    num_documents: int
    num_tokens: int
    sidecar: dict | None

    def read(self, first: int, count: int) -> np.ndarray:
        """``count`` token ids from position ``first`` on, as stored. Raises ShardError if the file has been cut off."""
        path = beside(self.prefix, ".bin")
        try:
            tokens = np.fromfile(path, self.dtype, count, offset=first * self.dtype.itemsize)
        except OSError as error:
            raise ShardError(f"{path}: {error.strerror or error}") from error
        if len(tokens) != count:
            raise ShardError(f"{path}: ends inside the {count} tokens at position {first} of {self.num_tokens}")
        return tokens

    def index(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The index, memory-mapped: sequence lengths int32 [n], byte offsets int64 [n], document bounds int64 [m]."""
        with open(beside(self.prefix, ".idx"), "rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        arrays, offset = [], HEADER.size
        for dtype, count in (("<i4", self.num_sequences), ("<i8", self.num_sequences), ("<i8", self.num_documents + 1)):
            arrays.append(np.frombuffer(content, dtype, count, offset))
            offset += arrays[-1].nbytes
        return tuple(arrays)


def open_shard(prefix: str | Path, *, foreign: bool = False, verify: bool = False) -> Shard:
    """Open PREFIX.{bin,idx,json} as a ``Shard`` after checking sizes and counts, whatever the number of documents.

    ``foreign`` accepts a pair without a sidecar, written by another tool. ``verify`` reads both files in full: the
    index must be consistent in itself and the checksums those of the sidecar. Raises ShardError.
    """
    bin_path, idx_path, json_path = (beside(prefix, suffix) for suffix in (".bin", ".idx", ".json"))
    sidecar = read_sidecar(json_path) if json_path.exists() else None
    if sidecar is None and not foreign:
        raise ShardError(f"{json_path} is missing: the shard is unfinished; run data_prep/tokenize.py again")
    try:
        with open(idx_path, "rb") as file:
            shard = read_header(file, Path(prefix), sidecar)
        bin_bytes, idx_bytes = bin_path.stat().st_size, idx_path.stat().st_size
    except OSError as error:
        raise ShardError(f"{error.filename}: {error.strerror}") from error
    if bin_bytes != shard.num_tokens * shard.dtype.itemsize:
        expected = shard.num_tokens * shard.dtype.itemsize
        raise ShardError(f"{bin_path}: {bin_bytes} bytes, but its index describes {expected}")
    if sidecar is not None:
        compare(json_path, "dtype", sidecar["dtype"], shard.dtype.name)
        compare(json_path, "documents", sidecar["documents"], shard.num_documents)
        compare(json_path, "tokens", sidecar["tokens"], shard.num_tokens)
        compare(json_path, "size of .bin", sidecar["bin"]["bytes"], bin_bytes)
        compare(json_path, "size of .idx", sidecar["idx"]["bytes"], idx_bytes)
    if verify:
        verify_index(shard)
        for key, path in (("bin", bin_path), ("idx", idx_path)) if sidecar else ():
            compare(json_path, f"SHA-256 of .{key}", sidecar[key]["sha256"], sha256_of(path))
    return shard


def read_header(file, prefix: Path, sidecar: dict | None) -> Shard:
    """A ``Shard`` from the header of an open index and its last entries, which must agree with the size of the file."""
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
    return Shard(prefix, dtype, sequences, bounds - 1, tokens, sidecar)


def read_sidecar(path: Path) -> dict:
    """The sidecar at ``path``. Raises ShardError if it is not one of this version."""
    sidecar = read_json(path)
    keys = {"dtype", "documents", "tokens", "largest_id", "tokenizer", "inputs", "bin", "idx"}
    if not keys <= sidecar.keys():
        raise ShardError(f"{path}: not the sidecar of a shard ({', '.join(sorted(keys - sidecar.keys()))} missing)")
    return sidecar


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ShardError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ShardError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict) or value.get("version") != VERSION:
        raise ShardError(f"{path}: not a file of this format, version {VERSION}")
    return value


def compare(path: Path, what: str, recorded, actual):
    if recorded != actual:
        raise ShardError(f"{path}: {what} is recorded as {recorded}, but is {actual}")


def verify_index(shard: Shard):
    """Raise ShardError unless offsets follow the lengths and the document bounds cover the sequences."""
    path = beside(shard.prefix, ".idx")
    lengths, pointers, bounds = shard.index()
    end = 0
    for start in range(0, len(lengths), CHUNK):
        part = lengths[start : start + CHUNK].astype(np.int64)
        ends = end + np.cumsum(part) * shard.dtype.itemsize
        if part.min() < 0 or not np.array_equal(pointers[start : start + CHUNK], ends - part * shard.dtype.itemsize):
            raise ShardError(f"{path}: byte offsets do not follow the lengths of the sequences")
        end = int(ends[-1])
    if bounds[0] != 0 or bounds[-1] != shard.num_sequences or (np.diff(bounds) < 0).any():
        raise ShardError(f"{path}: document bounds do not cover the {shard.num_sequences} sequences")


def sha256_of(path: str | Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()


# --- The data directory ---


def write_manifest(data_dir: str | Path) -> dict:
    """Make DATA_DIR/manifest.json from the sidecars found below ``data_dir``; returns it.

    {"version", "tokenizer": {"sha256", "vocab_size", "eos_id"}, "sources": {NAME: {"tokens", "documents", "units"}}}

    Raises ShardError if shards differ in their tokenizer, or if two shards of a source were made from the same input.
    """
    sources, inputs, tokenizers = {}, [], {}
    for path in sorted(Path(data_dir).glob("[!.]*/*.json")):
        sidecar = read_sidecar(path)
        source = sources.setdefault(path.parent.name, {"tokens": 0, "documents": 0, "units": []})
        source["tokens"] += sidecar["tokens"]
        source["documents"] += sidecar["documents"]
        source["units"].append(path.stem)
        inputs += [(path.parent.name, made_of["path"], *made_of["range"], path) for made_of in sidecar["inputs"]]
        tokenizers.setdefault(sidecar["tokenizer"]["sha256"], (path, sidecar["tokenizer"]))
    if len(tokenizers) > 1:
        (one, first), (other, second), *_ = tokenizers.values()
        raise ShardError(
            f"{one} and {other} were made with different tokenizers ({first['sha256']} and {second['sha256']}); "
            "keep one data directory for each tokenizer"
        )
    for (source, made_of, _, end, one), (next_source, next_made_of, start, _, other) in pairwise(sorted(inputs)):
        if (source, made_of) == (next_source, next_made_of) and start < end:
            raise ShardError(
                f"{one} and {other} were made from the same part of {made_of}; "
                f"run data_prep/tokenize.py for {source} again"
            )
    tokenizer = {key: value for _, used in tokenizers.values() for key, value in used.items() if key != "engine"}
    manifest = {"version": VERSION, "tokenizer": tokenizer, "sources": sources}
    publish(Path(data_dir) / "manifest.json", json_bytes(manifest))
    return manifest


def read_manifest(data_dir: str | Path) -> dict:
    """The manifest of a data directory. Raises ShardError."""
    path = Path(data_dir) / "manifest.json"
    manifest = read_json(path)
    if not {"tokenizer", "sources"} <= manifest.keys():
        raise ShardError(f"{path}: not the manifest of a data directory")
    return manifest
