"""Rotary position embeddings, half-split form: features i and i + e/2 of a head turn by an angle of position x f_i.

    default   f_i = theta^(-2i/e)
    linear    f_i / factor: positions are packed closer (Chen et al. 2023)
    llama3    as in LLaMA 3.1: compares the wavelength w = 2 pi / f_i with the original length L:
              f_i                     if w < L / high_freq_factor
              f_i / factor            if w > L / low_freq_factor
              in between              (1 - r) f_i / factor + r f_i,  r = (L/w - low) / (high - low)
    yarn      Peng et al. 2023 (arXiv 2309.00071): with c(n) = e ln(L / (2 pi n)) / (2 ln theta), the pair that turns n
              times in the original length L,
              (1 - r) f_i + r f_i / factor,  r = (i - floor c(32)) / (ceil c(1) - floor c(32)), between 0 and 1;
              cos and sin are multiplied by 0.1 ln(factor) + 1, and so the scores by its square

With --rotary-fraction only the first features of a head are rotated, as if they were the whole head (e above). Layers
whose --position is not rotary rotate none. Exports carry a copy of this file as moh_rotary.py, so it imports nothing
but torch and the standard library.

Shapes: s sequence, b batch, e head dimension.
"""

import functools
import math
from typing import NamedTuple

import torch

NEEDS = {  # type -> the fields of ``Rotary`` that it needs besides theta
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_length"),
    "yarn": ("factor", "original_length"),
}


class Rotary(NamedTuple):
    """The position encoding of a layer: how queries and keys are rotated at each position.

    Fields are those of ``ModelConfig`` without the prefix ``rope_``. head_dim: number of rotated leading features.
    """

    head_dim: int
    theta: float
    type: str = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_length: int | None = None

    def table(self, length, dtype, device, positions=None):
        """Return what ``apply_rotary`` needs for positions 0 to ``length`` - 1, or for ``positions``, int64 [s] or [1,
        b]."""
        table = rotary_table(length, self, dtype, device)
        if positions is None:
            return table
        return [part[positions].reshape(*positions.shape, *(1,) * (3 - positions.dim()), -1) for part in table]

    def apply_rotary(self, x, table):
        """Rotate the features of queries or keys [s, b, heads, e] to their positions."""
        if self.head_dim in (0, x.shape[-1]):
            return rotate(x, table) if self.head_dim else x
        return torch.cat((rotate(x[..., : self.head_dim], table), x[..., self.head_dim :]), dim=-1)


def rotary_of(config, layer_index=0, head_dim=None):
    """Return the ``Rotary`` of a layer. head_dim: width of its heads, by default that of the model."""
    share = config.rotary_fraction if config.position[layer_index] == "rotary" else 0
    width = int((head_dim or config.rotary_dim) * share)  # rounded as transformers does
    return Rotary(width, *(getattr(config, f"rope_{name}") for name in Rotary._fields[1:]))


def inverse_frequencies(rotary, dtype, device=None):
    """Return f_i in radians per position, [e/2] in ``dtype``."""
    exponent = torch.arange(0, rotary.head_dim, 2, dtype=dtype, device=device) / rotary.head_dim
    plain = 1.0 / rotary.theta**exponent
    if rotary.type == "default":
        return plain
    slow = plain / rotary.factor
    if rotary.type == "linear":
        return slow
    if rotary.type == "yarn":
        low, high = math.floor(turning_pair(rotary, 32)), math.ceil(turning_pair(rotary, 1))
        low, high = max(low, 0), min(high, rotary.head_dim - 1)
        pair = torch.arange(rotary.head_dim // 2, dtype=dtype, device=device)
        kept = 1 - ((pair - low) / (high - low or 0.001)).clamp(0, 1)
        return slow * (1 - kept) + plain * kept
    length, low, high = rotary.original_length, rotary.low_freq_factor, rotary.high_freq_factor
    wavelength = 2 * math.pi / plain
    ramp = (length / wavelength - low) / (high - low)
    between = (1 - ramp) * plain / rotary.factor + ramp * plain
    return torch.where(wavelength > length / low, slow, torch.where(wavelength < length / high, plain, between))


def turning_pair(rotary, turns):
    """Return c(n) of yarn: the fractional index of the pair that turns ``turns`` times in the original length."""
    wavelengths = math.log(rotary.original_length / (turns * 2 * math.pi))
    return rotary.head_dim * wavelengths / (2 * math.log(rotary.theta))


def magnitude(rotary):
    """Return the factor of cos and sin."""
    return 0.1 * math.log(rotary.factor) + 1 if rotary.type == "yarn" and rotary.factor > 1 else 1.0


def rotary_table(seq_length, rotary, dtype, device):
    """Return cos and sin of the angles, each [s, 1, 1, e]. Angles are fp32 or wider; the two halves of e are equal."""
    if torch.compiler.is_compiling():
        return kept_table.__wrapped__(seq_length, rotary, dtype, device)
    room = 1 << (seq_length - 1).bit_length()  # so that all lengths share a few tables
    with torch.inference_mode(False):  # a step of training may read the table next
        table = kept_table(room, rotary, dtype, device)
    return [part[:seq_length] for part in table]


@functools.cache  # a CUDA graph may read any of them later
def kept_table(room, rotary, dtype, device):
    wide = torch.promote_types(dtype, torch.float32)
    position = torch.arange(room, dtype=wide, device=device)
    angle = torch.outer(position, inverse_frequencies(rotary, wide, device)).repeat(1, 2)[:, None, None]
    return (angle.cos() * magnitude(rotary)).to(dtype), (angle.sin() * magnitude(rotary)).to(dtype)


def rotate(x, table):
    """Rotate the features of every head. x: [s, b, heads, e]; table: ``rotary_table``."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
