"""--packing best_fit: rows of random documents read back, in every layout and through changes of the data."""

import gc
import json
import re

import numpy as np
import pytest

from moh_lm.config import ConfigError, DataConfig
from moh_lm.data.dataset import Dataset
from moh_lm.data.loader import Loader
from moh_lm.data.packing import ROWS, count_cuts, pack
from tests.data.directories import VOCAB, make_directory
from tests.distributed import run_ranks
from tests.training.runs import arguments, equal, left_after, losses, parameters, run
from tools import inspect_data

LENGTH = 32


def opened(directory, packing="best_fit", fraction=0.0, mix=(), allow=False):
    data = DataConfig(str(directory), mix, fraction, packing=packing, allow_data_change=allow)
    return Dataset.open(data, seq_length=LENGTH, seed=3, vocab_size=VOCAB)


def loader(dataset, batch=8, rank=0, size=1, **options):
    ranks = dict(data_parallel_rank=rank, data_parallel_size=size)
    return Loader(dataset, global_batch_size=batch, micro_batch_size=1, **ranks, **options)


@pytest.fixture(scope="module")
def lengths():
    """Of 10,000 documents: most are short, some longer than several rows."""
    generator = np.random.default_rng(0)
    return np.minimum(np.exp(generator.normal(2.2, 1.0, 10_000)).astype(int) + 1, 200).tolist()


@pytest.fixture(scope="module")
def directory(lengths, tmp_path_factory):
    return make_directory(tmp_path_factory.mktemp("packed") / "data", {"a": [lengths[:6000], lengths[6000:]]})


def rows_of(dataset, epoch=0, **options):
    """(tokens, labels, positions or None) of each row of an epoch of a data set of one source."""
    windows, found = int(dataset.mixture.windows[0]), []
    for batch in loader(dataset, windows, **options).read_step(epoch * windows):
        positions = [None] if batch.positions is None else batch.positions.tolist()
        found += zip(batch.tokens.tolist(), batch.labels.tolist(), positions, strict=True)
    return found


@pytest.mark.parametrize("enabled", [False, True])
def test_opening_leaves_the_collector_of_garbage_as_it_was(directory, enabled):
    before, change = gc.isenabled(), gc.enable if enabled else gc.disable
    change()
    try:
        opened(directory)
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if before else gc.disable()


@pytest.mark.parametrize("epoch", [0, 1])
def test_each_token_of_10000_documents_is_in_one_row(directory, lengths, epoch):
    dataset = opened(directory)
    tokens = [token for row, *_ in rows_of(dataset, epoch) for token in row]
    phase = dataset.mixture.phase(0, epoch)
    assert sorted(tokens) == list(range(phase, phase + len(tokens)))  # the tokens are numbered through
    assert sum(lengths) - len(tokens) < 2 * LENGTH + 1


def test_labels_and_positions_stay_inside_of_documents(directory, lengths):
    starts = {0, *np.cumsum(lengths).tolist()}
    plain, resets = (rows_of(opened(directory), reset_at_documents=of) for of in (False, True))
    for (row, labels, _), (same, same_labels, positions) in zip(plain, resets, strict=True):
        assert (row, labels) == (same, same_labels)
        assert labels == [-100 if token + 1 in starts else token + 1 for token in row]
        begin = 0
        for place, token in enumerate(row):
            if place and (token in starts or token != row[place - 1] + 1):
                begin = place
            assert positions[place] == place - begin


def test_few_documents_are_cut_and_rows_begin_with_one(directory, lengths):
    ends = np.cumsum(lengths)
    firsts, document = {0, *ends.tolist()}, np.repeat(np.arange(len(lengths)), lengths)
    found = {}
    for packing in ("best_fit", "concatenate"):
        rows = [row for row, *_ in rows_of(opened(directory, packing))]
        times = np.bincount(np.concatenate([np.unique(document[row]) for row in rows]))
        fits = [index for index in np.flatnonzero(times) if lengths[index] <= LENGTH]
        begins = np.mean([row[0] in firsts for row in rows])
        found[packing] = np.mean([times[index] > 1 for index in fits]), begins
    (cut, begins), (cut_before, begins_before) = found.values()
    assert cut < cut_before / 5 and begins > 0.9 > begins_before


