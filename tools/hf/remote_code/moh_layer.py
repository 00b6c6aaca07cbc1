"""A block of an exported model: attention and MLP with their norms, recomputed in the backward pass on request.

Shapes: b batch, s new tokens, d hidden size.
"""

import functools

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralMLP

try:
    from transformers.modeling_layers import GradientCheckpointingLayer

    _ = GradientCheckpointingLayer._can_checkpoint_with_cache  # before 5.24 it drops caches without gradients too
except (ImportError, AttributeError):

    class GradientCheckpointingLayer(nn.Module):
        """A layer that is recomputed in the backward pass after ``gradient_checkpointing_enable``."""

        gradient_checkpointing = False

        def __call__(self, *args, **kwargs):
            if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                return self._gradient_checkpointing_func(functools.partial(super().__call__, **kwargs), *args)
            return super().__call__(*args, **kwargs)


class MoHLlamaDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config, self_attn):
        super().__init__()
        self.self_attn = self_attn
        self.mlp = MistralMLP(config)  # LlamaMLP of transformers 4.46 reads pretraining_tp
        self.post_norm = config.post_norm
        if self.post_norm:
            self.post_feedforward_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        else:
            self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, output_details=False, **kwargs):
        """Map hidden_states [b, s, d] to [b, s, d]; with details, a tuple of it and the attention's other results."""
        if self.post_norm:
            attended, *details = self.self_attn(hidden_states, **kwargs)
            hidden_states = hidden_states + self.post_attention_layernorm(attended)
            hidden_states = hidden_states + self.post_feedforward_layernorm(self.mlp(hidden_states))
        else:
            attended, *details = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
            hidden_states = hidden_states + attended
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return (hidden_states, *details) if output_details else hidden_states
