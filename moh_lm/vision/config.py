"""The configuration of a run of an image model. model_config.py has its model section; routers, optimizer, reliability
and alarms are those of language models.
"""

from dataclasses import dataclass, field
from pathlib import Path

from moh_lm.config import Config, OptimizerConfig, TaskConfig, option
from moh_lm.config.run import RunBase
from moh_lm.parsing import read_json
from moh_lm.vision.model_config import DiTConfig, ViTConfig
from moh_lm.vision.presets import DIT, VIT


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
