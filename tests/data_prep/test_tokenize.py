"""The command as users run it: from files to a data directory, its counts and its refusals."""

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_prep import report, writing
from data_prep import units as units_module
from data_prep.containers import InputError
from data_prep.encoding import Options, Tokenizer
from data_prep.output import check_source_names
from data_prep.report import outlook
from data_prep.tokenize import main
from data_prep.units import plan_units
from data_prep.writing import tokenize_unit
from moh_lm.data.files import beside
from moh_lm.data.shards import read_manifest
from moh_lm.supervise import run_directory
from tests.tokenizing import (
    ROOT,
    TEXTS,
    decoded,
    files,
    json_lines,
    run,
    sentencepiece_model,
    shards,
    tokenize,
    train_model,
)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    return train_model(tmp_path_factory.mktemp("other"), "entirely different words\n" * 50, 280)


# --- The command line ---


SAFE_PATH = pytest.mark.skipif(sys.version_info < (3, 11), reason="-P is new in Python 3.11")


@pytest.mark.parametrize(
    ("cwd", "interpreter", "script"),
    [
        (ROOT, (), "data_prep/tokenize.py"),
        (ROOT / "data_prep", (), "tokenize.py"),
        (ROOT, ("-m",), "data_prep.tokenize"),
        pytest.param(ROOT, ("-P",), "data_prep/tokenize.py", marks=SAFE_PATH),
    ],
)
def test_the_script_hides_no_standard_module(cwd, interpreter, script, model, tmp_path):
    (tmp_path / "a.txt").write_text("spawned workers too")
    flags = ("--tokenizer", model, "--source", f"a={tmp_path}/a.txt", "--output", tmp_path / "out", "--workers", 1)
    run(*flags, cwd=cwd, interpreter=interpreter, script=script)
    assert decoded(tmp_path / "out", "a", model) == ["spawned workers too"]


