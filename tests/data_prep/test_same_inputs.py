"""Inputs that come again: copies and moved files count once, and what only looks like a known file is another."""

import gzip
import os
import shutil

import pytest

from tests.tokenizing import decoded, files, json_lines, tokenize


def test_copies_are_left_out_and_a_shard_of_one_is_replaced(model, tmp_path):
    (tmp_path / "b.jsonl").write_bytes(json_lines(["once"]))
    tokenize(model, tmp_path / "out", f"a={tmp_path}/*.jsonl")
    (tmp_path / "a.jsonl").write_bytes(json_lines(["once"]))
    stdout, _ = tokenize(model, tmp_path / "out", f"a={tmp_path}/*.jsonl", f"a={tmp_path}/b*")
    assert f"left out as copies of other files: {tmp_path}/b.jsonl" in stdout
    assert "replaced 1 shard" in stdout
    assert decoded(tmp_path / "out", "a", model) == ["once"]


def test_many_copies_are_counted_and_listed_in_a_file(model, tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.jsonl").write_bytes(json_lines(["once"]))
    stdout, _ = tokenize(model, tmp_path / "out", f"a={tmp_path}/*.jsonl")
    assert f"other files: 4 files, such as {tmp_path}/1.jsonl; {tmp_path}/out/left_out.txt lists them\n" in stdout
    listed = [line.rpartition(": ")[2] for line in (tmp_path / "out/left_out.txt").read_text().splitlines()]
    assert listed == [f"{tmp_path}/{number}.jsonl" for number in range(1, 5)]
    tokenize(model, tmp_path / "out", f"a={tmp_path}/[12].jsonl")
    assert not (tmp_path / "out/left_out.txt").exists()


def test_a_list_that_someone_else_left_stays(model, tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.jsonl").write_bytes(json_lines(["once"]))
    (tmp_path / "out").mkdir()
    (tmp_path / "out/left_out.txt").write_text("mine\n")
    stdout, _ = tokenize(model, tmp_path / "out", f"a={tmp_path}/*.jsonl")
    assert all(f"{tmp_path}/{number}.jsonl" in stdout for number in range(1, 5))  # on the console instead
    assert (tmp_path / "out/left_out.txt").read_text() == "mine\n"


@pytest.mark.parametrize("then", ["moved", "copied", "linked"])
def test_a_file_that_comes_again_in_other_units_counts_once(then, model, tmp_path):
    long = [f"{number} {os.urandom(100_000).hex()}" for number in range(3)]  # larger than what is sampled
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/deep/b.jsonl").write_bytes(json_lines(long))
    (tmp_path / "in/deep/c.jsonl").write_bytes(json_lines(["other"]))
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in/deep/*.jsonl")
    again = tmp_path / "again"
    {"moved": os.rename, "copied": shutil.copytree, "linked": os.symlink}[then](tmp_path / "in", again)
    stdout, _ = tokenize(model, tmp_path / "out", f"a={again}/**/b.jsonl", unit_size="300K")
    assert "replaced 1 shard" in stdout
    assert sorted(decoded(tmp_path / "out", "a", model)) == sorted([*long, "other"])


def test_a_moved_file_beside_a_damaged_one_is_not_listed_twice(model, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/b.jsonl").write_bytes(json_lines([os.urandom(100_000).hex() for _ in range(3)]))
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*.jsonl")
    before = (tmp_path / "out/manifest.json").read_bytes()
    os.rename(tmp_path / "in", tmp_path / "again")
    (tmp_path / "again/c.jsonl.gz").write_bytes(gzip.compress(json_lines(["other"]))[:-9])
    again = f"a={tmp_path}/again/*"
    _, stderr = tokenize(model, tmp_path / "out", again, unit_size="300K", code=1)
    assert "manifest.json is left as it was" in stderr
    assert (tmp_path / "out/manifest.json").read_bytes() == before
    (tmp_path / "d.jsonl").write_bytes(json_lines(["of another source"]))
    later = [(f"{source}={tmp_path}/d.jsonl", {}) for source in "ba"]  # commands that read none of these files
    later.append((again, {"unit_size": "300K", "text_key": "absent"}))  # and one that finishes none
    for source, options in later:
        _, stderr = tokenize(model, tmp_path / "out", source, code=1, **options)
        assert "may have text that newer shards also have; run data_prep/tokenize.py for a again" in stderr
        assert (tmp_path / "out/manifest.json").read_bytes() == before
    (tmp_path / "again/c.jsonl.gz").write_bytes(gzip.compress(json_lines(["other"])))
    tokenize(model, tmp_path / "out", again, unit_size="300K")
    assert len(decoded(tmp_path / "out", "a", model)) == 5 and not (tmp_path / "out/a/.replacing").exists()


def test_a_file_with_another_middle_leaves_the_earlier_shard(model, tmp_path):
    texts = ["x" * 200_000, "first", "y" * 200_000]
    (tmp_path / "b.jsonl").write_bytes(json_lines(texts))
    tokenize(model, tmp_path / "out", f"a={tmp_path}/b.jsonl")
    (tmp_path / "c.jsonl").write_bytes(json_lines([texts[0], "later", texts[2]]))
    tokenize(model, tmp_path / "out", f"a={tmp_path}/c.jsonl")
    assert sorted(text for text in decoded(tmp_path / "out", "a", model) if len(text) < 9) == ["first", "later"]


def test_a_file_that_differs_in_its_middle_only_is_another(model, tmp_path):
    for folder, middle in (("one", "first"), ("two", "later")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_bytes(json_lines(["x" * 200_000, middle, "y" * 200_000]))
    tokenize(model, tmp_path / "out", f"a={tmp_path}/one/*", unit_size="100K")
    before = files(tmp_path / "out")
    _, stderr = tokenize(model, tmp_path / "out", f"a={tmp_path}/two/*", unit_size="100K", code=2)
    assert f"was made of {tmp_path}/one/a.jsonl; {tmp_path}/two/a.jsonl has the same name, size, first" in stderr
    assert "differs in between: give one of the files another name" in stderr and files(tmp_path / "out") == before
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    (tmp_path / "two/a.jsonl").rename(tmp_path / "two/b.jsonl")
    stdout, _ = tokenize(model, tmp_path / "out", f"a={tmp_path}/copy/*", f"a={tmp_path}/two/*", unit_size="100K")
    assert "a: 8 shards from 2 files, 4 of them already complete" in stdout
    shutil.rmtree(tmp_path / "one")  # moved, as it seems
    stdout, _ = tokenize(model, tmp_path / "out", f"a={tmp_path}/copy/*", unit_size="100K")
    assert "a: 4 shards from 1 file, 4 of them already complete" in stdout


def test_shards_of_inputs_that_are_not_named_are_counted(model, tmp_path):
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / f"in/{name}.jsonl").write_bytes(json_lines([f"{name} one", f"{name} two"]))
    stdout, _ = tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*", f"b={tmp_path}/in/a*")
    assert "does not name" not in stdout
    (tmp_path / "in/a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "in/a.jsonl").read_bytes()))
    (tmp_path / "in/a.jsonl").unlink()
    stdout, _ = tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*")
    (line,) = [line for line in stdout.splitlines() if "does not name" in line]
    assert line == "a keeps 1 shard (2 documents) from inputs that this command does not name"


def test_a_new_file_where_a_moved_one_was_is_another_input(model, tmp_path):
    """Whether or not a command has seen the moved file before."""
    for seen in (True, False):
        place = tmp_path / str(seen)
        (place / "in").mkdir(parents=True)
        (place / "in/part.jsonl").write_bytes(json_lines(["first"]))
        tokenize(model, place / "out", f"a={place}/in/*")
        (place / "in").rename(place / "old")
        if seen:
            tokenize(model, place / "out", f"a={place}/old/*")
        (place / "in").mkdir()
        (place / "in/part.jsonl").write_bytes(json_lines(["second, longer"]))
        tokenize(model, place / "out", *(f"a={place}/{name}/*" for name in (["in"] if seen else ["in", "old"])))
        assert sorted(decoded(place / "out", "a", model)) == ["first", "second, longer"]


def test_a_file_that_has_grown_is_the_same_by_another_path(model, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "in")
    (tmp_path / "in/a.jsonl").write_bytes(json_lines(["one"]))
    tokenize(model, tmp_path / "out", f"a={tmp_path}/alias/*")
    (tmp_path / "in/a.jsonl").write_bytes(json_lines(["one", "two"]))
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*")
    assert sorted(decoded(tmp_path / "out", "a", model)) == ["one", "two"]
