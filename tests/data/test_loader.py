"""From shards to micro-batches: what is held out, and who gets which sample."""

import hashlib
import json
import os
import shutil
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch

from moh_lm.data.shards import ShardError, open_shard
from tests.data.directories import SEQ_LENGTH, VOCAB, loader, make_directory, open_dataset, problems_of

SOURCES = {"books": [[400, 300, 350], [900]], "code": [[3] * 200, [20] * 40, [1]], "wiki": [[11] * 300]}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return make_directory(tmp_path_factory.mktemp("data") / "corpus", SOURCES)


def windows(batches):
    """The S + 1 tokens of every sequence that counts."""
    rows = []
    for batch in batches:
        for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
            if (labels != -100).all():
                rows.append((*tokens.tolist(), int(labels[-1])))
    return rows


def cut_of(shard, fraction):
    with shard.document_starts() as starts:
        return starts.cut(fraction)


def test_micro_batches_have_shifted_labels_and_their_source(data_dir):
    dataset = open_dataset(data_dir)
    batches = loader(dataset).train_step(0)
    assert len(batches) == 12
    ranges = {}  # of the tokens of each source, which are numbered through
    first = 0
    for name, shards in SOURCES.items():
        ranges[name] = range(first, first + sum(map(sum, shards)))
        first = ranges[name].stop
    for number, (tokens, labels, sources, positions, samples) in enumerate(batches):
        assert positions is None
        assert samples.tolist() == [2 * number, 2 * number + 1]
        assert (tokens.shape, labels.shape, sources.shape) == ((2, SEQ_LENGTH), (2, SEQ_LENGTH), (2,))
        assert tokens.dtype == labels.dtype == sources.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], labels[:, :-1])
        for row, label, source in zip(tokens.tolist(), labels.tolist(), sources.tolist(), strict=True):
            assert {*row, *label} <= set(ranges[dataset.source_names[source]])


def test_training_and_validation_share_no_token(data_dir):
    dataset = open_dataset(data_dir)
    samples = 24 * 90  # several epochs of every source, so several phases
    training = [windows(loader(dataset).train_step(24 * step)) for step in range(90)]
    validation = [windows(loader(dataset).validation(name, 10**6)) for name in dataset.source_names]
    trained, held_out = ({token for rows in parts for row in rows for token in row} for parts in (training, validation))
    assert min(row["epochs"] for row in dataset.plan(samples)) > 2
    assert not trained & held_out
    total = sum(sum(map(sum, shards)) for shards in SOURCES.values())
    assert len(trained) + len(held_out) > total - 3 * 2 * SEQ_LENGTH


def test_a_window_may_cross_shards_but_follows_the_stream(data_dir):
    dataset = open_dataset(data_dir)
    for source in dataset.sources:
        streams = {"training": [], "validation": []}
        for shard in source.shards:
            tokens = shard.read(0, shard.num_tokens).tolist()
            cut = cut_of(shard, 0.1)
            streams["training"] += tokens[:cut]
            streams["validation"] += tokens[cut:]
        for name, tokens in streams.items():
            stream = getattr(source, name)
            assert stream.num_tokens == len(tokens)
            for position in range(len(tokens) - SEQ_LENGTH):
                assert stream.read(position, SEQ_LENGTH + 1).tolist() == tokens[position : position + SEQ_LENGTH + 1]


