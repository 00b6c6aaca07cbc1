"""ZeRO-3: a weight is whole only while its layer computes, in layers as they are and in compiled ones.

DeepSpeed never shards a weight of less than 100,000 elements, here a run has none larger: its threshold is set to 0.
The storage of every weight that is given up is filled with NaN first, so that nothing computes with it any more unseen.
"""

import functools
import math
from unittest.mock import Mock

import pytest
import torch
import torch._dynamo as dynamo
from deepspeed.runtime.zero import partition_parameters
from torch.multiprocessing.reductions import StorageWeakRef

import moh_lm.training.engine
from moh_lm.model.transformer import compile_layers
from moh_lm.training.deepspeed import adapter
from moh_lm.training.frozen import FrozenWeights
from moh_lm.training.text_engine import TextEngine
from tests.distributed import run_ranks
from tests.training.runs import arguments, equal, left_after, losses, parameters, rows, run, training_rows

PLAIN = ("--zero-stage", "3")
COMPILED = (*PLAIN, "--compile", "--recompute")


def run_with_every_weight_sharded(flags):
    """Run ``flags``. Returns the weights given up in every forward pass of training, those of them whose storage was
    still there at the end of every one (gloo's threads hold some a moment longer, now and then), and how many graphs
    were made."""
    make_config, free_param = adapter.deepspeed_config, partition_parameters.free_param
    compute_loss = TextEngine.loss
    given_up, passes, kept = {}, [], []

    def config_without_threshold(*settings):
        config = make_config(*settings)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return config

    def spoil_and_free(parameter):
        given_up[parameter.ds_id] = StorageWeakRef(parameter.data.untyped_storage())
        parameter.data.fill_(math.nan)
        free_param(parameter)

    def watched_loss(engine, batch):
        given_up.clear()
        loss = compute_loss(engine, batch)
        if torch.is_grad_enabled():
            passes.append(set(given_up))
            kept.append({weight for weight, storage in given_up.items() if not storage.expired()})
        return loss

    adapter.deepspeed_config = config_without_threshold
    moh_lm.training.engine.compile_layers = functools.partial(compile_layers, backend="aot_eager")
    TextEngine.loss = watched_loss
    partition_parameters.free_param = spoil_and_free
    run(flags)
    return set.intersection(*passes), set.intersection(*kept), dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def run_of(data_dir, tmp_path_factory):
    """{flags: (run directory, what each rank returns)} of an uninterrupted run, made when first asked for."""
    made = {}

    def of(flags):
        if flags not in made:
            directory = tmp_path_factory.mktemp("sharded")
            made[flags] = directory, run_ranks(run_with_every_weight_sharded, 2, arguments(data_dir, directory, *flags))
        return made[flags]

    return of


@pytest.mark.parametrize("flags, graphs", [(PLAIN, 0), (COMPILED, 2)])
def test_no_weight_outlives_the_forward_pass_of_its_layer(flags, graphs, run_of, one_rank_run):
    directory, ranks = run_of(flags)
    for given_up, kept, number in ranks:
        assert len(given_up) == len(parameters(one_rank_run)) and not kept
        assert number == graphs  # of training and of evaluation
    assert losses(directory) == pytest.approx(losses(one_rank_run), rel=1e-6)
    found, expected = (list(map(figures, rows(each))) for each in (directory, one_rank_run))
    assert found == [pytest.approx(row, rel=1e-4) for row in expected]


def figures(row):
    """Those of a row that read weights: of the gradients, or of the attention to the first token."""
    return [value for layers in row["sink"].values() for value in layers] if "sink" in row else [row["grad_norm"]]


def test_a_compiled_run_with_sharded_weights_resumes_bit_for_bit(data_dir, tmp_path, run_of):
    whole, _ = run_of(COMPILED)
    left_after(3, whole, tmp_path)  # between two evaluations
    run_ranks(run_with_every_weight_sharded, 2, arguments(data_dir, tmp_path, *COMPILED))
    assert rows(tmp_path) == rows(whole)
    assert equal(parameters(tmp_path), parameters(whole))


def run_with_memory_full_of_nan(flags):
    """Run ``flags`` where memory that is asked for holds NaN until it is written."""
    torch.use_deterministic_algorithms(True)  # which fills it
    run(flags)


def test_padding_of_weights_reaches_no_number(data_dir, tmp_path):
    """Three ranks share weights of 32, 64, ... elements. DeepSpeed leaves the rest of a slice as the memory was."""
    flags = ("--batch-tokens", "96", "--train-iters", "3", "--save-interval", "0")
    run_ranks(run, 1, arguments(data_dir, tmp_path / "one", *flags))
    run_ranks(run_with_memory_full_of_nan, 3, arguments(data_dir, tmp_path / "three", *flags, "--zero-stage", "3"))
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    assert [row["skipped_steps"] for row in training_rows(tmp_path / "three")] == [0, 0]


def test_padding_of_a_frozen_weight_is_cleared():
    parts = torch.full((4,), 7.0)  # of which three are the weight's
    weight = Mock(requires_grad=False, ds_tensor=parts, ds_numel=3, partition_numel=lambda: 4)
    (part,) = FrozenWeights([weight], group=None).masters.values()
    assert part[1].tolist() == [7, 7, 7] and parts.tolist() == [7, 7, 7, 0]
