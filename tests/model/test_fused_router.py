"""The Triton kernels of a router, in Triton's interpreter, against the equations and the torch form in float64."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.model.batch_context import RouterInputs
from moh_lm.model.router import HeadRouter
from moh_lm.model.selection import SelectionReplay
from moh_lm.model.transformer import compile_layers
from tests.interpreting import multiply_bf16, train
from tests.layers import assert_equals_equations, vivid_layer
from tests.model import test_router
from tests.models import loss_and_gradients, make_model
from tests.training import runs

pytest.importorskip("triton", reason="Triton is not installed")

EQUATIONS = [
    "shared and routed", "released, one stage", "no routed head", "previous step's shares", "micro-batch, released",
    "groups, released", "in groups, scaled", "in groups, bias", "sigmoid, groups", "narrow, in groups",
    "bias, released",
]  # fmt: skip


def check_equations(case):
    case = test_router.CASES[case]
    config = test_router.make_config(**case)
    config = replace(config, heads=replace(config.heads, router_z_loss=0.0))
    layer = vivid_layer(config, fused_router=True)
    if case.get("bias"):
        layer.router.bias_steps.copy_(torch.tensor(case["bias"]))
    assert_equals_equations(layer, config)


@pytest.mark.parametrize("case", EQUATIONS)
def test_the_kernels_compute_the_equations_with_every_gradient(interpreter, case):
    interpreter(check_equations, case)


def router_of(routing, heads, shared, active, kv=1, width=40, unit="head", scope="sequence", bias=0.0):
    """The fused router of a model with weights that show, in float64."""
    choice = HeadsConfig(
        routing=routing, num_shared_heads=(shared,), num_active_routed_heads=(active,), routing_unit=unit,
        load_balance_scope=scope, load_balance_bias_rate=bias,
    )  # fmt: skip
    config = ModelConfig(
        num_layers=1, hidden_size=width, num_attention_heads=heads, num_key_value_heads=kv, head_dim=8, heads=choice
    )
    return vivid_layer(config, fused_router=True).router


def results(router, forward, x, upstream, replay=None):
    """The ``RouterOutput`` of a form of the router, less what is None, and the gradients of x and of the weights."""
    x, share = x.detach().requires_grad_(), torch.linspace(0.1, 0.9, router.layer.num_routed)
    output = forward(router, x, RouterInputs(micro_batches=3, previous_share=share), replay)
    total = (output.gates * upstream).sum() + 3 * output.loss
    return [part for part in output if part is not None], torch.autograd.grad(total, [x, *router.parameters()])


def check_shape(shape, dtype, kind):
    if dtype == torch.bfloat16:
        multiply_bf16()
    router = router_of(**kind).to(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, 40, generator=generator, dtype=torch.double).to(dtype)
    upstream = torch.randn(*shape, kind["heads"], generator=generator, dtype=torch.double)
    found, gradients = results(router, type(router).forward, x, upstream)
    exact = router.double()
    replay = SelectionReplay(torch.tensor(True), found[-1].double())
    expected, slopes = results(exact, HeadRouter.forward, x.double(), upstream, replay)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(gradients, slopes, strict=True):  # the interpreter cuts bf16 off in place of rounding
        allowed = {torch.bfloat16: 2**-6, torch.float16: 2**-10}.get(dtype, tolerance)
        assert (mine.double() - theirs).abs().max() <= allowed * theirs.abs().max()
    if dtype == torch.double:
        alone = results(exact, HeadRouter.forward, x, upstream)[0]
        assert torch.equal(alone[-1], found[-1])


SHAPES = {
    "3 heads": dict(routing="sigmoid", heads=3, shared=1, active=1, scope="micro_batch"),
    "9 heads": dict(routing="released", heads=9, shared=4, active=2, scope="global_batch"),
    "12 heads in 3 groups": dict(routing="paper", heads=12, shared=3, active=3, kv=3, unit="head_in_group", bias=0.1),
    "48 heads": dict(routing="paper_scaled", heads=48, shared=7, active=13),
}


CASES = [(kind, torch.float64) for kind in SHAPES]
CASES += [("48 heads", torch.float32), ("9 heads", torch.bfloat16), ("9 heads", torch.float16)]


@pytest.mark.parametrize("kind, dtype", CASES)
def test_tokens_fill_no_block_and_channels_no_power_of_two(interpreter, kind, dtype):
    interpreter(check_shape, (67, 3), dtype, SHAPES[kind])


def check_replay():
    router = router_of("paper", heads=9, shared=2, active=3)
    x = torch.randn(70, 2, 40, dtype=torch.double, generator=torch.Generator().manual_seed(2))
    upstream, other = torch.ones(70, 2, 9, dtype=torch.double), router(x.flip(0), RouterInputs()).selection
    for use in (False, True):
        replay = SelectionReplay(torch.tensor(use), other)
        forms = (type(router).forward, HeadRouter.forward)
        mine, theirs = (results(router, form, x, upstream, replay) for form in forms)
        torch.testing.assert_close(mine, theirs)
        assert torch.equal(mine[0][-1], other) == use


def test_the_selection_of_an_earlier_pass_is_replayed(interpreter):
    interpreter(check_replay)


def check_odd_scores(routing):
    router, inf, nan = router_of(routing, heads=6, shared=0, active=2), torch.inf, torch.nan
    x = torch.eye(40, dtype=torch.double)[:1, None]  # scores are the first column of the weights
    for scores in ([0.0] * 6, [1, 2, 2, 2, 1, 1], [-inf] * 6, [1, -inf, 0, 1, 2, 1], [nan, 9, 9, nan, 1, 2], [nan] * 6):
        router.w_routed.data.zero_()[:, 0] = torch.tensor(scores)
        mine, theirs = (form(router, x, RouterInputs()) for form in (type(router).forward, HeadRouter.forward))
        assert torch.equal(mine.selection, theirs.selection)
        torch.testing.assert_close(mine.gates, theirs.gates, equal_nan=True)


@pytest.mark.parametrize("routing", ["sigmoid", "paper"])
def test_equal_and_infinite_scores_and_nan_are_as_with_torch(interpreter, routing):
    interpreter(check_odd_scores, routing)


class Operations(TorchDispatchMode):
    """Launches of Triton, and torch's operations other than views and new memory."""

    SILENT = {"alias", "slice", "detach", "split_with_sizes", "expand", "view", "select", "empty", "new_empty"}

    def __enter__(self):
        from triton.runtime.interpreter import GridExecutor

        self.names, self.launcher, self.launch = [], GridExecutor, GridExecutor.__call__

        def noted(launcher, *arguments, **named):
            self.names.append(launcher.fn.__name__)
            return self.launch(launcher, *arguments, **named)

        GridExecutor.__call__ = noted
        return super().__enter__()

    def __exit__(self, *error):
        self.launcher.__call__ = self.launch
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in self.SILENT and function.namespace == "aten":
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def check_launches():
    router = router_of("sigmoid", heads=12, shared=3, active=3)
    x = torch.randn(8, 2, 40, dtype=torch.double, requires_grad=True)
    upstream, one = torch.ones(8, 2, 12, dtype=torch.double), torch.ones((), dtype=torch.double)
    with Operations() as forward:
        output = router(x, RouterInputs())
    with Operations() as backward:
        torch.autograd.grad((output.gates, output.loss), (x, *router.parameters()), (upstream, one))
    with torch.no_grad(), Operations() as alone:
        found = router(x, RouterInputs())
    assert found.loss is None and found.rows is None and found.gates.equal(output.gates)
    assert alone.names == ["forward_kernel"]
    assert forward.names == ["forward_kernel", "finish_kernel"]
    assert backward.names == ["backward_kernel", "weights_kernel"]