def test_every_mistake_of_usage_is_one_line_and_exit_code_2(model, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty.model").touch()
    (tmp_path / "folder").mkdir()
    good = {"--tokenizer": model, "--source": f"a={tmp_path}/a.txt", "--output": tmp_path / "out"}
    mistakes = [
        ({"--tokenizer": tmp_path / "empty.model"}, "not a SentencePiece model"),
        ({"--source": f"a={tmp_path}/*.jsonl"}, "matches no file"),
        ({"--source": f"a={tmp_path}/folder"}, f"write '{tmp_path}/folder/*'"),
        ({"--source": f"{tmp_path}/a.txt"}, "write NAME=GLOB"),
        ({"--source": f"a/b={tmp_path}/a.txt"}, "begin the name with a letter or digit"),
        ({"--source": f"Manifest.json={tmp_path}/a.txt"}, "Manifest.json is the name of a file in every"),
        ({"--source": f"left_out.txt={tmp_path}/a.txt"}, "left_out.txt is the name of a file in every"),
        ({"--unit-size": "1e400"}, "--unit-size 1e400: must be below 2^63"),
        ({"--max-bad-fraction": "nan"}, "--max-bad-fraction nan: must be between 0 and 1"),
        ({"--recognize": tmp_path / "absent"}, "is not a directory"),
        ({"--output": tmp_path / "a.txt" / "out"}, "cannot be written"),
    ]
    for change, words in mistakes:
        assert main([str(text) for pair in {**good, **change}.items() for text in pair]) == 2
        message = capsys.readouterr().err
        assert words in message
        assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_sources_that_differ_in_capitals_only_are_refused(model, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    out, (one, other) = tmp_path / "out", (f"{name}={tmp_path}/a.txt" for name in ("Wiki", "wiki"))
    said = "only in capitals, and some disks would keep both in one directory; choose another name"
    assert said in tokenize(model, out, one, other, code=2)[1] and not files(out)
    tokenize(model, out, one)
    before = files(out)
    assert said in tokenize(model, out, other, code=2)[1] and files(out) == before


def test_a_new_source_may_not_have_the_name_of_the_mean_over_sources(model, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    out = tmp_path / "out"
    assert "source mean would have the name under" in tokenize(model, out, f"mean={tmp_path}/a.txt", code=2)[1]
    assert not files(out)
    (out / "mean").mkdir()
    (out / "mean" / "earlier.json").touch()
    check_source_names(out, ["mean", "a"])


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_tokenizer_that_no_export_can_convert_is_used_with_a_warning(kind, tmp_path):
    path = sentencepiece_model(tmp_path / "m.model", TEXTS, 400, model_type=kind)
    (tmp_path / "a.txt").write_text("text")
    stdout, _ = tokenize(path, tmp_path / "out", f"a={tmp_path}/a.txt")
    why = "its model type is char, not bpe or unigram; train one with `python data_prep/tokenize.py train`"
    warning = f"warning: an export can hold no tokenizer.json of this model, because {why}\n"
    assert (warning in stdout) == (kind == "char") and decoded(tmp_path / "out", "a", path) == ["text"]


def test_names_of_files_need_not_be_utf_8(model, tmp_path):
    name = os.fsdecode(b"\xff")
    (tmp_path / name).mkdir()
    (tmp_path / name / "a.txt").write_text("text")
    shutil.copy(model, tmp_path / name / "tokenizer.model")
    tokenize(tmp_path / name, tmp_path / name / "out", f"a={tmp_path}/{name}/a.txt")
    assert decoded(tmp_path / name / "out", "a", model) == ["text"]


def test_two_runs_do_not_write_one_directory_at_the_same_time(model, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(run_directory, "LOCK_SECONDS", 0)
    with run_directory.lock_run_directory(tmp_path):  # a file, since NFS locks a directory on one machine only
        _, stderr = tokenize(model, tmp_path, f"a={tmp_path}/a.txt", code=2)
    assert f"--output {tmp_path}: another run is writing to it (process {os.getpid()} on" in stderr


def test_a_tokenizer_without_an_end_of_sequence_piece_is_refused(tmp_path):
    sentencepiece_model(tmp_path / "m.model", ["some words for a small model"] * 9, 24, byte_fallback=False, eos_id=-1)
    (tmp_path / "a.txt").write_text("text")
    _, stderr = tokenize(tmp_path / "m.model", tmp_path / "out", f"a={tmp_path}/a.txt", code=2)
    assert "no end-of-sequence piece" in stderr


def test_a_second_tokenizer_in_a_directory_is_refused(model, other_model, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    tokenize(model, tmp_path / "out", f"a={tmp_path}/a.txt")
    before = files(tmp_path / "out")
    _, stderr = tokenize(other_model, tmp_path / "out", f"b={tmp_path}/b.txt", code=2)
    for path in (model, other_model):
        assert Tokenizer(str(path)).description["sha256"] in stderr
    assert stderr.count("\n") == 1
    assert files(tmp_path / "out") == before
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == model.read_bytes()


# --- From files to shards ---


def test_every_kind_of_input_gives_the_same_documents_unaltered(model, tmp_path):
    (tmp_path / "in").mkdir()
    lines = json_lines(TEXTS)
    (tmp_path / "in/a.jsonl").write_bytes(lines.rstrip(b"\n"))
    (tmp_path / "in/b.json.gz").write_bytes(gzip.compress(lines[:700]) + gzip.compress(lines[700:]))
    (tmp_path / "in/c.jsonl.zst").write_bytes(zstandard.compress(lines[:700]) + zstandard.compress(lines[700:]))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "in/d.parquet", row_group_size=2)
    for number, text in enumerate(TEXTS):
        (tmp_path / f"in/{number}.text").write_bytes(text.encode())
    tokenize(model, tmp_path / "out", f"all={tmp_path}/in/*", unit_size=500)
    assert sorted(decoded(tmp_path / "out", "all", model)) == sorted(TEXTS * 5)


def test_standard_input_is_divided_and_known_when_it_comes_again(model, tmp_path):
    texts = [f"{number} {TEXTS[number % len(TEXTS)]}" for number in range(100)]
    flags = ("--tokenizer", model, "--source", "a=-", "--output", tmp_path / "out", "--unit-size", 2000, "--workers", 1)
    run(*flags, input=json_lines(texts))
    assert sorted(decoded(tmp_path / "out", "a", model)) == sorted(texts)
    made_of = [made_of["path"] for shard in shards(tmp_path / "out", "a") for made_of in shard.sidecar["inputs"]]
    assert len(made_of) > 3
    assert set(made_of) == {f"standard input, SHA-256 {hashlib.sha256(json_lines(texts)).hexdigest()}"}
    assert not list((tmp_path / "out/a").glob("stdin.tmp*"))
    before = files(tmp_path / "out")
    again = run(*flags, input=json_lines(texts)).stdout.decode()
    complete = re.search(r"a: (\d+) shards from 1 file, (\d+) of them already complete", again)
    assert complete[1] == complete[2]
    assert files(tmp_path / "out") == before


def test_other_standard_input_is_not_added_to_a_source(model, tmp_path):
    output = tmp_path / "out"
    flags = ("--tokenizer", model, "--source", "a=-", "--output", output, "--workers", 1)
    first, second = (["x" * 70_000, word, "y" * 70_000] for word in ("left", "lost"))  # of one size, with the same ends
    run(*flags, input=json_lines(first))
    before = files(output)
    said = run(*flags, input=json_lines(second), code=2).stderr.decode()
    assert f"remove {output}/a/stdin-*.json to replace that text, or give another source name" in said
    assert files(output) == before
    for sidecar in (output / "a").glob("stdin-*.json"):
        sidecar.unlink()
    run(*flags, input=json_lines(second))
    assert sorted(decoded(output, "a", model)) == sorted(second)


def test_damaged_standard_input_fails_and_other_sources_go_on(model, tmp_path):
    (tmp_path / "b.txt").write_text("sound")
    flags = ("--tokenizer", model, "--output", tmp_path / "out", "--source", "a=-", "--source", f"b={tmp_path}/b.txt")
    packed = gzip.compress(json_lines([str(number) for number in range(1000)]))
    for data, words in ((b"", b"standard input is empty"), (packed[:-9], b"standard input: the file is cut off")):
        assert words in run(*flags, input=data, code=1).stderr
        assert decoded(tmp_path / "out", "b", model) == ["sound"]
        assert list(read_manifest(tmp_path / "out")["sources"]) == ["b"]
    flags = ("--tokenizer", model, "--output", tmp_path / "out", "--source", "a=-", "--source", "b=-")
    assert b"can be read only once" in run(*flags, input=b"", code=2).stderr
    closed = run(*flags[:-2], code=1, stdin=None, preexec_fn=lambda: os.close(0))
    assert b"standard input is empty" in closed.stderr


# --- Damage ---


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


def test_something_is_said_while_nothing_happens(model, tmp_path, monkeypatch, capfd):
    """One long document is encoded, of which no progress is reported."""
    monkeypatch.setattr(report, "QUIET", 0.05)
    monkeypatch.setattr("data_prep.workers.QUIET", 0.05)
    (tmp_path / "a.jsonl").write_bytes(json_lines(["many words " * 100_000]))
    _, stderr = tokenize(model, tmp_path / "out", f"a={tmp_path}/a.jsonl")
    assert stderr.count("tokenizing:   0%") > 2
    with report.told("training"):
        time.sleep(0.3)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "training, 0 s so far" and 3 <= len(lines) < 7


@pytest.mark.parametrize(("text", "altered"), [("a\u2581b", 1), ("a\u2585b", 0)])
def test_the_space_mark_in_a_text_is_counted_and_said(text, altered, model, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines([text, "plain"]))
    for _ in range(2):  # also if the shard is complete already
        stdout, _ = tokenize(model, tmp_path / "out", f"a={tmp_path}/a.jsonl")
        assert ("U+2581 is in 1 document: SentencePiece reserves it" in stdout) == bool(altered)
    (shard,) = shards(tmp_path / "out", "a")
    assert shard.sidecar.get("altered", 0) == altered
    assert sorted(decoded(tmp_path / "out", "a", model)) == sorted([text.replace("\u2581", " "), "plain"])


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


def test_the_room_that_is_missing_counts_unpacked_bytes(model, tmp_path):
    texts = [f"{number} {' '.join(TEXTS)}" for number in range(400)]
    (tmp_path / "a").mkdir()
    pack = {".jsonl": bytes, ".json.gz": gzip.compress, ".jsonl.zst": zstandard.compress}
    for number, (suffix, packed) in enumerate(pack.items()):
        (tmp_path / f"{number}{suffix}").write_bytes(packed(json_lines(texts)))
    planned = plan_units("", "a", [f"{tmp_path}/[0-9]*"], text_key="text", unit_size=10**9)
    tokenizer = Tokenizer(str(model))
    made = {unit: tokenize_unit(unit, tokenizer, Options(), str(tmp_path), None, lambda *_: None) for unit in planned}
    for one in planned:
        needed = sum(made[unit][kind]["bytes"] for unit in planned if unit is not one for kind in ("bin", "idx")) / 1e6
        told = float(re.search(r"about ([0-9.]+) MB", outlook(planned, {one: made[one]}))[1])
        assert needed > 0.5 and abs(told - needed) < 0.1 * needed


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


def test_tokenizing_starts_without_torch():
    """It would take two seconds, in the program and again in every worker."""
    code = "import sys, data_prep.tokenize; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
