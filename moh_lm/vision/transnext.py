"""MoH-ViT: TransNeXt (Shi 2024, arXiv 2311.17132) whose attention layers route their heads (arXiv 2410.11842, 4.1).

Each stage begins with a convolution that makes patches of pixels, or of the previous stage's output. Then come its
layers, x + Attention(LayerNorm(x)) and x + MLP(LayerNorm(x)), and a LayerNorm. The logits are a linear map of the mean
over the last stage's tokens. Parameters have the names of the authors' code.

Shapes: s tokens of an image, row by row, b images, d width. Each stage has a quarter of the previous stage's tokens.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from moh_lm.model.batch_context import BatchContext
from moh_lm.model.block import RoutedBlock
from moh_lm.model.transformer import WholeModel
from moh_lm.vision.layers import (
    INIT_STD,
    AggregatedAttention,
    ConvolutionalGLU,
    CosineAttention,
    PatchEmbedding,
    layer_norm,
    linear,
    to_images,
)
from moh_lm.vision.routers import routed_layers


class Block(RoutedBlock):
    """A layer of a stage. layer: ``ImageLayer``."""

    def __init__(self, layer, router, sr_ratio, mlp_ratio, batch, recompute):
        super().__init__(layer.index, batch, recompute)
        width = layer.hidden_size
        self.norm1, self.norm2 = layer_norm(width), layer_norm(width)
        self.attn = make_attention(layer, router, sr_ratio)
        self.mlp = ConvolutionalGLU(width, 2 * width * mlp_ratio // 3)

    def router(self):
        return self.attn.router

    def block(self, x, kept, inputs, replay):
        """x: [s, b, d]. kept: [2, b, 1], factors of each image's attention and MLP, or None for 1."""
        attention, routing = self.attn(self.norm1(x), inputs, replay)
        x = x + (attention if kept is None else attention * kept[0])
        mlp = self.mlp(self.norm2(x))
        return x + (mlp if kept is None else mlp * kept[1]), routing


def make_attention(layer, router, sr_ratio):
    """Return the attention of an ``ImageLayer``. sr_ratio: side over cells, rounded down; 1: to all tokens."""
    parts = layer.hidden_size, layer.num_attention_heads, math.isqrt(layer.tokens), router
    return AggregatedAttention(*parts, cells=parts[2] // sr_ratio) if sr_ratio > 1 else CosineAttention(*parts)


class TransNeXt(WholeModel):
    """The whole model. config: ``ViTConfig``. Parameters are left as torch makes them; ``initialize`` draws them.

    seed: that of the run.
    """

    def __init__(self, config, recompute=False, seed=0):
        super().__init__()
        self.batch = BatchContext()
        self.num_stages, self.num_layers, self.drop_path = len(config.depths), config.num_layers, config.drop_path
        channels, layers = config.in_channels, routed_layers(config, seed)
        for stage, width in enumerate(config.hidden_sizes):
            ratios = config.sr_ratios[stage], config.mlp_ratios[stage]
            blocks = [Block(*next(layers), *ratios, self.batch, recompute) for _ in range(config.depths[stage])]
            self.add_module(f"patch_embed{stage + 1}", PatchEmbedding(channels, width, stride=2 if stage else 4))
            self.add_module(f"block{stage + 1}", nn.ModuleList(blocks))
            self.add_module(f"norm{stage + 1}", layer_norm(width))
            channels = width
        self.head = linear(channels, config.num_classes, INIT_STD)

    def forward(self, images, targets=None, draws=None):
        """Map images [b, channels, side, side] to logits [b, classes] in the dtype of the weights.

        With targets, float [b, classes] with sums of 1, return the mean cross entropy and that of each image [b], fp32
        or wider. draws: see ``kept_branches``; without them, or in evaluation, every branch is kept.
        """
        self.batch.advance(images.device)
        x = images.to(self.head.weight.dtype)
        kept = iter(self.kept_branches(draws, x.dtype))
        for stage in range(1, self.num_stages + 1):
            x = self.get_submodule(f"patch_embed{stage}")(x)
            for block in self.get_submodule(f"block{stage}"):
                x = block(x, next(kept))
            x = self.get_submodule(f"norm{stage}")(x)
            x = to_images(x) if stage < self.num_stages else x
        logits = self.head(x.mean(0))
        if targets is None:
            return logits
        losses = self.losses(logits, targets)
        return losses.mean(), losses

    def losses(self, logits, targets):
        """Return the cross entropy of each image [b], fp32 or wider, from logits and targets [b, classes]."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(wide), targets.to(wide), reduction="none")

    def kept_branches(self, draws, dtype):
        """Return ``kept`` for every layer. draws: [b, 2 layers], uniform in [0, 1). Layer i leaves out the branches
        whose draws are below its share p_i, and divides the others by 1 - p_i."""
        if draws is None or not self.training:
            return [None] * self.num_layers
        shares = torch.linspace(0, self.drop_path, self.num_layers, device=draws.device).repeat_interleave(2)
        kept = (draws >= shares) / (1 - shares)
        return kept.to(dtype).t().unsqueeze(-1).unflatten(0, (-1, 2))  # [layers, 2, b, 1]
