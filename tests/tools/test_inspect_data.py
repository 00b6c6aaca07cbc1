"""tools/inspect_data.py as a user runs it: counts by hand, text that comes back, damage that is named."""

import io
import json
import os
import shutil
import struct
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from moh_lm.config import DataConfig
from moh_lm.data.dataset import Dataset
from moh_lm.data.files import json_bytes, read_facts, seal, sha256_of
from moh_lm.data.shards import ShardWriter, write_manifest
from tests.tokenizing import llama_3_vocabulary, tokenize, train_model
from tools import inspect_data

ROOT = Path(__file__).resolve().parents[2]
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box five very old jars of quinces".split()
UNITS = {"books": ["b-0", "b-1"], "wiki": ["w-0"]}
FLAGS = "--seq-length 16 --validation-fraction 0.05 --seed 7".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    random = np.random.default_rng(0)
    text = [" ".join(random.choice(WORDS, 12)) for _ in range(300)]
    return train_model(tmp_path_factory.mktemp("model"), "\n".join(text), 300)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, model):
    """(data directory, {source: texts in the order of its documents})."""
    directory, random, texts = tmp_path_factory.mktemp("data") / "corpus", np.random.default_rng(1), {}
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    for source, units in UNITS.items():
        (directory / source).mkdir(parents=True)
        texts[source] = []
        for unit in units:
            mine = [" ".join(random.choice(WORDS, random.integers(1, 60))) for _ in range(40)]
            with ShardWriter(directory / source / unit, 300) as shard:
                for text in mine:
                    shard.add([*processor.encode(text), processor.eos_id()])
                shard.commit({
                    "text_bytes": sum(map(len, mine)),
                    "dropped": {"broken JSON": 3} if unit == "b-1" else {},
                    "tokenizer": {"sha256": sha256_of(model), "vocab_size": 300, "eos_id": processor.eos_id()},
                    "inputs": [],
                })
            texts[source] += mine
    shutil.copy(model, directory / "tokenizer.model")
    write_manifest(directory)
    return directory, texts


def inspect(*arguments, code=0):
    """(stdout, stderr) of the tool, run in this process."""
    with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(io.StringIO()) as stderr:
        assert inspect_data.main(list(map(str, arguments))) == code
    return stdout.getvalue(), stderr.getvalue()


def inspect_json(*arguments, code=0):
    return json.loads(inspect(*arguments, "--json", code=code)[0])


def test_counts_lengths_and_drops_are_those_of_the_documents(corpus, model):
    directory, texts = corpus
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    lengths = {source: [len(processor.encode(text)) + 1 for text in found] for source, found in texts.items()}
    rows = {row["name"]: row for row in inspect_json(directory)["sources"]}
    for source, counts in lengths.items():
        row = rows[source]
        assert (row["documents"], row["tokens"], row["longest"]) == (len(counts), sum(counts), max(counts))
        assert row["text_bytes"] == sum(len(text) for text in texts[source])
        for start, number in row["lengths"].items():
            assert number == sum(int(start) <= length < 2 * int(start) for length in counts)
        assert sum(row["lengths"].values()) == len(counts)
    assert (rows["books"]["dropped"], rows["wiki"]["dropped"]) == ({"broken JSON": 3}, {})
    table = inspect(directory)[0]
    assert max(map(len, table.splitlines())) <= 100
    assert f"{sum(lengths['books']):,}" in table
    assert f"{sum(map(len, texts['books'])) / sum(lengths['books']):.2f}" in table
    assert "3 broken JSON" in table


def test_planned_epochs_are_those_of_the_run(corpus):
    directory, _ = corpus
    flags = ["--train-tokens", "64K", "--batch-tokens", "256", "--data-mix", "books=1", "wiki=3", *FLAGS]
    plan = inspect_json(directory, *flags)["plan"]
    data = DataConfig(str(directory), (("books", "1"), ("wiki", "3")), 0.05)
    assert plan == Dataset.open(data, seq_length=16, seed=7, vocab_size=300).plan(4000)
    assert f"{plan[1]['epochs']:.3f}" in inspect(directory, *flags)[0]


def test_a_sample_is_the_text_that_the_run_reads(corpus, model):
    directory, texts = corpus
    dataset = Dataset.open(DataConfig(str(directory), (), 0.05), seq_length=16, seed=7, vocab_size=300)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    numbers = [0, 1, 5, 700, 1234]
    report = inspect_json(directory, *FLAGS, "--sample", *numbers)
    for number, sample in zip(numbers, report["samples"], strict=True):
        source, epoch, position = (int(column[0]) for column in dataset.mixture.locate([number]))
        assert (sample["sample"], sample["source"]) == (number, dataset.source_names[source])
        assert (sample["epoch"], sample["position"]) == (epoch, position)
        ids = [token for part in sample["pieces"] for token in part["ids"]]
        assert ids == dataset.sources[source].training.read(position, 17).tolist()
        for part in sample["pieces"]:
            shards = [shard.num_documents for shard in dataset.sources[source].shards]
            before = sum(shards[: UNITS[sample["source"]].index(part["shard"])])
            text = texts[sample["source"]][before + part["document"]]
            assert part["text"].strip() in text
            assert part["ids"][0] != processor.eos_id() or len(part["ids"]) == 1
            assert processor.eos_id() not in part["ids"][:-1]
    shown = inspect(directory, *FLAGS, "--sample", 700)[0]
    assert all(part["text"].strip() in shown for part in report["samples"][3]["pieces"])


