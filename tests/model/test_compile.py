"""``--compile``: graphs without breaks, one for all layers, that compute what the layers compute.

The graphs are executed by torch's own operations, but for one test: the fused kernels of inductor would call a C++
compiler for minutes.
"""

import copy
import functools
import subprocess
import sys

import pytest
import torch
import torch._dynamo as dynamo

import moh_lm.model.router as router_module
import moh_lm.training.engine
from moh_lm.checks import config_problems
from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.flags import parse_config
from moh_lm.kernels import choose
from moh_lm.kernels.gated_attention import choose_backend
from moh_lm.model.router import routers_of
from moh_lm.model.transformer import CausalLM, compile_layers
from tests.distributed import run_ranks
from tests.training.test_training import arguments, losses, rows, run

HEADS = {
    "paper": dict(routing="paper", num_shared_heads=(2,), num_active_routed_heads=(2,)),
    "no shared heads, one stage": dict(num_shared_heads=(0,), num_active_routed_heads=(4,), two_stage=False),
    "global balance": dict(num_shared_heads=(2,), num_active_routed_heads=(2,), load_balance_scope="global_batch"),
    "released": dict(num_shared_heads=(2,), num_active_routed_heads=(2,), routing="released"),
    "query norm": dict(num_shared_heads=(2,), num_active_routed_heads=(2,), routing="query_norm"),
    "groups, top-p": dict(
        routing="paper", num_shared_heads=(2,), num_active_routed_heads=(4,), routing_top_p=0.6,
        routing_unit="key_value_group",
    ),
    "own keys": dict(num_shared_heads=(2,), num_active_routed_heads=(2,), routed_keys="selected"),
    "gated": dict(head_selection="gated"),
    "static": dict(head_selection="static", num_shared_heads=(2,), num_active_routed_heads=(2,)),
    "all": dict(head_selection="all"),
}


def make_model(recompute=False, backend="auto", num_layers=3, head_dim=4, window=(), position=(), **heads):
    config = ModelConfig(
        num_layers=num_layers, hidden_size=32, intermediate_size=48, num_attention_heads=8, num_key_value_heads=4,
        head_dim=head_dim, vocab_size=50, window=window, position=position, heads=HeadsConfig(**heads),
    )  # fmt: skip
    model = CausalLM(config, recompute=recompute, attention_backend=backend)
    model.initialize(seed=3)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 5  # so that no gradient is hidden by small weights
    return model.train()


def step(model, seed, positions=None):
    """Loss, gradients and statistics of some tokens; the routing follows from ``seed``."""
    tokens = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    model.documents.feed([positions])
    loss, _ = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *gradients, *(router.statistics.take() for router in routers_of(model))]


