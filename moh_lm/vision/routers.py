"""The layers of an image model and their routers. A layer without a mixture uses every head."""

from moh_lm.build import gumbel_noise
from moh_lm.model.router import AllHeads, HeadRouter
from moh_lm.model.transformer import loss_terms
from moh_lm.vision.layers import INIT_STD


def routed_layers(config, seed):
    """Yield each ``ImageLayer`` of a model with its router. seed: that of the run, for Gumbel noise."""
    terms = loss_terms(config)
    for layer in map(config.layer, range(config.num_layers)):
        router = AllHeads()
        if layer.routed is not None:
            noise = gumbel_noise(config.heads, seed, layer.index)
            router = HeadRouter(layer, layer.index, INIT_STD, loss_terms=terms, noise=noise)
        yield layer, router
