"""How much the loss rises without a head: its importance by ablation (Michel et al. 2019, arXiv 1905.10650).

    rise_i = loss with g_i(t) H_i(t) = 0 for all tokens t - loss, in nats per token

One head is left out at a time. Later layers see the change and choose their heads again. Only that head's layer and
later ones are recomputed, so a head costs half a forward pass on average. A negative rise means that the text is
predicted better without the head. The size of a head's output (importance.py) needs no extra passes, but does not
show how later layers use it.

Heads that stand in for each other show when several are missing. The curve leaves heads out one after another, those
with the smallest rise (the mean over domains) first. It gives the loss against the share of used heads that is kept
(Michel et al. 2019, figure 3, with a task's metric in place of the loss).
"""

from functools import partial

import numpy as np
import torch

from moh_lm.parallel.cross_entropy import linear_cross_entropy
from tools.heads.measures import finish, read_heads

POINTS = 21  # most points of the curve


@torch.no_grad()
def measure_ablation(model, domains, num_tokens, progress):
    """Return ({domain: loss}, {domain: rises [L, h]}) on about ``num_tokens`` tokens each. progress: for each layer."""
    layers, texts = model.model.layers, sample(model, domains, num_tokens)
    shape = (len(layers), model.config.of_layer(0).num_attention_heads)
    losses, rises = {}, {name: np.zeros(shape) for name in texts}
    states = {name: [model.model.embed(tokens[:, :-1]) for tokens in of] for name, of in texts.items()}
    for name, xs in states.items():
        losses[name] = [loss_of(model, x, layers, tokens) for x, tokens in zip(xs, texts[name], strict=True)]
    for index, layer in enumerate(layers):
        for name, xs in states.items():
            for number, x in enumerate(xs):
                heads = read_heads(layer, x)
                weighted = heads.weighted()
                for head in heads.used.flatten(0, 1).any(0).nonzero().flatten().tolist():
                    without = weighted.clone()
                    without[:, :, head] = 0
                    loss = loss_of(model, finish(layer, x, without), layers[index + 1 :], texts[name][number])
                    rises[name][index, head] += (loss - losses[name][number]) / len(xs)
                xs[number] = finish(layer, x, weighted)
        progress()
    return {name: float(np.mean(of_windows)) for name, of_windows in losses.items()}, rises


@torch.no_grad()
def measure_pruning(model, domains, num_tokens, rises, used):
    """Return {"kept": shares of the used heads, from 1 to 0, "loss": {domain: losses}} on the ablation's tokens.

    rises: {domain: [L, h]} of ``measure_ablation``. used: bool [L, h], the heads that some token uses.
    """
    texts = sample(model, domains, num_tokens)
    mean = np.mean(list(rises.values()), 0)
    order = [place for place in mean.argsort(axis=None, kind="stable") if used.flat[place]]
    left_out = sorted({round(len(order) * point / (POINTS - 1)) for point in range(POINTS)})
    losses = {name: [] for name in texts}
    for number in left_out:
        kept = np.ones(mean.size, bool)
        kept[order[:number]] = False
        masks = torch.from_numpy(kept.reshape(mean.shape)).to(model.head_weight().device)
        for name, loss in masked_losses(model, masks, texts).items():
            losses[name].append(loss)
    return {"kept": [1 - number / len(order) for number in left_out], "loss": losses}


def sample(model, domains, num_tokens):
    """{domain: evenly spaced windows, int64 [1, s] each, on the device of the model}, about ``num_tokens`` tokens."""
    device, found = model.head_weight().device, {}
    for name, windows, _ in domains:
        count = min(max(1, num_tokens // len(windows[0])), len(windows))
        found[name] = [windows[at].to(device)[None] for at in np.linspace(0, len(windows) - 1, count).astype(int)]
    return found


def without_heads(layer, mask, x):
    """The output of ``layer`` for ``x`` with its heads multiplied by ``mask`` [h]."""
    weighted = read_heads(layer, x).weighted()
    return finish(layer, x, weighted * mask[:, None].to(weighted.dtype))


def masked_losses(model, masks, texts):
    """{domain: mean loss} with the heads multiplied by ``masks`` [L, h]. texts: result of ``sample``."""
    layers = [partial(without_heads, layer, mask) for layer, mask in zip(model.model.layers, masks, strict=True)]
    return {
        name: float(np.mean([loss_of(model, model.model.embed(tokens[:, :-1]), layers, tokens) for tokens in of]))
        for name, of in texts.items()
    }


def loss_of(model, x, layers, tokens):
    """Mean loss after ``layers`` of x [s - 1, b, d], the input for all tokens but the last; tokens: int64 [b, s]."""
    for layer in layers:
        x = layer(x)
    weight = model.head_weight()
    _, losses = linear_cross_entropy(model.model.norm(x), weight, tokens[:, 1:].t(), model.vocab_partition, model.group)
    return losses.double().mean().item()
