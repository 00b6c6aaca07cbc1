"""The inputs of a diffusion model: latents of images, or small images, with a time step, a class and noise.

tools/encode_latents.py writes a directory of latents:

    latents.npy     [N, 2, 2c, s, s], fp16 or fp32: for each image and its mirror image, the means and log variances
                    of the autoencoder's c channels of s x s
    labels.npy      int64 [N], from 0 to below the number of classes
    checksums.npy   uint32 [N, 2]: the CRC-32 of each image's latents, and of its mirror image's
    latents.json    images, classes, image_size, dtype, factor, ``content_hash``, and SHA-256 hashes: of the images'
                    names, of a sample of the images, and of the autoencoder; written last

Latents are compared with their checksum whenever they are read.

    x = (mean + exp(logvar / 2) eps) factor     logvar between -30 and 20, eps ~ N(0, 1)

Small images are centre crops (``center_crop``) with values from -1 to 1. The time step t is uniform; its quarters are
the sources in the log. With probability --class-dropout a class is replaced by num_classes, which stands for no class.
"""

import hashlib
import json
import zlib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from moh_lm.config import ConfigError
from moh_lm.data.files import ShardError, read_json
from moh_lm.vision.augment import middle
from moh_lm.vision.images import HELD_OUT, SAMPLE, generator, sample_hash
from moh_lm.vision.samples import Samples

LATENTS, LABELS, CHECKSUMS = "latents.npy", "labels.npy", "checksums.npy"
FACTS, PARTIAL = "latents.json", "latents.partial"
REMEDY = "restore the directory, or remove it and run tools/encode_latents.py again"


class LatentPlace(NamedTuple):
    """The place of an image's latents. checksums: CRC-32 for the image and its mirror image."""

    path: str
    index: int
    factor: float
    checksums: list[int]

    def draw(self, mirrored, rng):
        """Draw latents, float32 [c, s, s], of the image or its mirror image. Raises ShardError if they are damaged."""
        moments = moments_of(self.path)[self.index, int(mirrored)]
        if zlib.crc32(moments.tobytes()) != self.checksums[int(mirrored)]:
            damaged = f"the latents of image {self.index} are damaged: their CRC-32 is not that in {CHECKSUMS}"
            raise ShardError(f"{self.path}/{LATENTS}: {damaged}; {REMEDY}")
        mean, logvar = np.split(moments.astype(np.float32), 2)
        noise = rng.standard_normal(mean.shape, dtype=np.float32)
        return (mean + np.exp(logvar.clip(-30, 20) / 2) * noise) * np.float32(self.factor)


class Latents:
    """A directory of latents, with the attributes of moh_lm.vision.images.Images. Raises ConfigError if it is damaged
    or a label is outside its classes."""

    content = "latents or labels"

    def __init__(self, path):
        self.path = str(path)
        try:
            facts = read_json(Path(path) / FACTS)
            self.classes, self.factor, self.vae = list(facts["classes"]), facts["factor"], facts["vae"]
            made = json.dumps([facts[key] for key in ("sha256", "image_size", "dtype", "factor", "vae")])
            self.sha256, self.hash = hashlib.sha256(made.encode()).hexdigest(), facts["content"]
            if not 0 < self.factor < np.inf:
                raise ValueError(f"the factor is {self.factor}, and must be above 0")
            self.labels = array_in(Path(path) / LABELS)
            self.checksums = array_in(Path(path) / CHECKSUMS)
            moments = moments_of(self.path)
            self.shape = moments.shape
            if moments.dtype.kind != "f":
                raise ValueError(f"{LATENTS} holds {moments.dtype}, and latents must be fp16 or fp32")
            if len(self.shape) != 5 or self.labels.shape != self.shape[:1]:
                raise ValueError(f"latents {list(self.shape)}, but labels {list(self.labels.shape)}")
            if self.shape[1] != 2 or self.shape[2] % 2 or self.shape[3] != self.shape[4]:
                raise ValueError(f"{LATENTS} has shape {list(self.shape)}, which must be [N, 2, 2c, s, s]")
            if self.labels.dtype.kind not in "iu":
                raise ValueError(f"{LABELS} holds {self.labels.dtype}, and labels must be whole numbers")
            if self.hash != content_hash(facts, self.labels, self.checksums):
                raise ValueError(f"{LABELS}, {CHECKSUMS} and {FACTS} differ from their hash")
        except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
            raise ConfigError([f"{path}: its latents cannot be read ({error}); {REMEDY}"]) from error
        self.check_labels()
        labels = hashlib.sha256(self.labels.astype("<i8").tobytes())
        self.sampled = sample_hash(len(moments), lambda index: moments[index].tobytes(), labels)

    def check_labels(self):
        """Raise ConfigError unless each label is a class."""
        classes = len(self.classes)
        wrong = np.flatnonzero((self.labels < 0) | (self.labels >= classes))
        if len(wrong):
            first = f"label {self.labels[wrong[0]]} of image {wrong[0]} must be between 0 and {classes - 1}"
            why = f"{FACTS} names {classes} classes"
            raise ConfigError([f"{self.path}: {LABELS}: {first}, since {why}; correct it, or {REMEDY}"])

    def identity(self):
        """Return what distinguishes these latents from others, as JSON values."""
        return {"sha256": self.sha256, "sampled": self.sampled, "content": self.hash}

    def place(self, index):
        return LatentPlace(self.path, int(index), self.factor, self.checksums[index].tolist())

    def problems(self, model):
        """Return sentences that say why ``model`` cannot read these latents."""
        if not hasattr(model, "input_size"):
            return [f"{self.path}: holds latents, and a ViT reads images; give a directory or tar of class folders"]
        channels, size = self.shape[2] // 2, self.shape[3]
        if (model.in_channels, model.input_size) == (channels, size):
            return []
        needed = f"set --in-channels {channels} --input-size {size}"
        given = f"--in-channels {model.in_channels} --input-size {model.input_size}"
        return [f"{given}: {self.path} holds latents of {channels} channels, {size} x {size}; {needed}"]


