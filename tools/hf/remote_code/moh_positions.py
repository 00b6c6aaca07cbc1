"""The positions of tokens and the keys that they see, in an exported model: rotary positions and causal masks.

moh_rotary.py, the trainer's own file, has the frequencies. transformers makes the masks where it can.

Shapes: b batch, h heads, s tokens, k cached and new tokens, r rotated features of a head.
"""

import inspect

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_moh import ROPE_KEYS
from .moh_rotary import Rotary, inverse_frequencies, magnitude

try:
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    MASK_ARGUMENTS = set(inspect.signature(create_causal_mask).parameters)  # they differ between versions
    COUNT_SLOTS = "cache_position" in MASK_ARGUMENTS  # whether masks and caches receive the slots of new tokens
except ImportError:  # transformers before 4.53
    create_causal_mask, COUNT_SLOTS = None, True


class MoHLlamaRotaryEmbedding(nn.Module):
    """Returns cos and sin [b, 1, s, r]. It has no buffer, which transformers 5 would leave uninitialised on loading."""

    def __init__(self, config):
        super().__init__()
        self.rotary = rotary_of(config)

    def forward(self, x, position_ids):
        return rotary_table(self.rotary, x, position_ids.unsqueeze(1))


def rotary_of(config, width=None):
    """Return the ``Rotary`` of heads of this width, by default the model's."""
    rope, width = config.rope_parameters, width or config.turning_dim or config.query_dim
    settings = {field: rope.get(key) for field, key in ROPE_KEYS.items()}
    return Rotary(int(width * rope.get("partial_rotary_factor", 1.0)), type=rope["rope_type"], **settings)


def rotary_table(rotary, x, positions):
    """Return cos and sin [b, 1 or h, s, r] at these positions [b, 1 or h, s], in the dtype of x."""
    with torch.autocast(device_type=x.device.type, enabled=False):
        wide = torch.promote_types(x.dtype, torch.float32)
        angles = positions.unsqueeze(-1).to(wide) * inverse_frequencies(rotary, wide, x.device)
        angles = torch.cat((angles, angles), dim=-1)
        return tuple((part * magnitude(rotary)).to(x.dtype) for part in (angles.cos(), angles.sin()))


def slots_of(x, cache):
    """Return the slots of the new tokens x [b, s, d] in a cache, [s]."""
    past = 0 if cache is None else cache.get_seq_length()
    return torch.arange(x.shape[1], device=x.device) + past


def positions_of(slots, padding=None):
    """Return the positions of tokens in these slots, [b or 1, s]. padding: its mask [b, k], if it takes no place."""
    return slots.unsqueeze(0) if padding is None else (padding.long().cumsum(-1) - 1).clamp_min(0)[:, slots]


def of_padding(attention_mask):
    """Return the mask if it is a padding mask, [b, k], or None."""
    is_padding = isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2
    return attention_mask if is_padding else None


def causal_masks(config, hidden_states, attention_mask, cache, cache_position, position_ids):
    """Return {window: the mask of layers with that window}. attention_mask: the padding mask, or finished masks."""
    windows = {*config.layer_windows}
    if not isinstance(attention_mask, dict):
        given = config, hidden_states, attention_mask, cache, cache_position, position_ids
        return {window: causal_mask(*given, window) for window in windows}
    if windows == {*attention_mask}:
        return attention_mask
    kinds = {window: "sliding_attention" if window else "full_attention" for window in windows}
    return {window: attention_mask[kind] for window, kind in kinds.items()}  # masks of continuous batching


def causal_mask_before_4_53(hidden_states, attention_mask, past_key_values, cache_position, window):
    """Return an additive mask [b, 1, s, k]; k is the whole length of a static cache. Such a mask is not changed."""
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
    """Return the mask in the form of the attention implementation, made by transformers where it can.

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
