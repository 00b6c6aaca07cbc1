"""A gate for each feature of each head (``--element-gates``): the element-wise form of Gated Attention, as a control.

Head i of token t becomes 2 sigmoid(G_i x_t) * H_i before the output projection, with G_i [e, d] (Qiu et al. 2025, arXiv
2505.06708; Qwen3-Next has it without the 2). G begins with zeros, so that every gate begins with exactly 1. It has as
many parameters as the queries, where a gate for each head (``--head-selection gated``) has one row of them.
"""

from moh_lm.model.attention import Attention
from moh_lm.parallel.layers import ColumnParallelLinear


class ElementGatedAttention(Attention):
    """See ``Attention``. Parameter: g_proj [h e, d], divided among ranks by heads as q_proj is."""

    def make_projections(self, config, heads, init_std, output_std):
        super().make_projections(config, heads, init_std, output_std)
        d, h, e = config.hidden_size, config.num_attention_heads, config.head_dim
        self.g_proj = ColumnParallelLinear(d, h * e, 0.0, heads.partition(0, e))

    def output(self, heads, x):
        gates = 2 * self.g_proj(x).sigmoid()
        return super().output(heads * gates.unflatten(-1, (-1, self.head_dim)), x)
