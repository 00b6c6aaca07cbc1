"""The command as users run it: from files or standard input to a data directory, its words and its refusals."""

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_prep import report
from data_prep.encoding import Options, Tokenizer
from data_prep.output import check_source_names
from data_prep.report import outlook
from data_prep.tokenize import main
from data_prep.units import plan_units
from data_prep.writing import tokenize_unit
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


def test_what_may_not_be_read_is_not_called_absent_or_wrong(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError(13, "Permission denied")))
    flags = {"--tokenizer": model, "--source": f"a={tmp_path}/*.jsonl", "--output": tmp_path / "out"}
    for name, said in ("--tokenizer", f"{model}: permission denied; make it readable"), ("--source", "readable"):
        assert main([str(text) for pair in flags.items() for text in pair]) == 2
        assert f"{name} " in (message := capsys.readouterr().err) and said in message
        monkeypatch.undo()
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert f"a={tmp_path}/*.jsonl: matches no file; make {tmp_path} readable" in message


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


def test_tokenizing_starts_without_torch():
    """It would take two seconds, in the program and again in every worker."""
    code = "import sys, data_prep.tokenize; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


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


@pytest.mark.parametrize(("text", "altered"), [("a\u2581b", 1), ("a\u2585b", 0)])
def test_the_space_mark_in_a_text_is_counted_and_said(text, altered, model, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines([text, "plain"]))
    for _ in range(2):  # also if the shard is complete already
        stdout, _ = tokenize(model, tmp_path / "out", f"a={tmp_path}/a.jsonl")
        assert ("U+2581 is in 1 document: SentencePiece reserves it" in stdout) == bool(altered)
    (shard,) = shards(tmp_path / "out", "a")
    assert shard.sidecar.get("altered", 0) == altered
    assert sorted(decoded(tmp_path / "out", "a", model)) == sorted([text.replace("\u2581", " "), "plain"])


# --- What it says meanwhile ---


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
    (tmp_path / "1.json.gz").unlink()  # a file that has gone meanwhile counts as it lay there
    (plain,) = [unit for unit in planned if unit.pieces[0].container == "plain"]
    assert "1 of 3 shards are complete and stay, and the others need about" in outlook(planned, {plain: made[plain]})
