"""The micro-batches of an image model, and how those of a classifier are made.

Everything about sample n of a run follows from (--seed, n): which image it is, how it is augmented, and which random
numbers the model draws. A resumed run therefore reads the same samples, with any number of ranks and workers.

    epoch n // N, place p = n % N of N images
    image       permutation_epoch[p // --repeated-augmentation]
    training    random crop, mirroring, RandAugment, Random Erasing; then Mixup or CutMix within the micro-batch
    held out    a centre crop of 0.875 of the shorter side; an image that has the model's size is not cropped

Shapes: b images, c channels, S pixels per side.
"""

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from moh_lm.data.files import ShardError
from moh_lm.vision.augment import (
    center_crop,
    mix,
    normalized,
    rand_augment,
    random_crop,
    random_erasing,
    soft_targets,
)
from moh_lm.vision.images import MIXED, SAMPLE, generator


class Request(NamedTuple):
    """A micro-batch to read. numbers: samples of the run, or indices of held-out images. labels: classes; -1 is filler,
    which does not count."""

    numbers: np.ndarray
    places: list
    labels: np.ndarray
    training: bool


class ImageBatch(NamedTuple):
    """What an image model reads in one forward pass.

    inputs: the arguments of the pass; each has b as its first dimension. labels: int64 [b], the class of each image,
    or -1 for filler. sources: int64 [b], indices into the data set's ``source_names``. samples: int64 [b], numbers of
    the samples in the run; None for held-out images.
    """

    inputs: tuple[torch.Tensor, ...]
    labels: torch.Tensor
    sources: torch.Tensor
    samples: torch.Tensor | None = None


class Samples:
    """Turns a ``Request`` into an ``ImageBatch`` or an image's ShardError; a data set for torch's DataLoader.

    A subclass defines ``inputs``: for a request it returns what the model reads, and the sources, int64 [b], which
    index its ``source_names``. repeats: number of consecutive samples that show the same image.
    """

    repeats = 1

    def __init__(self, config):
        self.model, self.data, self.seed = config.model, config.data, config.run.seed

    def __getitem__(self, request):
        try:
            inputs, sources = self.inputs(request)
        except ShardError as error:  # ``batches_of`` raises it: torch makes many lines of a worker's error
            return error
        numbers = torch.from_numpy(request.numbers) if request.training else None
        return ImageBatch(inputs, torch.from_numpy(request.labels), sources, numbers)


class ViTSamples(Samples):
    """inputs: images [b, c, S, S], soft targets [b, classes], and in training draws [b, 2 num_layers], all float32."""

    source_names = ["images"]

    @property
    def repeats(self):
        return self.data.repeated_augmentation

    def inputs(self, request):
        labels, size, data = torch.from_numpy(request.labels), self.model.image_size, self.data
        sources = torch.zeros_like(labels)
        images = [place.read(self.model.in_channels) for place in request.places]
        if not request.training:
            targets = (labels[:, None] == torch.arange(self.model.num_classes)).float()
            return (torch.stack([normalized(center_crop(image, size)) for image in images]), targets), sources
        rngs = [generator(SAMPLE, self.seed, number) for number in request.numbers.tolist()]
        draws = np.stack([rng.random(2 * self.model.num_layers, dtype=np.float32) for rng in rngs])
        images = torch.stack([self.augmented(*pair) for pair in zip(images, rngs, strict=True)])
        targets = soft_targets(labels, self.model.num_classes, data.label_smoothing)
        images, targets = mix(images, targets, data.mixup, data.cutmix, generator(MIXED, self.seed, request.numbers[0]))
        return (images, targets, torch.from_numpy(draws)), sources

    def augmented(self, image, rng):
        data = self.data
        image = random_crop(image, self.model.image_size, data.min_crop_area, rng)
        if rng.random() < data.horizontal_flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = normalized(rand_augment(image, rng, strength=data.rand_augment) if data.rand_augment else image)
        random_erasing(pixels, data.random_erasing, rng)
        return pixels
