"""Sparse backends inside the model: layers, tensor parallelism, training, resumption, and what is refused."""

import pytest
import torch
import torch.distributed as dist

from moh_lm.checks import config_problems
from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.flags import parse_config
from moh_lm.kernels import devices
from tests.distributed import run_ranks, whole
from tests.layers import draw_tokens, vivid_layer
from tests.model.test_router import CASES, D, make_config
from tests.models import attend, make_model
from tests.training.runs import arguments, losses, parameters, rows, run

OWN_KEYS = (
    "shared and routed", "one shared head", "grouped queries", "groups", "relu, no shared head", "top-p", "window",
    "window, released, groups", "query norm",
)  # fmt: skip
OF_OWN = {f"{name}, own keys": CASES[name] | {"keys": "selected"} for name in OWN_KEYS}
OF_OWN["own positions"] = CASES["window, released, groups"] | {"keys": "selected", "counts": "head"}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("case", [*CASES.values(), *OF_OWN.values()], ids=[*CASES, *OF_OWN])
def test_a_layer_of_selected_rows_is_the_dense_layer(case, num_threads, threads):
    torch.set_num_threads(num_threads)
    x, upstream = draw_tokens(D, 2)
    results = []
    for backend in ("dense", "cpu_sparse"):
        layer = vivid_layer(make_config(**case), backend)
        leaf = x.clone().requires_grad_()
        output, routing = attend(layer, leaf)
        ((output * upstream).sum() + (0 if routing.loss is None else routing.loss)).backward()
        results.append([output, leaf.grad, *(parameter.grad for parameter in layer.parameters())])
    for dense, sparse in zip(*results, strict=True):
        if dense is None:  # of a router whose only gate is 1
            assert sparse is None
        else:
            torch.testing.assert_close(sparse, dense, rtol=0, atol=1e-11)


MODELS = {
    "paper": dict(routing="paper", num_shared_heads=(4,), num_active_routed_heads=(2,)),
    "own keys": dict(num_shared_heads=(4,), num_active_routed_heads=(2,), routed_keys="selected"),
    "groups, top-p": dict(
        routing="paper", num_shared_heads=(4,), num_active_routed_heads=(4,), routing_top_p=0.6,
        routing_unit="key_value_group",
    ),
    "query norm": dict(routing="query_norm", num_shared_heads=(4,), num_active_routed_heads=(2,)),
    "query norm, groups": dict(
        routing="query_norm", num_shared_heads=(4,), num_active_routed_heads=(2,), routing_unit="key_value_group"
    ),
}
POSITIONS = {"paper": dict(position=("cope", "rotary"), rotary_fraction=0.5)}
POSITIONS["query norm, groups"] = dict(position=("learned",), learned_positions=8)


def compute(name, backend, heads=8, key_value_heads=4):
    """{parameter: (its gradient, partition)} of a model in float64, on the ranks of this world."""
    config = ModelConfig(
        num_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=heads, qk_norm=name == "paper",
        num_key_value_heads=key_value_heads, head_dim=4, vocab_size=36, heads=HeadsConfig(**MODELS[name]),
        **POSITIONS.get(name, {}),
    )  # fmt: skip
    group = dist.group.WORLD if dist.is_initialized() else None
    model = make_model(config, scale=10, seed=5, group=group, backends=backend)
    tokens = torch.randint(0, 36, (3, 8), generator=torch.Generator().manual_seed(2))
    hidden = model.model(tokens)  # [s/tp, b, d]
    hidden.pow(3).sum().backward()
    return {key: (parameter.grad, parameter.tensor_partition) for key, parameter in model.model.named_parameters()}


def assert_same_gradients(ranks, expected):
    for key, (gradient, _) in expected.items():
        difference = whole([rank[key] for rank in ranks]) - gradient
        assert difference.abs().max() <= 1e-9 * gradient.abs().max(), key


@pytest.mark.parametrize("name", MODELS)
def test_two_tensor_parallel_ranks_are_the_dense_model_of_one(name):
    expected = compute(name, "dense")
    ranks = run_ranks(compute, 2, name, "cpu_sparse")
    assert_same_gradients(ranks, expected)


@pytest.mark.parametrize(
    "name, heads, key_value_heads, world_size, backend",
    [
        ("paper", 8, 1, 2, "cpu_sparse"),
        ("paper", 16, 2, 4, "dense"),
        ("paper", 16, 2, 4, "cpu_sparse"),
        ("own keys", 8, 2, 4, "cpu_sparse"),
    ],
)
def test_fewer_key_value_heads_than_ranks_are_held_by_all(name, heads, key_value_heads, world_size, backend):
    expected = compute(name, "dense", heads, key_value_heads)
    ranks = run_ranks(compute, world_size, name, backend, heads, key_value_heads)
    assert_same_gradients(ranks, expected)


@pytest.fixture(scope="module")
def dense(data_dir, tmp_path_factory):
    """The run directory of a dense run."""
    directory = tmp_path_factory.mktemp("dense")
    run_ranks(run, 1, arguments(data_dir, directory, "--attention-backend", "dense"))
    return directory


@pytest.mark.parametrize("world_size, more", [(1, ()), (2, ("--zero-stage", "3", "--recompute"))])
def test_a_sparse_run_has_the_losses_of_the_dense_run(data_dir, tmp_path, dense, world_size, more):
    run_ranks(run, world_size, arguments(data_dir, tmp_path, "--attention-backend", "cpu_sparse", *more))
    assert losses(tmp_path) == pytest.approx(losses(dense), rel=1e-6)
    norms = [[row["grad_norm"] for row in rows(directory) if "grad_norm" in row] for directory in (tmp_path, dense)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    weights = [parameters(directory) for directory in (tmp_path, dense)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])  # it was another arithmetic


def test_a_run_goes_on_with_another_backend(data_dir, tmp_path, dense):
    run_ranks(run, 1, arguments(data_dir, tmp_path, "--attention-backend", "dense"), 3)
    run_ranks(run, 1, arguments(data_dir, tmp_path, "--attention-backend", "cpu_sparse"))
    assert losses(tmp_path) == pytest.approx(losses(dense), rel=1e-6)


@pytest.mark.parametrize(
    "gpu, flags, problem",
    [
        (False, "triton", "triton: needs a CUDA GPU, and this machine shows none; choose auto"),
        (True, "cpu_sparse", "cpu_sparse: is for machines without a GPU; choose auto"),
        (True, "triton --head-dim 24", "triton: has no kernels for heads of 24 features, only for 16, 32, 48, 64"),
        (False, "cpu_sparse", None),
        (True, "triton --reset-at-documents", None),
        (True, "auto --head-dim 24", None),
        (True, "triton --routed-keys selected", None),
        (True, "triton --routed-keys selected --window 9", "does not support --routed-keys selected with --window"),
        (True, "auto --routed-keys selected", None),
        (False, "auto --routed-keys selected --head-selection gated", "selected: no layer has routed heads; leave it"),
    ],
)
def test_backends_that_could_not_compute_are_refused(monkeypatch, gpu, flags, problem):
    monkeypatch.setattr(devices, "on_gpu", lambda: gpu)
    monkeypatch.setattr(devices, "missing_for_triton", lambda: None)
    required = "--data-dir data --checkpoint-dir run --train-iters 10 --attention-backend "
    problems = config_problems(parse_config((required + flags).split())[0], world_size=1)
    problems = [text for text in problems if "triton is not installed" not in text]
    assert (problem in problems[0] and len(problems) == 1) if problem else problems == []
