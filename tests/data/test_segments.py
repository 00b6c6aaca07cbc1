"""Runs that stop, go on with other ranks, or with other data: which windows they read."""

import json
import shutil
from collections import Counter

import numpy as np
import pytest

from moh_lm.config import ConfigError, DataConfig
from moh_lm.data.dataset import Dataset
from moh_lm.data.loader import Loader
from moh_lm.data.shards import write_manifest
from tests.data import directories
from tests.data.directories import SEQ_LENGTH, VOCAB, counting, make_directory, write

LENGTHS = {"a": [[60, 45], [100]], "b": [[30] * 12], "c": [[150], [20, 20, 60]]}


def write_shard(prefix, lengths, first_token):
    write(prefix, counting(lengths, first_token), VOCAB)


@pytest.fixture
def directory(tmp_path):
    return make_directory(tmp_path, LENGTHS)


def open_dataset(directory, mix, fraction=0.0, **options):
    return directories.open_dataset(directory, [tuple(text.split("=")) for text in mix.split()], fraction, **options)


def saved(dataset):
    """The state of a dataset after a checkpoint on the disk."""
    return json.loads(json.dumps(dataset.state()))


def test_a_checkpoint_keeps_the_bos_of_its_data(directory, tmp_path):
    with_bos = make_directory(tmp_path / "bos", LENGTHS, bos_id=1)
    for path, kept in ((directory, {}), (with_bos, {"bos_id": 1})):
        dataset = open_dataset(path, "a=1 b=1")
        for state in (saved(dataset), saved(dataset.continue_from(saved(dataset), 5))):
            assert {key: state[key] for key in state.keys() - {"segments", "units"}} == kept


def windows(dataset, first, end):
    """(source, epoch, first token) of samples ``first`` to ``end`` - 1."""
    source, epoch, position = dataset.mixture.locate(np.arange(first, end))
    names = [dataset.source_names[s] for s in source]
    return list(zip(names, epoch.tolist(), position.tolist(), strict=True))


def of_source(name, found):
    return [(epoch, position) for source, epoch, position in found if source == name]


