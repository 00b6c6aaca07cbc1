"""What an attention layer of LLM-S launches, and the bytes that it moves, counted on tensors without numbers."""

import math
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moh_lm.build import build_model
from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.model.balance import RouterRows, attach_loss
from moh_lm.model.batch_context import RouterInputs

pytest.importorskip("triton", reason="Triton is not installed")


class Operations(TorchDispatchMode):
    """The number of operations other than views and new memory, and the bytes that they read and write."""

    FREE = ("empty", "new_empty", "empty_like", "detach", "alias", "_unsafe_view", "device", "promote_types")

    def __init__(self):
        super().__init__()
        self.number = self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not (function.is_view or function.overloadpacket.__name__ in self.FREE):
            self.number += 1
            self.bytes += sum(map(stored, tree_leaves((args, kwargs, result))))
        return result


def stored(value):
    """The bytes of a tensor; an expanded one has those of what it repeats."""
    if not isinstance(value, torch.Tensor):
        return 0
    sides = zip(value.shape, value.stride(), strict=True)
    return value.element_size() * math.prod(side for side, stride in sides if stride)


@contextmanager
def model_of(num_layers, vocab_size, **settings):
    """A model with half of its heads, in a mode in which tensors hold no numbers."""
    heads = HeadsConfig(num_shared_heads=(3,), num_active_routed_heads=(3,))
    config = ModelConfig(num_layers, 768, 2048, 12, head_dim=64, vocab_size=vocab_size, heads=heads)
    positions = build_model(replace(config, num_layers=1, vocab_size=8)).model.layers[0].self_attn.positions
    positions.table(torch.empty(2048, 8, 1, dtype=torch.bfloat16))  # which all layers share, and other tests too
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)  # tensors without numbers cannot be converted in place
        model = build_model(config, backends="triton", **settings).train()
        torch.set_default_dtype(torch.float32)
        yield model


def counted(**settings):
    """(operations forward, backward, all bytes) of the layer with half of its heads, for 16,384 tokens."""
    with model_of(1, 8, **settings) as model:
        layer = model.model.layers[0].self_attn
        x = torch.empty(2048, 8, 768, dtype=torch.bfloat16, requires_grad=True)
        with Operations() as forward:
            output, routing = layer(x, RouterInputs())
            output = attach_loss(output, routing.loss, routing.rows, RouterRows())
        upstream = torch.empty_like(output)
        with Operations() as backward:
            torch.autograd.grad(output, [x, *layer.parameters()], upstream)
    return forward.number, backward.number, forward.bytes + backward.bytes


def operations_of_a_step(num_layers, **settings):
    """Those of a micro-batch of 16,384 tokens, forward, loss and backward."""
    with model_of(num_layers, 65_536, **settings) as model, Operations() as seen:
        tokens = torch.zeros(8, 2048, dtype=torch.long)
        model(tokens, tokens)[0].backward()
    return seen.number


@pytest.mark.parametrize("settings, most", [({}, 165), ({"fused_router": True, "fused_projections": True}, 107)])
def test_a_layer_adds_few_launches_to_a_step(settings, most):
    one, two = (operations_of_a_step(layers, **settings) for layers in (1, 2))
    assert two - one <= most
    assert one - (two - one) <= 215  # the embedding, and the loss in parts of the tokens


def test_fused_layers_launch_less_and_move_less():
    forward, backward, most = counted()
    assert forward >= 44 and backward >= 50
    forward, backward, fewer = counted(fused_router=True)
    assert forward <= 18 and backward <= 28 and fewer < most
    forward, backward, fewest = counted(fused_router=True, fused_projections=True)
    assert forward <= 17 and backward <= 24 and fewest < 0.95 * fewer