@pytest.mark.parametrize(
    ("lengths", "fraction", "expected"),
    [
        ([100] * 10, 0.15, 800),  # 850 lies in the document that starts at 800
        ([100] * 10, 0.1, 900),  # a document starts there
        ([500, 500], 0.1, 900),  # the document at 500 would hold out five times too much
        ([500, 400, 100], 0.06, 900),
        ([500, 400, 100], 0.04, 960),
        ([1000], 0.1, 900),
        ([10, 10], 0.04, 20),  # less than one token
        ([10, 10], 0.0, 20),
    ],
)
def test_the_cut_is_a_document_boundary_where_one_is_near(tmp_path, lengths, fraction, expected):
    make_directory(tmp_path, {"a": [lengths]})
    assert cut_of(open_shard(tmp_path / "a" / "unit-0"), fraction) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_and_micro_batches_tile_the_global_batch_in_order(data_dir, size):
    dataset = open_dataset(data_dir)
    source, _, first = dataset.mixture.locate(np.arange(24 * 5, 24 * 6))
    streams = [dataset.sources[s].training for s in source]
    expected = [tuple(stream.read(t, SEQ_LENGTH + 1).tolist()) for stream, t in zip(streams, first, strict=True)]
    parts = [windows(loader(dataset, rank, size).train_step(24 * 5)) for rank in range(size)]
    assert sum(parts, []) == expected
    assert windows(loader(dataset, micro_batch_size=6).train_step(24 * 5)) == expected


@pytest.mark.parametrize("num_samples", [0, 1, 5, 13, 10**6])
def test_validation_windows_do_not_depend_on_the_ranks(data_dir, num_samples):
    dataset = open_dataset(data_dir)
    for name in dataset.source_names:
        reference = windows(loader(dataset, micro_batch_size=1).validation(name, num_samples))
        available = dataset.sources[dataset.source_names.index(name)].validation_windows
        assert len(set(reference)) == len(reference) == min(num_samples, available)
        for size in (2, 3):
            parts = [loader(dataset, rank, size).validation(name, num_samples) for rank in range(size)]
            assert len({len(part) for part in parts}) == 1
            assert {batch.tokens.shape for part in parts for batch in part} <= {(2, SEQ_LENGTH)}
            assert sorted(row for part in parts for row in windows(part)) == sorted(reference)


def test_fewer_validation_windows_are_the_first_of_more(data_dir):
    dataset = open_dataset(data_dir)
    more = windows(loader(dataset, micro_batch_size=1).validation("wiki", 10**6))
    assert windows(loader(dataset, micro_batch_size=1).validation("wiki", 7)) == more[:7]
    for one, other in pairwise(sorted(more)):
        assert one[-1] <= other[0]  # the last label may be the next window's first token


def test_validation_windows_do_not_depend_on_seed_or_mix(data_dir):
    reference = windows(loader(open_dataset(data_dir)).validation("wiki", 9))
    assert windows(loader(open_dataset(data_dir, [("wiki", "1")], seed=2)).validation("wiki", 9)) == reference


def test_without_validation_all_tokens_are_for_training(data_dir):
    dataset = open_dataset(data_dir, fraction=0.0)
    assert [row["validation_windows"] for row in dataset.plan(10)] == [0, 0, 0]
    assert loader(dataset).validation("wiki", 10) == []
    assert sum(source.training.num_tokens for source in dataset.sources) == 1950 + 1401 + 3300


def test_the_plan_counts_samples_and_epochs(data_dir):
    dataset = open_dataset(data_dir, [("wiki", "1"), ("books", "3")], fraction=0.1)
    books, wiki = dataset.plan(1000)
    assert (books["name"], books["weight"], books["share"], books["samples"]) == ("books", "3", 0.75, 750)
    assert (wiki["tokens"], wiki["documents"], wiki["samples"]) == (3300, 300, 250)
    training = dataset.sources[1].training.num_tokens
    assert wiki["windows"] == training // SEQ_LENGTH - 1
    assert wiki["epochs"] == 250 / wiki["windows"]
    assert wiki["validation_windows"] == (3300 - training - 1) // SEQ_LENGTH
    assert dataset.notes == ["not in --data-mix: code"]


def test_without_a_mix_shares_follow_the_training_tokens(data_dir):
    rows = open_dataset(data_dir, fraction=0.0).plan(0)
    assert [row["share"] for row in rows] == [1950 / 6651, 1401 / 6651, 3300 / 6651]


