"""Fits the routers and output projections of an import to sample text, so that less is lost before any training.

Layer by layer, on the hidden states that the earlier fitted layers compute from the sample, with H_i(t) the output of
head i and x(t) the normalized input of the attention layer, of which w_i reads the channels of the router:

    w_i  = argmin sum over t (w_i x(t) - |W_O_i H_i(t)|)^2      of routed scores, where they have weights
    W_O' = argmin sum over t |W_O' z(t) - W_O H(t)|^2 + ridge |W_O' - W_O|^2      z: the heads times their gates

So the router selects the heads that would write most into the residual stream, and the selected heads make up for
those that were left out. Subtracting a number from all scores that compete for a token, or scaling them, keeps their
order. They are therefore centred and scaled to the deviation SPREAD, so that gates begin near their usual values.

Both are least squares (the second as in the reconstruction of pruned layers: Hubara et al. 2021, arXiv 2102.07557),
which needs forward passes only: one layer and its sums are in memory at a time.
"""

from dataclasses import replace

import torch

from moh_lm.config import HeadsConfig
from moh_lm.model.gates import FORMS
from tools.heads.importance import embedded, read_layer, written_sizes

RIDGE = 0.01  # relative to the mean square of the inputs of the least squares
SPREAD = 0.25


@torch.no_grad()
def calibrate(config, source, parts, tokens, progress):
    """Return {parameter name: fp32 tensor} of what is fitted in the mixture of ``parts``; see ``import_weights.plan``.

    config: ModelConfig of the mixture. source: the ``Source`` whose embedding the tokens, int64 [b, s], belong to.
    progress: called after each layer.
    """
    blocks_of = {part.name: part.blocks for part in parts}
    whole = replace(config, heads=HeadsConfig("all"))
    x, fitted = embedded(config, source, tokens), {}
    for layer in range(config.num_layers):
        dense, mixture = (read_layer(model, layer, lambda name: joined(blocks_of[name])) for model in (whole, config))
        heads = attended(dense, x)
        attention = mixture.self_attn
        router = attention.router
        if fits_router(config, layer):
            sizes = written_sizes(heads.unflatten(-1, (-1, config.head_dim)), attention.o_proj.weight)
            read = dense.input_layernorm(x)[..., : router.width]
            router.w_routed.copy_(routed_weights(config.routed_layer(layer), read, sizes))
            fitted[f"model.layers.{layer}.self_attn.router.w_routed"] = router.w_routed.clone()
        used = attended(mixture, x)
        weight = attention.o_proj.weight
        weight += regression(used, (heads - used) @ weight.t()).t()
        fitted[f"model.layers.{layer}.self_attn.o_proj.weight"] = weight.clone()
        x = mixture.finish(x, used @ weight.t())
        progress()
    return fitted


def joined(blocks):
    """Join the parameter that a function gives in blocks of rows."""
    return torch.cat(list(blocks()))


def fits_router(config, layer):
    """Whether the router of a layer has weights that choose the K largest scores."""
    form = FORMS[config.heads.routing]
    if config.heads.head_selection != "mixture" or form.reads_queries or form.by_sign:
        return False
    return config.routed_layer(layer).num_routed > 0


def attended(block, x):
    """Return the input of a layer's output projection, [s, b, h e], one sequence of x [s, b, d] at a time."""
    found = []
    hook = block.self_attn.o_proj.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    for sequence in x.split(1, dim=1):
        block.self_attn(block.input_layernorm(sequence), block.batch.router_inputs(block.index))
    hook.remove()
    return torch.cat(found, dim=1)


def routed_weights(layer, x, sizes):
    """Return rows [E, w] whose products with the channels x [s, b, w] of the router rank the routed experts by size.

    layer: ``RoutedLayer``. sizes: norms of what each head writes, [s, b, h]; those selected together are added in
    quadrature.
    """
    experts = sizes.unflatten(-1, (-1, layer.heads_per_expert)).norm(dim=-1)[..., layer.routed_numbers]
    experts = experts.unflatten(-1, (layer.groups, -1))  # those of a group compete
    weight = regression(x, (experts - experts.mean(-1, keepdim=True)).flatten(-2)).t()
    return weight * (SPREAD / (x @ weight.t()).std().clamp_min(1e-12))


def regression(x, y):
    """Return the matrix [n, m] by which x [..., n] best predicts y [..., m], by least squares with a ridge."""
    x, y = x.flatten(0, -2), y.flatten(0, -2)
    gram = (x.t() @ x).double()
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(gram, (x.t() @ y).double()).float()
