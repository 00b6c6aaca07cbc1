"""The rule that updates each parameter: optimizer, weight decay, and the scaling of learning rates with width.

With --optimizer muon the matrices of the blocks are updated by Muon. AdamW updates all other parameters: embedding,
output head, routers and norms. Matrices have weight decay, norms do not. Routers form a group of their own.

With --base-width W, a learning rate that was tuned at width W also suits width d (Yang et al. 2022, arXiv 2203.03466,
Table 8, for AdamW). With r = W / d, these factors are 1 for W = d:

                                               first values       learning rate   weight decay
    vectors: norms                             1                  1               none
    tables: embedding, positions               N(0, s)            1               1
    hidden: projections, W_s, W_r              N(0, s sqrt(r))    r               1 / r
    two scores of a layer: W_h                 N(0, s r)          r               1 / r
    output head, or tied embedding             N(0, s)            1               1
    final norm: multiplier of the logits       r                  r               none

A step shrinks weights by rate times decay, which is therefore the same at every width. Gradients shrink like r, except
those of the final norm, and Adam's epsilon shrinks with them. The logits are multiplied by r through the weight of the
final norm: AdamW's steps ignore the size of gradients, so a weight that starts at r and moves by r acts as r times an
ordinary one. An export has nothing left to multiply, and one rule suffices for a tied embedding.

The numbers of heads and key/value heads, the ranks of latents and the size of the MLP should grow with the width.
Heads keep their size and with it the scale of attention scores, 1 / sqrt(head_dim). The number of routed heads then
grows with the width, so W_r is a hidden matrix. W_h always has two rows and is an output. Muon's rates are scaled in
moh_lm/training/muon.py.
"""

from typing import NamedTuple

import torch

from moh_lm.config.resolve import or_else
from moh_lm.model.matrices import is_block_matrix
from moh_lm.training.muon import Muon

EPS = 1e-8  # Adam's epsilon
TABLES = ("embed_tokens.weight", "embed_positions.weight", ".cope.weight", "lm_head.weight")  # the last is an output


class Rule(NamedTuple):
    """How a group is updated. orthogonal: whether Muon does so. rate: learning rate relative to the schedule, or to the
    routers' own schedule for a ``router``. eps: Adam's epsilon."""

    orthogonal: bool
    weight_decay: float
    rate: float = 1.0
    router: bool = False
    eps: float = EPS


def make_optimizer(named_parameters, config):
    """Return AdamW or Muon over the ``parameter_groups`` of pairs (canonical name, parameter)."""
    settings, groups = config.optimizer, parameter_groups(named_parameters, config)
    common = dict(lr=settings.learning_rate, betas=(settings.adam_beta1, settings.adam_beta2), eps=EPS, fused=True)
    if settings.optimizer == "muon":
        return Muon(groups, settings.muon_momentum, **common)
    return torch.optim.AdamW(groups, **common)


def rule_of(name, parameter, config):
    """Return the ``Rule`` for a parameter with this canonical name."""
    settings, ratio = config.optimizer, config.model.width_ratio
    if settings.optimizer == "muon" and is_block_matrix(name):
        rate = (settings.matrix_learning_rate or settings.learning_rate) / settings.learning_rate
        return Rule(True, or_else(settings.matrix_weight_decay, settings.weight_decay), rate)
    if name == "model.norm.weight":
        return Rule(False, 0.0, ratio)
    if len(parameter.whole_shape) == 1 or not getattr(parameter, "decays", True):
        return Rule(False, 0.0, eps=EPS * ratio)
    if name.endswith(TABLES):
        return Rule(False, or_else(settings.embedding_weight_decay, settings.weight_decay), eps=EPS * ratio)
    return Rule(False, settings.weight_decay / ratio, ratio, ".router." in name, EPS * ratio)


def parameter_groups(named_parameters, config):
    """Return groups for a torch optimizer, matrices before norms, each with the fields of its ``Rule`` and "params".

    named_parameters: (canonical name, parameter). Frozen parameters are in no group. Heads of several widths give
    tensor-parallel ranks shards of several sizes. What these ranks hold whole then has groups of its own, so that
    data-parallel ranks cut it at the same places on all of them.
    """
    groups, uneven = {}, config.parallel.tensor_parallel_size > 1 and bool(config.model.head_dims)
    for name, parameter in sorted(named_parameters, key=lambda item: len(item[1].whole_shape) == 1):
        if parameter.requires_grad:
            whole = uneven and parameter.tensor_partition is None
            groups.setdefault((rule_of(name, parameter, config), whole), []).append(parameter)
    return [{**rule._asdict(), "params": parameters} for (rule, _), parameters in groups.items()]
