"""The initial gates of a model, which decide whether a dense warm-up or a change of routing is allowed."""

import torch

from moh_lm.model.gates import FORMS


def gates_of_one(model):
    """Return whether all gates of the mixture ``model`` are 1 when all scores are equal."""
    return all(abs(gate - 1) < 1e-3 for layer in range(model.num_layers) for gate in layer_gates(model, layer))


def layer_gates(model, index):
    """Return the mean initial gates of the shared and of the selected experts in a layer; 1 if it has none."""
    layer, zeros = model.routed_layer(index).of_group(), torch.zeros
    form = FORMS[model.heads.routing](layer, model.heads.two_stage)
    scores = torch.full((layer.num_routed,), form.first_score)
    a1, a2 = form.type_weights(zeros(2)) if form.two_stage else (1, 1)
    selected = (torch.arange(layer.num_routed) < layer.num_active).float()
    shared = form.shared_gates(zeros(layer.num_shared)) * a1
    routed = form.routed_gates(scores, form.probability(scores), selected) * a2
    return tuple(gate.max().item() if len(gate) else 1.0 for gate in (shared, routed))
