"""MoH-DiT against its formula, image by image and token by token, with the heads of tests/reference.py."""

import math

import numpy as np
import pytest
import torch

from moh_lm.model.block import modules_of
from moh_lm.model.router import Gates
from moh_lm.model.transformer import compile_layers
from moh_lm.vision.diffusion import Diffusion, image_noise
from moh_lm.vision.dit import DiT, DiTBlock
from moh_lm.vision.model_config import DiTConfig, ImageHeadsConfig
from tests.reference import Routing, assert_slopes, attention_maps, balance_loss, route, sigmoid, weighted_heads

D, CHANNELS, SIZE, PATCH, CLASSES, LAYERS = 12, 3, 4, 2, 5, 2
CASES = {
    "dense": dict(head_selection="all"),
    "shared and routed": dict(num_shared_heads=(2,), num_active_routed_heads=(1,)),
    "no shared head": dict(num_shared_heads=(0,), num_active_routed_heads=(2,)),
    "a layer of shared heads": dict(num_shared_heads=(4, 2), num_active_routed_heads=(0, 1)),
}


def make_model(heads=(4,), head_dim=None, recompute=False, micro_batches=1, beta=0.3, **settings):
    config = DiTConfig(
        input_size=SIZE, in_channels=CHANNELS, patch_size=PATCH, num_classes=CLASSES, hidden_size=D, num_layers=LAYERS,
        num_attention_heads=heads, head_dim=head_dim, heads=ImageHeadsConfig(load_balance_coefficient=beta, **settings),
    )  # fmt: skip
    model = DiT(config, recompute).double()
    model.batch.begin(False, micro_batches)
    model.initialize(seed=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.train()


def make_inputs(batch=3):
    generator = torch.Generator().manual_seed(1)
    x, noise = torch.randn(2, batch, CHANNELS, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return x, torch.tensor([0, 999, 421])[:batch], torch.tensor([CLASSES, 0, 3])[:batch], noise


def waves(number, count, *functions):
    return np.array([function(number * 10000 ** (-k / count)) for function in functions for k in range(count)])


def silu(v):
    return v * sigmoid(v)


def normalised(v, shift, scale):
    centred = v - v.mean()
    return centred / np.sqrt((centred * centred).mean() + 1e-6) * (1 + scale) + shift


def patch_of(row, column):
    return slice(None), slice(row * PATCH, (row + 1) * PATCH), slice(column * PATCH, (column + 1) * PATCH)


def reference(config, weights, x, t, y):
    """What the model says of the images, and the mean of L_b over layers with routed heads; weights: by name."""

    def linear(name, v):
        weight = weights[f"{name}.weight"]
        return weight.reshape(len(weight), -1) @ v.flatten() + weights[f"{name}.bias"]

    places = list(np.ndindex(SIZE // PATCH, SIZE // PATCH))
    images, vectors, balances = [], [], []
    for image, step, label in zip(x, t, y, strict=True):
        at = [[waves(number, D // 4, np.sin, np.cos) for number in (column, row)] for row, column in places]
        tokens = [linear("x_embedder.proj", image[patch_of(*place)]) for place in places]
        images.append([token + np.concatenate(both) for token, both in zip(tokens, at, strict=True)])
        inner = silu(linear("t_embedder.mlp.0", waves(step, 128, np.cos, np.sin)))
        vectors.append(silu(linear("t_embedder.mlp.2", inner) + weights["y_embedder.embedding_table.weight"][label]))
    for index in range(LAYERS):
        name, routing = f"blocks.{index}", Routing("all", config.num_attention_heads[index])
        if config.heads.head_selection == "mixture":
            shared, active = config.heads.num_shared_heads[index], config.heads.num_active_routed_heads[index]
            routing = Routing("released", routing.heads, shared, active)
        router = {key.split(".")[-1]: weight for key, weight in weights.items() if f"{name}.attn.router." in key}
        routes = []
        for image, c in enumerate(vectors):
            shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = np.split(linear(f"{name}.adaLN_modulation.1", c), 6)
            inputs = [normalised(v, shift, scale) for v in images[image]]
            rows = np.array([linear(f"{name}.attn.qkv", v) for v in inputs])
            query, key, value = rows.reshape(len(inputs), 3, routing.heads, -1).swapaxes(0, 1)
            routes.append([route(routing, v, router) for v in inputs])
            maps = attention_maps(query, key, lambda t, i: range(len(places)))
            gates = np.array([of_token.gates for of_token in routes[-1]])
            attention = weighted_heads(maps, value, gates, weights[f"{name}.attn.proj.weight"])
            for token, v in enumerate(images[image]):
                v = v + gate * (attention[token] + weights[f"{name}.attn.proj.bias"])
                inner = linear(f"{name}.mlp.fc1", normalised(v, mlp_shift, mlp_scale))
                inner = inner / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner * inner * inner)))
                images[image][token] = v + mlp_gate * linear(f"{name}.mlp.fc2", inner)
        balances.append(balance_loss(routing, sum(routes, [])))
    said = np.zeros((len(x), 2 * CHANNELS, SIZE, SIZE), np.result_type(*weights.values()))
    for image, c in enumerate(vectors):
        changes = np.split(linear("final_layer.adaLN_modulation.1", c), 2)
        for v, place in zip(images[image], places, strict=True):
            values = linear("final_layer.linear", normalised(v, *changes))
            said[image][patch_of(*place)] = values.reshape(PATCH, PATCH, -1).transpose(2, 0, 1)
    balances = [balance for balance in balances if balance is not None]
    return said, sum(balances) / max(1, len(balances))


def gradients(model, *inputs):
    """Loss and {name: gradient} of a micro-batch."""
    model.zero_grad()
    loss, _ = model(*inputs)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("case", ["dense", "no shared head", "a layer of shared heads"])
def test_the_model_and_its_gradients_are_those_of_the_formula(case):
    heads = dict(heads=(4, 6), head_dim=2) if case == "a layer of shared heads" else {}
    model, (x, t, y, noise) = make_model(**heads, **CASES[case]), make_inputs(batch=2)
    x_t = model.diffusion.noised(x, t, noise)
    inputs = x_t.numpy(), t.tolist(), y.tolist()
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    said, balance = reference(model.config, weights, *inputs)
    np.testing.assert_allclose(model.predict(x_t, t, y).detach(), said, rtol=1e-9, atol=1e-9)
    loss, found = gradients(model, x, t, y, noise)
    said = torch.from_numpy(said).requires_grad_()
    expected = model.diffusion.losses(lambda *_: said, x, t, y, noise).mean()
    (upstream,) = torch.autograd.grad(expected, said)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-9)

    def objective(weights):
        said, balance = reference(model.config, weights, *inputs)
        return (said * upstream.numpy()).sum() + 0.3 * balance

    assert_slopes(objective, weights, {name: gradient.numpy() for name, gradient in found.items()}, 1e-9, 1e-9)
    assert len(modules_of(model, Gates)) == (0 if case == "dense" else 2)
    rows = [block.rows.take()[:, 0].mean().item() for block in modules_of(model) if case != "dense"]
    assert sum(rows) / max(1, len(model.config.routed_layers())) == pytest.approx(balance, rel=1e-9)


def test_a_mixture_of_all_heads_with_zero_scores_is_dense():
    dense = make_model(head_selection="all")
    mixture = make_model(num_shared_heads=(1,), num_active_routed_heads=(3,))
    missing, _ = mixture.load_state_dict(dense.state_dict(), strict=False)
    with torch.no_grad():
        for name in missing:
            mixture.get_parameter(name).zero_()
    x, t, y, _ = make_inputs()
    torch.testing.assert_close(mixture.predict(x, t, y), dense.predict(x, t, y))


def test_recomputed_activations_give_the_same_gradients():
    kept, again = (make_model(recompute=recompute, **CASES["shared and routed"]) for recompute in (False, True))
    expected, found = gradients(kept, *make_inputs()), gradients(again, *make_inputs())
    assert kept.blocks[1].recompute is False and again.blocks[1].recompute is True
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


def test_micro_batches_share_the_balance_loss():
    settings = dict(micro_batches=1), dict(micro_batches=2), dict(beta=0.0)
    models = [make_model(**CASES["shared and routed"], **setting) for setting in settings]
    first, second, alone = (gradients(model, *make_inputs())[1] for model in models)
    name = "blocks.0.attn.router.w_routed"
    torch.testing.assert_close(first[name] - alone[name], 2 * (second[name] - alone[name]))


def test_compiled_blocks_give_the_same_gradients():
    plain, compiled = make_model(**CASES["a layer of shared heads"]), make_model(**CASES["a layer of shared heads"])
    compile_layers(compiled, "aot_eager", DiTBlock)
    assert_close(gradients(compiled, *make_inputs())[1], gradients(plain, *make_inputs())[1])


def test_images_are_drawn_with_guidance_away_from_no_class():
    model, y = make_model(**CASES["shared and routed"]).eval(), torch.tensor([1, 4])
    noises = image_noise(5, [7, 8], (CHANNELS, SIZE, SIZE), "cpu")
    expected = Diffusion(1000, 3).sample(model.predict, y, noises, no_class=CLASSES, cfg_scale=2.0)
    torch.testing.assert_close(model.draw(y, [7, 8], seed=5, steps=3, cfg_scale=2.0), expected)


def test_bf16_says_about_the_same():
    model, (x, t, y, noise) = make_model(**CASES["dense"]), make_inputs()
    expected = model.predict(x, t, y)
    half = make_model(**CASES["dense"]).bfloat16()
    found = half.predict(x.float(), t, y)
    assert found.dtype == torch.bfloat16
    assert ((found - expected).norm() / expected.norm()).item() < 0.05
    loss, _ = gradients(half, x.float(), t, y, noise.float())
    assert loss.dtype == torch.float32 and loss.isfinite()


def test_first_values_are_those_of_dit():
    config = DiTConfig(
        input_size=8, num_classes=400, hidden_size=128, num_layers=1, num_attention_heads=(8,),
        heads=ImageHeadsConfig(num_shared_heads=(4,), num_active_routed_heads=(2,)),
    )  # fmt: skip
    model = DiT(config)
    model.initialize(seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "adaLN" in name or "final" in name:
            assert not parameter.any(), name
        elif "t_embedder" in name or "y_embedder" in name:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            expected = torch.nn.init.xavier_uniform_(torch.empty(parameter.flatten(1).shape))
            assert parameter.abs().max().item() == pytest.approx(expected.abs().max().item(), rel=0.05), name
            assert parameter.std().item() == pytest.approx(expected.std().item(), rel=0.1), name
