"""``--fused-projections``: fewer products, and what separate ones compute."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.model.transformer import compile_layers
from tests.models import draw_zeros, loss_and_gradients, make_model

SIZES = dict(num_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=8, head_dim=4, vocab_size=37)
MODELS = {
    "all": (dict(head_selection="all"), dict(num_key_value_heads=2, qk_norm=True)),
    "sigmoid": (dict(num_shared_heads=(2,), num_active_routed_heads=(2,)), {}),
    "query norm": (dict(routing="query_norm"), dict(num_key_value_heads=4)),
    "in groups": (dict(num_shared_heads=(0,), num_active_routed_heads=(2,), routing_unit="head_in_group"),
                  dict(num_key_value_heads=2)),
    "gates of features": (dict(head_selection="all"), dict(element_gates=True)),
    "several widths": (dict(num_shared_heads=(2,)), dict(head_dims=(8, 8, 8, 4, 4, 2, 2, 8), head_dim=8)),
    "latent": (dict(num_shared_heads=(2,)), dict(attention="latent", kv_lora_rank=12, qk_rope_head_dim=4)),
}  # fmt: skip
TOKENS = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(0))


def pair(name, **settings):
    heads, own = MODELS[name]
    config = ModelConfig(**SIZES | own, heads=HeadsConfig(**heads))
    backends = "groups" if config.chooses_in_groups else "dense"
    return [draw_zeros(make_model(config, scale=10, seed=1, backends=backends, fused_projections=fused, **settings))
            for fused in (True, False)]  # fmt: skip


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_joined_products_give_the_same_loss_and_gradients(name, recompute):
    joined, separate = (loss_and_gradients(model, TOKENS) for model in pair(name, recompute=recompute))
    torch.testing.assert_close(joined, separate, rtol=1e-11, atol=1e-12)


def test_a_compiled_layer_joins_its_products():
    model, separate = pair("sigmoid")
    torch._dynamo.reset()
    compile_layers(model, "aot_eager")
    torch.testing.assert_close(
        loss_and_gradients(model, TOKENS), loss_and_gradients(separate, TOKENS), rtol=1e-11, atol=1e-12
    )


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        self.found[function.overloadpacket._qualified_op_name] += 1
        return result

    def __enter__(self):
        self.found = Counter()
        return super().__enter__()


def test_a_layer_makes_four_products_in_place_of_seven():
    def products(model):
        with Counted() as counted:
            loss_and_gradients(model, TOKENS)
        return counted.found["aten::mm"]

    joined, separate = map(products, pair("all"))
    layers, kinds = 2, 3  # outputs, and the gradients of inputs and weights
    assert separate - joined == 3 * kinds * layers