def test_the_fingerprint_changes_exactly_with_the_samples(data_dir, tmp_path):
    mix = [("wiki", "1"), ("books", "3")]
    reference = open_dataset(data_dir, mix).fingerprint()
    assert open_dataset(data_dir, [("books", "0.75"), ("wiki", "0.25")]).fingerprint() == reference
    assert open_dataset(data_dir, mix, vocab_size=VOCAB * 2).fingerprint() == reference
    moved = make_directory(tmp_path / "same", {**SOURCES, "another": [[50]]})
    assert open_dataset(moved, mix).fingerprint() == reference
    changed = make_directory(tmp_path / "changed", {**SOURCES, "wiki": [[11] * 299 + [10, 1]]})
    others = [
        open_dataset(data_dir, mix, seed=2),
        open_dataset(data_dir, mix, seq_length=9),
        open_dataset(data_dir, mix, fraction=0.2),
        open_dataset(data_dir, [("wiki", "1"), ("books", "4")]),
        open_dataset(data_dir, [("wiki", "1"), ("code", "3")]),
        open_dataset(changed, mix),
    ]
    assert all(dataset.fingerprint() != reference for dataset in others)


def test_opening_reads_neither_tokens_nor_indexes_nor_sidecars(data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path / "copy")
    for path in (tmp_path / "copy").glob("*/*"):
        size = path.stat().st_size
        path.write_bytes(b"")
        os.truncate(path, size)  # a hole of the same size
    one, other = (open_dataset(directory, fraction=0.05) for directory in (data_dir, tmp_path / "copy"))
    assert one.fingerprint() == other.fingerprint()
    assert one.plan(1000) == other.plan(1000)


def test_the_tokenizer_of_the_directory_is_found(tmp_path):
    make_directory(tmp_path, {"a": [[100]]})
    assert open_dataset(tmp_path).tokenizer_path is None
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.touch()
    (problem,) = problems_of(tmp_path)
    assert "tokenizer.model: is not the tokenizer of the shards" in problem and problem.endswith("restore it")
    make_directory(tmp_path / "own", {"a": [[100]]}, sha256=hashlib.sha256().hexdigest())
    tokenizer.rename(tmp_path / "own" / "tokenizer.model")
    assert open_dataset(tmp_path / "own").tokenizer_path == tmp_path / "own" / "tokenizer.model"


def test_a_hugging_face_tokenizer_ends_documents_as_the_shards(tmp_path):
    pieces = json.dumps({"model": {"vocab": {"a": 0, "</s>": 2, "<x>": 3}}, "added_tokens": []}).encode()
    make_directory(tmp_path, {"a": [[100]]}, sha256=hashlib.sha256(pieces).hexdigest())
    (tmp_path / "tokenizer.json").write_bytes(pieces)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert open_dataset(tmp_path).tokenizer_path == tmp_path / "tokenizer.json"
    config.write_text(json.dumps({"eos_token": "<x>"}))
    (problem,) = problems_of(tmp_path)
    assert "documents end with id 2, and not with '<x>', id 3; restore it" in problem
    config.write_text("{}")
    (problem,) = problems_of(tmp_path)
    assert problem.endswith("documents end with id 2, and its eos_token is no piece; restore it")
    config.unlink()
    (problem,) = problems_of(tmp_path)
    assert "tokenizer_config.json: is not that of the tokenizer beside it" in problem
    (tmp_path / "tokenizer.json").write_text("{}")
    (problem,) = problems_of(tmp_path)
    assert "tokenizer.json: is not the tokenizer of the shards" in problem


def equal(one, other):
    """Whether two lists of micro-batches are the same to the last element."""
    pairs = list(zip(one, other, strict=True))
    return all(torch.equal(a, b) for x, y in pairs for a, b in zip(x[:3], y[:3], strict=True))


def test_steps_read_ahead_are_those_read_one_by_one(data_dir):
    dataset = open_dataset(data_dir)
    reading = loader(dataset)
    for step in [0, 1, 2, 3, 7, 8, 8, 2, 3, 4, 100]:
        assert equal(reading.train_step(24 * step), loader(dataset).read_step(24 * step))
        if step % 2:
            assert equal(reading.validation("wiki", 9), loader(dataset).validation("wiki", 9))
    reading.close()


