"""The shard format: bytes, refusals, crash safety, the manifest."""

import hashlib
import json
import os
import random
import struct
import zlib

import numpy as np
import pytest

from moh_lm.data import files
from moh_lm.data.files import json_bytes, read_facts, seal
from moh_lm.data.reader import verify_shard
from moh_lm.data.shards import ShardError, ShardWriter, open_shard, open_source, read_manifest, write_manifest
from moh_lm.data.source import Source
from tests.data.directories import TOKENIZER, open_sound, part, write


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
    text = (tmp_path / "x.y.json").read_bytes()
    assert json.loads(text) == {**sidecar, "sha256": hashlib.sha256(json_bytes(sidecar)).hexdigest()}
    for key, data in (("bin", tokens), ("idx", index)):
        sums = {"sha256": hashlib.sha256(data).hexdigest(), "crc32": f"{zlib.crc32(data):08x}"}
        assert sidecar[key] == {"bytes": len(data), **sums}
    assert (sidecar["documents"], sidecar["tokens"], sidecar["largest_id"]) == (3, 9, vocab_size - 1)


def test_documents_come_back_as_they_were_written(tmp_path):
    random = np.random.default_rng(0)
    documents = [random.integers(0, 65536, length) for length in random.integers(1, 200, 100)]
    write(tmp_path / "shard", documents)
    shard = open_sound(tmp_path / "shard")
    lengths, pointers, bounds = shard.index()
    assert shard.num_documents == 100
    assert bounds.tolist() == list(range(101))
    for document, length, pointer in zip(documents, lengths, pointers, strict=True):
        assert shard.read(int(pointer) // 2, int(length)).tolist() == document.tolist()


def test_a_temporary_name_that_is_a_link_is_not_written_through(tmp_path):
    (tmp_path / "mine").write_text("keep")
    for suffix in (".bin", ".idx", ".json"):
        part(tmp_path / "unit", f"{suffix}.tmp-{os.getpid()}").symlink_to("mine")
    write(tmp_path / "unit", [[1, 2]])
    assert (tmp_path / "mine").read_text() == "keep"
    assert open_sound(tmp_path / "unit").read(0, 2).tolist() == [1, 2]


def test_a_shard_without_documents_is_complete(tmp_path):
    write(tmp_path / "shard", [])
    shard = open_sound(tmp_path / "shard")
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
def test_a_document_that_the_format_cannot_hold_is_refused(tmp_path, document):
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
def test_a_damaged_shard_is_refused_at_opening_by_file(tmp_path, damage):
    prefix = tmp_path / "shard"
    write(prefix, [[5, 6, 2], [7, 2], [8, 9, 10, 2]])
    suffix, change = DAMAGE[damage]
    path = part(prefix, suffix)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ShardError, match=r"shard\.(bin|idx|json)"):
        open_shard(prefix)


def open_all(directory):
    """A small data directory as a run opens it, and its shards as a run first reads them."""
    manifest = read_manifest(directory)
    for name in manifest["sources"]:
        for shard in open_source(directory, name, manifest, 0.001).shards:
            shard.read(0, 1)


@pytest.mark.parametrize("name", ["wiki/a.json", "manifest.json"])
def test_every_flipped_bit_of_a_sidecar_or_manifest_is_found(tmp_path, name):
    write(tmp_path / "wiki" / "a", [[5, 6, 2], [7, 2], [8, 9, 10, 2]])
    write_manifest(tmp_path)
    path, generator = tmp_path / name, random.Random(0)
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ShardError) as caught:
            open_all(tmp_path)
        assert str(path) in str(caught.value) and "data_prep/tokenize.py" in str(caught.value), position
        assert "\n" not in str(caught.value)
    path.write_bytes(content)
    open_all(tmp_path)


@pytest.mark.parametrize("name", ["wiki/a.json", "manifest.json"])
def test_damage_under_a_valid_seal_ends_in_no_other_error(tmp_path, name):
    write(tmp_path / "wiki" / "a", [[5, 6, 2], [7, 2], [8, 9, 10, 2]])
    write_manifest(tmp_path)
    open_all(tmp_path)
    path, generator, found = tmp_path / name, random.Random(0), 0
    content = json_bytes(read_facts(path))
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << generator.randrange(8)
        path.write_bytes(seal(bytes(damaged)))
        try:
            open_all(tmp_path)
        except ShardError:
            found += 1
    assert found > len(content) / 2


