"""MoH-ViT against its formulas written out pixel by pixel and head by head in float64."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from moh_lm.model.balance import BALANCE
from moh_lm.model.batch_context import RouterInputs
from moh_lm.model.block import modules_of
from moh_lm.model.router import Gates
from moh_lm.model.selection import SelectionReplay
from moh_lm.model.transformer import compile_layers
from moh_lm.vision.layers import to_images, to_tokens
from moh_lm.vision.model_config import ImageHeadsConfig, ViTConfig
from moh_lm.vision.routers import routed_layers
from moh_lm.vision.transnext import Block, TransNeXt, make_attention
from tests.models import attend
from tests.reference import Routing, route

BATCH, CLASSES = 3, 5
MIXTURE = ImageHeadsConfig(
    num_shared_heads=(2, 1, 0, 2), num_active_routed_heads=(0, 2, 2, 3), load_balance_coefficient=1.0
)
DENSE = ImageHeadsConfig(head_selection="all")


def make_model(heads=MIXTURE, recompute=False, dtype=torch.float64, **options):
    settings = dict(
        image_size=32, in_channels=1, num_classes=CLASSES, hidden_sizes=(8, 16, 16, 24), depths=(1, 1, 2, 1),
        num_attention_heads=(2, 4, 4, 6), mlp_ratios=(2, 2, 2, 2), sr_ratios=(4, 2, 2, 1), drop_path=0.4, heads=heads,
    )  # fmt: skip
    model = TransNeXt(ViTConfig(**{**settings, **options}), recompute=recompute)
    return scattered(model).to(dtype)


@torch.no_grad()
def scattered(module):
    """Random values for every parameter, so that nothing is 0 or 1 by its beginning."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(0, 0.4)
    return module


def make_layer(side, cells, heads=MIXTURE):
    """An attention layer of 4 heads of 4 features on side^2 tokens, and its input."""
    config = ViTConfig(
        image_size=4 * side, hidden_sizes=(16,), depths=(1,), num_attention_heads=(4,), mlp_ratios=(2,),
        heads=replace(heads, num_shared_heads=(1,), num_active_routed_heads=(2,)),
    )  # fmt: skip
    attention = scattered(make_attention(*next(routed_layers(config, 0)), side // cells if cells else 1)).double()
    return attention, torch.randn(side * side, BATCH, 16, dtype=torch.float64)


def draw_inputs(dtype=torch.float64, size=32):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 1, size, size, generator=generator, dtype=dtype)
    targets = torch.rand(BATCH, CLASSES, generator=generator, dtype=dtype).softmax(-1)
    return images, targets


def draw_branches(model):
    return torch.rand(BATCH, 2 * model.num_layers, generator=torch.Generator().manual_seed(2))


def norm(x, layer, eps):
    return F.layer_norm(x, x.shape[-1:], layer.weight, layer.bias, eps)


def distance(difference, side):
    scaled = 8 * difference / (side - 1)
    return math.copysign(math.log2(abs(scaled) + 1) / math.log2(8), scaled)


def cell_pixels(cell, cells, side):
    """The pixels of an axis that a cell is the mean of."""
    return range(math.floor(cell * side / cells), math.ceil((cell + 1) * side / cells))


def pooled_by_hand(attention, image, side, cells):
    """{(row, column): pooled input [d]} of an image {(row, column): [d]}."""
    weight, bias = attention.sr.weight[:, :, 0, 0], attention.sr.bias
    found = {}
    for place in ((row, column) for row in range(cells) for column in range(cells)):
        rows, columns = (cell_pixels(cell, cells, side) for cell in place)
        pixels = [F.gelu(weight @ image[row, column] + bias) for row in rows for column in columns]
        found[place] = norm(sum(pixels) / len(pixels), attention.norm, 1e-5)
    return found


def position_bias(attention, head, query, middle, side):
    offsets = [distance(a - b, side) for a, b in zip(query, middle, strict=True)]
    hidden = attention.cpb_fc1(torch.tensor(offsets, dtype=torch.float64)).clamp_min(0)
    return attention.cpb_fc2.weight[head] @ hidden + attention.cpb_fc2.bias[head]


def attend_by_hand(attention, image, side, cells):
    """{(row, column): context [h, e]} of an image {(row, column): [d]}. cells: 0 for attention to all tokens."""
    heads, size = attention.shape
    if cells:
        weights = (attention.q.weight, *attention.kv.weight.chunk(2))
        biases = (attention.q.bias, *attention.kv.bias.chunk(2))
        far = pooled_by_hand(attention, image, side, cells)
    else:
        weights, biases = attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3)
        far = image

    def project(part, pixel, head):
        rows = slice(head * size, (head + 1) * size)
        return weights[part][rows] @ pixel + biases[part][rows]

    def middle(place):
        pixels = [cell_pixels(cell, cells or side, side) for cell in place]
        return [sum(axis) / len(axis) for axis in pixels]

    context = {place: torch.zeros(heads, size, dtype=torch.float64) for place in image}
    for (row, column), pixel in image.items():
        window = [(row + a, column + b) for a in (-1, 0, 1) for b in (-1, 0, 1)] if cells else []
        window = {place: index for index, place in enumerate(window) if place in image}
        for head in range(heads):
            direction = F.normalize(project(0, pixel, head), dim=0)
            scale = math.log(len(window) + len(far)) * math.log1p(math.exp(attention.temperature[head]))
            query = scale * (direction + attention.query_embedding[head, 0])
            scores, values, extra = [], [], []
            for place, index in window.items():
                score = query @ F.normalize(project(1, image[place], head), dim=0)
                scores.append(score + attention.relative_pos_bias_local[head, index])
                values.append(project(2, image[place], head))
                learned = direction @ attention.learnable_tokens[head, :, index]
                extra.append(learned + attention.learnable_bias[head, 0, index])
            for place, cell in far.items():
                bias = position_bias(attention, head, (row, column), middle(place), side)
                scores.append(query @ F.normalize(project(1, cell, head), dim=0) + bias)
                values.append(project(2, cell, head))
                extra.append(0)
            total = sum(score.exp() for score in scores)
            for score, value, more in zip(scores, values, extra, strict=True):
                context[row, column][head] += (score.exp() / total + more) * value
    return context