@pytest.mark.parametrize(
    "lengths, expected",
    [
        ([6, 5, 4, 3, 2], [[0, 11], [6, 15, 18]]),  # 6 with 4, and 5 with 3 and 2
        ([25, 5], [[0], [10], [25, 20]]),  # a whole document before the rest of one
        ([7, 7, 6], [[0, 17], [7, 14]]),  # 6 fits nowhere and is cut
    ],
)
def test_the_longest_document_goes_where_it_fits_best(lengths, expected):
    rows = pack(np.cumsum(lengths).tolist(), sum(lengths) // 10, 10)
    assert sorted(sum(piece.count for piece in row) for row in rows) == [10] * len(rows)
    assert [[piece.first for piece in row] for row in rows] == expected


def test_cuts_are_counted():
    found = count_cuts([7, 14, 20], 2, 10)  # 7, 7 and 6 tokens: the second one ends in the second window
    assert (found.documents, found.cut, found.cut_by_windows, found.tokens, found.apart) == (2, 1, 1, 20, 3)
    assert count_cuts([4, 25, 33], 3, 10)[:3] == (1, 1, 1)  # the last one reaches over the end of the block
    assert count_cuts([4, 25], 3, 10, 33)[:3] == (1, 1, 1)  # where the text ends
    assert count_cuts([4, 25, 40], 3, 10)[:3] == count_cuts([4, 25], 3, 10)[:3] == (0, 0, 0)  # it is longer than a row
    assert count_cuts([], 3, 10) == (0, 0, 0, 30, 0)  # a document that fills the block began before it


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_sample_is_the_same_in_every_layout(directory, size):
    expected = [batch.tokens.tolist() for batch in loader(opened(directory)).train_step(16)]
    ranks = [loader(opened(directory), rank=rank, size=size).train_step(16) for rank in range(size)]
    assert [batch.tokens.tolist() for batches in ranks for batch in batches] == expected


def test_another_packing_is_other_data(directory):
    packed, plain = opened(directory), opened(directory, "concatenate")
    assert "packing" not in plain.fingerprint() and packed.fingerprint()["packing"] == "best_fit"
    for now, saved, was, is_now in (
        (packed, plain, "concatenate", "best_fit"), (plain, packed, "best_fit", "concatenate"),
    ):  # fmt: skip
        state = json.loads(json.dumps(saved.state(40)))
        assert now.changes(state, 40) == [f"--packing was {was} and is {is_now}"]
        assert now.continue_from(state, 40).mixture.consumed.tolist() == [0]  # its rows are others
        assert not saved.changes(state, 40) and saved.continue_from(state, 40).mixture.first_sample == 0


def test_a_small_source_is_packed_too(tmp_path):
    dataset = opened(make_directory(tmp_path, {"a": [[5] * 7 + [LENGTH * 3]]}))
    assert int(dataset.mixture.windows[0]) == 3 < ROWS
    tokens = sorted(token for row, *_ in rows_of(dataset) for token in row)
    assert len(set(tokens)) == len(tokens) == 3 * LENGTH


def test_inspect_data_shows_the_documents_of_a_row(directory, capsys):
    (row, *_), *_ = rows_of(opened(directory))
    flags = f"--packing best_fit --seq-length {LENGTH} --seed 3 --validation-fraction 0".split()
    assert inspect_data.main([str(directory), "--sample", "0", "--json", *flags]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert [token for piece in sample["pieces"] for token in piece["ids"]] == row


def test_runs_in_two_layouts_and_through_a_resume_agree(data_dir, tmp_path):
    packed = ("--packing", "best_fit", "--reset-at-documents", "--log-interval", "1")
    for name, world_size, more in (("whole", 1, ()), ("stages", 2, ("--pipeline-parallel-size", "2"))):
        run_ranks(run, world_size, arguments(data_dir, tmp_path / name, *packed, *more))
    left_after(3, tmp_path / "whole", tmp_path / "resumed")
    run_ranks(run, 1, arguments(data_dir, tmp_path / "resumed", *packed))
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")
    assert equal(parameters(tmp_path / "resumed"), parameters(tmp_path / "whole"))
    assert np.allclose(losses(tmp_path / "stages"), losses(tmp_path / "whole"), rtol=1e-6, atol=0)


def test_the_dry_run_says_what_is_cut(directory):
    _, line = opened(directory).packer.describe(["a"])
    cut, apart, before = (float(part) for part in re.findall(r"([\d.]+)%", line))
    assert line.startswith("  a  ") and 0 < apart < cut < before / 5
    unit = next((directory / "a").glob("*.idx"))
    content = unit.read_bytes()
    try:
        unit.write_bytes(content[:-9] + b"damaged!" + content[-1:])
        with pytest.raises(ConfigError, match="source a: .*restore the file"):
            list(opened(directory).packer.describe(["a"]))
    finally:
        unit.write_bytes(content)

