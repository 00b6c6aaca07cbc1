"""Which class an attention layer is of."""

from moh_lm.extras.heterogeneous_heads import UnevenAttention
from moh_lm.model.attention import Attention
from moh_lm.model.mla import LatentAttention


def attention_kind(config):
    """The class of the attention layers of a ``ModelConfig``."""
    if config.head_dims:
        return UnevenAttention
    return LatentAttention if config.attention == "latent" else Attention
