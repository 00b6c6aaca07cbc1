"""Initial values of the parameters of image models, and what optimizer and checkpoints know about them.

Their layers are torch's. Each parameter carries the description of moh_lm/parallel/layers.py. It is whole on every
rank.
"""

from torch import nn


def describe(parameter, std=None, bound=None, value=0.0, decays=True):
    """Set how a parameter starts: N(0, std), uniform within +-bound, or all ``value``. decays: whether it has weight
    decay if it is not a vector. Returns the parameter."""
    parameter.whole_shape = tuple(parameter.shape)
    parameter.init_std, parameter.init_bound, parameter.init_value = std, bound, value
    parameter.tensor_partition = None
    parameter.tensor_model_parallel = False
    parameter.decays = decays
    return parameter


def described(module, std=None, bound=None, value=0.0, decays=True):
    """Call ``describe`` on the weight of a module, set its bias to start at 0, and return the module."""
    describe(module.weight, std, bound, value, decays)
    if module.bias is not None:
        describe(module.bias)
    return module


def linear(inputs, outputs, std=None, bound=None):
    return described(nn.Linear(inputs, outputs), std, bound)


def layer_norm(width, eps=1e-6):
    return described(nn.LayerNorm(width, eps=eps), value=1.0)
