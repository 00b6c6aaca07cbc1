"""Damaged inputs: bad records are counted and kept, and a file with too many of them fails alone, by name."""

import gzip
import json
import os
import time

import pyarrow
import pyarrow.parquet
import zstandard

from data_prep import units as units_module
from data_prep import writing
from data_prep.containers import InputError
from data_prep.encoding import Options, Tokenizer
from data_prep.units import plan_units
from data_prep.writing import tokenize_unit
from moh_lm.data.files import beside
from tests.tokenizing import decoded, files, json_lines, shards, tokenize


def test_counts_by_reason_add_up_and_bad_records_are_kept(model, tmp_path):
    lines = [b'{"text": "first"}', b"", b'{"text": "cut', b'{"text": "\xff\xfe"}', b'{"text": ""}', b'{"txt": 1}'] * 15
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    stdout, _ = tokenize(model, tmp_path / "out", f"a={tmp_path}/in.jsonl")
    (shard,) = shards(tmp_path / "out", "a")
    expected = {"bad UTF-8": 15, "blank line": 15, "broken JSON": 15, "empty text": 15, "missing text": 15}
    assert shard.sidecar["dropped"] == expected
    assert shard.num_documents + sum(expected.values()) == len(lines)
    assert "15 bad UTF-8, 15 blank line, 15 broken JSON, 15 empty text, 15 missing text" in stdout
    rejects = [json.loads(line) for line in beside(shard.prefix, ".rejects.jsonl").read_text().splitlines()]
    reasons = {lines[2]: "broken JSON", lines[3]: "bad UTF-8", lines[5]: "missing text"}
    data = (tmp_path / "in.jsonl").read_bytes()
    found = [data[reject["offset"] :].split(b"\n")[0] for reject in rejects]
    assert found == [line for line in lines if line in reasons][:20]
    for reject, line in zip(rejects, found, strict=True):
        assert reject["file"] == str(tmp_path / "in.jsonl")
        assert reject["reason"] == reasons[line]
        assert reject["excerpt"].strip() == line.decode(errors="backslashreplace")


def test_a_sound_input_leaves_no_file_of_rejects(model, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"\n\n" + json_lines(["a", ""]))
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in.jsonl")
    assert not list((tmp_path / "out").rglob("*rejects*"))


def test_rejects_that_were_fixed_in_place_disappear(model, tmp_path):
    path, good = tmp_path / "in.jsonl", json_lines(["x" * 1000] * 100)
    for line, count in ((b'{"text": 1}\n', 1), (b'{"text":""}\n', 0)):  # the same size, and far from both ends
        path.write_bytes(good + line + good)
        os.utime(path, (time.time() + 5 * (1 - count), time.time() + 5 * (1 - count)))
        tokenize(model, tmp_path / "out", f"a={path}")
        assert len(list((tmp_path / "out").rglob("*rejects*"))) == count


