"""The layers of TransNeXt (Shi 2024, arXiv 2311.17132) and parts of those of DiT, with their first values.

An export contains this very file as moh_layers.py, so it imports nothing but torch, NumPy and the standard library. The
two attention layers of TransNeXt multiply their heads by the gates of a router (arXiv 2410.11842, Eq. 4). They score
keys by direction only. Query i sees n_i keys, and a head with temperature t has the scores

    q_i k_j + b_ij,   k_j = W_k x_j / |W_k x_j|,   q_i = softplus(t) ln(n_i) (u_i + c),   u_i = W_q x_i / |W_q x_i|

c is the query embedding. b_ij is an MLP of the distances between i and j on both axes, on a logarithmic scale.

In ``CosineAttention`` a token sees all tokens. In ``AggregatedAttention`` it sees the 3 x 3 tokens around it and the
image pooled to cells, under one softmax. The score of a neighbour has a learned bias in place of b, and u_i a_j + v_j
is added to its weight, with the learned tokens a and biases v of its place in the window.

Each parameter carries the description of moh_lm/parallel/layers.py. It is whole on every rank.

Shapes: s = side^2 tokens of an image, row by row, b images, d width, h heads, e head dimension, c = cells^2 cells.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

INIT_STD = 0.02
WINDOW = 3
FIRST_SCALE = 1 / 0.24  # initial value of softplus(t)
BIAS_WIDTH = 512  # width of the MLP
FREQUENCIES = 128  # frequencies of a step, half of its features


def describe(parameter, std=None, bound=None, value=0.0, decays=True):
    """Set how a module's parameter starts: N(0, std), uniform within +-bound, or all ``value``. decays: whether it has
    weight decay if it is not a vector."""
    parameter.whole_shape = tuple(parameter.shape)
    parameter.init_std, parameter.init_bound, parameter.init_value = std, bound, value
    parameter.tensor_partition = None
    parameter.tensor_model_parallel = False
    parameter.decays = decays


def described(module, std=None, bound=None, value=0.0, decays=True):
    """Call ``describe`` on the weight of a module, set its bias to start at 0, and return the module."""
    describe(module.weight, std, bound, value, decays)
    if module.bias is not None:
        describe(module.bias)
    return module


def linear(inputs, outputs, std=None, bound=None):
    return described(nn.Linear(inputs, outputs), std, bound)


def layer_norm(width, eps=1e-6):
    return described(nn.LayerNorm(width, eps=eps), value=1.0)


def convolution(inputs, outputs, size, stride=1, groups=1):
    deviation = math.sqrt(2 * groups / (size**2 * outputs))
    return described(nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups), deviation)


class CosineAttention(nn.Module):
    """Attention of all tokens to all tokens. router: returns an object with ``gates`` [s, b, h], None for 1. buffers:
    whether constants are buffers, which stay on the device; transformers 5 would leave them uninitialised on loading.
    """

    def __init__(self, width, heads, side, router, cells=None, buffers=True):
        super().__init__()
        self.shape, self.side, self.has_buffers = (heads, width // heads), side, buffers
        self.temperature = nn.Parameter(torch.empty(heads, 1, 1))
        describe(self.temperature, value=math.log(math.expm1(FIRST_SCALE)), decays=False)
        self.query_embedding = nn.Parameter(torch.empty(heads, 1, width // heads))
        describe(self.query_embedding, INIT_STD, decays=False)
        self.make_projections(width)
        self.proj = linear(width, width, INIT_STD)
        self.cpb_fc1 = described(nn.Linear(2, BIAS_WIDTH), INIT_STD, decays=False)
        self.cpb_fc2 = described(nn.Linear(BIAS_WIDTH, heads), INIT_STD, decays=False)
        self.router = router
        distances, rows = axis_distances(side, cells or side)
        self.keep("distances", distances)
        self.keep("rows", rows)

    def make_projections(self, width):
        self.qkv = linear(width, 3 * width, INIT_STD)

    def keep(self, name, values):
        """Keep a constant, given as an array."""
        if self.has_buffers:
            self.register_buffer(name, torch.as_tensor(values), persistent=False)
        else:
            setattr(self, name, values)

    def forward(self, x, *inputs):
        """Map x [s, b, d], normalised, to the output [s, b, d] and the result of the router for x and ``inputs``."""
        routing = self.router(x, *inputs)
        context = self.attend(x)
        if routing.gates is not None:
            context = context * routing.gates.unsqueeze(-1).to(context.dtype)
        return self.proj(context.flatten(2)), routing

    def attend(self, x):
        """Return H_i of every head, given x [s, b, d]: [s, b, h, e]."""
        query, key, value = self.qkv(x).unflatten(-1, (3, *self.shape)).unbind(2)
        query = self.scaled(F.normalize(query, dim=-1), torch.full((), len(x), device=x.device))
        parts = (part.permute(1, 2, 0, 3) for part in (query, F.normalize(key, dim=-1), value))
        bias = self.position_bias().permute(2, 0, 1)
        return F.scaled_dot_product_attention(*parts, attn_mask=bias, scale=1).permute(2, 0, 1, 3)

    def scaled(self, unit, seen):
        """Return q, given u [s, b, h, e]. seen: n, integers, [] or [s, 1, 1, 1]."""
        wide = torch.promote_types(unit.dtype, torch.float32)
        scale = F.softplus(self.temperature.squeeze(-1).to(wide)) * seen.to(wide).log()
        return ((unit + self.query_embedding.squeeze(1)) * scale).to(unit.dtype)

    def position_bias(self):
        """Return b of all pairs, [s, c, h]; without pooling, every token is a cell."""
        device, dtype = self.query_embedding.device, self.query_embedding.dtype
        distances = torch.as_tensor(self.distances, dtype=dtype, device=device)
        rows = torch.as_tensor(self.rows, device=device)
        table = self.cpb_fc2(F.relu(self.cpb_fc1(torch.cartesian_prod(distances, distances))))  # [pairs, h]
        pairs = rows[:, None, :, None] * len(distances) + rows[None, :, None, :]
        return F.embedding(pairs, table).flatten(0, 1).flatten(1, 2)


class AggregatedAttention(CosineAttention):
    """Attention to the neighbours and to pooled cells. cells: on a side of the image."""

    def __init__(self, width, heads, side, router, cells, buffers=True):
        self.cells = cells
        super().__init__(width, heads, side, router, cells, buffers)
        places = WINDOW**2
        self.relative_pos_bias_local = nn.Parameter(torch.empty(heads, places))
        describe(self.relative_pos_bias_local, 0.0004, decays=False)
        self.learnable_tokens = nn.Parameter(torch.empty(heads, width // heads, places))
        describe(self.learnable_tokens, INIT_STD)
        self.learnable_bias = nn.Parameter(torch.empty(heads, 1, places))
        describe(self.learnable_bias)
        near = np.arange(side)[:, None] + np.arange(WINDOW) - WINDOW // 2  # the neighbours of a token along an axis
        there = (near >= 0) & (near < side)
        self.keep("inside", (there[:, None, :, None] & there[None, :, None]).reshape(side**2, 1, 1, places))

    def make_projections(self, width):
        self.q = linear(width, width, INIT_STD)
        self.kv = linear(width, 2 * width, INIT_STD)
        self.sr = convolution(width, width, 1)
        self.norm = layer_norm(width, eps=1e-5)

    def attend(self, x):
        inside = torch.as_tensor(self.inside, device=x.device)  # neighbours in the image, bool [s, 1, 1, places]
        unit = F.normalize(self.q(x).unflatten(-1, self.shape), dim=-1)
        query = self.scaled(unit, inside.sum(-1, keepdim=True) + self.cells**2)
        key, value = self.keys_and_values(x)
        pooled = F.adaptive_avg_pool2d(F.gelu(self.sr(to_images(x))), self.cells)
        pooled_key, pooled_value = self.keys_and_values(self.norm(to_tokens(pooled)))
        local = torch.stack([(query * near).sum(-1) for near in self.neighbours(key)], dim=-1)  # [s, b, h, places]
        local = (local + self.relative_pos_bias_local).masked_fill(~inside, -torch.inf)
        cells = torch.einsum("sbhe,cbhe->sbhc", query, pooled_key) + self.position_bias().transpose(1, 2).unsqueeze(1)
        wide = torch.promote_types(x.dtype, torch.float32)
        weights = torch.cat((local, cells), dim=-1).softmax(-1, dtype=wide).to(x.dtype)
        local, cells = weights.split((local.shape[-1], cells.shape[-1]), dim=-1)
        local = local + torch.einsum("sbhe,hej->sbhj", unit, self.learnable_tokens) + self.learnable_bias.squeeze(1)
        local = local.masked_fill(~inside, 0)
        context = torch.einsum("sbhc,cbhe->sbhe", cells, pooled_value)
        for weight, near in zip(local.unbind(-1), self.neighbours(value), strict=True):
            context = context + weight.unsqueeze(-1) * near
        return context

    def keys_and_values(self, x):
        """Return unit-length keys and values of tokens or cells [., b, d], both [., b, h, e]."""
        key, value = self.kv(x).unflatten(-1, (2, *self.shape)).unbind(2)
        return F.normalize(key, dim=-1), value

    def neighbours(self, x):
        """Return views of x [s, b, h, e] with each token's neighbours, one for each place in the window, row by row.

        The values of a neighbour outside the image belong to another row, or are 0.
        """
        edge = WINDOW // 2 * (self.side + 1)
        x = F.pad(x, (0, 0, 0, 0, 0, 0, edge, edge))
        starts = [row * self.side + column for row in range(WINDOW) for column in range(WINDOW)]
        return [x[start : start + self.side**2] for start in starts]


def axis_distances(side, cells):
    """Return the distinct distances along an axis from ``side`` tokens to the middles of ``cells``, float64 [n] on a
    logarithmic scale, and the index of each pair's distance, int64 [side, cells]."""
    cell = np.arange(cells)
    middles = (cell * side // cells + -(-(cell + 1) * side // cells) - 1) / 2
    distances, rows = np.unique(np.arange(side)[:, None] - middles, return_inverse=True)
    scaled = 8 / max(1, side - 1) * distances
    return np.sign(scaled) * np.log2(np.abs(scaled) + 1) / 3, rows.reshape(side, cells)


class PatchEmbedding(nn.Module):
    """Overlapping patches: pixels [b, channels, side, side] -> [s, b, d], s = (side / stride)^2."""

    def __init__(self, channels, width, stride):
        super().__init__()
        self.proj = convolution(channels, width, 2 * stride - 1, stride)
        self.norm = layer_norm(width, eps=1e-5)

    def forward(self, pixels):
        return self.norm(to_tokens(self.proj(pixels)))


class ConvolutionalGLU(nn.Module):
    """fc2(gelu(convolution(a)) * b), [a, b] = fc1(x); the convolution is 3 x 3, in each feature: [s, b, d] -> the same.

    inner: features of a.
    """

    def __init__(self, width, inner):
        super().__init__()
        self.fc1 = linear(width, 2 * inner, INIT_STD)
        self.dwconv = nn.ModuleDict({"dwconv": convolution(inner, inner, 3, groups=inner)})
        self.fc2 = linear(inner, width, INIT_STD)

    def forward(self, x):
        gate, x = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.gelu(to_tokens(self.dwconv["dwconv"](to_images(gate)))) * x)


