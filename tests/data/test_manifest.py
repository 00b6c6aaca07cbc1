"""manifest.json of a data directory: what is finished, in order, and what cannot stand in it."""

import numpy as np
import pytest

from moh_lm.data.files import json_bytes, read_facts, seal
from moh_lm.data.shards import CUTS, ShardError, open_shard, open_source, read_manifest, write_manifest
from tests.data.directories import TOKENIZER, write


def test_the_manifest_lists_what_is_finished_in_order(tmp_path):
    write(tmp_path / "wiki" / "b-2", [[1, 2], [3, 2]])
    write(tmp_path / "wiki" / "a.x-1", [[4, 2]])
    write(tmp_path / "books" / "c", [[5, 2]])
    (tmp_path / "wiki" / "unfinished.bin").write_bytes(b"12")
    manifest = write_manifest(tmp_path)
    assert manifest == read_manifest(tmp_path)
    assert list(manifest["sources"]) == ["books", "wiki"]
    wiki = manifest["sources"]["wiki"]
    assert (wiki["tokens"], wiki["documents"], list(wiki["units"])) == (6, 3, ["a.x-1", "b-2"])
    assert manifest["tokenizer"] == {"sha256": "a" * 64, "vocab_size": 65536, "eos_id": 2}


def test_a_manifest_of_two_tokenizers_is_refused(tmp_path):
    write(tmp_path / "wiki" / "a", [[1, 2]])
    write(tmp_path / "books" / "b", [[1, 2]], tokenizer={**TOKENIZER, "sha256": "b" * 64})
    with pytest.raises(ShardError, match=f"({'a' * 64}.*{'b' * 64})|({'b' * 64}.*{'a' * 64})"):
        write_manifest(tmp_path)


def test_a_manifest_with_an_input_twice_is_refused(tmp_path):
    write(tmp_path / "wiki" / "a", [[1, 2]], inputs=[{"path": "/text/x", "range": [0, 100]}])
    write(tmp_path / "wiki" / "b", [[1, 2]], inputs=[{"path": "/text/x", "range": [100, 200]}])
    write(tmp_path / "books" / "c", [[1, 2]], inputs=[{"path": "/text/x", "range": [0, 200]}])
    write_manifest(tmp_path)
    write(tmp_path / "wiki" / "d", [[1, 2]], inputs=[{"path": "/text/x", "range": [150, 300]}])
    with pytest.raises(ShardError, match=r"wiki/b\.json and .*wiki/d\.json .* /text/x"):
        write_manifest(tmp_path)


def test_the_manifest_knows_the_cuts_that_the_indexes_give(tmp_path):
    random = np.random.default_rng(0)
    for unit in range(3):
        write(tmp_path / "wiki" / f"unit-{unit}", [[1] * length for length in random.geometric(1 / 100, 300)])
    manifest = write_manifest(tmp_path)
    for fraction in (*CUTS, 0.0003, 0.1):
        opened = open_source(tmp_path, "wiki", manifest, fraction)
        with_index = []
        for unit in range(3):
            with open_shard(tmp_path / "wiki" / f"unit-{unit}").document_starts() as starts:
                with_index.append(starts.cut(fraction))
        assert opened.cuts == with_index
    assert open_source(tmp_path, "wiki", manifest, 0).cuts == [shard.num_tokens for shard in opened.shards]


def test_a_damaged_index_gives_no_cut(tmp_path):
    """Else a rank whose copy is damaged would read other samples than the rest."""
    random = np.random.default_rng(0)
    write(tmp_path / "wiki" / "unit", [[1] * length for length in random.geometric(1 / 100, 300)])
    manifest = write_manifest(tmp_path)
    path = tmp_path / "wiki" / "unit.idx"
    content = bytearray(path.read_bytes())
    content[-8 * 20] ^= 1  # the number of a sequence, among those of the last documents
    path.write_bytes(content)
    with pytest.raises(ShardError, match="unit.idx"):
        open_source(tmp_path, "wiki", manifest, 0.07)
    assert open_source(tmp_path, "wiki", manifest, CUTS[0]).cuts  # recorded, so the index is not read


WRONG = [("tokens", "12"), ("tokens", True), ("dtype", "int7"), ("content", None), ("documents", None), ("bytes", {}),
         ("cuts", []), ("cuts", [1.5] * len(CUTS))]  # fmt: skip


@pytest.mark.parametrize("key, value", WRONG)
def test_a_sealed_value_of_another_type_is_refused_by_name(tmp_path, key, value):
    for unit in range(3):
        write(tmp_path / "a" / f"unit-{unit}", [[1, 2, 3]])
    write_manifest(tmp_path)
    manifest = read_facts(tmp_path / "manifest.json")
    manifest["sources"]["a"]["units"]["unit-1"][key] = value
    (tmp_path / "manifest.json").write_bytes(seal(json_bytes(manifest)))
    name = "entry" if key == "bytes" else key
    with pytest.raises(ShardError, match=f"manifest.json: is damaged: a shard of a has a wrong {name}; "):
        read_manifest(tmp_path)


def test_a_finished_shard_outside_the_manifest_is_reported(tmp_path):
    write(tmp_path / "wiki" / "a", [[1, 2]])
    manifest = write_manifest(tmp_path)
    write(tmp_path / "wiki" / "b", [[1, 2]])
    opened = open_source(tmp_path, "wiki", manifest, 0)
    assert [shard.num_tokens for shard in opened.shards] == [2]
    assert opened.unlisted == ["b"]
