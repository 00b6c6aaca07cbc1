"""Where tokens stand and what they see, in an exported model: rotary positions and causal masks.

``config.rope_parameters`` has its keys by the names of transformers, which makes the masks where it can.

Shapes: b batch, h heads, s tokens, k cached and new tokens, r features of a head that turn.
"""

import inspect
import math

import torch
import torch.nn.functional as F
from torch import nn

try:
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    MASK_ARGUMENTS = set(inspect.signature(create_causal_mask).parameters)  # they differ between versions
except ImportError:  # transformers before 4.53
    create_causal_mask = None


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


def causal_mask_before_4_53(hidden_states, attention_mask, past_key_values, cache_position, window):
    """Additive mask [b, 1, s, k]; k is the whole length of a static cache. A mask of that form is left as it is."""
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    batch, length = hidden_states.shape[:2]
    total = length
    if past_key_values is not None:
        total = past_key_values.get_max_cache_shape() or past_key_values.get_seq_length() + length
    behind = cache_position[:, None] - torch.arange(total, device=hidden_states.device)  # [s, k]
    visible = (behind >= 0) & (behind < (window or total))
    visible = visible.expand(batch, 1, length, total)
    if attention_mask is not None:
        not_padding = F.pad(attention_mask, (0, max(0, total - attention_mask.shape[1])))[:, :total].bool()
        visible = visible & not_padding[:, None, None, :]
    mask = torch.zeros(visible.shape, dtype=hidden_states.dtype, device=hidden_states.device)
    return mask.masked_fill(~visible, torch.finfo(mask.dtype).min)


def causal_mask(config, hidden_states, attention_mask, past_key_values, cache_position, position_ids, window):
    """The mask in the form that the attention implementation wants, made by transformers where it can.

    window: the last keys that a token sees, 0 for all.
    """
    if create_causal_mask is None:
        return causal_mask_before_4_53(hidden_states, attention_mask, past_key_values, cache_position, window)
    available = {
        "config": config,
        "input_embeds": hidden_states,  # the name in transformers 4
        "inputs_embeds": hidden_states,  # the name in transformers 5
        "attention_mask": attention_mask,
        "cache_position": cache_position,  # transformers 4 only
        "past_key_values": past_key_values,  # the name before transformers 5.24
        "cache": past_key_values,  # the name since
        "position_ids": position_ids,
    }
    arguments = {name: value for name, value in available.items() if name in MASK_ARGUMENTS}
    if not window or config._attn_implementation == "vllm":  # which has masks of its own
        return create_causal_mask(**arguments)
    if window < config.sliding_window:  # which is the largest one
        arguments["and_mask_function"] = lambda batch, head, query, key: key > query - window
    return create_sliding_window_causal_mask(**arguments)