def test_a_tokenizer_that_is_not_the_one_of_the_shards_is_named(tmp_path):
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(bytes(1000))
    made_with = {**TOKENIZER, "sha256": hashlib.sha256(bytes(1000)).hexdigest()}
    write(tmp_path / "wiki" / "a", [[1, 2]], tokenizer=made_with)
    write_manifest(tmp_path)
    for position in (0, 500, 999):
        read_manifest(tmp_path)
        tokenizer.write_bytes(flip(bytes(1000), position))
        with pytest.raises(ShardError, match=r"tokenizer\.model: is not the tokenizer of the shards: .*; restore it"):
            read_manifest(tmp_path)
        tokenizer.write_bytes(bytes(1000))
    tokenizer.unlink()
    read_manifest(tmp_path)  # a run can do without


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A shard of several blocks of 64 KiB in each of its files, and its documents."""
    prefix = tmp_path_factory.mktemp("large") / "shard"
    random = np.random.default_rng(0)
    documents = [random.integers(0, 65536, length) for length in random.geometric(1 / 12, 9_001)]
    write(prefix, documents)
    return prefix, documents


def test_every_block_of_both_files_has_its_crc_in_the_sidecar(large):
    prefix, _ = large
    sidecar = json.loads(part(prefix, ".json").read_bytes())
    for key in ("bin", "idx"):
        data = part(prefix, f".{key}").read_bytes()
        blocks = [zlib.crc32(data[start : start + 65536]) for start in range(0, len(data), 65536)]
        assert len(blocks) > 2
        assert sidecar[key]["crc32"] == "".join(f"{block:08x}" for block in blocks)


@pytest.mark.parametrize("trial", range(40))
def test_a_flipped_bit_in_the_tokens_is_found_when_read(large, tmp_path, trial):
    prefix, documents = large
    tokens = np.concatenate(documents)
    position = int(np.random.default_rng(trial).integers(2 * len(tokens)))
    for suffix in (".bin", ".idx", ".json"):
        part(tmp_path / "shard", suffix).write_bytes(part(prefix, suffix).read_bytes())
    path = tmp_path / "shard.bin"
    path.write_bytes(flip(path.read_bytes(), position))
    shard = open_shard(tmp_path / "shard")
    with pytest.raises(ShardError, match=rf"shard\.bin: block {position // 65536}, "):
        shard.read(position // 2, 1)
    with pytest.raises(ShardError, match=rf"shard\.bin: block {position // 65536}, "):
        open_sound(tmp_path / "shard")
    if position >= 65536:
        assert shard.read(0, 32768).tolist() == tokens[:32768].tolist()  # the first block is whole


@pytest.mark.parametrize("trial", range(40))
def test_a_flipped_bit_in_the_index_is_found_by_file_and_block(large, tmp_path, trial):
    prefix, documents = large
    data = part(prefix, ".idx").read_bytes()
    position = int(np.random.default_rng(trial).integers(34, len(data)))
    for suffix in (".bin", ".json"):
        part(tmp_path / "shard", suffix).write_bytes(part(prefix, suffix).read_bytes())
    part(tmp_path / "shard", ".idx").write_bytes(flip(data, position))
    try:
        shard = open_shard(tmp_path / "shard")
        (problem,) = verify_shard(shard)
        assert f"shard.idx: block {position // 65536}, " in problem
        pointers = 34 + 4 * len(documents)
        document = (position - pointers) // 8
        if 0 <= document < len(documents):
            with pytest.raises(ShardError, match=rf"idx: block {position // 65536}, "):  # noqa: SIM117
                with shard.document_starts() as starts:
                    starts[document]
    except ShardError as error:  # in the last entries, which opening compares with the size of .bin
        assert "shard.idx" in str(error) or "shard.bin" in str(error)
        assert position >= 34 + 4 * (len(documents) - 1)


@pytest.mark.parametrize("name", ["manifest", "cut", "tokens", "documents"])
def test_a_read_that_fails_for_seconds_is_made_again(name, tmp_path, monkeypatch, capsys):
    """The files that are opened first stand for a file system that is away: reading /proc/self/mem there fails."""
    write(tmp_path / "a" / "unit", [[1, 2, 3]] * 50)
    manifest = write_manifest(tmp_path)
    stream = Source("a", open_source(tmp_path, "a", manifest, 0.05), 8).training
    read = {
        "manifest": lambda: read_manifest(tmp_path),
        "cut": lambda: open_source(tmp_path, "a", manifest, 0.3).cuts,
        "tokens": lambda: stream.read(10, 20).tolist(),
        "documents": lambda: stream.document_starts(10, 20),
    }[name]
    expected, away, pauses = read(), [], []
    monkeypatch.setattr(
        files, "open_at_once", lambda path, flags: os.open(away.pop() if away else path, flags)
    )
    monkeypatch.setattr(files, "sleep", pauses.append)
    for failures in (1, 4):
        away += ["/proc/self/mem"] * failures
        pauses.clear()
        assert read() == expected
        assert pauses == [1, 2, 4, 8][:failures]
        assert capsys.readouterr().err.count("Input/output error") == 1
    away += ["/proc/self/mem"] * 5
    with pytest.raises(ShardError, match="(unit.(bin|idx|json)|manifest.json): Input/output error$"):
        read()
    away += [tmp_path / "absent"]
    pauses.clear()
    with pytest.raises(ShardError, match="No such file|unit.json is missing"):
        read()
    assert pauses == []


def test_verification_counts_damaged_blocks_and_bytes_read(large, tmp_path):
    prefix, _ = large
    for suffix in (".bin", ".idx", ".json"):
        part(tmp_path / "shard", suffix).write_bytes(part(prefix, suffix).read_bytes())
    path = tmp_path / "shard.bin"
    path.write_bytes(flip(flip(flip(path.read_bytes(), 70_000), 70_001), 150_000))
    read = []
    (problem,) = verify_shard(open_shard(tmp_path / "shard"), read.append)
    assert "shard.bin: block 1, from byte 65536 on" in problem
    assert "1 more block" in problem
    assert sum(read) == path.stat().st_size + (tmp_path / "shard.idx").stat().st_size


def test_document_starts_are_found_by_position(large):
    prefix, documents = large
    ends = np.cumsum([len(document) for document in documents])
    expected = [0, *ends[:-1].tolist()]
    shard = open_shard(prefix)
    random = np.random.default_rng(1)
    with shard.document_starts() as starts:
        assert [starts[number] for number in range(len(starts))] == expected
    for first in [0, 1, int(ends[-1]) - 1, *random.integers(0, ends[-1], 200).tolist()]:
        end = min(first + int(random.integers(0, 200)), int(ends[-1]))
        with shard.document_starts() as starts:
            assert starts.inside(first, end) == [start for start in expected if first <= start < end]
            assert starts.number(first) == np.searchsorted(ends, first, side="right")


@pytest.mark.parametrize(
    "lengths",
    [[1] * 5000 + [100_000] + [1] * 3000 + [50_000] + [2] * 100, [100_000] + [1] * 8000, [1] * 8000 + [100_000]],
)
def test_documents_of_uneven_lengths_are_found_too(tmp_path, lengths):
    """The search begins where documents of even lengths would lie."""
    write(tmp_path / "shard", [np.zeros(length, np.int64) for length in lengths])
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    shard = open_shard(tmp_path / "shard")
    for first in (0, 1, 4_999, 5_000, 5_001, 60_000, 99_999, 100_000, 104_999, 105_000, 107_500, 107_999):
        with shard.document_starts() as starts:
            number = starts.number(first)
            assert bounds[number] <= first < bounds[number + 1]
            assert starts.inside(first, first + 5) == [start for start in bounds[:-1] if first <= start < first + 5]


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_a_missing_file_is_named(tmp_path, suffix):
    write(tmp_path / "shard", [[1, 2]])
    part(tmp_path / "shard", suffix).unlink()
    with pytest.raises(ShardError, match=rf"shard\{suffix}"):
        open_shard(tmp_path / "shard")


@pytest.mark.parametrize("step", range(3))
def test_a_shard_stopped_before_a_rename_is_written_again(tmp_path, monkeypatch, step):
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


def test_reading_from_a_truncated_shard_names_file_and_bytes(tmp_path):
    write(tmp_path / "shard", [[1, 2, 3, 4, 5, 2]])
    shard = open_shard(tmp_path / "shard")
    os.truncate(tmp_path / "shard.bin", 6)
    with pytest.raises(ShardError, match=r"shard\.bin: ends at byte 6, inside the bytes 4 to 9"):
        shard.read(2, 3)
