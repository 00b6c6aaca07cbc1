"""What tokens see: windows, documents that do not see each other (--reset-at-documents), and data that change."""

import shutil

import pytest
import torch

from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.data.files import read_json
from moh_lm.data.shards import ShardWriter, write_manifest
from moh_lm.kernels import gated_attention
from moh_lm.kernels.masks import apply_window, document_bounds, mean_keys
from tests.distributed import run_ranks
from tests.models import loss_and_gradients, make_model
from tests.training.runs import arguments, events, losses, rows, run


def test_what_a_window_shows_is_counted_by_hand():
    documents = document_bounds(torch.tensor([[0, 1, 2, 3, 0, 1]]))
    x = torch.empty(6, 1)
    starts, ends, _ = apply_window(documents, 3, x, False)
    assert (starts.tolist(), ends.tolist()) == ([[0, 0, 0, 1, 4, 4]], [[3, 4, 4, 4, 6, 6]])
    starts, ends, mask = apply_window(None, 2, x, True)
    assert (starts.tolist(), ends.tolist()) == ([[0, 0, 1, 2, 3, 4]], [[2, 3, 4, 5, 6, 6]])
    assert (mask[0, 0] == 0).sum(-1).tolist() == [1, 2, 2, 2, 2, 2]
    assert apply_window(documents, 6, x, True) is documents and apply_window(None, 0, x, True) is None
    for window in (1, 3, 6, 99):
        seen = [min(t + 0.5, window) if t + 1 <= window else window for t in range(6)]  # half of the last key
        assert mean_keys(6, window) == pytest.approx(sum(seen) / 6, abs=0.1)
    assert mean_keys(8192, 0) == mean_keys(8192, 8192) == 4096 and mean_keys(8192, 2048) == 2048 - 256


def test_the_mask_of_the_first_tokens_is_that_of_a_shorter_sequence():
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [3, 4, 0, 1, 2, 3, 4]])
    whole, shorter = (document_bounds(rows, torch.half) for rows in (positions, positions[:, :5]))
    assert all(torch.equal(*pair) for pair in zip(whole.first(5), shorter, strict=True))


def test_bounds_of_documents_are_counted_by_hand():
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [7, 8, 0, 1, 2, 3]])  # the second window begins inside a document
    starts, ends, mask = document_bounds(positions, torch.bfloat16)
    assert starts.tolist() == [[0, 0, 0, 3, 4, 4], [0, 0, 2, 2, 2, 2]]
    assert ends.tolist() == [[3, 3, 3, 4, 6, 6], [2, 2, 6, 6, 6, 6]]
    assert mask.dtype == torch.bfloat16 and mask[1, 0, 5].tolist() == [-torch.inf] * 2 + [0] * 4
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1],
    ]  # fmt: skip
    assert document_bounds(positions).mask is None


def kept_masks(window, positions=None, dtype=torch.double):
    """How many masks [s, s] attention keeps for the backward pass in a dense model of two layers."""
    model, kept = model_of(HEADS["all"], "dense", window).to(dtype), {}

    def note(tensor):
        if tensor.shape[-2:] == (48, 48):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.randint(50, (2, 49), generator=torch.Generator().manual_seed(1))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss_and_gradients(model, tokens, positions)
    return len(kept)


def test_all_layers_keep_one_mask():
    positions = torch.arange(48).repeat(2, 1) % 20
    assert kept_masks((), positions, torch.bfloat16) == 1
    assert [kept_masks((), positions), kept_masks((5, 5)), kept_masks((5, 7)), kept_masks(())] == [1, 1, 2, 0]


LENGTHS = (5, 1, 7, 3)  # of the documents in one window
HEADS = {
    "all": HeadsConfig("all"),
    "paper": HeadsConfig(routing="paper"),
    "no shared heads": HeadsConfig(num_shared_heads=(0,), num_active_routed_heads=(4,)),
    "query norm": HeadsConfig(routing="query_norm"),
    "static": HeadsConfig("static"),
}
BACKENDS = ("dense", "cpu_sparse")


