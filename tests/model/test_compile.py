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
from moh_lm.kernels import devices
from moh_lm.model.transformer import compile_layers
from moh_lm.parallel.layers import JoinedProducts
from tests.distributed import run_ranks
from tests.models import loss_and_gradients, make_model
from tests.training.runs import arguments, losses, rows, run

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
    "in groups": dict(num_shared_heads=(0,), num_active_routed_heads=(4,), routing_unit="head_in_group"),
    "own keys": dict(num_shared_heads=(2,), num_active_routed_heads=(2,), routed_keys="selected"),
    "gated": dict(head_selection="gated"),
    "static": dict(head_selection="static", num_shared_heads=(2,), num_active_routed_heads=(2,)),
    "all": dict(head_selection="all"),
}


def model_of(name, recompute=False, window=(), position=(), **heads):
    config = ModelConfig(
        num_layers=3, hidden_size=32, intermediate_size=48, num_attention_heads=8, num_key_value_heads=4, head_dim=4,
        vocab_size=50, window=window, position=position, heads=HeadsConfig(**HEADS[name] | heads),
    )  # fmt: skip
    backend = "groups" if config.chooses_in_groups else "dense"
    return make_model(config, scale=5, seed=3, recompute=recompute, backends=backend)


def tokens_of(seed):
    """Tokens whose routing follows from ``seed``."""
    return torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(seed))


def assert_same_step(compiled, plain, seed=0, positions=None):
    """Loss, gradients and rows of routers; returns those of ``plain``."""
    found, expected = (loss_and_gradients(model, tokens_of(seed), positions) for model in (compiled, plain))
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    return expected


@pytest.fixture(autouse=True)
def counters():
    dynamo.reset()
    dynamo.utils.counters.clear()
    yield dynamo.utils.counters
    dynamo.reset()


@pytest.mark.parametrize("name", ["paper", "own keys", "gated", "all"])
def test_all_layers_share_one_unbroken_graph(name, counters):
    plain, compiled = model_of(name), model_of(name, recompute=name == "own keys")
    compile_layers(compiled, backend="aot_eager")
    for seed in range(2):
        assert_same_step(compiled, plain, seed)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_the_fused_kernels_select_what_the_layers_select():
    """Inductor lets a selection that was made by a scatter be read before it is there."""
    plain, compiled = model_of("paper"), model_of("paper", recompute=True)
    compile_layers(compiled)
    assert_same_step(compiled, plain)


@pytest.mark.parametrize(
    "name, compiled",
    [*((name, False) for name in ("paper", "query norm", "groups, top-p", "in groups")),
     ("query norm", True), ("groups, top-p", True)],
)  # fmt: skip
def test_recomputed_layers_keep_their_selection(name, compiled, monkeypatch, counters):
    """All selections of the second pass are turned round, as rounding may turn some: nothing changes."""
    plain, model = model_of(name), model_of(name, recompute=True)
    if compiled:
        compile_layers(model, backend="aot_eager")
    expected = loss_and_gradients(plain, tokens_of(0))
    choose = router_module.top_k_mask

    def turned(scores, *others):
        return choose(torch.where(second_pass, -scores, scores), *others)

    second_pass = torch.tensor(False)
    monkeypatch.setattr(router_module, "top_k_mask", turned)
    loss, _ = model(tokens_of(0)[:, :-1], tokens_of(0)[:, 1:])
    second_pass.fill_(True)
    loss.backward()
    for got, wanted in zip([loss, *(weight.grad for weight in model.parameters())], expected, strict=False):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    assert counters["stats"]["unique_graphs"] == int(compiled) and not counters["graph_break"]


def test_documents_windows_and_previous_shares_reach_the_graph():
    position = ("none", "rotary", "cope")
    plain, compiled = (model_of("global balance", window=(0, 3, 3), position=position) for _ in range(2))
    compile_layers(compiled, backend="aot_eager")
    before = loss_and_gradients(plain, tokens_of(0))
    for model in (plain, compiled):
        model.batch.set_shares(dict.fromkeys(range(3), torch.linspace(0.1, 0.9, 6)))
    positions = torch.tensor([[*range(5), *range(11)], [*range(9), *range(7)]])
    expected = assert_same_step(compiled, plain, positions=positions)
    assert all((wanted - other).abs().max() > 1e-4 for wanted, other in zip(expected, before, strict=True))


def test_a_copy_of_a_compiled_model_has_its_own_weights():
    model = model_of("paper")
    compile_layers(model, backend="aot_eager")
    other = copy.deepcopy(model)
    loss_and_gradients(model, tokens_of(0))
    with torch.no_grad():
        for parameter in other.model.layers.parameters():
            parameter.zero_()
        x = torch.randn(4, 2, 32, dtype=torch.double)
        for layer in other.model.layers:
            assert layer(x).equal(x)


