"""Augmentation of images for a classifier, by Pillow: random crops, RandAugment, Random Erasing, Mixup, CutMix.

The recipe is the paper's, with the meanings that timm gives to its parameters ("rand-m9-mstd0.5-inc1"). Random numbers
come from a given generator, so an image is augmented in the same way in every layout and after a resume.

Shapes: b batch, c channels, H and W sides of an image.
"""

import math

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps

MEAN, DEVIATION = {3: (0.485, 0.456, 0.406), 1: (0.5,)}, {3: (0.229, 0.224, 0.225), 1: (0.5,)}  # of the channels
MODES = {3: "RGB", 1: "L"}
KEPT = 0.875  # share of the shorter side that an evaluation keeps
SWITCH = 0.5  # share of batches with CutMix, if there is Mixup too
STRONGEST = 10  # the largest strength of RandAugment


def random_crop(image, size, least_area, rng):
    """Resize a random part of the image to size x size. The part has at least ``least_area`` of the area and sides from
    3:4 to 4:3 (Szegedy et al. 2014, arXiv 1409.4842); of longer images, the middle if no such part is found. With a
    ``least_area`` of 1 the whole image is resized."""
    if least_area == 1:
        return image.resize((size, size), Image.Resampling.BICUBIC)
    width, height = image.size
    for _ in range(10):
        area = width * height * rng.uniform(least_area, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.integers(width - w + 1), rng.integers(height - h + 1)
            break
    else:  # as much of the middle as the ratios allow
        w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
        left, top = (width - w) // 2, (height - h) // 2
    crop = image.crop((left, top, left + w, top + h))  # with ``box=`` the filter would read pixels beside it
    return crop.resize((size, size), Image.Resampling.BICUBIC)


def center_crop(image, size):
    """Crop the middle after scaling the shorter side to size / 0.875; an image of that size is unchanged."""
    if image.size == (size, size):
        return image
    shorter = int(size / KEPT)
    return middle(image, [int(shorter * side / min(image.size)) for side in image.size], size)


def middle(image, sides, size):
    """Resize an image to ``sides``, its width and height, and return the size x size pixels in the middle."""
    image = image.resize(sides, Image.Resampling.BICUBIC)
    left, top = ((side - size) // 2 for side in sides)
    return image.crop((left, top, left + size, top + size))


def rand_augment(image, rng, number=2, strength=9, deviation=0.5, probability=0.5):
    """RandAugment (Cubuk et al. 2019, arXiv 1909.13719): ``number`` operations, each applied with ``probability`` at a
    strength from N(strength, deviation), clipped to 0 and ``STRONGEST``. A stronger operation always changes more."""
    for operation in rng.integers(len(OPERATIONS), size=number):
        if rng.random() < probability:
            level = np.clip(rng.normal(strength, deviation), 0, STRONGEST) / STRONGEST
            image = OPERATIONS[operation](image, level, 1 if rng.random() < 0.5 else -1)
    return image


def affine(image, *matrix):
    size, bicubic = image.size, Image.Resampling.BICUBIC
    return image.transform(size, Image.Transform.AFFINE, matrix, bicubic, fillcolor=mean_color(image))


def rotate(image, level, sign):
    return image.rotate(sign * level * 30, Image.Resampling.BICUBIC, fillcolor=mean_color(image))


def mean_color(image):
    """Return ImageNet's mean color in the channels of a Pillow image."""
    return tuple(round(255 * mean) for mean in MEAN[len(image.getbands())])


def solarize_add(image, level, sign):
    """Lighten pixels that are darker than the middle."""
    table = [min(255, value + int(level * 110)) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


def enhanced(kind):
    return lambda image, level, sign: kind(image).enhance(max(0.1, 1 + sign * level * 0.9))


OPERATIONS = (
    lambda image, level, sign: ImageOps.autocontrast(image),
    lambda image, level, sign: ImageOps.equalize(image),
    lambda image, level, sign: ImageOps.invert(image),
    rotate,
    lambda image, level, sign: ImageOps.posterize(image, max(1, 4 - int(level * 4))),
    lambda image, level, sign: ImageOps.solarize(image, 256 - int(level * 256)),
    solarize_add,
    *map(enhanced, (ImageEnhance.Color, ImageEnhance.Contrast, ImageEnhance.Brightness, ImageEnhance.Sharpness)),
    lambda image, level, sign: affine(image, 1, sign * level * 0.3, 0, 0, 1, 0),  # shear
    lambda image, level, sign: affine(image, 1, 0, 0, sign * level * 0.3, 1, 0),
    lambda image, level, sign: affine(image, 1, 0, sign * level * 0.45 * image.size[0], 0, 1, 0),  # shift
    lambda image, level, sign: affine(image, 1, 0, 0, 0, 1, sign * level * 0.45 * image.size[1]),
)


def normalized(image):
    """Convert a Pillow image to float32 [c, H, W] with mean 0 and deviation 1 over ImageNet."""
    pixels = np.asarray(image, dtype=np.float32).reshape(*image.size[::-1], -1) / 255
    channels = pixels.shape[2]
    pixels = (pixels - np.float32(MEAN[channels])) / np.float32(DEVIATION[channels])
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def random_erasing(pixels, probability, rng):
    """Fill a random box of ``pixels`` [c, H, W] with noise N(0, 1), in place. It has 2% to a third of the area and
    sides from 3:10 to 10:3 (Zhong et al. 2017, arXiv 1708.04896)."""
    channels, height, width = pixels.shape
    if rng.random() >= probability:
        return
    for _ in range(10):
        area = height * width * rng.uniform(0.02, 1 / 3)
        ratio = math.exp(rng.uniform(math.log(0.3), math.log(1 / 0.3)))
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if h < height and w < width:
            top, left = rng.integers(height - h + 1), rng.integers(width - w + 1)
            noise = rng.standard_normal((channels, h, w), dtype=np.float32)
            pixels[:, top : top + h, left : left + w] = torch.from_numpy(noise)
            return


def soft_targets(labels, num_classes, smoothing):
    """Smooth labels (Szegedy et al. 2015, arXiv 1512.00567): [b] to float32 [b, num_classes]."""
    off = smoothing / num_classes
    targets = torch.full((len(labels), num_classes), off)
    return targets.scatter_(1, labels[:, None], 1 - smoothing + off)


def mix(images, targets, mixup, cutmix, rng):
    """Combine each image with the one half a batch before it by Mixup or CutMix. Returns [b, c, H, W] and [b, classes].

    Three repeats of an image in a row are not combined with each other in a batch of 6 or more.

    mixup, cutmix: alpha of Beta(alpha, alpha), from which the batch's weight is drawn (arXiv 1710.09412, 1905.04899);
    0: never.
    """
    cuts = cutmix > 0 and (mixup == 0 or rng.random() < SWITCH)
    if not cuts and mixup == 0:
        return images, targets
    weight = rng.beta(*(cutmix if cuts else mixup,) * 2)
    half = len(images) // 2
    others = images.roll(half, 0)
    if cuts:
        height, width = images.shape[2:]
        sides = [int(side * math.sqrt(1 - weight)) for side in (height, width)]
        centers = [rng.integers(side) for side in (height, width)]
        (top, bottom), (left, right) = (
            (max(0, center - side // 2), min(whole, center + side // 2))
            for center, side, whole in zip(centers, sides, (height, width), strict=True)
        )
        images = images.clone()
        images[:, :, top:bottom, left:right] = others[:, :, top:bottom, left:right]
        weight = 1 - (bottom - top) * (right - left) / (height * width)
    else:
        images = images * weight + others * (1 - weight)
    return images, targets * weight + targets.roll(half, 0) * (1 - weight)