def to_images(x):
    """Map [s, b, d] to [b, d, side, side]."""
    side = math.isqrt(len(x))
    return x.unflatten(0, (side, side)).permute(2, 3, 0, 1)


def to_tokens(images):
    """Map [b, d, side, side] to [s, b, d]."""
    return images.flatten(2).permute(2, 0, 1)


def modulation(d, parts):
    """Return a layer from c [b, d] to [b, parts d] that starts at 0."""
    return nn.Sequential(nn.SiLU(), linear(d, parts * d))


def modulated(x, shift, scale):
    """Normalise x [s, b, d] without weights, then scale and shift it by [b, d]."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def angles(numbers, count):
    """Multiply numbers [n] by frequencies from 1 down to almost 1/10000: float64 [n, count]."""
    frequencies = 10000.0 ** (-torch.arange(count, dtype=torch.float64, device=numbers.device) / count)
    return numbers.double()[:, None] * frequencies


def step_features(t):
    """Return the cosines, then sines, of steps t [b]: float64 [b, 2 FREQUENCIES]."""
    turned = angles(t, FREQUENCIES)
    return torch.cat((turned.cos(), turned.sin()), dim=-1)


def position_table(side, d, dtype, device):
    """Return sines and cosines of the columns, then of the rows, of side x side patches: [s, 1, d]."""
    turned = angles(torch.arange(side, device=device), d // 4)
    waves = torch.cat((turned.sin(), turned.cos()), dim=-1)  # [side, d/2]
    table = torch.cat((waves.repeat(side, 1), waves.repeat_interleave(side, 0)), dim=-1)
    return table.unsqueeze(1).to(dtype)
