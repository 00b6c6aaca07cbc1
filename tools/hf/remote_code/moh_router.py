"""The router of an exported model: the gates of a token's heads and the heads that it uses.

moh_gates.py, the trainer's own file, has the routing forms: how scores become gates. Here are the weights that give the
scores, and the selection. Routing is computed in fp32 or wider, whatever the model's dtype, and scores are ranked in
``routing_dtype``; if scores are equal, the lower index is selected.

An expert is a head, or with ``routing_unit`` key_value_group the heads that share a key/value head: the gate of a group
is the gate of each of its heads. With head_in_group, heads compete only inside their group. With ``routing_top_p`` a
token uses the fewest routed experts, the largest first and at most K, whose softmax adds up to it. With
``load_balance_bias_rate`` u the K experts with the largest (affinity + u c) are selected, c the ``bias_steps`` of
training. Gates see no bias, and training here does not move it.

    L_b = sum over the routed experts of f_i P_i                                    (Eq. 7)

with f_i the share of the tokens of a sequence that select expert i and P_i the mean of its probability. Padding does
not count.

Shapes: b batch, s new tokens, k cached and new tokens, h heads, n experts, E routed experts, d hidden size.
"""

from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .moh_gates import form_of

WEIGHTS = ("w_shared", "w_routed", "w_type")


