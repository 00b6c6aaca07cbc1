"""MoH-DiT against its formula written out image by image, token by token and head by head in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from moh_lm.model.block import modules_of
from moh_lm.model.router import Gates
from moh_lm.model.transformer import compile_layers
from moh_lm.vision.config import DiTConfig, ImageHeadsConfig
from moh_lm.vision.diffusion import Diffusion, image_noise
from moh_lm.vision.dit import DiT, DiTBlock

D, CHANNELS, SIZE, PATCH, CLASSES, LAYERS = 12, 3, 4, 2, 5, 2
CASES = {
    "dense": dict(head_selection="all"),
    "shared and routed": dict(num_shared_heads=(2,), num_active_routed_heads=(1,)),
    "no shared head": dict(num_shared_heads=(0,), num_active_routed_heads=(2,)),
    "a layer of shared heads": dict(num_shared_heads=(4, 2), num_active_routed_heads=(0, 1)),
}


def make_model(heads=(4,), head_dim=None, recompute=False, micro_batches=1, **settings):
    config = DiTConfig(
        input_size=SIZE, in_channels=CHANNELS, patch_size=PATCH, num_classes=CLASSES, hidden_size=D, num_layers=LAYERS,
        num_attention_heads=heads, head_dim=head_dim, heads=ImageHeadsConfig(load_balance_coefficient=0.3, **settings),
    )  # fmt: skip
    model = DiT(config, micro_batches, recompute).double()
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
    return [function(number * 10000 ** (-k / count)) for function in functions for k in range(count)]


def normalised(v, shift, scale):
    return (v - v.mean()) / (v.var(unbiased=False) + 1e-6).sqrt() * (1 + scale) + shift


def head_gates(weights, name, config, index, v):
    """Gates of all heads, probabilities of the routed ones, and the selected ones, for one token."""
    shared, active = config.heads.num_shared_heads[index], config.heads.num_active_routed_heads[index]
    first = torch.zeros(0)
    if shared:
        first = shared * torch.softmax(weights[f"{name}.w_shared"] @ v, 0)
    if not active:
        return first, None, None
    probability = torch.softmax(weights[f"{name}.w_routed"] @ v, 0)
    selected = probability.argsort(descending=True)[:active].tolist()
    total = sum(probability[i] for i in selected)
    others = [active * p / total if i in selected else 0 * p for i, p in enumerate(probability)]
    a1, a2 = 2 * torch.softmax(weights[f"{name}.w_type"] @ v, 0) if shared else (1, 1)
    return torch.stack([*(a1 * gate for gate in first), *(a2 * gate for gate in others)]), probability, selected


def reference(model, x, t, y):
    """What the model says of the images, and the mean of L_b over layers with routed heads."""
    w, config, side = dict(model.named_parameters()), model.config, SIZE // PATCH
    places = [(row, column) for row in range(side) for column in range(side)]
    images, vectors = [], []
    for image, step, label in zip(x, t.tolist(), y, strict=True):
        tokens = []
        for row, column in places:
            patch = image[:, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
            at = waves(column, D // 4, math.sin, math.cos) + waves(row, D // 4, math.sin, math.cos)
            value = (w["x_embedder.proj.weight"] * patch).sum((1, 2, 3)) + w["x_embedder.proj.bias"]
            tokens.append(value + torch.tensor(at))
        images.append(tokens)
        features = torch.tensor(waves(step, 128, math.cos, math.sin))
        inner = F.silu(w["t_embedder.mlp.0.weight"] @ features + w["t_embedder.mlp.0.bias"])
        c = w["t_embedder.mlp.2.weight"] @ inner + w["t_embedder.mlp.2.bias"]
        vectors.append(F.silu(c + w["y_embedder.embedding_table.weight"][label]))
    balances = []
    for index in range(LAYERS):
        name, heads, e = f"blocks.{index}", config.num_attention_heads[index], config.head_dim
        probabilities, selections = [], []
        for image, c in enumerate(vectors):
            changes = w[f"{name}.adaLN_modulation.1.weight"] @ c + w[f"{name}.adaLN_modulation.1.bias"]
            shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = changes.split(D)
            inputs = [normalised(v, shift, scale) for v in images[image]]
            rows = torch.stack([w[f"{name}.attn.qkv.weight"] @ v + w[f"{name}.attn.qkv.bias"] for v in inputs])
            query, key, value = rows.view(len(places), 3, heads, e).unbind(1)
            for token, v in enumerate(inputs):
                gates = torch.ones(heads)
                if config.heads.head_selection == "mixture":
                    gates, probability, selected = head_gates(w, f"{name}.attn.router", config, index, v)
                    probabilities.append(probability)
                    selections.append(selected)
                context = []
                for head in range(heads):
                    share = torch.softmax(key[:, head] @ query[token, head] / math.sqrt(e), 0)
                    context.append(gates[head] * (share @ value[:, head]))
                attention = w[f"{name}.attn.proj.weight"] @ torch.cat(context) + w[f"{name}.attn.proj.bias"]
                v = images[image][token] + gate * attention
                inner = w[f"{name}.mlp.fc1.weight"] @ normalised(v, mlp_shift, mlp_scale) + w[f"{name}.mlp.fc1.bias"]
                inner = inner / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
                images[image][token] = v + mlp_gate * (w[f"{name}.mlp.fc2.weight"] @ inner + w[f"{name}.mlp.fc2.bias"])
        if probabilities and probabilities[0] is not None:
            number, mean = len(probabilities[0]), torch.stack(probabilities).mean(0)
            share = torch.tensor([sum(i in s for s in selections) / len(selections) for i in range(number)])
            balances.append(number * (share * mean).sum())
    said = torch.zeros(len(x), 2 * CHANNELS, SIZE, SIZE)
    for image, c in enumerate(vectors):
        changes = w["final_layer.adaLN_modulation.1.weight"] @ c + w["final_layer.adaLN_modulation.1.bias"]
        for v, (row, column) in zip(images[image], places, strict=True):
            values = w["final_layer.linear.weight"] @ normalised(v, *changes.split(D)) + w["final_layer.linear.bias"]
            patch = values.view(PATCH, PATCH, -1).permute(2, 0, 1)
            said[image, :, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] = patch
    return said, sum(balances) / len(balances) if balances else torch.zeros(())


@pytest.fixture(autouse=True)
def wide():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def gradients(model, *inputs):
    """Loss and {name: gradient} of a micro-batch."""
    model.zero_grad()
    loss, _ = model(*inputs)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_close(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("case", CASES)
def test_the_model_and_its_gradients_are_those_of_the_formula(case):
    heads = dict(heads=(4, 6), head_dim=2) if case == "a layer of shared heads" else {}
    model, (x, t, y, noise) = make_model(**heads, **CASES[case]), make_inputs()
    x_t = model.diffusion.noised(x, t, noise)
    said, balance = reference(model, x_t, t, y)
    torch.testing.assert_close(model.predict(x_t, t, y), said, rtol=1e-9, atol=1e-9)
    loss, found = gradients(model, x, t, y, noise)
    model.zero_grad()
    expected = model.diffusion.losses(lambda *_: said, x, t, y, noise).mean()
    (expected + 0.3 * balance).backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-9)
    assert_close(found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert len(modules_of(model, Gates)) == (0 if case == "dense" else 2)
    rows = [block.rows.take()[:, 0].mean() for block in modules_of(model) if case != "dense"]
    balanced = max(1, len(model.config.routed_layers()))
    torch.testing.assert_close(sum(rows) / balanced + torch.zeros(()), balance.detach(), rtol=1e-9, atol=0)


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
    one, two = (make_model(micro_batches=number, **CASES["shared and routed"]) for number in (1, 2))
    (_, first), (_, second) = gradients(one, *make_inputs()), gradients(two, *make_inputs())
    for model in (one, two):
        for router in modules_of(model, Gates):
            router.balance_scale = 0.0
    (_, alone) = gradients(one, *make_inputs())
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