def test_at_most_two_steps_are_read_ahead_and_none_after_close(data_dir):
    others = set(threading.enumerate())
    reading = loader(open_dataset(data_dir))
    asked = []
    read_step = reading.read_step
    reading.read_step = lambda consumed: asked.append(consumed) or read_step(consumed)
    reading.train_step(0)
    reading.reader.submit(int).result()  # what was submitted before is done
    assert asked == [0, 24, 48]
    reading.train_step(24)
    reading.reader.submit(int).result()
    assert asked == [0, 24, 48, 72]
    (own,) = set(threading.enumerate()) - others
    reading.close()
    assert not own.is_alive()
    assert len(reading.validation("wiki", 2)) == 1


def test_an_error_of_the_reading_thread_is_raised_by_its_step(tmp_path):
    make_directory(tmp_path, {"a": [[4000]]})
    dataset = open_dataset(tmp_path, seq_length=8)
    reading = loader(dataset)
    path = tmp_path / "a" / "unit-0.bin"
    whole = path.read_bytes()
    first, last = (reading.train_step(24 * step) for step in (0, 1))
    reading.forget()
    path.write_bytes(bytes(len(whole)))
    for _ in range(2):
        with pytest.raises(ShardError, match=r"unit-0\.bin: block 0, from byte 0 on, is damaged"):
            reading.train_step(24)
    path.write_bytes(whole)
    reading.forget()
    assert equal(reading.train_step(24), last)
    assert equal(reading.train_step(0), first)
    reading.close()


def boundaries(row, starts):
    """Indices of a window's tokens at which a document begins, or the text jumps; tokens are numbered through."""
    return [i for i in range(1, len(row)) if row[i] in starts or row[i] != row[i - 1] + 1]


@pytest.mark.parametrize("fraction", [0.0, 0.1])
def test_with_resets_nothing_is_predicted_across_documents(data_dir, fraction):
    lengths = [length for shards in SOURCES.values() for documents in shards for length in documents]
    starts = set(np.cumsum([0, *lengths]).tolist())
    dataset = open_dataset(data_dir, fraction=fraction, seq_length=20)
    batches, expected = [], []
    for reading, found in ((loader(dataset), expected), (loader(dataset, reset_at_documents=True), batches)):
        for step in range(60):
            found += reading.read_step(24 * step)
        for name in SOURCES:
            found += reading.validation(name, 10**6)
    joins = 0
    for with_resets, plain in zip(batches, expected, strict=True):
        assert torch.equal(with_resets.tokens, plain.tokens)
        assert with_resets.positions.dtype == torch.int64
        columns = (plain.tokens, plain.labels, with_resets.labels, with_resets.positions)
        for row, labels, new, positions in zip(*(column.tolist() for column in columns), strict=True):
            if -100 in labels:  # a sequence that only fills the batch
                assert new == labels
                continue
            window = [*row, labels[-1]]
            found = boundaries(window, starts)
            joins += sum(window[i] != window[i - 1] + 1 for i in found)
            assert new == [-100 if i + 1 in found else label for i, label in enumerate(labels)]
            assert positions == [i - max([0, *(b for b in found if b <= i)]) for i in range(len(row))]
    assert joins or not fraction


@pytest.mark.parametrize("reset_at_documents", [False, True])
def test_a_gpu_is_given_pinned_memory_with_the_same_content(reset_at_documents, data_dir, monkeypatch):
    pinned = []

    def pin_memory(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    dataset = open_dataset(data_dir)
    for read in (lambda it: it.train_step(24), lambda it: it.validation("wiki", 3)):
        plain, fast = (loader(dataset, reset_at_documents=reset_at_documents, pin_memory=pin) for pin in (False, True))
        pinned.clear()
        expected, got = read(plain), read(fast)
        memory = {tensor.untyped_storage().data_ptr() for tensor in pinned}
        for batch, other in zip(got, expected, strict=True):
            for tensor, same in zip(batch, other, strict=True):
                assert tensor is same is None or tensor.equal(same)
                assert tensor is None or tensor.untyped_storage().data_ptr() in memory
        plain.close(), fast.close()
