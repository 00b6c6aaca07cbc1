"""Multi-head latent attention: keys and values of all heads are made of one short vector, which is all that a cache
keeps of a token, with one key that turns (DeepSeek-V2, arXiv 2405.04434, equations 9 to 19).

    c = RMSNorm(W_DKV x)                        the latent, of kv_lora_rank features
    k_i = [rotated W_KR x; W_UK_i c]            the first part is the same for all heads, qk_rope_head_dim features
    q_i = [rotated W_QR_i x; W_UQ_i x]          with q_lora_rank of RMSNorm(W_DQ x) in place of x
    v_i = W_UV_i c
    H_i = softmax(q_i k_i^T / sqrt(e + qk_rope_head_dim)) v_i

Gates multiply the heads as ever, and routing goes before. In generation W_UK_i is applied to the query, and W_UV_i to
what the scores have weighed: q_i k_i^T = [rotated W_QR_i x; W_UK_i^T W_UQ_i x] [rotated W_KR x; c]^T. So a token asks
a cache that has one key for all heads, and whose values are a part of it.

Weights are named and ordered as transformers has them: of a head's query first the features that do not turn. In here
those that turn are the first. Shapes: as of attention.py, and r = kv_lora_rank, t = qk_rope_head_dim.
"""

import torch
import torch.nn.functional as F

from moh_lm.model.attention import Attention
from moh_lm.model.gates import FORMS
from moh_lm.parallel.layers import ColumnParallelLinear, RMSNorm


class LatentAttention(Attention):
    """As ``Attention``. The latent and the key that turns are made whole on every tensor-parallel rank."""

    one_cache, by_rows = True, False

    def make_projections(self, config, init_std):
        d, h, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank
        self.latent_dim, self.turning_dim = config.kv_lora_rank, config.qk_rope_head_dim
        size, rows = h * self.query_dim, self.heads.partition(0, self.query_dim)
        if rank is None:
            self.q_proj = ColumnParallelLinear(d, size, init_std, rows)
        else:
            self.q_a_proj = ColumnParallelLinear(d, rank, init_std, None)
            self.q_a_layernorm = RMSNorm(rank, config.rms_norm_eps, self.group)
            self.q_b_proj = ColumnParallelLinear(rank, size, init_std, rows)
        self.kv_a_proj_with_mqa = ColumnParallelLinear(d, self.latent_dim + self.turning_dim, init_std, None)
        self.kv_a_layernorm = RMSNorm(self.latent_dim, config.rms_norm_eps, self.group)
        pairs = self.heads.partition(0, 2 * self.head_dim)
        self.kv_b_proj = ColumnParallelLinear(self.latent_dim, 2 * h * self.head_dim, init_std, pairs)

    def queries(self, x):
        if hasattr(self, "q_proj"):
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x, self.whole)))
        return query.unflatten(-1, (-1, self.query_dim)).roll(self.turning_dim, -1)

    def turned(self, query, table):
        return self.positions.turn(query, table)

    def latents(self, x, positions=None, length=None):
        """c [s, b, r], the key that turns, at its positions [s, b, 1, t], and their table, of x [s, b, d]."""
        latent, key = self.kv_a_proj_with_mqa(x, self.whole).split((self.latent_dim, self.turning_dim), -1)
        table = self.positions.table(length or x.shape[0], x.dtype, x.device, positions)
        return self.kv_a_layernorm(latent), self.positions.turn(key.unsqueeze(2), table), table

    def keys_and_values(self, x, positions=None, length=None):
        latent, turning, table = self.latents(x, positions, length)
        key, value = self.kv_b_proj(latent).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        return torch.cat((turning.expand(-1, -1, key.shape[2], -1), key), -1), value, table

    def attend(self, projected, documents=None, backend="dense"):
        value = F.pad(projected.value, (0, self.turning_dim))  # kernels have keys and values of one width
        return super().attend(projected._replace(value=value), documents, backend)[..., : self.head_dim]

    # --- Generation, on one rank ---

    def expansions(self):
        """W_UK and W_UV of each head: [h, e, r]."""
        return self.kv_b_proj.weight.unflatten(0, (-1, 2 * self.head_dim)).chunk(2, 1)

    def project_token(self, x, positions, length):
        projected = self.project(x, positions, length)
        turning, still = projected.query.split((self.turning_dim, self.head_dim), -1)
        query = torch.cat((turning, torch.einsum("sbhe,her->sbhr", still, self.expansions()[0])), -1)
        query = query * (query.shape[-1] / self.query_dim) ** 0.5  # a cache divides by the root of what it sees
        kept, _ = self.to_cache(x, projected, positions, length)
        return projected._replace(query=query, key=kept, value=kept)

    def to_cache(self, x, projected, positions, length):
        latent, turning, _ = self.latents(x, positions, length)
        return (torch.cat((turning, latent.unsqueeze(2)), -1),) * 2

    def from_cache(self, context):
        return torch.einsum("bhr,her->bhe", context[..., self.turning_dim :], self.expansions()[1])

    def cache_shape(self, rows, length):
        return rows, 1, min(self.window or length, length), self.turning_dim + self.latent_dim

    # --- What it costs ---

    @staticmethod
    def products(config):
        d, e, h, t = config.hidden_size, config.head_dim, config.num_attention_heads, config.qk_rope_head_dim
        of_queries = (config.q_lora_rank or d) * (e + t)
        for_all = d * ((config.q_lora_rank or 0) + config.kv_lora_rank + t) + 2 * h * config.kv_lora_rank * e
        return of_queries + d * e, 2 * e + t, for_all

    @staticmethod
    def cache_width(config):
        return config.kv_lora_rank + config.qk_rope_head_dim

    @staticmethod
    def describe_kv(config):
        return f"latent keys of {config.kv_lora_rank} + {config.qk_rope_head_dim} features"

    @staticmethod
    def cache_shares(config, layer_index):
        """All of it is kept, and read whichever heads a token uses."""
        return 1.0, 1.0

    @classmethod
    def activation_bytes(cls, config, width, tp, counted=0):
        """As of ``Attention``: of the rank's heads q, k, padded v and context, and what is left of it; the input, what
        both norms read, in fp32, and what they give."""
        h, e, t, q = config.num_attention_heads, config.head_dim, config.qk_rope_head_dim, config.q_lora_rank or 0
        heads = h * (4 * (e + t) + e)
        if config.heads.head_selection == "mixture" and FORMS[config.heads.routing].reads_queries:
            heads += h * (e + t) * 4 / width  # their norms, in fp32
        return width * (heads / tp + config.hidden_size) + (4 + 2 * width) * (config.kv_lora_rank + q)
