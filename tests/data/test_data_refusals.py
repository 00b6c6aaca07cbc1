"""Data that cannot be trained on, or not wholly: what is refused or noted when a directory is opened."""

import os
import shutil

import pytest

from moh_lm.config import ConfigError
from moh_lm.data.shards import ShardError, write_manifest
from moh_lm.flags import parse_config
from moh_lm.run.text import open_data
from tests.data.directories import loader, make_directory, open_dataset, problems_of


def test_an_absent_or_unfinished_directory_is_refused(tmp_path):
    (absent,) = problems_of(tmp_path / "absent")
    assert "--data-dir" in absent
    assert "tokenize.py" in absent
    (tmp_path / "wiki").mkdir()
    (unfinished,) = problems_of(tmp_path)
    assert "manifest.json" in unfinished
    write_manifest(tmp_path)
    (empty,) = problems_of(tmp_path)
    assert "holds no source" in empty


def test_everything_that_is_wrong_is_said_at_once(tmp_path):
    make_directory(tmp_path, {"books": [[400]], "short": [[8]], "broken": [[100]], "wiki": [[100]]})
    with open(tmp_path / "broken" / "unit-0.bin", "ab") as file:
        file.write(b"\0\0")
    mix = [("books", "1000"), ("short", "1"), ("broken", "1"), ("wikis", "1"), ("wiki", "0.0000001")]
    problems = problems_of(tmp_path, mix, vocab_size=500)
    expected = ["source short has", "unit-0.bin", "did you mean wiki?", "--vocab-size 500", "of source wiki"]
    for words in expected:
        assert sum(words in problem for problem in problems) == 1, (words, problems)
    assert len(problems) == len(expected)
    assert all("\n" not in problem for problem in problems)


def test_a_source_outside_the_mix_may_be_damaged(tmp_path):
    make_directory(tmp_path, {"books": [[400]], "broken": [[100]]})
    (tmp_path / "broken" / "unit-0.json").unlink()
    open_dataset(tmp_path, [("books", "1")])
    assert "unit-0.json" in problems_of(tmp_path)[0]


def test_a_held_out_part_below_a_window_is_refused_with_a_remedy(tmp_path):
    make_directory(tmp_path, {"a": [[400]]})
    (problem,) = problems_of(tmp_path, fraction=0.02)
    assert "holds out 8 of 400 tokens of source a" in problem
    remedy = float(problem.split("raise it to about ")[1].split(",")[0])
    assert open_dataset(tmp_path, fraction=remedy).plan(0)[0]["validation_windows"] == 1


@pytest.mark.parametrize("shards", [[[30]] * 40, [[90]] * 40, [[5000], *[[30]] * 40]])
def test_the_proposed_fraction_works_with_many_small_shards(shards, tmp_path):
    make_directory(tmp_path, {"a": shards})
    (problem,) = problems_of(tmp_path, fraction=0.001)
    remedy = float(problem.split("raise it to about ")[1].split(",")[0])
    assert remedy > 0.001
    assert open_dataset(tmp_path, fraction=remedy).plan(0)[0]["validation_windows"] >= 1


def test_more_text_is_asked_for_where_no_fraction_works(tmp_path):
    make_directory(tmp_path, {"a": [[1]] * 40})
    assert "prepare more text, or set it to 0 for no validation" in problems_of(tmp_path)[0]


def test_documents_whose_ends_are_held_out_are_noted(tmp_path):
    lengths = {"texts": [[100]] * 9 + [[50, 50]], "lines": [[1000], [10] * 200], "one": [[400]]}
    make_directory(tmp_path, lengths)
    one, note = open_dataset(tmp_path).notes
    assert one.startswith("source one: 1 of its 1 shards hold one document each, whose end is held out")
    assert note.startswith("source texts: 9 of its 10 shards hold one document each, whose end is held out")
    assert "end-of-sequence token" in note and "one .jsonl file, a document per line" in note
    assert open_dataset(tmp_path, fraction=0.0).notes == []


def test_a_vocabulary_smaller_than_the_data_is_refused(tmp_path):
    make_directory(tmp_path, {"a": [[100]], "b": [[100]]})
    (problem,) = problems_of(tmp_path, vocab_size=199)
    assert "--vocab-size 199" in problem
    assert "199 in source b" in problem
    assert "200" in problem
    open_dataset(tmp_path, vocab_size=200)