def model_of(heads, backend, window, scale=1, **settings):
    config = ModelConfig(2, 32, 64, 8, num_key_value_heads=4, vocab_size=50, window=window, heads=heads)
    return make_model(config, scale, backends=backend, **settings)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [(), (3, 0)])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_a_document_has_the_logits_that_it_has_alone(heads, window, backend):
    model = model_of(heads, backend, window)
    tokens = torch.randint(50, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    model.batch.feed([positions])
    together = model(tokens)
    for document, logits in zip(tokens.split(LENGTHS, 1), together.split(LENGTHS), strict=True):
        torch.testing.assert_close(logits, model(document), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(together, model(tokens))  # without bounds they see each other


@pytest.mark.parametrize("recompute, window", [(False, ()), (True, ()), (True, (9, 60))])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_sparse_and_dense_models_agree_inside_documents(heads, recompute, window, monkeypatch):
    """Their losses, and every gradient."""
    monkeypatch.delattr(gated_attention, "document_mask")  # no layer makes a mask
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(50, (2, 131), generator=generator)
    positions = torch.stack([torch.arange(130), torch.arange(130)])
    for row, starts in enumerate(([1, 2, 60, 124], [64, 100])):
        for start in starts:
            positions[row, start:] = torch.arange(130 - start)
    found = []
    for backend in BACKENDS:
        model = model_of(heads, backend, window, scale=5, recompute=recompute)
        found.append(loss_and_gradients(model, tokens, positions))
        assert (model.batch.mask.mask is None) == (backend == "cpu_sparse" or bool(window))
    for sparse, dense in zip(*reversed(found), strict=True):
        torch.testing.assert_close(sparse, dense, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def one_process(data_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("one")
    run_ranks(run, 1, arguments(data_dir, directory, "--reset-at-documents", "true"))
    return directory


def test_resets_train_the_same_model_on_sparse_ranks(data_dir, tmp_path, one_process):
    """Dense ranks of every layout are in tests/training/test_layouts.py."""
    layout = "--reset-at-documents true --attention-backend cpu_sparse --tensor-parallel-size 2 --recompute".split()
    run_ranks(run, 2, arguments(data_dir, tmp_path, *layout))
    for row, expected in zip(rows(tmp_path), rows(one_process), strict=True):
        for key in ("loss", "grad_norm", "load_balance_loss", "evaluation"):
            if key in expected:
                assert row[key] == pytest.approx(expected[key], rel=1e-5 if key == "grad_norm" else 1e-6)


def test_resets_leave_labels_out_and_nothing_of_the_balance_loss(data_dir, tmp_path, one_process):
    run_ranks(run, 1, arguments(data_dir, tmp_path))
    (plain, reset) = ([row for row in rows(directory) if "loss" in row] for directory in (tmp_path, one_process))
    assert all(row["loss"] != other["loss"] for row, other in zip(plain, reset, strict=True))
    assert [row["load_balance_loss"] for row in reset] == pytest.approx(
        [row["load_balance_loss"] for row in plain], rel=0.05
    )
    assert [row["tokens"] for row in reset] == [row["tokens"] for row in plain]


@pytest.fixture
def grown(data_dir, tmp_path):
    """The data directory with another shard in one source."""
    directory = tmp_path / "data"
    shutil.copytree(data_dir, directory)
    with ShardWriter(directory / "odd" / "unit-2", 64) as shard:
        for first in range(40):
            shard.add([*range(3 + first % 7, 40), 2])
        shard.commit({"tokenizer": {"sha256": "none", "vocab_size": 64, "eos_id": 2}, "inputs": []})
    write_manifest(directory)
    return directory


def test_changed_data_are_named_and_refused_or_gone_on_with(data_dir, grown, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    run_ranks(run, 1, arguments(data_dir, one), 3)
    shutil.copytree(one, other)
    mix = ("--data-mix", "even=1", "odd=1")
    named = r"(?s)source even was 5/7 .* is 1/2 .*source odd: unit-2 added, 3 shards now"
    with pytest.raises(AssertionError, match=named):
        run_ranks(run, 1, arguments(grown, one, *mix))
    run_ranks(run, 1, arguments(grown, one, *mix, "--allow-data-change", "true"))
    (event,) = events(one, "data changed")
    assert event["step"] == 3 and any("unit-2 added" in change for change in event["changes"])
    history = read_json(one / "checkpoints" / "step-7" / "state.json")["guard"]["history"]
    assert [len(values) for values in history.values()] == [4, 4]  # a loss of other data is no spike
    # In mid-interval, with other ranks, stopped once more: the same samples.
    run_ranks(run, 2, arguments(grown, other, *mix, "--allow-data-change", "true"), 6)
    run_ranks(run, 1, arguments(grown, other, *mix))
    assert losses(other) == pytest.approx(losses(one), rel=1e-6)
    history = read_json(other / "checkpoints" / "step-7" / "state.json")["alarms"]["history"]
    values = {kind: len(values) for kind, _, values in history}  # at steps 4, 6 and 7, since the change of data
    assert (values["balance loss"], values["throughput"]) == (3, 1)  # which has changed its ranks since


def test_resets_change_the_data_and_another_loss_is_no_spike(data_dir, one_process, tmp_path):
    shutil.copytree(one_process, tmp_path / "run")
    flags = arguments(data_dir, tmp_path / "run", "--train-iters", "9", "--z-loss", "1e-3")
    with pytest.raises(AssertionError, match=r"--reset-at-documents was True and is False \(--allow-data-change"):
        run_ranks(run, 1, flags)
    run_ranks(run, 1, [*flags, "--reset-at-documents", "true"])
    (event,) = events(tmp_path / "run", "loss changed")
    assert (event["step"], event["changes"]) == (7, {"z_loss": [0.0, 1e-3]})
    history = read_json(tmp_path / "run" / "checkpoints" / "step-9" / "state.json")["guard"]["history"]
    assert [len(values) for values in history.values()] == [2, 2]
