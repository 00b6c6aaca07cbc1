"""The operators of the Triton backend: what torch is told of them, alone, in compiled layers and in whole models.

The kernels run in Triton's interpreter; the fixture ``interpreter`` runs a test in a process of its own.
"""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.inference.generate import generate
from moh_lm.kernels.gated_attention import TRITON, gated_attention
from moh_lm.model.transformer import compile_layers
from tests.attention_cases import Problem, assert_all_close, make_inputs, make_mask, reference, with_gradients
from tests.models import loss_and_gradients, make_model

pytest.importorskip("triton", reason="Triton is not installed")


def attention(*arguments):
    """``gated_attention`` by the kernels, of (query, key, value, gates, selected, num_shared, mask)."""
    return gated_attention(*arguments, backend=TRITON)


def check_joined(heads, kv_heads, num_shared, frozen):
    *tensors, upstream, selected = make_inputs(40, 2, heads, kv_heads, 16, "varying_routing")
    leaves = [tensor.requires_grad_(name not in frozen) for name, tensor in zip("qkvg", tensors, strict=True)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    expected = reference(*leaves, selected, num_shared)
    with Operations() as seen:
        out = attention(*leaves, selected, num_shared)
        gradients = torch.autograd.grad(out, wanted, upstream, retain_graph=True)
    assert not {"cat", "zeros", "clone", "slice_backward", "add"} & seen.names
    assert all(map(torch.equal, gradients, torch.autograd.grad(out, wanted, upstream)))
    for got, right in zip((out, *gradients), (expected, *torch.autograd.grad(expected, wanted, upstream)), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def check_anomalies():
    *tensors, upstream, selected = make_inputs(20, 1, 4, 4, 16)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        with torch.autograd.detect_anomaly(check_nan=True):
            with_gradients(lambda *t: attention(*t, selected, 2), *tensors, upstream)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:Anomaly")
def test_no_gradient_on_the_way_looks_like_an_anomaly(interpreter):
    interpreter(check_anomalies)


class Operations(TorchDispatchMode):
    """The names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.__name__.split(".")[0])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "heads, kv_heads, num_shared, frozen",
    [(4, 4, 1, ""), (6, 3, 2, ""), (4, 4, 2, "q"), (4, 4, 2, "kv"), (4, 4, 2, "qkv"), (4, 4, 2, "g")],
)
def test_shared_and_routed_heads_are_joined_without_copies(interpreter, heads, kv_heads, num_shared, frozen):
    interpreter(check_joined, heads, kv_heads, num_shared, frozen)


def check_operator():
    """torch's own checks of the two operators: schema, fake results, autograd, compilation."""
    from moh_lm.kernels import triton_attention

    *tensors, upstream, selected = make_inputs(20, 1, 2, 1, 16, "everything")  # slots of others are not written
    leaves = [tensor.requires_grad_() for tensor in tensors]
    for bounds in ((None, None), make_mask([[7, 9, 4]], 20, 1)[:2]):
        arguments = (*leaves, selected, None, *bounds)
        torch.library.opcheck(triton_attention.head_sparse_attention, arguments)
        saved = triton_attention.head_sparse_attention(*arguments)[1:]
        arguments = [t if t is None else t.detach() for t in (upstream, *leaves, None, *bounds, *saved)]
        torch.library.opcheck(triton_attention.head_sparse_attention_backward, tuple(arguments))
    context = torch.rand(2, 1, 20, 16, dtype=torch.float64).permute(2, 1, 0, 3).requires_grad_()
    parts = [tensor.repeat_interleave(2, 2).detach().requires_grad_() for tensor in leaves]
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")  # the rest compares what is not written
    arguments = (*parts, selected.repeat_interleave(2, 2), context)
    torch.library.opcheck(triton_attention.head_sparse_attention, arguments, test_utils=checks)


def test_the_operators_pass_the_checks_of_torch(interpreter):
    interpreter(check_operator)


def check_compilation():
    """One graph for every routing of a shape and all documents, and for every layer that computes it."""
    from torch._dynamo.utils import counters

    results = []
    step = torch.compile(lambda *t: attention(*t[:-1], 1, t[-1]) * 2, fullgraph=True, backend="aot_eager")
    for layer, routing in enumerate(("random_routing", "odd_routing", "everything", "nothing")):
        lengths = [[layer + 1, 10, 100]]
        mask = make_mask(lengths, 40, 1)
        *tensors, upstream, selected = make_inputs(40, 1, 4, 2, 16, routing, seed=layer)
        got = with_gradients(lambda *t, s=selected, m=mask: step(*t, s, m), *tensors, upstream)
        expected = with_gradients(lambda *t, s=selected, n=lengths: 2 * reference(*t, s, 1, n), *tensors, upstream)
        assert_all_close(got, expected, 1e-12)
        results.append(counters["stats"]["unique_graphs"])
    assert results == [1] * 4


def test_routing_anew_and_new_documents_compile_nothing_anew(interpreter):
    interpreter(check_compilation)


def check_layers(routing, positions, compiling):
    """A whole model whose layers are computed again, with these kernels, against the plain dense one."""
    from torch._dynamo.utils import counters

    heads = HeadsConfig(routing=routing, num_shared_heads=(2,), num_active_routed_heads=(2,))
    config = ModelConfig(2, 32, 48, 8, num_key_value_heads=4, head_dim=16, vocab_size=50, heads=heads)
    dense = make_model(config, scale=5, seed=3)
    joined = positions is None  # gradients of shared heads are then written into views of one product
    again = make_model(config, scale=5, seed=3, recompute=True, backends="triton", fused_projections=joined)
    if compiling:
        compile_layers(again, backend="aot_eager")
    counters.clear()
    tokens = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(0))
    found, expected = (loss_and_gradients(model, tokens, positions) for model in (again, dense))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)
    return counters["stats"]["unique_graphs"]