def test_little_data_is_sampled_in_shorter_windows(model, tmp_path):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    (tmp_path / "notes").mkdir()
    facts = {"text_bytes": 9, "dropped": {}, "inputs": []}
    facts["tokenizer"] = {"sha256": "a" * 64, "vocab_size": 300, "eos_id": processor.eos_id()}
    for number in range(64):
        with ShardWriter(tmp_path / "notes" / f"n-{number:02d}", 300) as shard:
            shard.add([*processor.encode("the quick brown fox"), processor.eos_id()])
            shard.commit(facts)
    write_manifest(tmp_path)
    total = 64 * (len(processor.encode("the quick brown fox")) + 1)
    output, message = inspect(tmp_path, "--sample", 0, "--tokenizer", model, "--json")
    seq_length = int(message.split("--seq-length ")[1])
    assert "--validation-fraction 0 " in message and seq_length < total <= 2 * seq_length + 1
    (sample,) = json.loads(output)["samples"]
    assert sum(len(part["ids"]) for part in sample["pieces"]) == seq_length + 1
    assert "quick brown fox" in sample["pieces"][1]["text"]
    _, message = inspect(tmp_path, "--sample", 0, "--seq-length", 2048, code=2)
    assert "--validation-fraction" in message or "training tokens" in message
    _, message = inspect(tmp_path, "--sample", 0, "--seq-length", 16)
    assert message.endswith("these are samples with --validation-fraction 0\n")


def test_a_sample_before_a_change_of_data_is_found_by_the_state(corpus, tmp_path):
    directory, _ = corpus
    rounded = (("books", "0.5333337"), ("wiki", "0.66666701"))  # to numbers with a common divisor
    mixes = [(("books", "1"), ("wiki", "1")), rounded]
    first, second = (
        Dataset.open(DataConfig(str(directory), mix, 0.05), seq_length=16, seed=7, vocab_size=300) for mix in mixes
    )
    second = second.continue_from(first.state(), 100)
    state = {"step": 9, "consumed_samples": 300, "data": second.state()}
    (tmp_path / "state.json").write_text(json.dumps(state))
    numbers = [0, 99, 100, 101, 300]
    output, message = inspect(directory, "--state", tmp_path / "state.json", "--sample", *numbers, "--json")
    samples = json.loads(output)["samples"]
    for number, sample in zip(numbers, samples, strict=True):
        dataset = first if number < 100 else second
        source, epoch, position = (int(column[0]) for column in dataset.mixture.locate([number]))
        assert (sample["source"], sample["epoch"]) == (dataset.source_names[source], epoch)
        assert sample["position"] == position
    assert message == (
        "inspect_data: this checkpoint has read 300 samples and not yet sample 300; the run will read another one "
        "there if its data change, such as at its --decay-mix\n"
    )

    changed = tmp_path / "changed"
    shutil.copytree(directory, changed)
    (changed / "books" / "b-1.json").unlink()
    write_manifest(changed)
    _, message = inspect(changed, "--state", tmp_path / "state.json", "--sample", 100, code=2)
    assert "source books had other shards" in message


def test_documents_come_back_as_text(corpus):
    directory, texts = corpus
    documents = inspect_json(directory, "--document", "books:0", "books:41", "wiki:39")["documents"]
    assert [document["text"] for document in documents] == [texts["books"][0], texts["books"][41], texts["wiki"][39]]
    assert texts["books"][0].split()[0] in inspect(directory, "--document", "books:0")[0]


def test_foreign_shards_are_read_from_a_directory_or_by_prefix(corpus, model, tmp_path):
    directory, texts = corpus
    for unit in UNITS["books"]:
        for suffix in ("bin", "idx"):
            shutil.copy(directory / "books" / f"{unit}.{suffix}", tmp_path / f"{unit}.{suffix}")
    (row,) = inspect_json(tmp_path)["sources"]
    assert (row["name"], row["shards"], row["documents"], row["text_bytes"]) == (tmp_path.name, 2, 80, None)
    (row,) = inspect_json(tmp_path / "b-1")["sources"]
    assert (row["shards"], row["documents"]) == (1, 40)
    name = f"{tmp_path.name}:3"
    (document,) = inspect_json(tmp_path / "b-1", "--document", name, "--tokenizer", model)["documents"]
    assert document["text"] == texts["books"][43]
    (document,) = inspect_json(tmp_path / "b-1", "--document", name)["documents"]
    assert document["text"] == " ".join(map(str, document["ids"]))
    assert "2 shards read in full, 2 have no checksums" in inspect(tmp_path, "--verify")[0]


