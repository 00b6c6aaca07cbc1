"""The router: which heads a token uses and with what weight (paper, section 3.2, Eq. 5-7 and 9-10).

Heads 1..h_s are shared, the others are routed. For a token x_t:

    shared head i:   g_i = a1 softmax(W_s x_t)_i                                               (Eq. 5)
    routed head i:   g_i = a2 softmax(W_r x_t)_i if i is among the K largest, else 0           (Eq. 5)
    [a1, a2] = softmax(W_h x_t)                                                                (Eq. 6)

The softmax of the routed heads runs over all of them, selected or not. Equal scores: the lower head index is selected.
``released`` is the form of the authors' published vision code, which keeps the sum of the gates near the number of
active heads; ``query_norm`` is the form without weights that continues a trained model (Eq. 9-10).

Shapes: s sequence, b batch, tp tensor-parallel ranks, h heads, h_s shared, E = h - h_s routed, d hidden size. The
router works on its slice of the sequence, in fp32 or wider whatever the precision of the model.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from moh_lm.parallel.groups import group_size
from moh_lm.parallel.layers import make_parameter
from moh_lm.parallel.mappings import replicate


class HeadRouter(nn.Module):
    """Gates of all heads and the load-balance loss, for one layer.

    Parameters: w_shared [h_s, d], w_routed [E, d], w_type [2, d]; each only where it has a say (w_type needs both
    kinds of heads and ``two_stage``; ``query_norm`` has none of them).
    """

    def __init__(self, config, layer_index, init_std, group):
        super().__init__()
        heads = config.heads
        self.layer_index = layer_index
        self.routing = heads.routing
        self.num_shared = heads.num_shared_heads[layer_index]
        self.num_active = heads.num_active_routed_heads[layer_index]
        self.num_routed = config.num_attention_heads - self.num_shared
        self.group = group
        self.scope = heads.load_balance_scope
        self.statistics = RouterStatistics()
        learned = self.routing != "query_norm"
        two_kinds = self.num_shared > 0 and self.num_routed > 0 and heads.two_stage
        rows = {"w_shared": self.num_shared, "w_routed": self.num_routed, "w_type": 2 if two_kinds else 0}
        for name, count in rows.items():
            present = learned and count > 0
            parameter = make_parameter((count, config.hidden_size), init_std) if present else None
            self.register_parameter(name, parameter)

    def forward(self, x, kept_selection=None, query_norms=None):
        """Gates and balance terms of the tokens.

        x: [s/tp, b, d], the normalised input of the attention layer. query_norms: [s, b, h], only for
        ``query_norm``. Returns gates [s/tp, b, h] (fp32 or wider) and the balance loss, a scalar whose terms add up
        over the tp ranks, with the selections [E] of this rank's tokens (None and None if the layer has no routed
        heads).
        """
        if self.routing == "query_norm":
            shared = torch.ones_like(query_norms[..., : self.num_shared])
            scores = self.query_norm_scores(query_norms)
        else:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            shared, scores = self.softmax(x, self.w_shared), self.scores(x, self.w_routed)
        if self.num_routed == 0:
            return self.scale_shared(shared), None, None
        selected = self.select(scores, kept_selection)  # [s/tp, b, E]
        probability = scores.softmax(-1)
        routed = self.routed_gates(probability, selected)
        if self.num_shared == 0:
            gates = routed
        else:
            a1, a2 = self.type_weights(x)
            gates = torch.cat((self.scale_shared(shared) * a1, routed * a2), dim=-1)  # [s/tp, b, h]
        return gates, *self.load_balance(probability, selected)

    def select(self, scores, kept_selection):
        if kept_selection:
            return kept_selection[0]
        selected = select_top_k(scores.detach(), self.num_active)
        if kept_selection is not None:
            kept_selection.append(selected)
        return selected

    def scores(self, x, weight):
        """W x: [s/tp, b, d] -> [s/tp, b, rows of W]; None without W."""
        return None if weight is None else F.linear(x, replicate(weight, self.group).to(x.dtype))

    def softmax(self, x, weight):
        return None if weight is None else self.scores(x, weight).softmax(-1)

    def type_weights(self, x):
        """[a1, a2] of Eq. 6, each [s/tp, b, 1]; 1 without the second stage. The released code doubles them."""
        if self.w_type is None:
            return 1, 1
        weights = self.softmax(x, self.w_type)
        return (weights * 2 if self.routing == "released" else weights).split(1, dim=-1)

    def scale_shared(self, shared):
        return shared * self.num_shared if self.routing == "released" else shared

    def routed_gates(self, probability, selected):
        """Gates of the routed heads [s/tp, b, E] before a2; exactly 0 where not selected."""
        kept = probability * selected
        if self.routing == "released":
            return kept / kept.sum(-1, keepdim=True) * self.num_active
        if self.routing == "query_norm":
            # Straight-through (Eq. 10): 1 forward, the gradient of the score backward.
            return kept + (selected - kept).detach()
        return kept

    def query_norm_scores(self, query_norms):
        """|q_i| / std(|q|) of the routed heads (Eq. 9): [s, b, h] -> [s, b, E]."""
        norms = query_norms[..., self.num_shared :]
        if self.num_routed == 1:  # the unbiased deviation of one number is not defined
            return norms
        return norms / norms.std(-1, keepdim=True).clamp_min(1e-6)  # a token of zeros has equal norms

    def load_balance(self, probability, selected):
        """L_b = sum_i f_i P_i (Eq. 7), the mean over sequences, and the selections [E] of this rank's tokens.

        probability, selected: [s/tp, b, E]. f is the share of the tokens that select head i: of each sequence, or of
        the whole previous step (``global_batch``; uniform before the first). P is the mean probability. ``released``
        multiplies by E.
        """
        batch = probability.shape[1]
        tokens = probability.shape[0] * group_size(self.group)  # of one sequence
        selections = selected.sum(0)  # [b, E]
        counts = selections.sum(0)  # [E]
        if self.scope == "global_batch":
            share = self.statistics.previous_share  # [E]
            if share is None:
                share = torch.full_like(counts, self.num_active / self.num_routed)
        else:
            if self.group is not None:
                dist.all_reduce(selections, group=self.group)
            share = selections / tokens  # [b, E]
        if self.routing == "query_norm":  # every rank has all tokens: the sums above count each of them tp times
            counts = counts / group_size(self.group)
        loss = (share * probability.sum(0)).sum() / (tokens * batch)
        return loss * self.num_routed if self.routing == "released" else loss, counts


def select_top_k(scores, k):
    """1 for the k largest scores of each token, else 0: [..., E] -> [..., E]; equal scores: the lower index first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(scores).scatter(-1, order[..., :k], 1)