def test_damaged_containers_fail_alone_and_are_not_published(model, tmp_path):
    lines = json_lines([f"document {number} {os.urandom(30).hex()}" for number in range(2000)])
    (tmp_path / "in").mkdir()
    (tmp_path / "in/good.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "in/cut.jsonl.gz").write_bytes(gzip.compress(lines)[:-20_000])
    (tmp_path / "in/cut.jsonl.zst").write_bytes(zstandard.compress(lines)[:-20_000])
    (tmp_path / "in/page.json.gz").write_bytes(b"<!DOCTYPE html>\n<html>404</html>\n")
    pyarrow.parquet.write_table(pyarrow.table({"content": ["a"] * 100}), tmp_path / "in/column.parquet")
    _, stderr = tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*.*", code=1)
    failed = [line for line in stderr.splitlines() if "failed:" in line]
    for name in ("cut.jsonl.gz", "cut.jsonl.zst", "page.json.gz", "column.parquet"):
        assert sum(name in line for line in failed) == 1, (name, failed)
    assert len(failed) == 4
    (shard,) = shards(tmp_path / "out", "a")
    assert shard.num_documents == 2000
    assert {path.suffix for path in (tmp_path / "out" / "a").iterdir()} == {".bin", ".idx", ".json"}
    assert len(list((tmp_path / "out" / "a").iterdir())) == 3


def test_a_source_without_a_document_fails_and_says_why(model, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'{"content": "x"}\n' * 3)
    _, stderr = tokenize(model, tmp_path / "out", f"a={tmp_path}/in.jsonl", code=1)
    assert "in.jsonl: holds no document (3 missing text)" in stderr
    assert "--text-key" in stderr
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in.jsonl", text_key="content")
    assert decoded(tmp_path / "out", "a", model) == ["x"] * 3


def test_a_file_of_which_nothing_can_be_read_fails_by_name(model, tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    lost = {
        "noise.bin": (bytes(range(0x80, 0x100)) * 8, "1 bad UTF-8"),
        "latin-1.txt": ("Zwölf Boxkämpfer".encode("latin-1"), "1 bad UTF-8"),
        "key.jsonl": (b'{"content": "x"}\n' * 3, "3 missing text"),
        "cut.jsonl": (b'{"text": "a' * 400, "1 broken JSON"),
    }
    for name, (data, _) in lost.items():
        (tmp_path / "in" / name).write_bytes(data)
    (tmp_path / "in/sound.txt").write_text("sound")
    (tmp_path / "in/empty.txt").touch()
    (tmp_path / "in/blank.jsonl").write_text("\n\n")
    stdout, stderr = tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*", code=1)
    assert f"contain no document: {tmp_path}/in/blank.jsonl, {tmp_path}/in/empty.txt\n" in stdout
    for name, (_, reasons) in lost.items():
        assert f"{tmp_path}/in/{name}: holds no document ({reasons})" in stderr
    assert stderr.count("failed: ") == len(lost)
    assert decoded(tmp_path / "out", "a", model) == ["sound"]
    monkeypatch.setattr(units_module, "MANY", 2)  # in a shard with others too
    _, stderr = tokenize(model, tmp_path / "grouped", f"a={tmp_path}/in/*.txt", code=1)
    assert f"{tmp_path}/in/latin-1.txt: holds no document (1 bad UTF-8)" in stderr
    stdout, _ = tokenize(model, tmp_path / "grouped", f"a={tmp_path}/in/*.txt", max_bad_fraction=0.5)
    assert f"contain no document: {tmp_path}/in/empty.txt\n" in stdout
    assert decoded(tmp_path / "grouped", "a", model) == ["sound"]


def bad_lines(path, good, bad):
    path.write_bytes(json_lines([str(number) for number in range(good)]) + b'{"text": nothing}\n' * bad)
    return path


def test_a_unit_with_too_many_bad_records_fails_and_shows_them(model, tmp_path):
    bad_lines(tmp_path / "worse.jsonl", 89, 11)
    bad_lines(tmp_path / "better.jsonl", 90, 10)
    _, stderr = tokenize(model, tmp_path / "out", f"a={tmp_path}/*.jsonl", max_bad_fraction=0.1, code=1)
    words = "worse.jsonl: 11 of 100 records are bad (11 broken JSON), more than --max-bad-fraction 0.1"
    assert f"{tmp_path}/{words}" in stderr
    (shard,) = shards(tmp_path / "out", "a")
    assert shard.num_documents == 90
    (rejects,) = (tmp_path / "out/a").glob("worse*")
    assert len(rejects.read_text().splitlines()) == 11
    assert str(rejects) in stderr
    tokenize(model, tmp_path / "out", f"a={tmp_path}/*.jsonl", max_bad_fraction=0.11)
    assert sum(shard.num_documents for shard in shards(tmp_path / "out", "a")) == 179
    before = files(tmp_path / "out")
    _, stderr = tokenize(model, tmp_path / "out", f"a={tmp_path}/*.jsonl", max_bad_fraction=0.1, code=1)
    assert "11 of 100 records are bad" in stderr
    assert files(tmp_path / "out") == before


def test_how_many_records_may_be_bad_by_default(model, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "USUAL_NUMBER", 10)
    tokenizer = Tokenizer(str(model))
    (tmp_path / "a").mkdir()

    def outcome(good, bad, limit=None):
        pattern = str(bad_lines(tmp_path / f"{good}-{bad}.jsonl", good, bad))
        (unit,) = plan_units("", "a", [pattern], text_key="text", unit_size=10**9)
        try:
            return tokenize_unit(unit, tokenizer, Options(), str(tmp_path), limit, lambda *_: None)["documents"]
        except InputError as error:
            return str(error).split(": ")[1].split(" (")[0]

    assert outcome(1, 9) == 1
    assert outcome(1, 10) == "10 of 11 records are bad"
    assert outcome(1, 11) == "11 of 12 records are bad"
    assert outcome(99 * 11, 11) == 99 * 11
    assert outcome(99 * 11 - 1, 11) == "11 of 1,099 records are bad"
    assert outcome(1, 11, limit=1.0) == 1
    assert outcome(100, 1, limit=0.0) == "1 of 101 records are bad"


def test_blank_lines_and_empty_texts_are_not_bad(model, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["a", ""]) + b"\n\n")
    tokenize(model, tmp_path / "out", f"a={tmp_path}/a.jsonl", max_bad_fraction=0)
    assert shards(tmp_path / "out", "a")[0].sidecar["dropped"] == {"blank line": 2, "empty text": 1}


def test_bad_lines_of_a_mixed_file_are_measured_against_all_of_its_records(model, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "USUAL_NUMBER", 2)
    records = [
        json.dumps({"text": f"{number}", "meta": {"redpajama_set_name": name}})
        for number, name in enumerate(["RedPajamaC4"] * 400 + ["RedPajamaBook"] * 2)
    ]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/x.jsonl").write_text("\n".join([*records, "{broken", "{broken", "{broken", ""]))
    tokenize(model, tmp_path / "out", recognize=tmp_path / "in")
    assert sorted(decoded(tmp_path / "out", "slimpajama-books", model)) == ["400", "401"]