@pytest.mark.parametrize("trial", range(10))
def test_every_window_is_read_once_per_epoch(directory, trial):
    """Ten random stops; after each the run goes on with other numbers of ranks and of sequences per micro-batch."""
    random = np.random.default_rng(trial)
    reference = open_dataset(directory, "a=1 b=2.5 c=0.75", seed=trial)
    whole = Loader(reference, global_batch_size=16, micro_batch_size=16, data_parallel_rank=0, data_parallel_size=1)
    state, consumed, rows = saved(reference), 0, []
    for _ in range(10):
        dataset = open_dataset(directory, "a=1 b=2.5 c=0.75", seed=trial).continue_from(state, consumed)
        ranks, accumulation = random.choice([1, 2, 4], 2)
        loaders = [
            Loader(
                dataset,
                global_batch_size=16,
                micro_batch_size=int(16 // ranks // accumulation),
                data_parallel_rank=rank,
                data_parallel_size=int(ranks),
            )
            for rank in range(ranks)
        ]
        for _ in range(random.integers(1, 6)):
            batches = [batch for loader in loaders for batch in loader.train_step(consumed)]
            assert len(batches) == ranks * accumulation
            (expected,) = whole.read_step(consumed)
            assert np.concatenate([batch.tokens for batch in batches]).tolist() == expected.tokens.tolist()
            rows += [tuple(row) for batch in batches for row in batch.tokens.tolist()]
            consumed += 16
        for loader in loaders:
            loader.close()
        state = saved(dataset)
    assert len(state["segments"]) == 1
    epochs = []
    for name, number in zip(reference.source_names, reference.mixture.windows.tolist(), strict=True):
        located = zip(windows(reference, 0, consumed), rows, strict=True)
        mine = [(epoch, row) for (source, epoch, _), row in located if source == name]
        assert len(set(mine)) == len(mine)
        read = Counter(epoch for epoch, _ in mine)
        epochs.append(max(read))
        assert all(read[epoch] == number for epoch in range(max(read)))
    assert max(epochs) > 1


def test_the_same_data_have_one_segment_and_the_same_samples(directory):
    dataset = open_dataset(directory, "a=1 b=3")
    state = saved(dataset)
    again = open_dataset(directory, "b=0.75 a=0.25")
    assert again.changes(state) == []
    later = again.continue_from(state, 40)
    assert later.state() == dataset.state()
    assert windows(later, 0, 100) == windows(dataset, 0, 100)


def test_with_other_weights_every_source_resumes_at_its_window(directory):
    first = open_dataset(directory, "a=1 b=3")
    second = open_dataset(directory, "a=5 b=2 c=1").continue_from(saved(first), 70)
    third = open_dataset(directory, "a=1 c=1").continue_from(saved(second), 95)
    fourth = open_dataset(directory, "a=1 b=1 c=1").continue_from(saved(third), 130)
    found = windows(first, 0, 70) + windows(second, 70, 95) + windows(third, 95, 130) + windows(fourth, 130, 300)
    for name in "abc":
        mine = of_source(name, found)
        alone = of_source(name, windows(open_dataset(directory, f"{name}=1"), 0, len(mine)))
        assert mine == alone
    assert [segment["first_sample"] for segment in fourth.state()["segments"]] == [0, 70, 95, 130]
    shares = Counter(source for source, _, _ in windows(third, 95, 130))
    assert abs(shares["a"] - shares["c"]) <= 1


def test_sample_n_is_a_pure_function_of_n_and_the_segments(directory):
    first = open_dataset(directory, "a=1 b=3")
    second = open_dataset(directory, "a=5 b=2 c=1").continue_from(saved(first), 70)
    for consumed in (71, 100, 200):
        resumed = open_dataset(directory, "a=5 b=2 c=1").continue_from(saved(second), consumed)
        assert resumed.state() == second.state()
        assert windows(resumed, 70, 250) == windows(second, 70, 250)
    with pytest.raises(ValueError, match="sample 69 is before the first, 70"):
        windows(second, 69, 80)


def test_a_source_with_another_shard_restarts_alone(directory):
    first = open_dataset(directory, "a=1 b=1")
    write_shard(directory / "a" / "unit-9", [90], 900)
    write_manifest(directory)
    second = open_dataset(directory, "a=1 b=1").continue_from(saved(first), 41)
    found = windows(second, 41, 141)
    assert of_source("a", found) == of_source("a", windows(open_dataset(directory, "a=1"), 0, 50))
    counts = Counter(source for source, _, _ in windows(first, 0, 41))
    alone = of_source("b", windows(open_dataset(directory, "b=1"), 0, 100))
    assert of_source("b", found) == alone[counts["b"] :][:50]


def test_a_source_that_is_changed_back_goes_on_where_it_was(directory):
    first = open_dataset(directory, "a=1 b=1")
    shutil.copytree(directory, directory / ".before")
    write_shard(directory / "a" / "unit-9", [90], 900)
    write_manifest(directory)
    second = open_dataset(directory, "a=1 b=1").continue_from(saved(first), 40)
    third = open_dataset(directory / ".before", "a=1 b=1").continue_from(saved(second), 60)
    mine = of_source("a", windows(first, 0, 40)) + of_source("a", windows(third, 60, 160))
    assert mine == of_source("a", windows(open_dataset(directory / ".before", "a=1"), 0, len(mine)))


@pytest.mark.parametrize("changed", [{"seed": 2}, {"seq_length": 9}, {"fraction": 0.2}])
def test_with_another_order_of_windows_every_source_begins_again(directory, changed):
    first = open_dataset(directory, "a=1 b=1")
    second = open_dataset(directory, "a=1 b=1", **changed).continue_from(saved(first), 40)
    assert windows(second, 40, 140) == windows(open_dataset(directory, "a=1 b=1", **changed), 0, 100)


def test_tokens_are_counted_by_the_length_that_each_segment_had(directory):
    first = open_dataset(directory, "a=1 b=1")
    second = open_dataset(directory, "a=1 b=1", seq_length=9).continue_from(saved(first), 40)
    assert first.tokens_read(40) == 40 * 8 and second.tokens_read(50) == 40 * 8 + 10 * 9


def test_a_segment_in_which_nothing_was_read_leaves_no_trace(directory):
    first = open_dataset(directory, "a=1 b=3")
    second = open_dataset(directory, "a=1 b=1").continue_from(saved(first), 40)
    third = open_dataset(directory, "a=1 b=3").continue_from(saved(second), 40)
    assert third.state() == first.state()
    fresh = open_dataset(directory, "a=1 b=1").continue_from(saved(first), 0)
    assert fresh.state() == open_dataset(directory, "a=1 b=1").state()


def test_what_changed_is_said_field_by_field(directory):
    state = saved(open_dataset(directory, "a=1 b=3", fraction=0.1))
    write_shard(directory / "a" / "unit-9", [900], 900)
    (directory / "a" / "unit-0.json").unlink()
    write_shard(directory / "a" / "unit-1", [100], 0)
    write_manifest(directory)
    now = open_dataset(directory, "a=1 c=1", seed=2, fraction=0.2, seq_length=9)
    assert now.changes(state) == [
        "--seed was 1 and is 2",
        "--seq-length was 8 and is 9",
        "--validation-fraction was 0.1 and is 0.2",
        "source a was 1/4 (25.00%) of the mix and is 1/2 (50.00%) of it",
        "source a: unit-9 added, 2 shards now",
        "source a: unit-0 removed, 2 shards now",
        "source a: unit-1 changed, 2 shards now",
        "source b was 3/4 (75.00%) of the mix and is no longer in it",
        "source c was not in the mix and is 1/2 (50.00%) of it",
    ]


def test_of_many_shards_that_changed_three_are_named(directory):
    state = saved(open_dataset(directory, "b=1"))
    for number in range(10, 20):
        write_shard(directory / "b" / f"unit-{number}", [90], 900)
    write_manifest(directory)
    (change,) = open_dataset(directory, "b=1").changes(state)
    assert change == "source b: unit-10, unit-11, unit-12 and 7 more added, 11 shards now"


def test_the_state_names_every_shard_once(directory):
    dataset = open_dataset(directory, "a=1 b=3")
    sizes = []
    for number in range(20):
        dataset = open_dataset(directory, f"a=1 b={number + 1}").continue_from(saved(dataset), 10 * number + 1)
        sizes.append(len(json.dumps(dataset.state())))
        assert json.dumps(dataset.state()).count("unit-0") == 2  # of a and of b
    assert max(np.diff(sizes)) < 500


def test_the_plan_after_a_change_counts_all_that_is_read(directory):
    first = open_dataset(directory, "a=1 b=3")
    second = open_dataset(directory, "a=1 b=1").continue_from(saved(first), 40)
    read = Counter(source for source, _, _ in windows(first, 0, 40) + windows(second, 40, 100))
    assert {row["name"]: row["samples"] for row in second.plan(100)} == dict(read)


def test_the_plan_counts_sources_that_the_decay_reads_no_more(directory):
    def opened():
        data = DataConfig(str(directory), (("a", "1"), ("b", "1")), 0.0, decay_mix=(("a", "1"), ("c", "1")))
        return Dataset.open(data, seq_length=SEQ_LENGTH, seed=1, vocab_size=2**20, decay_begins=48)

    state = json.loads(json.dumps(opened().state(64)))
    write_shard(directory / "c" / "unit-9", [90], 900)
    write_manifest(directory)
    assert [row["samples"] for row in opened().continue_from(state, 64).plan(96)] == [48, 24, 16]


def test_a_decay_has_its_own_mix_and_reads_no_window_twice(directory):
    """From sample 48 on source b is left out and c, which was not in the mix, is in it."""
    def opened(begins=48):
        data = DataConfig(str(directory), (("a", "1"), ("b", "3")), 0.0, decay_mix=(("c", "1"), ("a", "1")))
        return Dataset.open(data, seq_length=SEQ_LENGTH, seed=1, vocab_size=2**20, decay_begins=begins)

    def read(dataset, first, end):
        """(source, epoch, first token), in steps of 16 samples as the loader reads them."""
        found = []
        for step in range(first, end, 16):
            source, *place = dataset.mixture_of(step).locate(np.arange(step, step + 16))
            found += zip((dataset.source_names[s] for s in source), *(column.tolist() for column in place), strict=True)
        return found

    whole = opened()
    samples = read(whole, 0, 96)
    stable = open_dataset(directory, "a=1 b=3")
    assert samples[:48] == windows(stable, 0, 48)
    share = Counter(source for source, *_ in samples[48:])
    assert share == {"a": 24, "c": 24}
    for name in "abc":  # in the order of the source's windows, which one source alone has too
        mine = of_source(name, samples)
        assert mine == of_source(name, windows(open_dataset(directory, f"{name}=1"), 0, len(mine)))

    for consumed in (0, 16, 48, 64):  # stopped before, at and in the decay
        state = json.loads(json.dumps(opened().state(consumed)))
        again = opened()
        assert again.changes(state, consumed) == []
        assert read(again.continue_from(state, consumed), consumed, 96) == samples[consumed:]
    segments = opened().state(64)["segments"]
    assert [segment["first_sample"] for segment in segments] == [0, 48]
    assert segments[1]["consumed"] == {"a": 12, "c": 0}

    branch = opened(32)  # a stable run, or this one, whose decay begins elsewhere
    for earlier in (stable, opened()):
        assert branch.changes(earlier.state(32), 32) == []
    assert opened(32).changes(opened().state(64), 64) == ["--decay-mix began at sample 48 and begins at sample 32"]
    (change,) = opened(80).changes(opened().state(64), 64)
    assert "--decay-mix began at sample 48 and would begin at 80: give the earlier budget" in change
    assert [row["samples"] for row in opened().plan(96)] == [36, 36, 24]
    again = opened(64).continue_from(opened().state(64), 64)  # extended by a second decay from here
    state = json.loads(json.dumps(again.state(80)))
    assert [segment["first_sample"] for segment in state["segments"]] == [0, 48, 64]
    assert opened(64).changes(state, 80) == []
    assert read(opened(64).continue_from(state, 80), 80, 112) == read(again, 80, 112)

    changed = opened().state(64)  # --allow-data-change in the decay, at sample 64
    changed["segments"].append(changed["segments"][-1] | {"first_sample": 64, "consumed": {"a": 20, "c": 8}})
    assert opened().changes(changed, 80) == []
    for begins in (0, 32):
        assert opened(begins).changes(opened().state(64), 64) != []
    data = DataConfig(str(directory), (("a", "1"),), 0.0, decay_mix=(("d", "1"),))
    with pytest.raises(ConfigError, match="^--decay-mix: no source is named d; the data directory has a, b, c"):
        Dataset.open(data, seq_length=SEQ_LENGTH, seed=1, vocab_size=2**20, decay_begins=48)
