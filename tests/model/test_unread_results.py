"""What nobody reads is not computed: gradients of frozen weights, and the losses of routers without gradients."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.extras.cpu_sparse import ProjectRows, SelectedRows, SumRows
from moh_lm.extras.gumbel import GumbelNoise
from moh_lm.model.batch_context import RouterInputs
from moh_lm.parallel.cross_entropy import linear_cross_entropy
from moh_lm.parallel.layers import JoinedProducts, even_partition
from tests.layers import draw_tokens, vivid_layer

TOKENS, D = 11, 6


class Operations(TorchDispatchMode):
    """Counts operations by name. lengths: of the sums in matrix products."""

    def __enter__(self):
        self.names, self.lengths = Counter(), set()
        return super().__enter__()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        name = function.overloadpacket.__name__
        self.names[name] += 1
        if name == "mm":
            self.lengths.add(arguments[0].shape[1])
        return function(*arguments, **(named or {}))


def cross_entropy(x, weight):
    labels = torch.arange(TOKENS) % len(weight)
    return linear_cross_entropy(x, weight, labels, even_partition(0, len(weight), None), None)[0]


def rows():
    """Those of two heads that every token uses, computed by this thread, since a mode sees no other."""
    torch.set_num_threads(1)
    return SelectedRows(torch.ones(TOKENS, 1, 2))


FUNCTIONS = {
    "loss": cross_entropy,
    "joined products": lambda x, weight: torch.cat(JoinedProducts.apply(x, weight, weight * 2), -1),
    "rows of queries": lambda x, weight: ProjectRows.apply(x.unsqueeze(1), weight, rows()),
    "rows of outputs": lambda x, weight: SumRows.apply(x.repeat(2, 1), weight.repeat(1, 2), rows()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_frozen_weights_have_no_gradient_and_others_the_same(name):
    generator, found = torch.Generator().manual_seed(0), []
    x, weight = (torch.randn(rows, D, generator=generator).requires_grad_() for rows in (TOKENS, 8))
    for matrix in (weight, weight.detach()):
        with Operations() as seen:
            result = FUNCTIONS[name](x, matrix)
            upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
            gradient, *_ = torch.autograd.grad(result, [x, matrix][: 1 + matrix.requires_grad], upstream)
        found.append((gradient, TOKENS in seen.lengths))  # a gradient of a weight sums over tokens
    assert found[0][0].equal(found[1][0])
    assert [sums for _, sums in found] == [True, False]


def router_of(scope="sequence", **heads):
    heads = HeadsConfig(load_balance_scope=scope, router_z_loss=0.1, **heads)
    config = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=8, head_dim=4, heads=heads)
    return vivid_layer(config).router


ROUTERS = {
    "paper": dict(routing="paper", num_shared_heads=(3,), num_active_routed_heads=(2,)),
    "sigmoid": dict(routing="sigmoid", num_shared_heads=(3,), num_active_routed_heads=(2,), scope="micro_batch"),
    "gated": dict(head_selection="gated"),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_compute_no_loss_without_gradients(name):
    router, (x,) = router_of(**ROUTERS[name]), draw_tokens(8)
    with Operations() as training:
        expected = router(x, RouterInputs())
    with torch.no_grad(), Operations() as seen:
        found = router(x, RouterInputs())
    assert found.loss is None and found.rows is None and expected.loss is not None
    assert found.gates.equal(expected.gates)
    of_the_loss = {"sum", "mean", "pow", "logsumexp"}
    assert of_the_loss & training.names.keys() and not of_the_loss & seen.names.keys()


def test_noise_without_a_bias_computes_no_probability():
    router, (x,) = router_of(**ROUTERS["paper"]).train(), draw_tokens(8)
    inputs, softmaxes = RouterInputs(samples=torch.arange(x.shape[1])), []
    for router.noise in (None, GumbelNoise(1.0, 0, 0)):
        with Operations() as seen:
            router(x, inputs)
        softmaxes.append(seen.names["_softmax"])
    assert softmaxes[0] == softmaxes[1] > 0