class RouterStatistics:
    """Selections and balance loss of one layer, summed over sequences until ``take`` is called.

    They are added in the backward pass, which runs once per micro-batch even if activations are recomputed.
    ``previous_share`` [E] is f of Eq. 7 for the scope ``global_batch``: the share of the tokens of the whole previous
    step, over all ranks, that selected each head; None before the first step.
    """

    def __init__(self):
        self.previous_share = None
        self.sums = None

    def add(self, loss, counts, num_sequences):
        """loss: mean over ``num_sequences``. counts: [E], summed over their tokens."""
        row = torch.cat((loss.reshape(1) * num_sequences, counts)).to(torch.float64)
        self.sums = row if self.sums is None else self.sums + row

    def take(self):
        """[1 + E] float64: this rank's sums of the loss and of the selections since the last call."""
        sums, self.sums = self.sums, None
        return sums


def attach_loss(hidden, loss, scale, counts, statistics):
    """Return ``hidden`` unchanged; its backward pass also starts that of ``loss``, with the gradient ``scale``.

    So the balance loss of Eq. 8 needs no road of its own through the layers, stages and micro-batches that follow.
    """
    return AttachLoss.apply(hidden, loss, scale, counts, statistics)


class AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, loss, scale, counts, statistics):
        ctx.save_for_backward(loss, counts)
        ctx.scale = scale
        ctx.statistics = statistics
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        loss, counts = ctx.saved_tensors
        ctx.statistics.add(loss, counts, num_sequences=gradient.shape[1])
        return gradient, torch.full_like(loss, ctx.scale), None, None, None
