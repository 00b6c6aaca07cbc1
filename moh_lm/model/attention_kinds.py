"""Which class an attention layer is of."""

from moh_lm.model.attention import Attention
from moh_lm.model.latent import LatentAttention
from moh_lm.model.uneven import UnevenAttention


def attention_kind(config):
    """The class of the attention layers of a ``ModelConfig``."""
    if config.head_dims:
        return UnevenAttention
    return LatentAttention if config.attention == "latent" else Attention
