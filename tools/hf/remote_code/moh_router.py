"""The router of an exported model: the gates of a token's heads and the heads that it uses.

    g_i = a1 softmax(W_s x)_i  for the shared heads, which come first               (Eq. 5)
    g_i = a2 softmax(W_r x)_i  for the K routed heads with the largest (W_r x)_i, the softmax over all routed heads
    g_i = 0                    for the other routed heads
    [a1, a2] = softmax(W_h x)                                                       (Eq. 6)

Layers with one kind of heads have no W_h: a1 = 1 or a2 = 1. Routing is computed in fp32 or wider whatever the model's
dtype, and scores are ranked in ``routing_dtype``; of equal ones the lower head index is selected.

With ``routing_unit`` key_value_group the heads that share a key/value head are one expert: "head" above reads "group",
and the gate of a group is that of each of its heads. With ``routing_top_p`` a token uses the fewest routed heads, the
largest first and at most K, whose softmax adds up to it. With ``load_balance_bias_rate`` u the K heads with the largest
(affinity + u c) are selected, c the ``bias_steps`` of training; the affinity is sigmoid(score) with routing sigmoid,
else the softmax. Gates see no bias, and training here does not move it.

    L_b = sum over the routed heads of f_i P_i                                      (Eq. 7)

with f_i the share of the tokens of a sequence that select head i and P_i the mean of its softmax. Padding does not
count. The authors' published code multiplies L_b by the number of routed heads.

Shapes: b batch, s new tokens, k cached and new tokens, h heads, n experts, E routed experts, d hidden size.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


def select(scores, num_active, top_p=None, in_bf16=False):
    """1 for the ``num_active`` largest scores of a token, 0 for the others; of equal scores the lower index wins.

    top_p: 1 only for the fewest of them whose softmax, which runs over all scores, adds up to it, or for all of them.
    in_bf16: by the softmax of the scores in bf16, as in the authors' MoH-LLaMA3; torch.topk decides among equal ones.
    Each score counts those that stand before it: unlike a stable sort this can be written as ONNX.
    """
    if in_bf16:
        best = scores.bfloat16().softmax(dim=-1).topk(num_active).indices
        return (best.unsqueeze(-1) == torch.arange(scores.shape[-1], device=scores.device)).any(-2).to(scores.dtype)
    index = torch.arange(scores.shape[-1], device=scores.device)
    own, other = scores.unsqueeze(-1), scores.unsqueeze(-2)  # [b, s, E, 1] and [b, s, 1, E]
    before = (other > own) | ((other == own) & (index < index.unsqueeze(-1)))
    selected = before.sum(dim=-1) < num_active
    if top_p is not None:
        selected = selected & ((before * scores.softmax(dim=-1).unsqueeze(-2)).sum(dim=-1) < top_p)
    return selected.to(scores.dtype)


def with_shared(routed, num_shared):
    """The selection of all experts, bool [b, s, n], from that of the routed ones, 0 or 1 [b, s, n - num_shared]."""
    return torch.cat((routed.new_ones(*routed.shape[:-1], num_shared), routed), dim=-1).bool()


def per_head(experts, heads_per_expert):
    """What is said of experts [b, s, n], for each of their heads: [b, s, h]."""
    return experts if heads_per_expert == 1 else experts.repeat_interleave(heads_per_expert, dim=-1)


def affinity(routing, scores):
    """What a bias of the selection is added to, [b, s, E]."""
    return scores.sigmoid() if routing == "sigmoid" else scores.softmax(dim=-1)


class MoHLlamaRouter(nn.Module):
    """Routing of one layer from learned weights; with ``query_norm`` only the bias of its selection.

    x [b, s, d] -> gates and selection, bool, both [b, s, h]; scores of the routed experts [b, s, E]. Gates and scores
    are fp32, or float64 as x is.

    ``paper`` is Eq. 5-6. ``released`` is the authors' published vision code: routed gates are renormalised over the
    selected heads and multiplied by their number, so are shared gates by theirs, a1 and a2 by 2. ``paper_scaled`` is
    Eq. 5-6 times the number of shared heads, that of routed heads, and 2. ``sigmoid`` has gates 2 sigmoid(score), and
    no a1 and a2; ``relu`` the same for shared heads, and for routed ones ReLU(score), which selects those above 0. The
    weights are parameters of this module and not of nn.Linear layers, which quantizers and inference engines replace.
    """

    def __init__(self, config, layer_idx):
        super().__init__()
        size = config.heads_per_expert
        self.heads_per_expert = size
        self.num_shared = config.num_shared_heads[layer_idx] // size  # of experts, as the next two
        self.num_routed = config.layer_heads[layer_idx] // size - self.num_shared
        self.num_active = config.num_active_routed_heads[layer_idx] // size
        self.top_p = config.routing_top_p
        self.in_bf16 = config.routing_dtype == "bf16"
        self.routing = config.routing
        self.scaled = config.routing in ("released", "paper_scaled")
        one_stage = config.routing in ("sigmoid", "relu") or not config.two_stage
        self.two_stage = not one_stage and self.num_shared > 0 and self.num_routed > 0
        self.bias_rate = config.load_balance_bias_rate
        self.bias_steps = None
        if self.bias_rate and self.num_routed:  # counts, which no dtype of a model rounds
            steps = torch.zeros(self.num_routed, dtype=torch.int32)
            self.bias_steps = nn.Parameter(steps, requires_grad=False)
        if config.routing == "query_norm":
            self.two_stage = False
            return
        if self.num_shared:
            self.w_shared = nn.Parameter(torch.empty(self.num_shared, config.hidden_size))
        if self.num_routed:
            self.w_routed = nn.Parameter(torch.empty(self.num_routed, config.hidden_size))
        if self.two_stage:
            self.w_type = nn.Parameter(torch.empty(2, config.hidden_size))

    def forward(self, x):
        """Of query_norm, whose scores are norms of queries: what is selected by. Else gates, selection and scores."""
        if self.routing == "query_norm":
            return self.biased(x)
        with torch.autocast(device_type=x.device.type, enabled=False):
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            gates, selected, scores = [], x[..., :0], x[..., :0]
            if self.num_shared:
                gates.append(self.shared_gates(F.linear(x, self.w_shared.to(x.dtype))))
            if self.num_routed:
                scores = F.linear(x, self.w_routed.to(x.dtype))
                if self.routing == "relu":
                    selected = (scores > 0).to(scores.dtype)
                else:
                    selected = select(self.biased(scores), self.num_active, self.top_p, self.in_bf16)
                gates.append(self.routed_gates(scores, selected))
            if self.two_stage:
                a = F.linear(x, self.w_type.to(x.dtype)).softmax(dim=-1)  # Eq. 6
                a = a * 2 if self.scaled else a
                gates = [gates[0] * a[..., :1], gates[1] * a[..., 1:]]
            experts = torch.cat(gates, dim=-1), with_shared(selected, self.num_shared)
            return *(per_head(part, self.heads_per_expert) for part in experts), scores

    def requires_grad_(self, requires_grad=True):
        """Of the weights: counts can have no gradient, and PEFT asks for that of the whole module."""
        for weight in self.parameters():
            weight.requires_grad_(requires_grad and weight.is_floating_point())
        return self

    def biased(self, scores):
        """What is selected by."""
        if self.bias_steps is None:
            return scores
        return affinity(self.routing, scores) + self.bias_rate * self.bias_steps.to(scores.dtype)

    def shared_gates(self, scores):
        if self.routing in ("sigmoid", "relu"):
            return 2 * scores.sigmoid()
        gates = scores.softmax(dim=-1)  # Eq. 5, shared heads
        return gates * self.num_shared if self.scaled else gates

    def routed_gates(self, scores, selected):
        if self.routing == "sigmoid":
            return 2 * scores.sigmoid() * selected
        if self.routing == "relu":
            return scores.relu()
        gates = scores.softmax(dim=-1) * selected  # Eq. 5, routed heads
        if self.routing == "released":
            return gates / gates.sum(dim=-1, keepdim=True) * selected.sum(dim=-1, keepdim=True)
        return gates * self.num_routed if self.scaled else gates


def image_router(config, layer, width, num_heads):
    """The router of a layer of an exported image model: W_r, W_s and W_h, and no option of language models."""
    return MoHLlamaRouter(
        SimpleNamespace(
            routing=config.routing, two_stage=config.two_stage, hidden_size=width, layer_heads={layer: num_heads},
            num_shared_heads=config.num_shared_heads, num_active_routed_heads=config.num_active_routed_heads,
            heads_per_expert=1, routing_top_p=None, routing_dtype="fp32", load_balance_bias_rate=0,
        ),
        layer,
    )  # fmt: skip


def query_norm_routing(
    query, num_shared, num_active, heads_per_expert=1, in_bf16=False, biased=lambda scores: scores
):
    """Routing without weights: query [b, s, h, head_dim], before rotary -> the same as ``MoHLlamaRouter``.

    The score of a routed head is the L2 norm of its query, divided by the standard deviation over the routed heads, as
    in the authors' released code. Shared and selected heads have gate 1 (Eq. 9); the gradient of a selected gate goes
    to its softmax score (Eq. 10).
    The query of a group is those of its heads, one after the other. num_shared, num_active: of experts. in_bf16: norms,
    scores and their ranking are in bf16. biased: what is selected by, made of the scores.
    """
    norms = query.to(torch.bfloat16 if in_bf16 else torch.float32).norm(dim=-1)
    if heads_per_expert > 1:
        norms = norms.unflatten(-1, (-1, heads_per_expert)).norm(dim=-1)
    scores = norms[..., num_shared:]
    if scores.shape[-1] > 1:
        scores = scores / scores.std(dim=-1, keepdim=True).clamp_min(1e-6)  # equal norms: a token of zeros
    scores = scores.float()
    selected = select(biased(scores), num_active, in_bf16=in_bf16)
    probabilities = scores.softmax(dim=-1)
    routed = selected + selected * (probabilities - probabilities.detach())  # Eq. 9, and Eq. 10 backward
    shared = torch.ones_like(norms[..., :num_shared], dtype=torch.float32)
    experts = torch.cat((shared, routed), dim=-1), with_shared(selected, num_shared)
    return *(per_head(part, heads_per_expert) for part in experts), scores


def load_balance_loss(config, router_logits, router_selections, attention_mask):
    """Eq. 7, the mean over the sequences and over the layers with routed heads; a scalar in fp32.

    router_logits, router_selections: of every layer, [b, s, E], E = 0 without routed heads, and [b, s, h].
    attention_mask [b, k] or None: 0 for padding, of which the last s columns belong to the tokens.
    """
    losses, size = [], config.heads_per_expert
    budgets = (config.num_shared_heads, config.num_active_routed_heads)
    for scores, selected, shared, active in zip(router_logits, router_selections, *budgets, strict=True):
        num_routed = scores.shape[-1]
        if not num_routed:
            continue
        counted = scores.new_ones(*scores.shape[:2], 1)
        if attention_mask is not None and attention_mask.dim() == 2:
            counted = attention_mask[:, -scores.shape[1] :, None].to(scores)
        tokens = counted.sum(1).clamp_min(1)  # [b, 1]
        share = (selected[..., shared::size] * counted).sum(1) / tokens  # f, [b, E]
        if config.routing == "sigmoid":
            probability = scores.sigmoid() / scores.sigmoid().sum(dim=-1, keepdim=True)
        elif config.routing == "relu":  # L_b over K / E is the L1 norm, weighed by the load
            probability = scores.relu() * num_routed * size / active
        else:
            probability = scores.softmax(dim=-1)
        probability = (probability * counted).sum(1) / tokens  # P
        loss = (share * probability).sum(-1).mean()
        losses.append(loss * num_routed if config.routing == "released" else loss)
    return sum(loss.to(losses[0].device) for loss in losses) / len(losses) if losses else torch.zeros(())