@torch.no_grad()
@pytest.mark.parametrize("heads", [MIXTURE, DENSE], ids=["mixture", "dense"])
@pytest.mark.parametrize("side, cells", [(4, 2), (3, 1), (5, 2), (3, 0)], ids=["even", "one cell", "overlap", "all"])
def test_attention_is_its_formula_for_every_pixel_and_head(side, cells, heads):
    attention, x = make_layer(side, cells, heads)
    output, _ = attend(attention, x)
    routing = Routing("released" if heads is MIXTURE else "all", heads=4, shared=1, active=2)
    weights = {name: weight.numpy() for name, weight in attention.router.named_parameters()}
    gates = [[route(routing, one, weights).gates for one in token] for token in x.numpy()]
    for sample in range(BATCH):
        image = {divmod(token, side): x[token, sample] for token in range(len(x))}
        for (row, column), context in attend_by_hand(attention, image, side, cells).items():
            token = row * side + column
            gated = torch.cat([gate * head for gate, head in zip(gates[token][sample], context, strict=True)])
            expected = attention.proj.weight @ gated + attention.proj.bias
            torch.testing.assert_close(output[token, sample], expected, rtol=1e-9, atol=1e-9)


def convolve(images, layer, stride, groups=1):
    return F.conv2d(images, layer.weight, layer.bias, stride, layer.weight.shape[-1] // 2, groups=groups)


def model_by_hand(model, images, kept):
    """The logits. kept: [layers, 2, b], factors of the branches."""
    x, index = images, 0
    for stage in range(1, 5):
        embed, blocks, last = (getattr(model, f"{name}{stage}") for name in ("patch_embed", "block", "norm"))
        x = norm(to_tokens(convolve(x, embed.proj, 4 if stage == 1 else 2)), embed.norm, 1e-5)
        for block in blocks:
            attention, mlp = kept[index].unsqueeze(-1)
            x = x + attention * attend(block.attn, norm(x, block.norm1, 1e-6))[0]
            inner = norm(x, block.norm2, 1e-6) @ block.mlp.fc1.weight.t() + block.mlp.fc1.bias
            gate, value = inner.tensor_split(2, -1)
            gate = to_tokens(convolve(to_images(gate), block.mlp.dwconv["dwconv"], 1, groups=gate.shape[-1]))
            gate = gate * (1 + torch.erf(gate / math.sqrt(2))) / 2
            x = x + mlp * ((gate * value) @ block.mlp.fc2.weight.t() + block.mlp.fc2.bias)
            index += 1
        x = to_images(norm(x, last, 1e-6))
    return x.mean((2, 3)) @ model.head.weight.t() + model.head.bias


@torch.no_grad()
@pytest.mark.parametrize("size", [32, 64])
def test_the_model_is_its_formula_with_dropped_branches(size):
    model, (images, targets) = make_model(image_size=size), draw_inputs(size=size)
    draws = draw_branches(model)
    shares = torch.tensor([0.4 * layer / 4 for layer in range(5)])[:, None, None]
    kept = (draws.t().unflatten(0, (5, 2)) >= shares).double() / (1 - shares.double())
    assert 0 < (kept == 0).sum() < kept.numel() / 2
    logits = model_by_hand(model, images, kept)
    torch.testing.assert_close(model(images, draws=draws), logits, rtol=1e-6, atol=1e-6)
    expected = -(targets * (logits.exp() / logits.exp().sum(-1, keepdim=True)).log()).sum(-1)
    loss, losses = model(images, targets, draws)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(loss, losses.mean())
    whole = model_by_hand(model, images, torch.ones_like(kept))
    torch.testing.assert_close(model.eval()(images, draws=draws), whole, rtol=1e-9, atol=1e-9)


def gradients(model, dtype=torch.float64):
    images, targets = draw_inputs(dtype)
    loss, _ = model(images, targets, draw_branches(model))
    loss.backward()
    rows = [rows for block in modules_of(model) if (rows := block.rows.take()) is not None]
    return [loss.detach(), *rows, *(parameter.grad for parameter in model.parameters())]


def test_recomputation_gives_the_same_gradients():
    pairs = zip(gradients(make_model(recompute=True)), gradients(make_model()), strict=True)
    assert all(torch.equal(again, once) for again, once in pairs)


def test_recomputation_replays_the_selection():
    block = make_model().block4[0]
    x = torch.randn(1, BATCH, 24, dtype=torch.float64)
    other = 1 - block.block(x, None, RouterInputs(), None)[1].selection
    _, again = block.block(x, None, RouterInputs(), SelectionReplay(torch.tensor(True), other))
    assert torch.equal(again.selection, other)


def test_compiled_layers_give_the_same_gradients():
    heads = replace(MIXTURE, num_shared_heads=(1,), num_active_routed_heads=(1,))
    sizes = dict(hidden_sizes=(8, 16), depths=(1, 1), num_attention_heads=(2, 4), sr_ratios=(4, 1))
    model = make_model(heads, **sizes)
    compile_layers(model, "aot_eager", Block)
    torch.testing.assert_close(gradients(model), gradients(make_model(heads, **sizes)))


def test_a_router_learns_from_task_and_balance_losses():
    model = make_model()
    weight = modules_of(model, Gates)[-1].w_routed

    def whole_loss():
        loss, *rows = gradients(model)[: 1 + len(modules_of(model, Gates))]
        return loss + sum(row[:, BALANCE].mean() for row in rows) / 4

    whole_loss()
    gradient = weight.grad[1, 2].clone()
    with torch.no_grad():
        weight[1, 2] += 1e-6
    above = whole_loss()
    with torch.no_grad():
        weight[1, 2] -= 2e-6
    torch.testing.assert_close(gradient, (above - whole_loss()) / 2e-6, rtol=1e-4, atol=1e-8)


def test_bf16_is_close_to_fp32_and_trains_a_mixture():
    wide = make_model(DENSE, dtype=torch.float32)
    narrow = copy.deepcopy(wide).bfloat16()
    images, targets = draw_inputs(torch.float32)
    (expected, losses), (found, narrow_losses) = wide(images, targets), narrow(images, targets)
    assert narrow_losses.dtype == torch.float32 and narrow(images).dtype == torch.bfloat16
    torch.testing.assert_close(narrow_losses, losses, rtol=0.1, atol=0.1)
    expected.backward()
    found.backward()
    for one, other in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert (one.grad - other.grad).norm() < 0.2 * one.grad.norm() + 1e-3
    assert all(part.isfinite().all() for part in gradients(make_model(dtype=torch.bfloat16), torch.bfloat16))


@torch.no_grad()
def test_a_mixture_whose_gates_are_1_is_the_dense_model():
    model, dense, (images, _) = make_model(), make_model(DENSE), draw_inputs()
    dense.load_state_dict({name: value for name, value in model.state_dict().items() if "router" not in name})
    assert not torch.allclose(model(images), dense(images), rtol=1e-3)
    model.batch.begin(True)  # a dense warm-up
    assert torch.equal(model(images), dense(images))


def test_first_values_are_those_of_transnext():
    model = make_model()
    model.initialize(5)
    attention = model.block1[0].attn
    scale = torch.full((2, 1, 1), 1 / 0.24, dtype=torch.float64)
    torch.testing.assert_close(F.softplus(attention.temperature), scale, rtol=1e-6, atol=0)
    deviations = {"patch_embed1.proj": math.sqrt(2 / (49 * 8)), "block4.0.mlp.dwconv.dwconv": math.sqrt(2 / 9)}
    deviations |= {"block1.0.attn.sr": math.sqrt(2 / 8), "block4.0.mlp.fc1": 0.02, "block1.0.attn.cpb_fc1": 0.02}
    for name, deviation in deviations.items():
        weight = model.get_submodule(name).weight
        assert abs(weight.std() / deviation - 1) < 4 / math.sqrt(2 * weight.numel())
        assert not model.get_submodule(name).bias.any()


def test_weight_decay_spares_embeddings_and_temperatures():
    spared = [name for name, parameter in make_model().named_parameters() if not getattr(parameter, "decays", True)]
    spared = {name.split("attn.")[-1].removesuffix(".weight") for name in spared}
    assert spared == {"query_embedding", "relative_pos_bias_local", "temperature", "cpb_fc1", "cpb_fc2"}
