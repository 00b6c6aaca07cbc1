"""The configuration of image models: MoH-ViT, which is TransNeXt (Shi 2024, arXiv 2311.17132), and MoH-DiT, which is
DiT (Peebles and Xie 2023, arXiv 2212.09748), both with Mixture-of-Head attention (arXiv 2410.11842, 4.1 and 4.2).

Layers are numbered through all stages. Heads, routers, optimizer, reliability and alarms are those of language models,
with the defaults of the authors' released image models: gates of ``released``, Eq. 7 over a micro-batch.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from moh_lm.config import BUDGETS, Config, HeadsConfig, OptimizerConfig, RoutedLayer, TaskConfig, option
from moh_lm.config.heads import HeadsOfLayers
from moh_lm.config.resolve import few_enough, for_every_layer
from moh_lm.config.run import RunBase
from moh_lm.parsing import read_json
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


@dataclass(frozen=True)
class ImageDataConfig:
    """data: images, or latents of images"""

    data_dir: str = option("", "training images: a directory or tar of class folders, or latents for a DiT")
    validation_dir: str = option("", "held-out images in the same form (default: none are held out)")
    workers: int = option(4, "processes per rank that read and augment images; 0: the rank does it itself")
    rand_augment: float = option(9.0, "strength of RandAugment for a ViT, 0 to 10; 0: none")
    mixup: float = option(0.8, "alpha of Mixup for a ViT; 0: off")
    cutmix: float = option(1.0, "alpha of CutMix for a ViT; 0: off")
    random_erasing: float = option(0.25, "probability of Random Erasing for a ViT")
    min_crop_area: float = option(
        0.08,
        "smallest share of an image that a random crop keeps, for a ViT; images longer than 4:3 may lose their ends; "
        "1: no crops",
    )
    horizontal_flip: float = option(0.5, "probability that a training image is mirrored")
    label_smoothing: float = option(0.1, "label smoothing for a ViT")
    repeated_augmentation: int = option(3, "augmentations of an image in a row, for a ViT; an epoch keeps its length")
    allow_data_change: bool = option(False, "resume with other images than the checkpoint's")


@dataclass(frozen=True)
class ImageOptimizerConfig(OptimizerConfig):
    """optimizer: AdamW, and the schedule of the learning rate"""


@dataclass(frozen=True)
class ImageRunConfig(RunBase):
    """run: batch, budget, precision, files"""

    batch_size: int = option(1024, "images per iteration over all ranks")
    micro_batch_size: int = option(128, "images per rank in one forward pass")
    epochs: float | None = option(None, "training budget in passes over the images", replaces="train_iters")
    train_iters: int | None = option(
        None, "training budget in iterations; if --epochs is given too, the last one takes effect", replaces="epochs"
    )
    ema_decay: float = option(0.0, "decay of the moving average of the weights that is evaluated and exported; 0: none")
    eval_images: int = option(0, "held-out images to evaluate; 0: all")
    samples: int = option(16, "images that a DiT draws at every evaluation")
    sampling_steps: int = option(250, "denoising steps of each of --samples")
    cfg_scale: float = option(4.0, "guidance strength of --samples; 1: none")

    @property
    def global_batch_size(self):
        return self.batch_size

    @property
    def batch_given(self):
        return f"--batch-size {self.batch_size}"


@dataclass(frozen=True, kw_only=True)
class ImageTraining(TaskConfig):
    """A whole run of an image model. kind: the first word of its command. unused: fields of the other kind only."""

    data: ImageDataConfig = field(default_factory=ImageDataConfig)
    optimizer: ImageOptimizerConfig = field(default_factory=ImageOptimizerConfig)
    run: ImageRunConfig = field(default_factory=ImageRunConfig)
    unit, sample_name = "mean over images", "images"
    of_presets = "sets sizes and heads, unless other flags do"
    of_data = ("seed",)  # the seed determines the order of images
    of_loss = (
        "rand_augment", "mixup", "cutmix", "random_erasing", "min_crop_area", "horizontal_flip", "label_smoothing",
        "micro_batch_size",  # Mixup and CutMix combine its images, and balance losses count over it
    )  # fmt: skip

    @property
    def seq_length(self):
        """The number of tokens of an image in the first layer."""
        return self.model.tokens

    @staticmethod
    def hides(entry):
        return entry.metadata.get("text_only", False)

    def may_change(self, name, was):
        return name in self.of_loss

    def idle_fields(self):
        return {f"in a model of {self.kind}": list(self.unused)}

    def to_dict(self):
        return {"program": self.program, **super().to_dict()}

    @classmethod
    def from_dict(cls, values):
        return super().from_dict({key: value for key, value in values.items() if key != "program"})


@dataclass(frozen=True, kw_only=True)
class ViTTraining(ImageTraining):
    """Train MoH-ViT, a classifier of images. The scripts in launch/ hold the paper's values."""

    model: ViTConfig = field(default_factory=ViTConfig)
    kind, presets, program, about = "vit", VIT, "moh_lm.vision vit", __doc__
    of_data, of_loss = ("seed", "repeated_augmentation"), (*ImageTraining.of_loss, "drop_path")
    unused = ("samples", "sampling_steps", "cfg_scale")


@dataclass(frozen=True, kw_only=True)
class DiTTraining(ImageTraining):
    """Train MoH-DiT, which generates images of a class. The scripts in launch/ hold the paper's values."""

    model: DiTConfig = field(default_factory=DiTConfig)
    kind, presets, program, about = "dit", DIT, "moh_lm.vision dit", __doc__
    of_loss = (*ImageTraining.of_loss, "class_dropout")
    unused = (
        "rand_augment", "mixup", "cutmix", "random_erasing", "min_crop_area", "label_smoothing",
        "repeated_augmentation",
    )  # fmt: skip

    def may_change(self, name, was):
        """See ``TaskConfig``. A --class-dropout of 0 stays, since it decides whether guidance is possible."""
        return super().may_change(name, was) and was > 0 < getattr(self.model, name)


KINDS = {kind.kind: kind for kind in (ViTTraining, DiTTraining)}


def kind_of_run(directory):
    """Return the class of the configuration in a run or step directory; ``Config`` if it is not of an image model."""
    try:
        program = read_json(Path(directory) / "config.json").get("program")
    except (OSError, ValueError, AttributeError):
        return Config  # it reports what is wrong
    return next((kind for kind in KINDS.values() if kind.program == program), Config)