def select(scores, num_active, top_p=None, in_bf16=False):
    """Return 1 for the ``num_active`` largest scores of a token, else 0. If scores are equal, the lower index wins.

    top_p: 1 only for the fewest of them whose softmax, taken over all scores, adds up to it, or for all of them.
    in_bf16: rank the softmax in bf16, as in the authors' MoH-LLaMA3; torch.topk decides among equal ones.
    Each score counts the scores that rank before it. Unlike a stable sort, this can be exported to ONNX.
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


class Routing(NamedTuple):
    """gates and selection (bool) of the heads, both [b, s, h], and scores of the routed experts [b, s, E]; gates and
    scores are fp32, or float64 if the input is. None where all heads are used with gates 1."""

    gates: torch.Tensor | None = None
    selection: torch.Tensor | None = None
    scores: torch.Tensor | None = None


class MoHLlamaRouter(nn.Module):
    """Routing of one layer. form: from moh_gates.py. width: number of leading input channels that it reads. The other
    arguments are those of ``routing_form`` and ``select``.

    The weights are parameters of this module and not of nn.Linear layers, which quantizers and inference engines
    replace.
    """

    def __init__(self, form, width, top_p=None, in_bf16=False, bias_rate=0.0):
        super().__init__()
        self.form, self.width, self.top_p, self.in_bf16, self.bias_rate = form, width, top_p, in_bf16, bias_rate
        steps = torch.zeros(form.layer.num_routed * form.groups, dtype=torch.int32)  # counts, which no dtype rounds
        self.register_buffer("bias_steps", steps if bias_rate and form.layer.num_routed else None)
        weights = form.weights(0.0, width)
        for name in WEIGHTS:
            rows, _ = weights.get(name, (0, None))
            self.register_parameter(name, nn.Parameter(torch.empty(rows, width)) if rows else None)

    def forward(self, x):
        """Return the ``Routing`` of x [b, s, d], or for forms that read queries that of the queries of all heads
        [b, s, h, head_dim], before norm and rotary."""
        form, size = self.form, self.form.layer.heads_per_expert
        with torch.autocast(device_type=x.device.type, enabled=False):
            shared, scores, kinds = self.scores(x)
            gates, routed, selected = shared, scores, scores
            if form.layer.num_shared:
                gates = form.shared_gates(shared)
            if form.layer.num_routed:
                probability = form.probability(scores)
                selected = self.select(scores, probability)
                routed = form.routed_gates(scores, probability, selected)
            if form.two_stage:
                a1, a2 = form.type_weights(kinds)
                gates, routed = gates * a1, routed * a2
            experts = form.in_order(gates, routed), form.in_order(torch.ones_like(shared), selected).bool()
        return Routing(*(part if size == 1 else part.repeat_interleave(size, dim=-1) for part in experts), scores)

    def scores(self, x):
        """Return scores of the shared experts, the routed ones, and the two kinds; of width 0 without a weight."""
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.form.reads_queries:
            norms = x.to(torch.bfloat16 if self.in_bf16 else wide).norm(dim=-1)
            return *(part.to(wide) for part in self.form.scores(norms)), None
        x = x[..., : self.width].to(wide)
        weights = (getattr(self, name) for name in WEIGHTS)
        return [x[..., :0] if weight is None else F.linear(x, weight.to(wide)) for weight in weights]

    def select(self, scores, probability):
        """Return 1 for the routed experts that a token uses, else 0: [b, s, E]."""
        if self.form.by_sign:
            return (scores > 0).to(scores.dtype)
        if self.bias_steps is not None:
            scores = self.form.affinity(scores, probability) + self.bias_rate * self.bias_steps.to(scores.dtype)
        rivals = self.form.rivals(scores)
        return select(rivals, self.form.layer.num_active, self.top_p, self.in_bf16).reshape(scores.shape)


def routing_form(config, layer, num_heads, heads_per_expert=1, groups=1):
    """Return the routing form of a layer with ``num_heads`` heads, which compete inside ``groups`` groups."""
    shared, active = config.num_shared_heads[layer], config.num_active_routed_heads[layer]
    numbers = {"num_shared": shared, "num_routed": num_heads - shared, "num_active": active}
    experts = {name: number // (heads_per_expert * groups) for name, number in numbers.items()}
    of_group = SimpleNamespace(**experts, heads_per_expert=heads_per_expert)
    return form_of(config.routing, of_group, config.two_stage, groups)


def layer_form(config, layer):
    """Return the routing form of a layer of a language model."""
    groups = config.competing_groups(layer)
    return routing_form(config, layer, config.layer_heads[layer], config.heads_per_expert, groups)


def layer_router(config, layer):
    """Return the router of a layer of a language model."""
    in_bf16, bias_rate = config.routing_dtype == "bf16", config.load_balance_bias_rate
    width = config.gate_width or config.hidden_size
    router = MoHLlamaRouter(layer_form(config, layer), width, config.routing_top_p, in_bf16, bias_rate)
    if config._attn_implementation == "vllm" and (steps := router.bias_steps) is not None:  # vLLM loads no buffers
        del router.bias_steps
        router.bias_steps = nn.Parameter(steps, requires_grad=False)
    return router


class AllHeads(nn.Module):
    """Uses all heads of every token, without gates."""

    def forward(self, x):
        return Routing()


def image_router(config, layer, width, num_heads):
    """Return the router of a layer of an image model, without the options of language models."""
    if config.head_selection != "mixture":
        return AllHeads()
    return MoHLlamaRouter(routing_form(config, layer, num_heads), width)


def load_balance_loss(config, router_logits, router_selections, attention_mask):
    """Return Eq. 7, averaged over the sequences and over the layers with routed heads; a scalar in fp32.

    router_logits, router_selections: of every layer, [b, s, E], E = 0 without routed heads, and [b, s, h].
    attention_mask [b, k] or None: 0 for padding, of which the last s columns belong to the tokens.
    """
    losses = []
    for layer, (scores, selected) in enumerate(zip(router_logits, router_selections, strict=True)):
        if not scores.shape[-1]:
            continue
        counted = scores.new_ones(*scores.shape[:2], 1)
        if attention_mask is not None:
            counted = attention_mask[:, -scores.shape[1] :, None].to(scores)
        tokens = counted.sum(1).clamp_min(1)  # [b, 1]
        form = layer_form(config, layer)
        experts = selected[..., :: config.heads_per_expert].unflatten(-1, (form.groups, -1))
        selected = experts[..., form.layer.num_shared :].flatten(-2)
        share = (selected * counted).sum(1) / tokens  # f, [b, E]
        probability = (form.probability(scores) * counted).sum(1) / tokens  # P
        losses.append((share * probability).sum(-1).mean() * form.balance_factor)
    return sum(loss.to(losses[0].device) for loss in losses) / len(losses) if losses else torch.zeros(())
