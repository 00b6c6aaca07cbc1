"""How far training has moved the weights of each head since an earlier checkpoint, and whether rare heads move less.

    c_i = |W_i - W_i'| / |W_i'|    W_i: rows of q and columns of o of head i; W_i': of the earlier checkpoint

A routed head learns from the tokens that select it. The routed heads of each layer are divided into the half that text
uses less, and the rest. Over all layers, the ratio of their mean changes is below 1 if rarely chosen heads move less.
"""

import numpy as np
import torch

from moh_lm.config import ConfigError


def measure_changes(model, earlier):
    """c [L, h] of two models of one shape. Raises ConfigError if the shapes differ."""
    found = []
    for now, then in zip(model.model.layers, earlier.model.layers, strict=False):
        heads = model.config.of_layer(now.index).num_attention_heads
        after, before = (head_weights(layer.self_attn, heads) for layer in (now, then))
        if after.shape != before.shape or len(model.model.layers) != len(earlier.model.layers):
            raise ConfigError(["--since: its heads are not those of --model; give a step of the same run"])
        found.append(((after - before).norm(dim=1) / before.norm(dim=1)).tolist())
    return np.array(found)


def head_weights(attention, heads):
    """Rows of q and columns of o of each head: float64 [h, 2 d e]."""
    queries = attention.q_proj if hasattr(attention, "q_proj") else attention.q_b_proj
    rows, columns = (project.weight.detach().double() for project in (queries, attention.o_proj))
    return torch.cat((rows.view(heads, -1), columns.T.reshape(heads, -1)), dim=1)


def rare_against_others(changes, load, routed):
    """(the ratio, the mean load of the rare half, that of the rest); NaN without routed heads, or without change.

    changes, load: [L, h]. routed: bool [L, h].
    """
    found = []
    for change, used, heads in zip(changes, load, routed, strict=True):
        places = np.flatnonzero(heads)[np.argsort(used[heads])]
        rare, others = places[: len(places) // 2], places[len(places) // 2 :]
        if len(rare):
            found.append([values[half].mean() for values in (change, used) for half in (rare, others)])
    moved, moved_others, *loads = np.mean(found, axis=0).tolist() if found else [np.nan] * 4
    return moved / moved_others if moved_others else np.nan, *loads
