"""From text files to shards: every container, every kind of damage, restarts, and the command line."""

import fcntl
import gzip
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
import zstandard

from data_prep.encoding import Options, Tokenizer
from data_prep.sentencepiece_training import sample_sentences
from data_prep.tokenize import main
from data_prep.units import Unit, plan_units
from data_prep.workers import run_units
from moh_lm.data.shards import open_shard, read_manifest

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [
    "The quick brown fox jumps over the lazy dog.\n",
    "  Indented,\n\ttabbed,\r\nand with trailing blanks   \n\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich 1234567890",
    "文字也可以，\N{GRINNING FACE} and \0 nul",
    "a literal </s> and <unk> and <s> and <0x0A>",
    "def f(x):\n    return x + 1  # comment\n" * 20,
    "ﬁ ligature, Ａ fullwidth, é combining é",
]


def run(*arguments, code=0, cwd=ROOT, interpreter=(), script="data_prep/tokenize.py", **options):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, *interpreter, script, *map(str, arguments)]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, **options)
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result


def json_lines(texts):
    return "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)).encode()


def train(pattern, vocab_size, output, code=0):
    assert main(["train", "--input", str(pattern), "--vocab-size", str(vocab_size), "--output", str(output)]) == code
    return output


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model trained by the command itself."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "text.jsonl").write_bytes(json_lines(TEXTS * 3))
    return train(directory / "*.jsonl", 400, directory / "m.model")


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("other")
    (directory / "text.txt").write_text("entirely different words " * 50)
    return train(directory / "*", 280, directory / "m.model")


def tokenize(model, output, *sources, code=0, **options):
    """(stdout, stderr) of the command, run in this process; its workers are processes as always."""
    flags = ["--tokenizer", model, "--output", output]
    flags += [flag for source in sources for flag in ("--source", source)]
    flags += [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value) if text != ""]
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        assert main(list(map(str, flags))) == code
    return stdout.getvalue(), stderr.getvalue()


def shards(output, source):
    units = read_manifest(output)["sources"][source]["units"]
    return [open_shard(output / source / unit, verify=True) for unit in units]