def test_no_batch_size_is_beyond_the_recompile_limit(counters):
    model = model_of("paper")
    with dynamo.config.patch(accumulated_recompile_limit=2):
        compile_layers(model, backend="eager", batch_sizes=3)
        for micro_batches in (1, 2, 3):
            model.batch.begin(False, micro_batches)
            loss_and_gradients(model, tokens_of(0))
    assert counters["stats"]["unique_graphs"] == 3


def test_layers_with_other_budgets_have_graphs_of_their_own(counters):
    budgets = dict(num_shared_heads=(2, 0, 2), num_active_routed_heads=(2, 4, 2))
    plain, compiled = (model_of("no shared heads, one stage", **budgets) for _ in range(2))
    compile_layers(compiled, backend="aot_eager")
    assert_same_step(compiled, plain)
    assert counters["stats"]["unique_graphs"] == 2


LAYOUTS = {  # in this order: DeepSpeed keeps what it is told of tensor and pipeline ranks
    "context": ("--context-parallel-size", "2"),
    "tensor": ("--tensor-parallel-size", "2"),
    "pipeline": ("--pipeline-parallel-size", "2"),
}


def run_without_inductor(arguments):
    dynamo.reset()
    dynamo.utils.counters.clear()
    moh_lm.training.engine.compile_layers = functools.partial(compile_layers, backend="aot_eager")
    run(arguments)
    assert dynamo.utils.counters["stats"]["unique_graphs"] > 0


def run_all_layouts(data_dir, directory):
    """One after another on these two ranks: the first compilation in a process takes longest."""
    for name, layout in LAYOUTS.items():
        run_without_inductor(arguments(data_dir, directory / name, "--compile", "--recompute", *layout))


@pytest.fixture(scope="module")
def compiled(data_dir, tmp_path_factory):
    directory = tmp_path_factory.mktemp("compiled")
    run_ranks(run_all_layouts, 2, data_dir, directory)
    return directory


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_run_has_the_losses_and_norms_of_a_plain_one(layout, compiled, one_rank_run):
    found = compiled / layout
    assert losses(found) == pytest.approx(losses(one_rank_run), rel=1e-6)
    norms = [[row["grad_norm"] for row in rows(directory) if "grad_norm" in row] for directory in (found, one_rank_run)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("--attention-backend cpu_sparse", "--compile: does not support --attention-backend cpu_sparse"),
        ("--zero-stage 3 --attention-backend dense", None),
        ("", "--compile: needs a C++ compiler on a machine without a GPU"),
    ],
)
def test_what_has_no_graph_is_refused(flags, problem, monkeypatch):
    monkeypatch.setenv("CXX", sys.executable if flags else "/no/such/compiler")
    config, _ = parse_config(["--compile", *flags.split(), "--checkpoint-dir", "run", "--train-iters", "1"])
    found = [sentence for sentence in config_problems(config, 1) if "compile" in sentence]
    assert [sentence.startswith(problem) for sentence in found] == ([True] if problem else [])


@pytest.mark.parametrize("flags", ["--compile", "--fused-loss", "--fused-router", "--attention-backend triton"])
@pytest.mark.parametrize("lacks", ["compiler", "headers", None])
def test_what_compiles_on_a_gpu_needs_a_c_compiler_and_the_headers_of_python(flags, lacks, tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "on_gpu", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "bin").mkdir()
    if lacks != "compiler":
        (tmp_path / "bin/gcc").symlink_to(sys.executable)
    if lacks != "headers":
        (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(devices.sysconfig, "get_path", lambda *_: str(tmp_path))
    config, _ = parse_config([*flags.split(), "--checkpoint-dir", "run", "--train-iters", "1"])
    found = [sentence for sentence in config_problems(config, 1) if "Triton compiles" in sentence]
    said = {"compiler": "lacks a C compiler; install gcc", "headers": f"lacks {tmp_path}/Python.h; install python3-dev"}
    assert len(found) == bool(lacks) and all(said[lacks] in sentence for sentence in found)


def test_commands_that_compile_nothing_load_no_compiler():
    code = """
import sys
import moh_lm.cost.summary, moh_lm.run.text, tools.hf.convert.trainer_model, tools.hf.convert.write_export
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("trains", [False, True])
def test_joined_products_are_compiled_for_training_and_for_evaluation(count, trains):
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(count + 1))
    compiled = torch.compile(JoinedProducts.apply, backend="eager", fullgraph=True)
    with torch.set_grad_enabled(trains):
        products = compiled(x, *(weight.requires_grad_() for weight in weights))
    for product, weight in zip(products, weights, strict=True):
        torch.testing.assert_close(product, x @ weight.t())
