"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, equations 9 to 19). Keys and values of all heads are
computed from one short vector. A cache keeps only this vector and one key that carries the position.

    c = RMSNorm(W_DKV x)                        the latent, of kv_lora_rank features
    k_i = [rotated W_KR x; W_UK_i c]            the first part is the same for all heads, qk_rope_head_dim features
    q_i = [rotated W_QR_i x; W_UQ_i x]          with q_lora_rank, RMSNorm(W_DQ x) takes the place of x
    v_i = W_UV_i c
    H_i = softmax(q_i k_i^T / sqrt(e + qk_rope_head_dim)) v_i

Routing comes first and gates multiply the heads, as in ``Attention``. Weights have transformers' names and order, in
which the features without positions come first in a head's query; only pairs that rotate together are half a width
apart, not neighbours. In this module the rotated ones come first.

Shapes: see attention.py; r = kv_lora_rank, t = qk_rope_head_dim.
"""

import torch
import torch.nn.functional as F
from torch import nn

from moh_lm.kernels.core_attention import CoreAttention
from moh_lm.model.attention import Attention
from moh_lm.parallel.layers import ColumnParallelLinear, ReplicatedLinear, RMSNorm, RowParallelLinear


class MultiLatentAttention(Attention):
    """See ``Attention``. The latent and the rotated key are computed whole on every tensor-parallel rank."""

    def make_projections(self, config, heads, init_std, output_std):
        d, e, h = config.hidden_size, config.head_dim, config.num_attention_heads
        self.latent_dim, self.rotary_dim = config.kv_lora_rank, config.qk_rope_head_dim
        rank, size, rows = config.q_lora_rank, h * config.query_dim, heads.partition(0, config.query_dim)
        self.direct = rank is None  # queries are projected from the input itself
        if self.direct:
            self.q_proj = ColumnParallelLinear(d, size, init_std, rows)
        else:
            self.q_a_proj = ReplicatedLinear(d, rank, init_std, heads.group)
            self.q_a_layernorm = RMSNorm(rank, config.rms_norm_eps, heads.group)
            self.q_b_proj = ColumnParallelLinear(rank, size, init_std, rows)
        self.kv_a_proj_with_mqa = ReplicatedLinear(d, self.latent_dim + self.rotary_dim, init_std, heads.group)
        self.kv_a_layernorm = RMSNorm(self.latent_dim, config.rms_norm_eps, heads.group)
        self.kv_b_proj = ColumnParallelLinear(self.latent_dim, 2 * h * e, init_std, heads.partition(0, 2 * e))
        self.q_norm = nn.Identity()
        self.o_proj = RowParallelLinear(h * e, d, output_std, heads.partition(1, e), heads.group)

    def project(self, x, table):
        latent, rotated = self.latents(x, table)
        key, value = self.kv_b_proj(latent).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        key = torch.cat((rotated.expand(-1, -1, key.shape[2], -1), key), -1)
        query = self.q_proj(x) if self.direct else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return query.unflatten(-1, (-1, self.head_dim + self.rotary_dim)).roll(self.rotary_dim, -1), key, value

    def latents(self, x, table):
        """Map x [s, b, d] to c [s, b, r] and the rotated key [s, b, 1, t]."""
        latent, key = self.kv_a_proj_with_mqa(x).split((self.latent_dim, self.rotary_dim), -1)
        return self.kv_a_layernorm(latent), self.positions.key(key.unsqueeze(2), table)


class LatentCore(CoreAttention):
    """See ``CoreAttention``. Kernels need keys and values of one width, so values are padded with zeros."""

    def forward(self, query, key, value, gates=None, selected=None, mask=None):
        padded = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
        return super().forward(query, key, padded, gates, selected, mask)[..., : value.shape[-1]]
