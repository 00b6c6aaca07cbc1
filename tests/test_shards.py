"""The shard format: bytes, refusals, crash safety, the manifest."""

import hashlib
import json
import os
import struct
import tracemalloc

import numpy as np
import pytest

from moh_lm.data.shards import ShardError, ShardWriter, open_shard, read_manifest, write_manifest

TOKENIZER = {"sha256": "a" * 64, "vocab_size": 65536, "eos_id": 2, "engine": "test"}


def write(prefix, documents, vocab_size=65536, tokenizer=TOKENIZER, inputs=()):
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with ShardWriter(prefix, vocab_size) as shard:
        for document in documents:
            shard.add(document)
        return shard.commit({"tokenizer": tokenizer, "inputs": list(inputs)})


def part(prefix, suffix):
    return prefix.with_name(prefix.name + suffix)


@pytest.mark.parametrize(("vocab_size", "code", "letter"), [(65536, 8, "H"), (65537, 4, "i")])
def test_a_shard_has_the_bytes_of_the_format_written_by_hand(tmp_path, vocab_size, code, letter):
    documents = [[0, vocab_size - 1, 2], [2], [7, 7, 7, 7, 2]]
    sidecar = write(tmp_path / "x.y", documents, vocab_size)

    size = struct.calcsize(letter)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 3, 4)
    index += struct.pack("<3i", 3, 1, 5) + struct.pack("<3q", 0, 3 * size, 4 * size) + struct.pack("<4q", 0, 1, 2, 3)
    tokens = struct.pack(f"<9{letter}", *sum(documents, []))
    assert (tmp_path / "x.y.idx").read_bytes() == index
    assert (tmp_path / "x.y.bin").read_bytes() == tokens
    assert json.loads((tmp_path / "x.y.json").read_bytes()) == sidecar
    assert sidecar["bin"] == {"bytes": 9 * size, "sha256": hashlib.sha256(tokens).hexdigest()}
    assert sidecar["idx"] == {"bytes": len(index), "sha256": hashlib.sha256(index).hexdigest()}
    assert (sidecar["documents"], sidecar["tokens"], sidecar["largest_id"]) == (3, 9, vocab_size - 1)


def test_documents_come_back_as_they_were_written(tmp_path):
    random = np.random.default_rng(0)
    documents = [random.integers(0, 65536, length) for length in random.integers(1, 200, 100)]
    write(tmp_path / "shard", documents)
    shard = open_shard(tmp_path / "shard", verify=True)
    lengths, pointers, bounds = shard.index()
    assert shard.num_documents == 100
    assert bounds.tolist() == list(range(101))
    for document, length, pointer in zip(documents, lengths, pointers, strict=True):
        assert shard.read(int(pointer) // 2, int(length)).tolist() == document.tolist()


def test_a_shard_without_documents_is_complete(tmp_path):
    write(tmp_path / "shard", [])
    shard = open_shard(tmp_path / "shard", verify=True)
    assert (shard.num_documents, shard.num_tokens, len(shard.read(0, 0))) == (0, 0, 0)


def test_offsets_beyond_four_gigabytes_do_not_wrap(tmp_path):
    longest = 2**31 - 1
    with ShardWriter(tmp_path / "shard", 70000) as shard:
        shard.lengths.extend([longest] * 3)
        shard.commit({"tokenizer": TOKENIZER, "inputs": []})
    offsets = struct.unpack_from("<3q", (tmp_path / "shard.idx").read_bytes(), 34 + 3 * 4)
    assert offsets == (0, 4 * longest, 8 * longest)


@pytest.mark.parametrize(
    "document", [[], [65536], [-1], np.broadcast_to(np.uint16(1), 2**31)], ids=["empty", "large id", "negative", "long"]
)
def test_a_document_that_the_format_cannot_hold_is_refused_and_leaves_no_file(tmp_path, document):
    with pytest.raises(ShardError, match="shard"):
        write(tmp_path / "shard", [[1, 2], document])
    assert list(tmp_path.iterdir()) == []


def flip(data, position):
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


DAMAGE = {
    "tokens truncated": (".bin", lambda data: data[:-2]),
    "tokens padded": (".bin", lambda data: data + b"\0\0"),
    "index truncated": (".idx", lambda data: data[:-8]),
    "index padded": (".idx", lambda data: data + bytes(20)),
    "index shorter than its header": (".idx", lambda data: data[:20]),
    "no index": (".idx", lambda data: b"hello, world" * 9),
    "another version": (".idx", lambda data: flip(data, 9)),
    "another dtype than the sidecar's": (".idx", lambda data: data[:17] + b"\3" + data[18:]),
    "floating-point tokens": (".idx", lambda data: data[:17] + b"\7" + data[18:]),
    "sidecar cut off": (".json", lambda data: data[:-9]),
    "sidecar of another file": (".json", lambda data: b'{"version": 1}'),
    "sidecar with another count": (".json", lambda data: data.replace(b'"documents": 3', b'"documents": 4')),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_refused_at_opening_by_the_name_of_its_file(tmp_path, damage):
    prefix = tmp_path / "shard"
    write(prefix, [[5, 6, 2], [7, 2], [8, 9, 10, 2]])
    suffix, change = DAMAGE[damage]
    path = part(prefix, suffix)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ShardError, match=r"shard\.(bin|idx|json)"):
        open_shard(prefix)


@pytest.mark.parametrize(("suffix", "position"), [(".bin", 4), (".idx", 34), (".idx", 34 + 12 + 8), (".idx", 78)])
def test_an_altered_byte_is_found_by_verification(tmp_path, suffix, position):
    prefix = tmp_path / "shard"
    write(prefix, [[5, 6, 2], [7, 2], [8, 9, 10, 2]])
    path = part(prefix, suffix)
    path.write_bytes(flip(path.read_bytes(), position))
    open_shard(prefix)  # sizes and counts are right
    with pytest.raises(ShardError, match="shard"):
        open_shard(prefix, verify=True)


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_a_missing_file_is_named(tmp_path, suffix):
    write(tmp_path / "shard", [[1, 2]])
    part(tmp_path / "shard", suffix).unlink()
    with pytest.raises(ShardError, match=rf"shard\{suffix}"):
        open_shard(tmp_path / "shard")


def foreign_index(lengths, pointers, bounds):
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, len(lengths), len(bounds))
    arrays = (np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(bounds, "<i8"))
    return header + b"".join(array.tobytes() for array in arrays)


