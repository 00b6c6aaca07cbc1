"""Shards of another tool: what stands in their index, opened on request, and what is wrong with it."""

import struct
import tracemalloc

import numpy as np
import pytest

from moh_lm.data.shards import ShardError, open_shard
from tests.data.directories import open_sound


def foreign_index(lengths, pointers, bounds):
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, len(lengths), len(bounds))
    arrays = (np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(bounds, "<i8"))
    return header + b"".join(array.tobytes() for array in arrays)


def test_a_shard_of_another_tool_is_opened_on_request_only(tmp_path):
    (tmp_path / "shard.bin").write_bytes(np.arange(10, dtype="<i4").tobytes())
    (tmp_path / "shard.idx").write_bytes(foreign_index([4, 1, 0, 5], [0, 16, 20, 20], [0, 2, 4]))
    with pytest.raises(ShardError, match="unfinished"):
        open_shard(tmp_path / "shard")
    shard = open_sound(tmp_path / "shard", foreign=True)
    assert (shard.num_sequences, shard.num_documents, shard.num_tokens) == (4, 2, 10)
    assert shard.read(3, 4).tolist() == [3, 4, 5, 6]
    with shard.document_starts() as starts:
        assert list(starts) == [0, 5]
        assert starts.inside(0, 10) == [0, 5]
        assert [starts.number(position) for position in (0, 4, 5, 9)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("pointers", "bounds"),
    [
        ([0, 20, 20, 20], [0, 2, 4]),
        ([0, 16, 20, 20], [0, 3, 2]),
        ([0, 16, 20, 20], [0, 5, 4]),
        ([0, 16, 20, 20], [1, 2, 4]),
    ],
)
def test_wrong_offsets_and_bounds_are_found_without_a_sidecar(tmp_path, pointers, bounds):
    (tmp_path / "shard.bin").write_bytes(bytes(40))
    (tmp_path / "shard.idx").write_bytes(foreign_index([4, 1, 0, 5], pointers, bounds))
    with pytest.raises(ShardError, match=r"shard\.idx"):
        open_sound(tmp_path / "shard", foreign=True)


def test_empty_documents_begin_where_the_next_one_does(tmp_path):
    (tmp_path / "shard.bin").write_bytes(np.arange(10, dtype="<i4").tobytes())
    (tmp_path / "shard.idx").write_bytes(foreign_index([4, 1, 5], [0, 16, 20], [0, 0, 2, 2, 3, 3]))
    with open_sound(tmp_path / "shard", foreign=True).document_starts() as starts:
        assert list(starts) == [0, 0, 5, 5, 10]
        assert starts.inside(1, 10) == [5, 5]


def test_an_index_that_points_outside_is_refused_when_used(tmp_path):
    (tmp_path / "shard.bin").write_bytes(bytes(40))
    (tmp_path / "shard.idx").write_bytes(foreign_index([4, 1, 0, 5], [0, 16, 20, 20], [0, 99, 4]))
    shard = open_shard(tmp_path / "shard", foreign=True)
    with pytest.raises(ShardError, match=r"shard\.idx: document 1 begins with sequence 99"):  # noqa: SIM117
        with shard.document_starts() as starts:
            starts.inside(0, 10)


def test_opening_takes_no_memory_for_the_index(tmp_path):
    documents = 10**8
    with open(tmp_path / "shard.idx", "wb") as file:  # sparse: two gigabytes of zeros that take no space
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, documents, documents + 1))
        file.truncate(34 + 12 * documents + 8 * (documents + 1))
    (tmp_path / "shard.bin").touch()
    tracemalloc.start()
    shard = open_shard(tmp_path / "shard", foreign=True)
    shard.index()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert shard.num_documents == documents
    assert peak < 2**20


def test_finding_a_document_takes_no_memory_for_the_index(tmp_path):
    documents = 10**6
    (tmp_path / "shard.bin").write_bytes(bytes(4 * 3 * documents))
    starts_of = 3 * np.arange(documents)
    index = foreign_index(np.full(documents, 3), 4 * starts_of, np.arange(documents + 1))
    (tmp_path / "shard.idx").write_bytes(index)
    shard = open_shard(tmp_path / "shard", foreign=True)
    tracemalloc.start()
    with shard.document_starts() as starts:
        assert starts.inside(1_500_001, 1_500_010) == [1_500_003, 1_500_006, 1_500_009]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
