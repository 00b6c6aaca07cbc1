"""MoH-DiT: a transformer that predicts the noise in an image, with patches as tokens (paper, section 4.2).

The model is DiT (Peebles and Xie 2023, arXiv 2212.09748): patches and their positions; blocks of attention and MLP; and
a vector c [b, d], computed from step and class, that shifts, scales and gates what each block adds (adaLN-Zero). Its
attention is Mixture-of-Head: the heads are multiplied by the gates of ``HeadRouter`` (Eq. 4). Blocks may differ in
their heads.

Parameters have the names and first values of the authors' code; its wg, wg_0 and wg_1 are those of the router.
Positions are computed, not stored in files. The noise and the loss are in moh_lm/vision/diffusion.py.

Shapes: b images [c, H, W] of s = H W / p^2 tokens, row by row, p the side of a patch; d width, h heads, e head
dimension.
"""

import functools
import math

import torch.nn.functional as F
from torch import nn

from moh_lm.kernels.gated_attention import gated_attention
from moh_lm.model.batch_context import BatchContext
from moh_lm.model.block import RoutedBlock
from moh_lm.model.transformer import WholeModel
from moh_lm.vision.diffusion import Diffusion, image_noise
from moh_lm.vision.layers import (
    FREQUENCIES,
    INIT_STD,
    describe,
    described,
    linear,
    modulated,
    modulation,
    position_table,
    step_features,
)
from moh_lm.vision.routers import routed_layers

positions = functools.lru_cache(maxsize=8)(position_table)


class DiT(WholeModel):
    """The whole model. Parameters are left empty; ``initialize`` draws them. seed: that of the run."""

    def __init__(self, config, recompute=False, seed=0):
        super().__init__()
        self.config, self.diffusion = config, Diffusion(config.diffusion_steps)
        d, c, p = config.hidden_size, config.in_channels, config.patch_size
        self.batch = BatchContext()
        patches = described(nn.Conv2d(c, d, p, p), bound=xavier(c * p * p, d))
        steps = linear(2 * FREQUENCIES, d, INIT_STD), nn.SiLU(), linear(d, d, INIT_STD)
        classes = nn.Embedding(config.num_classes + 1, d)  # the last one means no class
        describe(classes.weight, INIT_STD)
        self.x_embedder = nn.ModuleDict({"proj": patches})
        self.t_embedder = nn.ModuleDict({"mlp": nn.Sequential(*steps)})
        self.y_embedder = nn.ModuleDict({"embedding_table": classes})
        parts = config.mlp_ratio, self.batch, recompute
        self.blocks = nn.ModuleList(DiTBlock(*layer, *parts) for layer in routed_layers(config, seed))
        self.final_layer = nn.ModuleDict({"linear": linear(d, p * p * 2 * c), "adaLN_modulation": modulation(d, 2)})

    def forward(self, x, t, y, noise):
        """Return the mean loss and the losses [b] of images and noise [b, c, H, W], steps and classes int64 [b]."""
        self.batch.advance(x.device)
        losses = self.diffusion.losses(self.predict, x, t, y, noise)
        return losses.mean(), losses

    def predict(self, x, t, y):
        """Predict the noise in x [b, c, H, W] and the position of the log variance in its range: [b, 2c, H, W]. t, y:
        int64 [b]; the class num_classes means none."""
        d, p = self.config.hidden_size, self.config.patch_size
        patches = self.x_embedder.proj(x.to(self.x_embedder.proj.weight.dtype))  # [b, d, H/p, W/p]
        side, dtype = patches.shape[-1], patches.dtype
        x = patches.flatten(2).permute(2, 0, 1) + positions(side, d, dtype, x.device)  # [s, b, d]
        c = self.t_embedder.mlp(step_features(t).to(dtype)) + self.y_embedder.embedding_table(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.final_layer.adaLN_modulation(c).chunk(2, dim=-1)
        x = self.final_layer.linear(modulated(x, shift, scale))  # [s, b, p p 2c]
        return x.view(side, side, len(t), p, p, -1).permute(2, 5, 0, 3, 1, 4).reshape(len(t), -1, side * p, side * p)

    def draw(self, y, numbers, seed, steps, cfg_scale, progress=lambda: None):
        """Sample images [b, c, H, W] of classes y, int64 [b]. Each depends only on its number and the seed."""
        config = self.config
        shape = config.in_channels, config.input_size, config.input_size
        noises = image_noise(seed, numbers, shape, y.device)
        chain = Diffusion(config.diffusion_steps, steps)
        return chain.sample(self.predict, y, noises, config.num_classes, cfg_scale, progress)


class DiTBlock(RoutedBlock):
    """x + gate Attention(modulated x), then x + gate MLP(modulated x). layer: ``ImageLayer``."""

    def __init__(self, layer, router, mlp_ratio, batch, recompute):
        super().__init__(layer.index, batch, recompute)
        d, inner = layer.hidden_size, int(layer.hidden_size * mlp_ratio)
        self.attn = Attention(layer, router)
        self.mlp = nn.ModuleDict({"fc1": xavier_linear(d, inner), "fc2": xavier_linear(inner, d)})
        self.adaLN_modulation = modulation(d, 6)

    def router(self):
        return self.attn.router

    def block(self, x, c, inputs, replay):
        """Map x [s, b, d] and c [b, d] to the output [s, b, d] and the ``RouterOutput``."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.adaLN_modulation(c).chunk(6, dim=-1)
        attention, routing = self.attn(modulated(x, shift, scale), inputs, replay)
        x = x + gate * attention
        inner = F.gelu(self.mlp.fc1(modulated(x, mlp_shift, mlp_scale)), approximate="tanh")
        return x + mlp_gate * self.mlp.fc2(inner), routing


class Attention(nn.Module):
    """Mixture-of-Head attention of every token to every token, or ordinary attention without a router.

    The rows of qkv are those of queries, keys and values, each ordered by head.
    """

    def __init__(self, layer, router):
        super().__init__()
        self.heads = layer.num_attention_heads, layer.head_dim
        d, inner = layer.hidden_size, math.prod(self.heads)
        self.qkv, self.proj = xavier_linear(d, 3 * inner), xavier_linear(inner, d)
        self.router = router
        for weight in router.parameters():
            if weight.init_std:  # weights of ``sigmoid`` start at 0
                describe(weight, bound=xavier(*weight.shape))

    def forward(self, x, inputs, replay):
        """Map x [s, b, d] to the output [s, b, d] and the ``RouterOutput``."""
        routing = self.router(x, inputs, replay)
        query, key, value = self.qkv(x).unflatten(-1, (3, *self.heads)).unbind(2)  # [s, b, h, e]
        return self.proj(gated_attention(query, key, value, routing.gates, causal=False).flatten(2)), routing


def xavier(inputs, outputs):
    """Return the bound of Xavier's uniform distribution."""
    return math.sqrt(6 / (inputs + outputs))


def xavier_linear(inputs, outputs):
    return linear(inputs, outputs, bound=xavier(inputs, outputs))