def test_a_document_of_several_sequences_counts_once(tmp_path):
    """As other tools write them: here documents of 5 and 5 tokens, in sequences of 4, 1, 0 and 5."""
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 4, 3) + struct.pack("<4i", 4, 1, 0, 5)
    index += struct.pack("<4q", 0, 16, 20, 20) + struct.pack("<3q", 0, 2, 4)
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes(np.arange(10, dtype="<i4").tobytes())
    (row,) = inspect_json(tmp_path)["sources"]
    assert (row["documents"], row["tokens"], row["longest"], row["lengths"]) == (2, 10, 5, {"4": 2})
    (document,) = inspect_json(tmp_path, "--document", f"{tmp_path.name}:1")["documents"]
    assert (document["ids"], document["first"]) == ([5, 6, 7, 8, 9], 5)


def test_verification_names_every_damaged_file_and_its_block(corpus, tmp_path):
    directory, _ = corpus
    damaged = tmp_path / "damaged"
    shutil.copytree(directory, damaged)
    (damaged / "raw").mkdir()
    (damaged / "raw" / "x.json").write_text("{}")  # a folder of something else
    assert inspect_json(damaged, "--verify") == {"verified": 3, "without_checksums": 0, "problems": []}
    for name, position in (("books/b-0.bin", 101), ("wiki/w-0.idx", 300)):
        data = bytearray((damaged / name).read_bytes())
        data[position] ^= 1
        (damaged / name).write_bytes(data)
    (damaged / "books" / "b-1.bin").unlink()
    manifest = read_facts(damaged / "manifest.json")
    manifest["sources"]["wiki"]["units"]["w-0"]["content"] = "0" * 64
    (damaged / "manifest.json").write_bytes(seal(json_bytes(manifest)))
    shutil.copy(damaged / "wiki" / "w-0.json", damaged / "wiki" / "w-1.json")
    shutil.copytree(damaged / "wiki", damaged / "lost")
    problems = inspect_json(damaged, "--verify", code=1)["problems"]
    expected = ["books/b-0.bin: block 0,", "wiki/w-0.idx: block 0,", "books/b-1.bin", "wiki/w-1.json: is not in"]
    expected += ["wiki/w-0.json: its checksums differ from those in manifest.json", "damaged/lost: is not in manifest"]
    for words in expected:
        assert sum(words in problem for problem in problems) == 1, (words, problems)
    assert len(problems) == len(expected)
    _, message = inspect(damaged, "--verify", code=1)
    assert sorted(message.splitlines()) == sorted(f"inspect_data: {problem}" for problem in problems)


def test_what_is_damaged_does_not_hide_what_is_sound(corpus, tmp_path):
    directory, _ = corpus
    damaged = tmp_path / "damaged"
    shutil.copytree(directory, damaged)
    (damaged / "books" / "b-1.idx").write_bytes(b"")
    report = inspect_json(damaged, code=1)
    assert {row["name"]: row["documents"] for row in report["sources"]} == {"books": 40, "wiki": 40}
    assert len(report["problems"]) == 1
    assert "b-1.idx" in report["problems"][0]


def test_text_in_the_tokens_of_llama_3_is_decoded(tmp_path):
    pytest.importorskip("tiktoken")
    tokens = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" the"]
    llama_3_vocabulary(tmp_path / "llama.model", tokens)
    text = "the text and the 文字"
    (tmp_path / "a.txt").write_text(text)
    tokenize(tmp_path / "llama.model", tmp_path / "data", f"a={tmp_path}/a.txt")
    (document,) = inspect_json(tmp_path / "data", "--document", "a:0")["documents"]
    assert (document["text"], document["ids"][0], document["ids"][-1]) == (text, 257, 128_001)  # the end of text


def test_the_command_runs_anywhere_and_ends_with_its_reader(corpus, tmp_path):
    numbers = " ".join(map(str, range(2000)))  # of output more than a pipe holds
    arguments = f"{corpus[0]} {' '.join(FLAGS)} --json --sample {numbers}"
    command = f"{sys.executable} {ROOT}/tools/inspect_data.py {arguments} | head -n 1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{\n", "")



def test_a_directory_without_a_source_has_no_document(tmp_path, capsys):
    write_manifest(tmp_path)
    assert inspect_data.main([str(tmp_path), "--document", "books:0"]) == 2
    assert "write SOURCE:N, such as NAME:0; sources: none" in capsys.readouterr().err