@pytest.fixture(autouse=True)
def counters():
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield dynamo.utils.counters
    dynamo.reset()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_all_layers_share_one_unbroken_graph_that_computes_the_same_for_every_routing(heads, recompute, counters):
    plain, compiled = make_model(**heads), make_model(recompute, **heads)
    compile_layers(compiled, backend="aot_eager")
    for seed in range(3):
        for got, expected in zip(step(compiled, seed), step(plain, seed), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_the_fused_kernels_select_what_the_layers_select():
    """Inductor lets a selection that was made by a scatter be read before it is there."""
    plain, compiled = (make_model(recompute, "dense", **HEADS["paper"]) for recompute in (False, True))
    compile_layers(compiled)
    for got, expected in zip(step(compiled, 0), step(plain, 0), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("heads", ["paper", "query norm", "groups, top-p"])
def test_what_is_recomputed_keeps_the_selection_though_rounding_would_choose_others(heads, compiled, monkeypatch):
    """All selections of the second pass are turned round: nothing changes."""
    plain, model = make_model(**HEADS[heads]), make_model(recompute=True, **HEADS[heads])
    if compiled:
        compile_layers(model, backend="aot_eager")
    expected = step(plain, 0)
    choose = router_module.select

    def turned(scores, *others):
        return choose(torch.where(second_pass, -scores, scores), *others)

    second_pass = torch.tensor(False)
    monkeypatch.setattr(router_module, "select", turned)
    tokens = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(0))
    loss, _ = model(tokens[:, :-1], tokens[:, 1:])
    second_pass.fill_(True)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for got, wanted in zip([loss.detach(), *gradients], expected, strict=False):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("position", [(), ("none", "rotary", "cope")])
def test_documents_windows_and_the_shares_of_the_step_before_reach_the_graph(position):
    plain, compiled = (make_model(**HEADS["global balance"], window=(0, 3, 3), position=position) for _ in range(2))
    compile_layers(compiled, backend="aot_eager")
    positions = torch.tensor([[*range(5), *range(11)], [*range(9), *range(7)]])
    before = step(plain, 0)
    for model in (plain, compiled):
        for router in routers_of(model):
            router.statistics.previous_share = torch.linspace(0.1, 0.9, 6)
    expected = step(plain, 0, positions)
    for got, wanted in zip(step(compiled, 0, positions), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    assert all((wanted - other).abs().max() > 1e-4 for wanted, other in zip(expected, before, strict=True))


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights():
    model = make_model(**HEADS["paper"])
    compile_layers(model, backend="aot_eager")
    other = copy.deepcopy(model)
    step(model, 0)
    with torch.no_grad():
        for parameter in other.model.layers.parameters():
            parameter.zero_()
        x = torch.randn(4, 2, 32, dtype=torch.double)
        for layer in other.model.layers:
            assert layer(x).equal(x)


def test_auto_is_dense_in_a_graph_where_a_plain_layer_takes_the_sparse_backend(counters, monkeypatch):
    key = choose.key_of(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(choose, "MEASURED", [choose.Measurement(*key, "", 0, [[1, 1.0, 0.5]], [])])
    assert choose_backend("auto", torch.device("cpu"), torch.float32, (16, 1, 4, 8), 0.5) == "cpu_sparse"
    model = make_model(**HEADS["paper"]).float()
    compile_layers(model, backend="aot_eager")
    step(model, 0)
    assert counters["stats"]["unique_graphs"] == 1


def test_layers_with_other_budgets_have_graphs_of_their_own(counters):
    heads = dict(num_shared_heads=(2, 0, 2), num_active_routed_heads=(2, 4, 2))
    plain, compiled = make_model(**heads), make_model(**heads)
    compile_layers(compiled, backend="aot_eager")
    for got, expected in zip(step(compiled, 0), step(plain, 0), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == 2


def run_without_inductor(arguments, *more):
    moh_lm.training.engine.compile_layers = functools.partial(compile_layers, backend="aot_eager")
    run(arguments, *more)
    assert dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.fixture(scope="module")
def plain(data_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain")
    run_ranks(run, 1, arguments(data_dir, directory))
    return directory


LAYOUTS = {
    "one rank": (1, ()),
    "data, ZeRO-2": (2, ("--zero-stage", "2")),
    "tensor, recompute": (2, ("--tensor-parallel-size", "2", "--recompute")),
    "context, recompute": (2, ("--context-parallel-size", "2", "--recompute")),
    "pipeline, recompute": (2, ("--pipeline-parallel-size", "2", "--recompute")),
}


@pytest.mark.parametrize("world_size, more", LAYOUTS.values(), ids=LAYOUTS)
def test_a_compiled_run_has_the_losses_and_norms_of_a_plain_one(world_size, more, data_dir, tmp_path, plain):
    run_ranks(run_without_inductor, world_size, arguments(data_dir, tmp_path, "--compile", *more))
    assert losses(tmp_path) == pytest.approx(losses(plain), rel=1e-6)
    norms = [[row["grad_norm"] for row in rows(directory) if "grad_norm" in row] for directory in (tmp_path, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("--attention-backend cpu_sparse", "--compile: does not know --attention-backend cpu_sparse"),
        ("--zero-stage 3 --attention-backend dense", None),
        ("", "--compile: needs a C++ compiler on a machine without a GPU"),
    ],
)
def test_what_has_no_graph_is_refused(flags, problem, monkeypatch):
    monkeypatch.setenv("CXX", sys.executable if flags else "/no/such/compiler")
    config, _ = parse_config(["--compile", *flags.split(), "--checkpoint-dir", "run", "--train-iters", "1"])
    found = [sentence for sentence in config_problems(config, 1) if "compile" in sentence]
    assert [sentence.startswith(problem) for sentence in found] == ([True] if problem else [])


def test_a_command_that_compiles_nothing_does_not_load_torchs_compiler():
    code = """
import sys
import moh_lm.cost.summary, moh_lm.run.program, tools.hf.convert.trainer_model, tools.hf.convert.write_export
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