def test_a_shard_of_another_tool_is_opened_on_request_only(tmp_path):
    (tmp_path / "shard.bin").write_bytes(np.arange(10, dtype="<i4").tobytes())
    (tmp_path / "shard.idx").write_bytes(foreign_index([4, 1, 0, 5], [0, 16, 20, 20], [0, 2, 4]))
    with pytest.raises(ShardError, match="unfinished"):
        open_shard(tmp_path / "shard")
    shard = open_shard(tmp_path / "shard", foreign=True, verify=True)
    assert (shard.num_sequences, shard.num_documents, shard.num_tokens) == (4, 2, 10)
    assert shard.read(3, 4).tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("pointers", "bounds"),
    [
        ([0, 20, 20, 20], [0, 2, 4]),
        ([0, 16, 20, 20], [0, 3, 2]),
        ([0, 16, 20, 20], [0, 5, 4]),
        ([0, 16, 20, 20], [1, 2, 4]),
    ],
)
def test_wrong_offsets_and_wrong_bounds_are_found_without_a_sidecar(tmp_path, pointers, bounds):
    (tmp_path / "shard.bin").write_bytes(bytes(40))
    (tmp_path / "shard.idx").write_bytes(foreign_index([4, 1, 0, 5], pointers, bounds))
    with pytest.raises(ShardError, match=r"shard\.idx"):
        open_shard(tmp_path / "shard", foreign=True, verify=True)


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


@pytest.mark.parametrize("step", range(3))
def test_a_shard_stopped_before_any_rename_is_unfinished_and_written_again_the_same(tmp_path, monkeypatch, step):
    documents = [[5, 6, 2], [7, 2]]
    write(tmp_path / "good" / "shard", documents)
    good = {path.name: path.read_bytes() for path in (tmp_path / "good").iterdir()}
    renames = []

    def rename_then_stop(source, target):
        if len(renames) == step:
            raise KeyboardInterrupt
        renames.append(target)
        rename(source, target)

    rename = os.replace
    monkeypatch.setattr(os, "replace", rename_then_stop)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "stopped" / "shard", documents)
    monkeypatch.undo()
    with pytest.raises(ShardError, match="unfinished"):
        open_shard(tmp_path / "stopped" / "shard")
    write(tmp_path / "stopped" / "shard", documents)
    assert {path.name: path.read_bytes() for path in (tmp_path / "stopped").iterdir()} == good


def test_reading_from_a_shard_that_was_cut_off_since_names_file_and_position(tmp_path):
    write(tmp_path / "shard", [[1, 2, 3, 4, 5, 2]])
    shard = open_shard(tmp_path / "shard")
    os.truncate(tmp_path / "shard.bin", 6)
    with pytest.raises(ShardError, match=r"shard\.bin.* position 2 of 6"):
        shard.read(2, 3)


def test_the_manifest_lists_what_is_finished_in_order(tmp_path):
    write(tmp_path / "wiki" / "b-2", [[1, 2], [3, 2]])
    write(tmp_path / "wiki" / "a.x-1", [[4, 2]])
    write(tmp_path / "books" / "c", [[5, 2]])
    (tmp_path / "wiki" / "unfinished.bin").write_bytes(b"12")
    manifest = write_manifest(tmp_path)
    assert manifest == read_manifest(tmp_path)
    assert list(manifest["sources"]) == ["books", "wiki"]
    assert manifest["sources"]["wiki"] == {"tokens": 6, "documents": 3, "units": ["a.x-1", "b-2"]}
    assert manifest["tokenizer"] == {"sha256": "a" * 64, "vocab_size": 65536, "eos_id": 2}


def test_a_manifest_of_two_tokenizers_is_refused_with_both_hashes(tmp_path):
    write(tmp_path / "wiki" / "a", [[1, 2]])
    write(tmp_path / "books" / "b", [[1, 2]], tokenizer={**TOKENIZER, "sha256": "b" * 64})
    with pytest.raises(ShardError, match=f"({'a' * 64}.*{'b' * 64})|({'b' * 64}.*{'a' * 64})"):
        write_manifest(tmp_path)


def test_a_manifest_in_which_an_input_would_count_twice_is_refused(tmp_path):
    write(tmp_path / "wiki" / "a", [[1, 2]], inputs=[{"path": "/text/x", "range": [0, 100]}])
    write(tmp_path / "wiki" / "b", [[1, 2]], inputs=[{"path": "/text/x", "range": [100, 200]}])
    write(tmp_path / "books" / "c", [[1, 2]], inputs=[{"path": "/text/x", "range": [0, 200]}])
    write_manifest(tmp_path)
    write(tmp_path / "wiki" / "d", [[1, 2]], inputs=[{"path": "/text/x", "range": [150, 300]}])
    with pytest.raises(ShardError, match=r"wiki/b\.json and .*wiki/d\.json .* /text/x"):
        write_manifest(tmp_path)
