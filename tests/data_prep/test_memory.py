"""Memory follows the longest document, whatever a file is packed in and however large it is unpacked."""

import hashlib
import os
import subprocess
import sys
import tracemalloc
import zlib

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_prep.writing import shuffled
from moh_lm.data.index import index_bytes, token_code
from tests.tokenizing import ROOT, json_lines, write, zstd

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak is read from /proc")
PEAK = """
import re, sys
from dataclasses import replace
from data_prep.documents import documents, inspect_file
from data_prep.tables import first_row

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

before = peak()
piece = inspect_file(*sys.argv[1:])
for source in ("", "redpajama-github") if piece.form == "column" else ():
    first_row(piece, "text")
    all(documents(replace(piece, source=source), "text"))
print(sum(document.num_bytes for document in documents(inspect_file(*sys.argv[1:]), "text")), peak() - before)
"""


def text_and_memory(path):
    """Bytes of the documents of a file, and those that reading them takes at the most."""
    command = [sys.executable, "-c", PEAK, str(path), path.name]
    return map(int, subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("name", ["x.jsonl.zst", "x.parquet"])
def test_memory_follows_neither_the_file_nor_its_row_groups(name, tmp_path):
    path = tmp_path / name
    texts = [os.urandom(8000).hex() for _ in range(15000)]  # 240 MB, in one row group
    if name == "x.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, use_dictionary=False, compression="none")
    else:
        write(path, zstd(json_lines(texts), level=1))
    size, memory = text_and_memory(path)
    assert size == 240_000_000
    assert memory < 130_000_000  # Arrow takes 60 to 95 MB for a file of any size


PACKERS = {
    "gzip": lambda: zlib.compressobj(9, wbits=zlib.MAX_WBITS | 16),
    "zstd": lambda: zstandard.ZstdCompressor().compressobj(),
    "zstd -19": lambda: zstandard.ZstdCompressor(level=19).compressobj(),
}


@pytest.mark.parametrize("kind", PACKERS)
def test_a_small_archive_of_much_is_unpacked_piece_by_piece(kind, tmp_path):
    packer, parts = PACKERS[kind](), [b'{"text": "a"}\n', *[b" " * 2**20 + b"\n"] * 250]
    path = write(tmp_path / "x.jsonl", b"".join(map(packer.compress, parts)) + packer.flush())
    assert path.stat().st_size < 300_000
    size, memory = text_and_memory(path)
    assert size == 1
    assert memory < 130_000_000


REPEATED = {
    "dictionary": {"compression": "brotli", "store_schema": False},
    "delta": {"compression": "zstd", "use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
}


@pytest.mark.parametrize("form", REPEATED)
def test_a_value_repeated_in_a_page_is_read_a_few_times_at_once(form, tmp_path):
    rows = pyarrow.array([0] * 250, pyarrow.int32())
    text = pyarrow.DictionaryArray.from_arrays(rows, pyarrow.array(["a" * 2**20])).cast(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), tmp_path / "x.parquet", **REPEATED[form])
    assert (tmp_path / "x.parquet").stat().st_size < 1_000
    size, memory = text_and_memory(tmp_path / "x.parquet")
    assert size == 250 * 2**20
    assert memory < 130_000_000


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_an_endless_list_beside_the_text_is_not_read(name, tmp_path):
    nothing = pyarrow.nulls(1 << 26, pyarrow.int8() if name == "x.parquet" else pyarrow.null())
    meta = pyarrow.ListArray.from_arrays(pyarrow.array([0, len(nothing)], pyarrow.int32()), nothing)
    meta = pyarrow.StructArray.from_arrays([pyarrow.array(["h"]), meta], ["content_hash", "language"])
    table, path = pyarrow.table({"text": ["hello"], "meta": meta}), tmp_path / name
    if name == "x.parquet":
        pyarrow.parquet.write_table(table, path, write_batch_size=len(nothing), data_page_size=1 << 30)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    assert path.stat().st_size < 10_000
    size, memory = text_and_memory(path)
    assert size == 5
    assert memory < 80_000_000


def peak_of(work):
    """(the result of ``work``, the most bytes that Python and NumPy held for it at a time)."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_document_of_a_shard_takes_few_bytes(tmp_path):
    count = 50_000
    keys = [hashlib.blake2b(n.to_bytes(8, "little"), key=b"unit", digest_size=8).digest() for n in range(count)]
    documents = shuffled((np.array([n], np.int32) for n in range(count)), "unit", tmp_path)
    first, memory = peak_of(lambda: next(documents))
    assert memory < 30 * count  # 4 of them are its token
    assert np.concatenate([first, *documents]).tolist() == sorted(range(count), key=keys.__getitem__)
    assert peak_of(lambda: index_bytes(np.ones(count, np.int32), token_code(100)))[1] < 45 * count
