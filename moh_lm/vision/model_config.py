"""The model section of an image model: sizes and heads of MoH-ViT, which is TransNeXt (Shi 2024, arXiv 2311.17132), and
of MoH-DiT, which is DiT (Peebles and Xie 2023, arXiv 2212.09748), with Mixture-of-Head attention (arXiv 2410.11842, 4.1
and 4.2).

Layers are numbered through all stages. Heads have the defaults of the authors' released image models: gates of
``released``, Eq. 7 over a micro-batch.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from moh_lm.config import BUDGETS, HeadsConfig, RoutedLayer, option
from moh_lm.config.heads import HeadsOfLayers
from moh_lm.config.resolve import few_enough, for_every_layer
from moh_lm.vision.presets import DIT, VIT


@dataclass(frozen=True)
class ImageHeadsConfig(HeadsConfig):
    """heads: which attention heads a token uses (paper, section 3)"""

    head_selection: str = option(
        "mixture",
        "all: ordinary attention; mixture: shared heads plus K heads that a router picks per token",
        choices=("all", "mixture"),
    )
    num_shared_heads: tuple[int, ...] = option(
        (), "heads that are always active: one value, one per stage of a ViT, or one per layer"
    )
    num_active_routed_heads: tuple[int, ...] = option(
        (), "K, the routed heads that are active per token: one value, one per stage of a ViT, or one per layer"
    )
    routing: str = option(
        "released",
        "how scores become gates: softmax shares (paper, Eq. 5-6); the same, scaled to start at 1; the authors' "
        "released code; or 2 x sigmoid",
        choices=("paper", "paper_scaled", "released", "sigmoid"),
    )
    load_balance_scope: str = option(
        "micro_batch",
        "tokens over which the load-balancing loss (Eq. 7) counts selections: each image, each micro-batch, or the "
        "whole previous step",
        choices=("sequence", "micro_batch", "global_batch"),
    )


class ImageLayer(NamedTuple):
    """The parts of one layer. tokens: number of tokens of an image in this layer. routed: None in a dense model."""

    index: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    tokens: int
    heads: ImageHeadsConfig
    routed: RoutedLayer | None
    width_ratio = 1.0  # no width transfer

    def routed_layer(self, index):
        return self.routed


def budgets_of_layers(heads, places):
    """Return an ``ImageHeadsConfig`` with a budget per layer, given one number, one per place, or one per layer.

    places: the layers of each place, a stage or a single layer.
    """
    found = {}
    for key in BUDGETS:
        value = for_every_layer(getattr(heads, key), len(places))
        if len(value) == len(places):
            value = tuple(number for number, count in zip(value, places, strict=True) for _ in range(count))
        found[key] = value
    return replace(heads, **found)


class ImageModelConfig(HeadsOfLayers):
    """What both models have in common. head_counts: number of heads of all layers."""

    def routed_layer(self, index):
        """Return the ``RoutedLayer`` of a layer of a mixture."""
        shared, active = self.heads.num_shared_heads[index], self.heads.num_active_routed_heads[index]
        stride = self.tokens // self.tokens_of(index)
        return RoutedLayer(index, shared, self.head_counts[index] - shared, active, stride=stride)

    def layer(self, index):
        """Return the ``ImageLayer`` of a layer."""
        routed = self.routed_layer(index) if self.heads.head_selection == "mixture" else None
        heads, tokens = self.head_counts[index], self.tokens_of(index)
        return ImageLayer(index, self.width_of(index), heads, self.head_dim_of(index), tokens, self.heads, routed)


@dataclass(frozen=True)
class ViTConfig(ImageModelConfig):
    """model: TransNeXt, four stages; of each stage width, layers, heads, MLP, pooling"""

    image_size: int = option(224, "side of an image in pixels, a multiple of 32")
    in_channels: int = option(3, "channels of an image: 3 for RGB, 1 for grey")
    num_classes: int = option(1000, "classes, each with a folder of images")
    hidden_sizes: tuple[int, ...] = option(VIT["S"]["hidden_sizes"], "width of each stage", metavar="N")
    depths: tuple[int, ...] = option(VIT["S"]["depths"], "layers of each stage", metavar="N")
    num_attention_heads: tuple[int, ...] = option(VIT["S"]["num_attention_heads"], "heads of each stage", metavar="N")
    mlp_ratios: tuple[int, ...] = option(
        (8, 8, 4, 4), "per stage: ratio of the MLP width to the width, before it is multiplied by 2/3", metavar="N"
    )
    sr_ratios: tuple[int, ...] = option(
        (8, 4, 2, 1), "per stage: factor by which keys are pooled; 1: attention to all tokens", metavar="N"
    )
    drop_path: float = option(0.45, "share of images that skip the last layer; it grows linearly from 0")
    heads: ImageHeadsConfig = field(default_factory=ImageHeadsConfig)

    def derived(self):
        return {"heads": budgets_of_layers(self.heads, self.depths)}

    def lists(self):
        of_stages = ("hidden_sizes", "num_attention_heads", "mlp_ratios", "sr_ratios")
        return super().lists() | dict.fromkeys(of_stages, len(self.depths))

    @property
    def num_layers(self):
        return sum(self.depths)

    @property
    def hidden_size(self):
        return "-".join(map(str, self.hidden_sizes))

    @property
    def tokens(self):
        """The number of tokens of an image in the first stage."""
        return (self.image_size // 4) ** 2

    @property
    def head_counts(self):
        return tuple(self.num_attention_heads[self.stage_of(layer)] for layer in range(self.num_layers))

    def stage_of(self, layer):
        """Return the stage of a layer, from 0."""
        return next(stage for stage in range(len(self.depths)) if layer < sum(self.depths[: stage + 1]))

    def tokens_of(self, layer):
        return (self.image_size // 4 >> self.stage_of(layer)) ** 2

    def width_of(self, layer):
        return self.hidden_sizes[self.stage_of(layer)]

    def head_dim_of(self, layer):
        return self.hidden_sizes[self.stage_of(layer)] // self.head_counts[layer]


@dataclass(frozen=True)
class DiTConfig(ImageModelConfig):
    """model: DiT with adaLN-Zero"""

    input_size: int = option(32, "side of a generated image, in latents or pixels")
    in_channels: int = option(4, "channels of a generated image")
    patch_size: int = option(2, "side of a patch")
    num_classes: int = option(1000, "classes")
    hidden_size: int = option(DIT["S"]["hidden_size"], "width of the model")
    num_layers: int = option(DIT["S"]["num_layers"], "layers")
    num_attention_heads: tuple[int, ...] = option(
        DIT["S"]["num_attention_heads"], "heads: one number, or one per layer"
    )
    head_dim: int | None = option(None, "width of a head (default: hidden size / heads of the first layer)")
    mlp_ratio: float = option(4.0, "ratio of the MLP width to the model width")
    class_dropout: float = option(0.1, "share of images that are trained without their class")
    diffusion_steps: int = option(1000, "steps of the linear noise schedule")
    heads: ImageHeadsConfig = field(default_factory=ImageHeadsConfig)

    def derived(self):
        numbers, head_dim = for_every_layer(self.num_attention_heads, few_enough(self.num_layers)), self.head_dim
        if head_dim is None and numbers:
            head_dim = self.hidden_size // max(1, numbers[0])
        heads = budgets_of_layers(self.heads, (1,) * self.num_layers)
        return {"num_attention_heads": numbers, "head_dim": head_dim, "heads": heads}

    def lists(self):
        return super().lists() | {"num_attention_heads": self.num_layers}

    @property
    def tokens(self):
        """The number of tokens of an image."""
        return (self.input_size // max(1, self.patch_size)) ** 2

    @property
    def head_counts(self):
        return self.num_attention_heads

    def tokens_of(self, layer):
        return self.tokens

    def width_of(self, layer):
        return self.hidden_size

    def head_dim_of(self, layer):
        return self.head_dim