FILES = ("bin", "idx", "json")
ON_DISK = {
    "missing tokens": lambda path: path["books.bin"].unlink(),
    "missing index": lambda path: path["books.idx"].unlink(),
    "missing sidecar": lambda path: path["books.json"].unlink(),
    "missing source": lambda path: shutil.rmtree(path["books.bin"].parent),
    "empty tokens": lambda path: path["books.bin"].write_bytes(b""),
    "empty index": lambda path: path["books.idx"].write_bytes(b""),
    "truncated tokens": lambda path: os.truncate(path["books.bin"], 100),
    "truncated index": lambda path: os.truncate(path["books.idx"], 40),
    "truncated sidecar": lambda path: os.truncate(path["books.json"], 40),
    "padded tokens": lambda path: os.truncate(path["books.bin"], 4 * 1050 + 4),
    "tokens all zero": lambda path: path["books.bin"].write_bytes(bytes(4 * 1050)),
    "another dtype": lambda path: alter(path["books.idx"], 17, b"\3"),
    "another magic": lambda path: alter(path["books.idx"], 0, b"X"),
    "index past the end": lambda path: alter(path["books.idx"], 34 + 12 + 16, b"\xff\xff"),
    "another count in the sidecar": lambda path: replace(path["books.json"], b'"documents": 3', b'"documents": 4'),
    "swapped tokens": lambda path: swap(path["books.bin"], path["other.bin"]),
    "swapped shards": lambda path: [swap(path[f"books.{key}"], path[f"other.{key}"]) for key in ("bin", "idx", "json")],
}


def alter(path, position, data):
    path.write_bytes(path.read_bytes()[:position] + data + path.read_bytes()[position + len(data) :])


def replace(path, old, new):
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))


def swap(one, other):
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


@pytest.mark.parametrize("damage", ON_DISK)
def test_a_directory_unlike_its_manifest_is_refused_by_file(tmp_path, damage):
    """The two shards have the same sizes and counts, so that only their contents tell them apart."""
    make_directory(tmp_path, {"books": [[400, 300, 350], [350, 400, 300]]}, vocab_size=2**17)
    units = {"books": tmp_path / "books" / "unit-0", "other": tmp_path / "books" / "unit-1"}
    ON_DISK[damage]({f"{name}.{key}": unit.with_suffix(f".{key}") for name, unit in units.items() for key in FILES})
    named = r"books: No such file" if damage == "missing source" else r"unit-[01]\.(bin|idx|json)"
    with pytest.raises((ConfigError, ShardError), match=named) as caught:
        loader(open_dataset(tmp_path), reset_at_documents=True).train_step(0)
    assert "\n" not in str(caught.value)


def test_one_rank_of_each_machine_compares_the_sizes(tmp_path, monkeypatch):
    make_directory(tmp_path, {"a": [[400, 300]]}, vocab_size=1024)
    with open(tmp_path / "a" / "unit-0.bin", "ab") as file:
        file.write(b"\0\0")
    flags = "--seq-length 8 --vocab-size 1024 --num-layers 1 --batch-tokens 64 --micro-batch-size 1 --precision fp32"
    config = parse_config([*flags.split(), "--validation-fraction", "0", "--data-dir", str(tmp_path)])[0]
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="unit-0.bin: 1402 bytes, but manifest.json records 1400"):
        open_data(config, [], False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    dataset = open_data(config, [], False)[1]
    with pytest.raises(ShardError, match="unit-0.bin: 1402 bytes, but its index describes 1400"):
        loader(dataset).read_step(0)


def test_shards_outside_the_manifest_are_noted_and_unused(tmp_path):
    make_directory(tmp_path, {"a": [[150, 150], [150, 150]]})
    reference = open_dataset(tmp_path)
    for suffix in FILES:
        shutil.copy(tmp_path / "a" / f"unit-0.{suffix}", tmp_path / "a" / f"unit-2.{suffix}")
    dataset = open_dataset(tmp_path)
    assert dataset.notes == [
        "source a: manifest.json does not list 1 of its shards, such as unit-2; "
        "they are not used until data_prep/tokenize.py has finished"
    ]
    assert dataset.fingerprint() == reference.fingerprint()