def content_hash(facts, labels, checksums):
    """Return the SHA-256 of labels, checksums and the other values in latents.json, which covers the directory."""
    known = json.dumps({key: value for key, value in sorted(facts.items()) if key != "content"})
    parts = known.encode(), labels.astype("<i8").tobytes(), checksums.astype("<u4").tobytes()
    return hashlib.sha256(b"".join(parts)).hexdigest()


def array_in(path, mmap_mode=None):
    """Return the array in a file. Raises OSError, also for a pipe, or what NumPy does."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.name}")
    return np.load(path, mmap_mode)


@lru_cache
def moments_of(path):
    """Return the memory-mapped latents of a directory, [N, 2, 2c, s, s], fp16 or fp32."""
    return array_in(Path(path) / LATENTS, mmap_mode="r")


def center_crop(image, size):
    """Return the central size x size pixels of a Pillow image, which is halved while its shorter side is at least twice
    ``size``, then resized and cropped, as in ADM (Dhariwal and Nichol 2021, arXiv 2105.05233)."""
    while min(image.size) >= 2 * size:
        image = image.resize([side // 2 for side in image.size], Image.Resampling.BOX)
    scale = size / min(image.size)
    return middle(image, [round(side * scale) for side in image.size], size)


def pixels(image):
    """Convert a Pillow image to float32 [c, H, W] with values from -1 to 1."""
    values = np.asarray(image, dtype=np.float32).reshape(*image.size[::-1], -1)
    return np.ascontiguousarray(values.transpose(2, 0, 1)) / np.float32(127.5) - 1


def quarters(steps):
    """Return the names of the sources, which are quarters of the time steps: t belongs to quarter 4 t // steps."""
    ends = [-(-part * steps // 4) for part in range(5)]
    return [f"t {first}-{end - 1}" for first, end in zip(ends, ends[1:], strict=False)]


class DiTSamples(Samples):
    """inputs: x [b, c, s, s] float32, t and y int64 [b], noise [b, c, s, s] float32. A held-out image always keeps its
    class and is never mirrored; its t and noise depend only on its index."""

    @property
    def source_names(self):
        return quarters(self.model.diffusion_steps)

    def inputs(self, request):
        labels, training = request.labels.tolist(), request.training
        rows = map(self.row, request.numbers.tolist(), request.places, labels, [training] * len(labels))
        x, t, y, noise = (torch.from_numpy(np.stack(parts)) for parts in zip(*rows, strict=True))
        return (x, t, y, noise), 4 * t // self.model.diffusion_steps

    def row(self, number, place, label, training):
        model = self.model
        rng = generator(SAMPLE, self.seed, number) if training else generator(HELD_OUT, 0, number)
        t, mirror, drop = rng.integers(model.diffusion_steps), rng.random(), rng.random()
        mirrored = training and mirror < self.data.horizontal_flip
        noise = rng.standard_normal((model.in_channels, model.input_size, model.input_size), dtype=np.float32)
        dropped = training and drop < model.class_dropout
        y = np.int64(model.num_classes if dropped else max(label, 0))
        if isinstance(place, LatentPlace):
            return place.draw(mirrored, rng), t, y, noise
        x = pixels(center_crop(place.read(model.in_channels), model.input_size))
        return x[:, :, ::-1].copy() if mirrored else x, t, y, noise