def test_a_pass_is_two_launches_or_one_without_gradients_and_its_backward_pass_two(interpreter):
    interpreter(check_launches)


def check_compiled():
    heads = HeadsConfig(routing="paper", num_shared_heads=(2,), num_active_routed_heads=(3,), two_stage=True)
    config = ModelConfig(
        num_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=8, head_dim=4, vocab_size=50,
        heads=heads,
    )  # fmt: skip
    tokens = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(0))
    plain = make_model(config, scale=5, seed=3)
    compiled = make_model(config, scale=5, seed=3, fused_router=True, recompute=True)
    compile_layers(compiled, backend="aot_eager")
    for found, expected in zip(loss_and_gradients(compiled, tokens), loss_and_gradients(plain, tokens), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_a_compiled_layer_is_one_graph_and_computes_the_same(interpreter):
    interpreter(check_compiled)


def test_a_run_on_slices_of_sequences_trains_the_same_model(interpreter, data_dir, one_rank_run, tmp_path):
    flags = "--fused-router --recompute --context-parallel-size 2 --train-iters 2 --eval-samples 1".split()
    interpreter(train, 2, runs.arguments(data_dir, tmp_path, *flags))
    assert runs.losses(tmp_path) == pytest.approx(runs.losses(one_rank_run)[:1], rel=1e-5)


def check_comparison():
    router = router_of("released", heads=9, shared=4, active=2).float()
    x, inputs = torch.randn(70, 2, 40, generator=torch.Generator().manual_seed(0)), RouterInputs()
    found = router.compare(x, inputs)
    assert found.outputs < 1e-5 and found.gradients < 1e-5 and found.others == 0
    router.balanced = (2 * router.balanced[0], *router.balanced[1:])
    assert router.compare(x, inputs).excess > 1
    router = router_of("released", heads=8, shared=4, active=2, kv=2, unit="head_in_group").float()
    assert router.compare(x, inputs).excess <= 1  # one of two experts in each group, whose gate is always 1


def check_improbable():
    router = router_of("released", heads=8, shared=4, active=2, bias=1.0).float()
    router.bias_steps.copy_(torch.tensor([2, 2, 0, 0]))
    with torch.no_grad():
        router.w_routed[2] *= 1000  # the probabilities of the first two, which are selected, are often 0 in fp32
    found = router.compare(torch.randn(70, 2, 40, generator=torch.Generator().manual_seed(0)), RouterInputs())
    assert found.outputs < 1e-5 and found.gradients < 1e-5 and found.others == 0


def test_released_gates_of_improbable_heads_are_finite(interpreter):
    interpreter(check_improbable)


def test_a_comparison_with_torch_finds_another_loss(interpreter):
    interpreter(check_comparison)
