"""Models and attention layers in float64, with weights so large that nothing is hidden by small ones."""

import torch

from moh_lm.build import Settings, build_attention, build_model
from moh_lm.model.batch_context import RouterInputs
from moh_lm.model.block import modules_of


def make_model(config, scale=1, seed=0, **settings):
    """The model of a ``ModelConfig``, its weights ``scale`` times as large as they are drawn. settings: see
    ``build_model``."""
    model = build_model(config, **settings)
    model.initialize(seed)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter *= scale
    return model


def draw_zeros(model, seed=0):
    """Give the matrices of a model that begin with zeros, those of gates, values that show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.3, generator=generator)
    return model


def make_layer(config, **settings):
    """The attention of the first layer of a ``ModelConfig``; its weights are not drawn. settings: of ``Settings``."""
    return build_attention(config, 0, Settings(**settings)).double()


def attend(layer, x):
    """Output and ``RouterOutput`` of an attention layer for x [s/tp, b, d], of a run without documents."""
    return layer(x, RouterInputs())


def loss_and_gradients(model, tokens, positions=None):
    """[loss, every gradient, the rows of every router] of tokens [b, s + 1]; positions: of them in their documents."""
    model.zero_grad()
    model.batch.feed([positions])
    loss, _ = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *gradients, *(block.rows.take() for block in modules_of(model))]
