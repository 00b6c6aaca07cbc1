"""Pictures of generated images."""

import math

import numpy as np

GAP = 2  # pixels between the images of a grid


def to_bytes(images):
    """Convert images in [-1, 1], [n, c, H, W], to a numpy array, uint8 [n, H, W, c]."""
    scaled = ((images.float() + 1) * 127.5).round().clamp(0, 255)
    return scaled.permute(0, 2, 3, 1).byte().cpu().numpy()


def grid(images, least=64):
    """Arrange images in [-1, 1], [n, c, H, W], in rows: uint8 [H, W, 3]. Small ones are enlarged to ``least`` pixels or
    more. For latents, the first three channels are shown, or the first."""
    pixels = to_bytes(images)
    pixels = pixels[..., [0, 0, 0] if pixels.shape[3] < 3 else [0, 1, 2]]
    factor = max(1, math.ceil(least / pixels.shape[1]))
    pixels = pixels.repeat(factor, axis=1).repeat(factor, axis=2)
    pixels = np.pad(pixels, ((0, 0), (0, GAP), (0, GAP), (0, 0)), constant_values=255)
    columns = math.ceil(math.sqrt(len(pixels)))
    blank = np.zeros((-len(pixels) % columns, *pixels.shape[1:]), np.uint8)
    rows = np.concatenate((pixels, blank)).reshape(-1, columns, *pixels.shape[1:])
    return rows.transpose(0, 2, 1, 3, 4).reshape(rows.shape[0] * rows.shape[2], -1, 3)