def decoded(output, source, model):
    """The texts of a source, each of which must end with the only end-of-sequence id of its document."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    texts = []
    for shard in shards(output, source):
        for length, pointer in zip(*shard.index()[:2], strict=True):
            ids = shard.read(int(pointer) // shard.dtype.itemsize, int(length)).tolist()
            assert ids.index(processor.eos_id()) == len(ids) - 1
            assert processor.bos_id() not in ids
            texts.append(processor.decode(ids[:-1]))
    return texts


def files(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


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
def test_the_script_does_not_hide_the_standard_module_of_its_name(cwd, interpreter, script, model, tmp_path):
    assert "--tokenizer" in run("--help", cwd=cwd, interpreter=interpreter, script=script).stdout
    (tmp_path / "a.txt").write_text("spawned workers too")
    flags = ("--tokenizer", model, "--source", f"a={tmp_path}/a.txt", "--output", tmp_path / "out", "--workers", 1)
    run(*flags, cwd=cwd, interpreter=interpreter, script=script)
    assert decoded(tmp_path / "out", "a", model) == ["spawned workers too"]


def test_every_mistake_of_usage_is_one_clear_line_and_exit_code_2(model, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty.model").touch()
    (tmp_path / "folder").mkdir()
    good = {"--tokenizer": model, "--source": f"a={tmp_path}/a.txt", "--output": tmp_path / "out"}
    mistakes = [
        ({"--tokenizer": tmp_path / "absent.model"}, "absent.model: no such file"),
        ({"--tokenizer": tmp_path / "a.txt"}, "not a SentencePiece model"),
        ({"--tokenizer": tmp_path / "empty.model"}, "not a SentencePiece model"),
        ({"--source": f"a={tmp_path}/*.jsonl"}, "matches no file"),
        ({"--source": f"a={tmp_path}/folder"}, f"write '{tmp_path}/folder/*'"),
        ({"--source": f"{tmp_path}/a.txt"}, "write NAME=GLOB"),
        ({"--source": f"a/b={tmp_path}/a.txt"}, "begin the name with a letter or digit"),
        ({"--output": tmp_path / "a.txt" / "out"}, "cannot be written"),
        ({"--workers": "0"}, "--workers: 0: must be at least 1"),
        ({"--unit-size": "many"}, "--unit-size: 'many': write a whole number"),
        ({"--unknown": "1"}, "--unknown"),
    ]
    for change, words in mistakes:
        assert main([str(text) for pair in {**good, **change}.items() for text in pair]) == 2
        message = capsys.readouterr().err
        assert words in message
        assert message.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_two_runs_do_not_write_one_directory_at_the_same_time(model, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    directory = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    flags = ["--tokenizer", model, "--source", f"a={tmp_path}/a.txt", "--output", tmp_path]
    assert main([str(flag) for flag in flags]) == 2
    assert "another run is writing" in capsys.readouterr().err
    os.close(directory)


def test_a_tokenizer_without_an_end_of_sequence_piece_is_refused(tmp_path, capsys):
    model = io.BytesIO()
    sentences = iter(["some words for a small model"] * 9)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_writer=model, vocab_size=24, model_type="bpe", eos_id=-1, minloglevel=2
    )
    (tmp_path / "m.model").write_bytes(model.getvalue())
    (tmp_path / "a.txt").write_text("text")
    flags = ["--tokenizer", tmp_path / "m.model", "--source", f"a={tmp_path}/a.txt", "--output", tmp_path / "out"]
    assert main([str(flag) for flag in flags]) == 2
    assert "no end-of-sequence piece" in capsys.readouterr().err


# --- Training ---


def test_training_is_deterministic_and_makes_a_model_like_llamas(model, tmp_path):
    (tmp_path / "text.jsonl").write_bytes(json_lines(TEXTS * 3))
    assert train(tmp_path / "*.jsonl", 400, tmp_path / "m.model").read_bytes() == model.read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert processor.vocab_size() == 400
    assert (processor.unk_id(), processor.bos_id(), processor.eos_id(), processor.pad_id()) == (0, 1, 2, -1)
    assert processor.id_to_piece(3) == "<0x00>"
    pieces = [processor.id_to_piece(number).strip("▁") for number in range(3 + 256, 400)]
    assert {piece for piece in pieces if any(map(str.isdigit, piece))} == set("1234567890") & set("".join(TEXTS))
    for text in [*TEXTS, "never seen: ☃ \N{GREEK SMALL LETTER ALPHA}"]:
        assert processor.decode(processor.encode(text)) == text


def test_a_text_too_small_for_the_vocabulary_is_refused_with_the_largest_size_that_works(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(" ".join(TEXTS))
    train(tmp_path / "text.txt", 5000, tmp_path / "m.model", code=2)
    message = capsys.readouterr().err
    largest = message.split("at most ")[1].split(",")[0]
    assert message.count("\n") == 1
    assert not (tmp_path / "m.model").exists()
    train(tmp_path / "text.txt", largest, tmp_path / "m.model")


def test_a_small_vocabulary_is_not_spent_on_rare_characters(tmp_path):
    words = " ".join(first + last for first in ("ka", "lo", "mi", "nu", "re") for last in ("st", "ver", "ding", "mon"))
    text = f"common words {words} " * 300 + "".join(map(chr, range(0x4E00, 0x4E00 + 500)))
    (tmp_path / "text.txt").write_text(text)
    train(tmp_path / "text.txt", 330, tmp_path / "m.model")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    pieces = [processor.id_to_piece(number) for number in range(259, 330)]
    assert sum(len(piece) > 1 for piece in pieces) > len(pieces) / 2
    assert processor.decode(processor.encode(text)) == text


def test_the_training_sample_spreads_over_all_files_and_all_of_a_large_one(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_bytes(json_lines([f"{name}{number:05d}" for number in range(1000)]))
    units, _ = plan_units("--input ", "", [f"{tmp_path}/*"], text_key="text", unit_size=4096, identity=None)
    sample = [sentence.decode() for sentence in sample_sentences(units, "text", 3000)]
    assert 2400 < sum(map(len, sample)) <= 3000
    for name in "abc":
        numbers = [int(sentence[1:]) for sentence in sample if sentence[0] == name]
        assert len(numbers) > 100
        assert min(numbers) < 50
        assert max(numbers) > 800


# --- Containers ---


def write_containers(directory):
    """The same documents in every container, most under a name that says something else."""
    directory.mkdir()
    lines = json_lines(TEXTS)
    cut = lines.index(b"\n", len(lines) // 2) - 5  # inside a line
    compress = zstandard.ZstdCompressor().compress
    (directory / "plain.jsonl").write_bytes(lines.rstrip(b"\n"))
    (directory / "marked.txt").write_bytes(b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n"))
    (directory / "members.json.gz").write_bytes(gzip.compress(lines[:cut]) + gzip.compress(lines[cut:]) + bytes(20))
    (directory / "gzip.jsonl").write_bytes(gzip.compress(lines))
    (directory / "frames.jsonl.zst").write_bytes(compress(lines[:cut]) + compress(b"") + compress(lines[cut:]))
    (directory / "zstd.gz").write_bytes(compress(lines))
    columns = {"id": list(range(len(TEXTS))), "text": TEXTS}
    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table, directory / "string.parquet", row_group_size=2)
    dictionary = table.set_column(1, "text", table["text"].cast(pyarrow.large_string()).dictionary_encode())
    pyarrow.parquet.write_table(dictionary, directory / "dictionary.jsonl")
    for number, text in enumerate(TEXTS):
        (directory / f"{number}.text").write_bytes(text.encode())
    return 9


def test_every_container_gives_the_same_documents_unaltered(model, tmp_path):
    copies = write_containers(tmp_path / "in")
    tokenize(model, tmp_path / "out", f"all={tmp_path}/in/*")
    assert sorted(decoded(tmp_path / "out", "all", model)) == sorted(TEXTS * copies)


@pytest.mark.parametrize("unit_size", ["300", "1k"])
def test_ranges_of_lines_and_row_groups_hold_every_document_once(model, tmp_path, unit_size):
    texts = [f"{number} " + "words " * (number % 7) for number in range(300)]
    (tmp_path / "in.jsonl").write_bytes(json_lines(texts))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "in.parquet", row_group_size=20)
    tokenize(model, tmp_path / "out", f"lines={tmp_path}/in.jsonl", f"rows={tmp_path}/in.parquet", unit_size=unit_size)
    for source in ("lines", "rows"):
        assert len(shards(tmp_path / "out", source)) > 5
        assert sorted(decoded(tmp_path / "out", source, model)) == sorted(texts)


def test_small_files_are_grouped_and_a_later_file_changes_only_its_group(model, tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02d}.txt").write_text(f"file {number:02d}")
    tokenize(model, tmp_path / "out", f"a={tmp_path}/*.txt", unit_size=1600)  # groups of 100 bytes
    before = set(read_manifest(tmp_path / "out")["sources"]["a"]["units"])
    assert len(before) == 3
    (tmp_path / "99.txt").write_text("file 99")
    stdout, _ = tokenize(model, tmp_path / "out", f"a={tmp_path}/*.txt", unit_size=1600)
    after = set(read_manifest(tmp_path / "out")["sources"]["a"]["units"])
    assert len(before & after) == len(before) - 1
    assert "replaced 1 shards" in stdout
    assert sorted(decoded(tmp_path / "out", "a", model)) == [f"file {number:02d}" for number in [*range(40), 99]]


# --- Damage ---


def test_bad_lines_are_counted_by_reason_and_cost_no_other_document(model, tmp_path):
    lines = [
        b'{"text": "first"}', b"", b'{"text": "second"', b"[1, 2]", b'"a string"', b'{"txt": "no key"}',
        b'{"text": null}', b'{"text": 5}', b'{"text": ["a", "b"]}', b'{"text": ""}', b'{"text": "\\ud800 alone"}',
        b'{"text": "\xff\xfe"}', b"[" * 100_000, b'{"text": "pair \\ud83d\\ude00"}', b'\x00{"text": "nul"}',
        b'  {"text": "last"}  ',
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    stdout, _ = tokenize(model, tmp_path / "out", f"a={tmp_path}/in.jsonl", no_shuffle="")
    (shard,) = shards(tmp_path / "out", "a")
    assert sorted(decoded(tmp_path / "out", "a", model)) == ["first", "last", "pair \N{GRINNING FACE}"]
    expected = {
        "bad UTF-8": 1, "blank line": 1, "broken JSON": 3, "empty text": 1, "lone surrogate": 1, "missing text": 2,
        "not an object": 2, "text is not a string": 2,
    }  # fmt: skip
    assert shard.sidecar["dropped"] == expected
    assert sum(expected.values()) + shard.num_documents == len(lines)
    for reason, count in expected.items():
        assert f"{count} {reason}" in stdout


def test_bad_values_of_a_parquet_column_and_bad_text_files_are_counted(model, tmp_path):
    (tmp_path / "in").mkdir()
    column = pyarrow.array([b"good", None, b"", b"\xff\xfe", b"fine"]).cast(pyarrow.string(), safe=False)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "in" / "x.parquet")
    (tmp_path / "in" / "bad.txt").write_bytes(b"\xff\xfe not UTF-8")
    (tmp_path / "in" / "empty.txt").touch()
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in/*")
    dropped = [shard.sidecar["dropped"] for shard in shards(tmp_path / "out", "a")]
    assert sorted(decoded(tmp_path / "out", "a", model)) == ["fine", "good"]
    expected = [{"bad UTF-8": 1, "empty text": 1}, {"bad UTF-8": 1, "empty text": 1, "missing text": 1}]
    assert sorted(dropped, key=str) == sorted(expected, key=str)


def test_truncated_containers_fail_alone_by_name_and_are_not_published(model, tmp_path):
    lines = json_lines([f"document {number} {os.urandom(30).hex()}" for number in range(2000)])
    (tmp_path / "good.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(lines)[:-20_000])
    (tmp_path / "cut.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines)[:-20_000])
    (tmp_path / "flipped.jsonl.gz").write_bytes(gzip.compress(lines)[:-8] + b"\0\0\0\0" + gzip.compress(lines)[-4:])
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * 100}), tmp_path / "cut.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "cut.parquet").read_bytes()[:-10])
    pyarrow.parquet.write_table(pyarrow.table({"content": ["a"] * 100}), tmp_path / "column.parquet")
    _, stderr = tokenize(model, tmp_path / "out", f"a={tmp_path}/*.*", code=1)
    failed = [line for line in stderr.splitlines() if "failed:" in line]
    for name in ("cut.jsonl.gz", "cut.jsonl.zst", "flipped.jsonl.gz", "cut.parquet", "column.parquet"):
        assert sum(name in line for line in failed) == 1, (name, failed)
    assert len(failed) == 5
    (shard,) = shards(tmp_path / "out", "a")
    assert shard.num_documents == 2000
    assert {path.suffix for path in (tmp_path / "out" / "a").iterdir()} == {".bin", ".idx", ".json"}
    assert len(list((tmp_path / "out" / "a").iterdir())) == 3


def test_a_source_without_any_document_is_a_failure_that_says_why(model, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b'{"content": "x"}\n' * 3)
    stdout, stderr = tokenize(model, tmp_path / "out", f"a={tmp_path}/in.jsonl", code=1)
    assert "3 missing text" in stdout
    assert "--text-key" in stderr
    tokenize(model, tmp_path / "out", f"a={tmp_path}/in.jsonl", text_key="content")
    assert decoded(tmp_path / "out", "a", model) == ["x"] * 3


# --- Determinism, restarts ---


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    texts = [f"{number}: " + TEXTS[number % len(TEXTS)] for number in range(1500)]
    (directory / "a.jsonl").write_bytes(json_lines(texts))
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(texts[:300])))
    (directory / "c.txt").write_text("one document")
    return directory


@pytest.fixture(scope="module")
def reference(corpus, model, tmp_path_factory):
    """The data directory that one worker makes in one run."""
    output = tmp_path_factory.mktemp("reference") / "out"
    tokenize(model, output, f"x={corpus}/a*", f"y={corpus}/[bc].*", workers=1, unit_size="32k")
    return output


def test_any_number_of_workers_writes_the_same_bytes(corpus, model, reference, tmp_path):
    tokenize(model, tmp_path / "out", f"x={corpus}/a*", f"y={corpus}/[bc].*", workers=3, unit_size="32k")
    assert files(tmp_path / "out") == files(reference)


def test_sources_may_be_added_by_a_later_run(corpus, model, reference, tmp_path):
    tokenize(model, tmp_path / "out", f"y={corpus}/[bc].*", unit_size="32k")
    tokenize(model, tmp_path / "out", f"x={corpus}/a*", unit_size="32k")
    assert files(tmp_path / "out") == files(reference)


def test_the_shuffle_changes_the_order_and_nothing_else(corpus, model, reference, tmp_path):
    tokenize(model, tmp_path / "out", f"x={corpus}/a*", unit_size="32k", no_shuffle="")
    in_order, shuffled = decoded(tmp_path / "out", "x", model), decoded(reference, "x", model)
    numbers = [int(text.split(":")[0]) for text in in_order[: shards(tmp_path / "out", "x")[0].num_documents]]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert in_order != shuffled
    assert sorted(in_order) == sorted(shuffled)
    positions = np.array([int(text.split(":")[0]) for text in shuffled[: shards(reference, "x")[0].num_documents]])
    assert abs(np.corrcoef(positions[:-1], positions[1:])[0, 1]) < 0.2


def test_a_killed_run_goes_on_where_it_was_and_ends_with_the_same_bytes(corpus, model, reference, tmp_path):
    output = tmp_path / "out"
    flags = ["--tokenizer", model, "--output", output, "--source", f"x={corpus}/a*", "--source", f"y={corpus}/[bc].*"]
    command = [sys.executable, ROOT / "data_prep/tokenize.py", *flags, "--workers", 2, "--unit-size", "32k"]
    for shards_before in (1, 4):
        process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while len(list(output.glob("*/*.json"))) < shards_before and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished = len(list(output.glob("*/*.json")))
    result = run(*flags, "--workers", 2, "--unit-size", "32k")
    complete = re.findall(r"(\d+) of them complete already", result.stdout)
    assert sum(map(int, complete)) >= finished > 0
    assert files(output) == files(reference)


def test_a_restart_redoes_only_what_is_missing_or_damaged(corpus, model, reference, tmp_path):
    output = tmp_path / "out"
    sources = (f"x={corpus}/a*", f"y={corpus}/[bc].*")
    tokenize(model, output, *sources, unit_size="32k")
    missing, damaged, *rest = sorted((output / "x").glob("*.json"))
    missing.unlink()
    with open(damaged.with_suffix(".bin"), "ab") as file:
        file.write(b"\0\0")
    times = {path: path.stat().st_mtime_ns for path in rest}
    stdout, _ = tokenize(model, output, *sources, unit_size="32k")
    assert f"x: {len(rest) + 2} shards, {len(rest)} of them complete already" in stdout
    assert {path: path.stat().st_mtime_ns for path in rest} == times
    assert files(output) == files(reference)


def test_an_input_that_changed_replaces_its_shard(model, tmp_path):
    text = tmp_path / "in.txt"
    text.write_text("old")
    tokenize(model, tmp_path / "out", f"a={text}")
    text.write_text("new")  # the same size
    os.utime(text, (time.time() + 5, time.time() + 5))
    tokenize(model, tmp_path / "out", f"a={text}")
    assert decoded(tmp_path / "out", "a", model) == ["new"]
    text.write_text("longer than before")
    tokenize(model, tmp_path / "out", f"a={text}")
    assert decoded(tmp_path / "out", "a", model) == ["longer than before"]
    assert len(list((tmp_path / "out" / "a").iterdir())) == 3


def test_a_second_tokenizer_in_one_directory_is_refused_with_both_hashes(model, other_model, tmp_path):
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


def test_a_worker_that_is_killed_fails_its_unit_only(model, tmp_path):
    (tmp_path / "large.jsonl").write_bytes(json_lines(["many words " * 10_000] * 200))
    (tmp_path / "small.jsonl").write_bytes(json_lines(["few words"]))
    patterns = [f"{tmp_path}/large.jsonl", f"{tmp_path}/small.jsonl"]
    units, _ = plan_units("--source a=", "a", patterns, text_key="text", unit_size=2**30, identity=None)
    units = [Unit("a", piece.name, (piece,)) for unit in units for piece in unit.pieces]
    (tmp_path / "out" / "a").mkdir(parents=True)
    outcome = {}
    for unit, event, value in run_units(units, 1, str(model), Options(), str(tmp_path / "out")):
        if event == "progress" and not outcome:
            (worker,) = multiprocessing.active_children()
            worker.kill()
        elif event != "progress":
            outcome[unit.name] = (event, value)
    assert outcome["large.jsonl"] == ("failed", "the worker died (exit code -9)")
    assert outcome["small.jsonl"][0] == "done"


# --- Encoding ---


def test_a_long_text_cut_at_newlines_has_the_tokens_of_the_whole(model):
    tokenizer = Tokenizer(str(model))
    assert tokenizer.chunk
    random = np.random.default_rng(0)
    parts = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "▁", "\0", "</s>", "word", "0", "é", "文", "\N{GRINNING FACE}"]
    texts = ["".join(random.choice(parts, random.integers(1, 60))) for _ in range(300)]
    for text in [*texts, *TEXTS, "\n", "\n" * 50, " \n" * 50, "x" * 500]:
        for tokenizer.chunk in (1, 5, 16):
            assert tokenizer.encode(text).tolist() == [*tokenizer.model.encode(text), 2]


def test_a_model_whose_pieces_or_rules_reach_across_newlines_encodes_whole_texts():
    refusing = [
        {"user_defined_symbols": ["word\n"]},
        {"normalization_rule_name": "nmt_nfkc"},
        {"remove_extra_whitespaces": True},
        {"model_type": "unigram"},
        {"byte_fallback": False},
    ]
    for change in [{}, *refusing]:
        model = io.BytesIO()
        options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
        options |= {"model_type": "bpe", "vocab_size": 400, "hard_vocab_limit": False, "minloglevel": 2, **change}
        lines = iter("".join(TEXTS * 3).split("\n"))
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **options)
        tokenizer = Tokenizer.__new__(Tokenizer)
        tokenizer.model = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        assert tokenizer.newlines_separate() == (not change), change
