"""Rotary positions of an exported model: ``config.rope_parameters`` as transformers names them.

Shapes: b batch, h heads, s tokens, r features of a head that turn.
"""

import math

import torch
from torch import nn


def rotate(x, cos, sin):
    """Rotary embedding in Llama's half-split form: x [b, h, s, head_dim], feature i pairs with i + r / 2, where the
    first r features turn and the others stay."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def rotary_frequencies(rope, head_dim, device):
    """Angle per position of each pair of features that turns, fp32 [r / 2]. rope: ``config.rope_parameters``.

    linear divides the frequencies by ``factor``; llama3 divides the low ones only: those whose wavelength fits into the
    original context fewer than low_freq_factor times wholly, those that fit high_freq_factor times or more not at all.
    yarn divides the pairs wholly that turn less than once in the original context, and none that turn 32 times.
    """
    head_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    exponent = torch.arange(0, head_dim, 2, device=device).float() / head_dim
    frequencies = 1.0 / rope["rope_theta"] ** exponent
    if rope["rope_type"] == "linear":
        return frequencies / rope["factor"]
    if rope["rope_type"] == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        fits = rope["original_max_position_embeddings"] / (2 * math.pi / frequencies)
        kept = ((fits - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / rope["factor"] + kept * frequencies
    if rope["rope_type"] == "yarn":
        waves = [math.log(rope["original_max_position_embeddings"] / (turns * 2 * math.pi)) for turns in (32, 1)]
        low, high = (head_dim * wave / (2 * math.log(rope["rope_theta"])) for wave in waves)
        low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
        pairs = torch.arange(head_dim // 2, device=device).float()
        slowed = ((pairs - low) / (high - low or 0.001)).clamp(0, 1)
        return frequencies / rope["factor"] * slowed + frequencies * (1 - slowed)
    return frequencies


def rotary_magnitude(rope):
    """What cos and sin are multiplied by."""
    return 0.1 * math.log(rope["factor"]) + 1 if rope["rope_type"] == "yarn" and rope["factor"] > 1 else 1.0


class MoHLlamaRotaryEmbedding(nn.Module):
    """cos and sin [b, s, r]. No buffer: transformers 5 leaves one uninitialised when it loads a model."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x, position_ids):
        return rotary_table(self.config, self.config.turning_dim or self.config.query_dim, x, position_ids)


def rotary_table(config, width, x, position_ids):
    """cos and sin [b, s, r] of heads of this width, in the dtype of x."""
    with torch.autocast(device_type=x.device.type, enabled=False):
        frequencies = rotary_frequencies(config.rope_parameters, width, x.device)
        angles = position_ids[..., None].float() * frequencies  # [b, s, r / 2]
        angles = torch.cat((angles, angles), dim=-1)
        magnitude = rotary_magnitude(config.rope_parameters)
        return (angles.cos() * magnitude).to(x.dtype), (angles.sin() * magnitude).to(x.dtype)
