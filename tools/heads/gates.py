"""Finds heads that a model does not need, by training gates for them (Voita et al. 2019, arXiv 1905.09418, section 6).

    s_i = sigmoid((ln u - ln(1 - u) + ln alpha_i) / beta), u uniform on (0, 1), drawn for every step and head
    z_i = min(1, max(0, s_i (zeta - gamma) + gamma)),      beta 2/3, gamma -0.1, zeta 1.1 (Louizos et al. 2018)

The heads write z_i g_i H_i, and ln alpha is trained to lower loss + lambda sum_i P(z_i > 0), where P(z_i > 0) =
sigmoid(ln alpha_i - beta ln(-gamma / zeta)). The weights of the model stay as they are; Voita et al. train them too.
Then s_i = sigmoid(ln alpha_i) without noise, and the heads with z_i above 0 are kept.
"""

import math

import torch

from moh_lm.parallel.cross_entropy import linear_cross_entropy
from tools.heads.ablation import masked_losses, sample, without_heads

BETA, GAMMA, ZETA = 2 / 3, -0.1, 1.1
STEPS, RATE, START = 400, 0.1, 2.0  # steps of Adam, on a window each; its rate; and the initial ln alpha


def measure_gates(model, domains, num_tokens, penalties, used, progress):
    """Return [{"lambda", "kept": share of the used heads, "heads": bool [L, h], "loss": {domain: loss with z}}], one
    for each of ``penalties``, on the tokens of the ablation. used: bool [L, h]. progress: called after each of them."""
    texts, found = sample(model, domains, num_tokens), []
    for penalty in penalties:
        z = trained_gates(model, [tokens for of in texts.values() for tokens in of], penalty, used)
        with torch.no_grad():
            losses = masked_losses(model, z, texts)
        kept = (z > 0).cpu().numpy() & used
        found.append({"lambda": penalty, "kept": kept.sum() / used.sum(), "heads": kept, "loss": losses})
        progress()
    return found


def trained_gates(model, batches, penalty, used):
    """z without noise, [L, h], after ``STEPS`` steps; the same for the same batches, [int64 [1, s + 1]]."""
    weight = model.head_weight()
    random, used = torch.Generator().manual_seed(0), torch.from_numpy(used).to(weight.device)
    log_alpha = torch.full(used.shape, START, device=weight.device, requires_grad=True)
    adam = torch.optim.Adam([log_alpha], lr=RATE)
    for step in range(STEPS):
        tokens = batches[step % len(batches)]
        u = torch.rand(log_alpha.shape, generator=random).clamp(1e-6, 1 - 1e-6).to(weight.device)
        x, z = model.model.embed(tokens[:, :-1]), stretched((u.logit() + log_alpha) / BETA)
        for layer, gates in zip(model.model.layers, z, strict=True):
            x = without_heads(layer, gates, x)
        x, labels = model.model.norm(x), tokens[:, 1:].t()
        loss, _ = linear_cross_entropy(x, weight, labels, model.vocab_partition, model.group)
        (log_alpha.grad,) = torch.autograd.grad(loss + penalty * above_0(log_alpha)[used].sum(), log_alpha)
        adam.step()
    return stretched(log_alpha.detach())


def above_0(log_alpha):
    return (log_alpha - BETA * math.log(-GAMMA / ZETA)).sigmoid()


def stretched(logits):
    return (logits.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)
