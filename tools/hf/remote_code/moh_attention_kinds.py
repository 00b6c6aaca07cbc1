"""The kinds of attention besides ``MoHLlamaAttention``: from a latent, and with heads of several widths.

Shapes: b batch, s new tokens, k cached and new tokens, h heads, e head dimension, t rotated features besides these, r
features of the latent.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .moh_attention import MoHLlamaAttention
from .moh_positions import rotary_of, rotary_table


class MoHLlamaLatentAttention(MoHLlamaAttention):
    """Computes keys and values of all heads from one latent per token and one rotated key (arXiv 2405.04434). A cache
    keeps only these two. The rotated features of queries are the last in the weights, but the first in here."""

    projects = True

    def make_projections(self, config):
        self.latent_dim, self.turning_dim = config.kv_lora_rank, config.turning_dim
        size = self.num_heads * (self.head_dim + self.turning_dim)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(config.hidden_size, size, bias=False)
        else:
            self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
            self.q_a_layernorm = LlamaRMSNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, self.latent_dim + self.turning_dim, bias=False)
        self.kv_a_layernorm = LlamaRMSNorm(self.latent_dim, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.latent_dim, 2 * self.num_heads * self.head_dim, bias=False)

    def project(self, hidden_states, position_embeddings, position_ids):
        """Return queries [b, s, h, t + e], rotated queries [b, h, s, t + e], the rotated key [b, 1, s, t] and the
        latent [b, 1, s, r]."""
        if self.config.q_lora_rank is None:
            queries = self.q_proj(hidden_states)
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        queries = queries.unflatten(-1, (-1, self.head_dim + self.turning_dim)).roll(self.turning_dim, -1)
        latent, key = self.kv_a_proj_with_mqa(hidden_states).split((self.latent_dim, self.turning_dim), -1)
        query, key = queries.transpose(1, 2), key.unsqueeze(1)
        if self.rotary:
            query, key = (self.rotary.apply_rotary(x, position_embeddings) for x in (query, key))
        return queries, query, key, self.kv_a_layernorm(latent).unsqueeze(1)

    def expand(self, key, value):
        """Return the keys and values of heads from the content of a cache."""
        still, value = self.kv_b_proj(value[:, 0]).unflatten(-1, (-1, 2 * self.head_dim)).transpose(1, 2).chunk(2, -1)
        key = torch.cat((key.expand(-1, still.shape[1], -1, -1), still), -1)
        return key, F.pad(value, (0, self.turning_dim))  # kernels have keys and values of one width


class MoHLlamaUnevenAttention(MoHLlamaAttention):
    """Heads of several widths, padded with zeros to the widest, and each rotated by the angles of its own width."""

    projects = True

    def make_projections(self, config):
        size = sum(config.head_dims)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(config.hidden_size, size, bias=False) for _ in range(3))

    def project(self, hidden_states, position_embeddings, position_ids):
        """Return padded queries [b, s, h, e], then rotated queries, rotated keys, and values, [b, h, s, e] each."""
        widths, wide, turns = self.config.head_dims, self.head_dim, {}
        for width in {*widths} if self.rotary is not None else ():
            rotary = rotary_of(self.config, width)
            table = rotary_table(rotary, hidden_states, position_ids.unsqueeze(1))
            turns[width] = functools.partial(rotary.apply_rotary, table=table)

        def turned(head):
            return turns[head.shape[-1]](head.unsqueeze(1)).squeeze(1) if turns else head

        def padded(heads):
            return torch.stack([F.pad(head, (0, wide - head.shape[-1])) for head in heads], 1)

        query, key, value = (
            project(hidden_states).split(widths, -1) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        scaled = [turned(head) * (wide / head.shape[-1]) ** 0.5 for head in query]  # scores are over sqrt(e)
        return padded(query).transpose(1, 2), padded(scaled), padded(map(turned, key)), padded(value)

    def expand(self, key, value):
        return key, value

    def joined(self, output):
        return torch.cat([output[:, :, head, :width] for head, width in enumerate(self.config.head_dims)], -1)


def attention_kind(config):
    """Return the class of a model's attention layers."""
    if config.head_dims:
        return MoHLlamaUnevenAttention
    return MoHLlamaLatentAttention if config.attention == "latent" else MoHLlamaAttention