POSITIONS = torch.tensor([[*range(5), *range(11)], [*range(9), *range(7)]])


def test_compiled_and_recomputed_layers_have_one_graph(interpreter):
    assert interpreter(check_layers, "query_norm", POSITIONS, True) == 1


@pytest.mark.parametrize("routing, positions", [("paper", POSITIONS), ("query_norm", None)])
def test_recomputed_layers_compute_what_dense_ones_do(interpreter, routing, positions):
    assert interpreter(check_layers, routing, positions, False) == 0


def kernels_by_guard():
    """The names of the kernels of a training step and of generation: of all, and of those without ``device_of``."""
    from triton.runtime.interpreter import GridExecutor

    guarded, every, outside, launch = [], set(), set(), GridExecutor.__call__

    @contextlib.contextmanager
    def device_of(tensor):
        guarded.append(tensor)
        yield
        guarded.pop()

    def noted(kernel, *arguments, **named):
        for names in [every] if guarded else [every, outside]:
            names.add(kernel.fn.__name__)
        return launch(kernel, *arguments, **named)

    heads = HeadsConfig(num_shared_heads=(1,), num_active_routed_heads=(1,))
    config = ModelConfig(1, 32, 48, 4, head_dim=16, vocab_size=50, heads=heads)
    model = make_model(config, backends="triton", fused_router=True, fused_loss=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_of", device_of)
        patch.setattr(GridExecutor, "__call__", noted)
        loss_and_gradients(model, torch.arange(5)[None])
        list(generate(model, [[1, 2]], 2, (), attention_backend="triton"))
    return every, outside


def test_every_kernel_is_launched_on_the_device_of_its_tensors(interpreter):
    every, outside = interpreter(kernels_by_guard)
    assert not outside and {"compact_kernel", "weights_kernel", "gradient_kernel", "combine_kernel"} <= every


def test_without_a_gpu_the_backend_says_so():
    with pytest.raises(RuntimeError, match="triton: the tensors are on cpu, not on a GPU; choose auto"):
        Problem((20, 1, 4, 4, 16, 0)).results(TRITON)
    with pytest.raises(ValueError, match="triton: head dimension 24, only"):
        Problem((20, 1, 4, 4, 24, 0)).results(TRITON)
