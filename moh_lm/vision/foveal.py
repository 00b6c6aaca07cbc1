"""The attention layers of TransNeXt (Shi 2024, arXiv 2311.17132), with a gate per head (arXiv 2410.11842, Eq. 4).

Both score keys by direction only. Query i sees n_i keys, and a head with temperature t has the scores

    q_i k_j + b_ij,   k_j = W_k x_j / |W_k x_j|,   q_i = softplus(t) ln(n_i) (u_i + c),   u_i = W_q x_i / |W_q x_i|

c is the query embedding. b_ij is an MLP of the distances between i and j on both axes, on a logarithmic scale.

In ``CosineAttention`` a token sees all tokens. In ``AggregatedAttention`` it sees the 3 x 3 tokens around it and the
image pooled to cells, under one softmax. The score of a neighbour has a learned bias in place of b, and u_i a_j + v_j
is added to its weight, with the learned tokens a and biases v of its place in the window.

Shapes: s = side^2 tokens of an image, row by row, b images, d width, h heads, e head dimension, c = cells^2 cells.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from moh_lm.model.router import AllHeads, HeadRouter
from moh_lm.model.transformer import INIT_STD
from moh_lm.vision.parameters import describe, described, layer_norm, linear

WINDOW = 3
FIRST_SCALE = 1 / 0.24  # initial value of softplus(t)
BIAS_WIDTH = 512  # width of the MLP


class CosineAttention(nn.Module):
    """Attention of all tokens to all tokens. layer: ``ImageLayer``. loss_terms: see ``HeadRouter``."""

    def __init__(self, layer, loss_terms, cells=None):
        super().__init__()
        heads, width = layer.num_attention_heads, layer.hidden_size
        self.shape = heads, layer.head_dim
        self.side = math.isqrt(layer.tokens)
        temperature = math.log(math.expm1(FIRST_SCALE))
        self.temperature = describe(nn.Parameter(torch.empty(heads, 1, 1)), value=temperature, decays=False)
        embedding = nn.Parameter(torch.empty(heads, 1, layer.head_dim))
        self.query_embedding = describe(embedding, INIT_STD, decays=False)
        self.make_projections(width)
        self.proj = linear(width, width, INIT_STD)
        self.cpb_fc1 = described(nn.Linear(2, BIAS_WIDTH), INIT_STD, decays=False)
        self.cpb_fc2 = described(nn.Linear(BIAS_WIDTH, heads), INIT_STD, decays=False)
        self.router = AllHeads()
        if layer.routed:
            self.router = HeadRouter(layer, layer.index, INIT_STD, loss_terms=loss_terms)
        distances, rows = axis_distances(self.side, cells or self.side)
        self.register_buffer("distances", torch.as_tensor(distances), persistent=False)
        self.register_buffer("rows", torch.as_tensor(rows), persistent=False)

    def make_projections(self, width):
        self.qkv = linear(width, 3 * width, INIT_STD)

    def forward(self, x, inputs, replay=None):
        """Map x [s, b, d], normalised, to the output [s, b, d] and the ``RouterOutput``. inputs: ``RouterInputs``."""
        routing = self.router(x, inputs, replay)
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
        distances = self.distances.to(self.query_embedding.dtype)
        table = self.cpb_fc2(F.relu(self.cpb_fc1(torch.cartesian_prod(distances, distances))))  # [pairs, h]
        pairs = self.rows[:, None, :, None] * len(distances) + self.rows[None, :, None, :]
        return F.embedding(pairs, table).flatten(0, 1).flatten(1, 2)


class AggregatedAttention(CosineAttention):
    """Attention to the neighbours and to pooled cells. sr_ratio: side over cells, rounded down."""

    def __init__(self, layer, loss_terms, sr_ratio):
        self.cells = math.isqrt(layer.tokens) // sr_ratio
        super().__init__(layer, loss_terms, self.cells)
        (heads, head_dim), places = self.shape, WINDOW**2
        local = nn.Parameter(torch.empty(heads, places))
        self.relative_pos_bias_local = describe(local, 0.0004, decays=False)
        self.learnable_tokens = describe(nn.Parameter(torch.empty(heads, head_dim, places)), INIT_STD)
        self.learnable_bias = describe(nn.Parameter(torch.empty(heads, 1, places)))
        inside = F.unfold(torch.ones(1, 1, self.side, self.side), WINDOW, padding=WINDOW // 2)[0].t() > 0
        self.register_buffer("inside", inside[:, None, None], persistent=False)  # [s, 1, 1, places]

    def make_projections(self, width):
        self.q = linear(width, width, INIT_STD)
        self.kv = linear(width, 2 * width, INIT_STD)
        self.sr = convolution(width, width, 1)
        self.norm = layer_norm(width, eps=1e-5)

    def attend(self, x):
        unit = F.normalize(self.q(x).unflatten(-1, self.shape), dim=-1)
        query = self.scaled(unit, self.inside.sum(-1, keepdim=True) + self.cells**2)
        key, value = self.keys_and_values(x)
        pooled = F.adaptive_avg_pool2d(F.gelu(self.sr(to_images(x))), self.cells)
        pooled_key, pooled_value = self.keys_and_values(self.norm(to_tokens(pooled)))
        local = torch.stack([(query * near).sum(-1) for near in self.neighbours(key)], dim=-1)  # [s, b, h, places]
        local = (local + self.relative_pos_bias_local).masked_fill(~self.inside, -torch.inf)
        cells = torch.einsum("sbhe,cbhe->sbhc", query, pooled_key) + self.position_bias().transpose(1, 2).unsqueeze(1)
        wide = torch.promote_types(x.dtype, torch.float32)
        weights = torch.cat((local, cells), dim=-1).softmax(-1, dtype=wide).to(x.dtype)
        local, cells = weights.split((local.shape[-1], cells.shape[-1]), dim=-1)
        local = local + torch.einsum("sbhe,hej->sbhj", unit, self.learnable_tokens) + self.learnable_bias.squeeze(1)
        local = local.masked_fill(~self.inside, 0)
        context = torch.einsum("sbhc,cbhe->sbhe", cells, pooled_value)
        for weight, near in zip(local.unbind(-1), self.neighbours(value), strict=True):
            context = context + weight.unsqueeze(-1) * near
        return context

    def keys_and_values(self, x):
        """Return unit-length keys and values of tokens or cells [., b, d], both [., b, h, e]."""
        key, value = self.kv(x).unflatten(-1, (2, *self.shape)).unbind(2)
        return F.normalize(key, dim=-1), value

    def neighbours(self, x):
        """Yield views of x [s, b, h, e] with each token's neighbours, one for each place in the window, row by row.

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


def to_images(x):
    """Map [s, b, d] to [b, d, side, side]."""
    side = math.isqrt(len(x))
    return x.unflatten(0, (side, side)).permute(2, 3, 0, 1)


def to_tokens(images):
    """Map [b, d, side, side] to [s, b, d]."""
    return images.flatten(2).permute(2, 0, 1)


def convolution(inputs, outputs, size, stride=1, groups=1):
    deviation = math.sqrt(2 * groups / (size**2 * outputs))
    return described(nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups), deviation)
