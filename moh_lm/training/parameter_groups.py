"""Which rule updates which parameter.

With --optimizer muon the matrices of the blocks are Muon's. All others are AdamW's: embedding, output head, routers and
norms. Matrices decay, norms do not. Routers are a group of their own where ``Config.routers_apart``.
"""

from typing import NamedTuple


class Rule(NamedTuple):
    """How a group is updated. orthogonal: by Muon. rate: its learning rate over that of the schedule; that of a
    ``router`` is given in every step."""

    orthogonal: bool
    weight_decay: float
    rate: float = 1.0
    router: bool = False


def rule_of(name, parameter, config):
    """The ``Rule`` of a parameter by its canonical name."""
    settings = config.optimizer
    if settings.optimizer == "muon" and is_block_matrix(name):
        rate = (settings.matrix_learning_rate or settings.learning_rate) / settings.learning_rate
        return Rule(True, or_else(settings.matrix_weight_decay, settings.weight_decay), rate)
    if len(parameter.whole_shape) == 1:
        return Rule(False, 0.0)
    is_vocabulary = name.endswith(("embed_tokens.weight", "lm_head.weight"))
    special = settings.embedding_weight_decay if is_vocabulary else None
    apart = config.routers_apart and ".router." in name
    return Rule(False, or_else(special, settings.weight_decay), router=apart)


def is_block_matrix(name):
    """Whether a parameter is a projection of a decoder layer, of its attention or its MLP."""
    return name.endswith("_proj.weight")


def or_else(value, default):
    return default if value is None else value


def parameter_groups(named_parameters, config):
    """Groups for a torch optimizer, matrices before norms: the fields of their ``Rule``, and "params".

    named_parameters: (canonical name, parameter). What is frozen is in none.
    """
    groups = {}
    for name, parameter in sorted(named_parameters, key=lambda item: len(item[1].whole_shape) == 1):
        if parameter.requires_grad:
            groups.setdefault(rule_of(name, parameter, config), []).append(parameter)
    return [{**rule._asdict(), "params": parameters} for rule, parameters in groups.items()]
