"""The router: which heads a token uses and with what weight (paper, section 3.2, Eq. 5-8 and 9-10).

Heads 1..h_s are shared, the others are routed. For a token x_t:

    shared head i:   g_i = a1 softmax(W_s x_t)_i                                               (Eq. 5)
    routed head i:   g_i = a2 softmax(W_r x_t)_i if i is among the K largest, else 0           (Eq. 5)
    [a1, a2] = softmax(W_h x_t)                                                                (Eq. 6)

The softmax of the routed heads runs over all of them, selected or not. Equal scores: the lower head index is selected.
``released`` is the form of the authors' published vision code, which keeps the sum of the gates near the number of
active heads; ``query_norm`` is the form without weights that continues a trained model (Eq. 9-10).

Two things go beyond the paper. With ``routing_unit`` key_value_group the r heads that share a key/value head are one
expert: "head" above reads "group", and the gate of a group is that of each of its heads. With ``routing_top_p`` P, K is
only the most: a token selects the fewest heads, the largest first, whose softmax adds up to P, and the entropy H of
that softmax keeps them few (Huang et al. 2024, "Harder Tasks Need More Experts"). The loss of a layer then is

    beta L_b + gamma H,   H = mean over tokens of - sum over routed i of p_i ln p_i,   p = softmax(W_r x_t)

Shapes: s sequence, b batch, tp tensor-parallel ranks, d hidden size, h heads, n = h / r experts (r = 1: heads), n_s of
them shared and E = n - n_s routed. The router works on its slice of the sequence, in fp32 or wider whatever the
precision of the model.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from moh_lm.kernels.wide_linear import wide_linear
from moh_lm.parallel.groups import group_size
from moh_lm.parallel.layers import make_parameter
from moh_lm.parallel.mappings import replicate


class HeadRouter(nn.Module):
    """Gates of all heads and the loss of the router, for one layer.

    Parameters: w_shared [n_s, d], w_routed [E, d], w_type [2, d]; each only where it has a say (w_type needs both
    kinds of experts and ``two_stage``; ``query_norm`` has none of them). loss_terms: layers times micro-batches, over
    whose losses Eq. 8 takes the mean.
    """

    def __init__(self, config, layer_index, init_std, group, loss_terms=1):
        super().__init__()
        heads, size = config.heads, config.heads_per_expert
        self.layer_index = layer_index
        self.routing = heads.routing
        self.heads_per_expert = size
        self.num_shared = heads.num_shared_heads[layer_index] // size  # of experts, as the numbers that follow
        self.num_active = heads.num_active_routed_heads[layer_index] // size
        self.num_routed = config.num_attention_heads // size - self.num_shared
        self.top_p = heads.routing_top_p
        self.balance_scale = heads.load_balance_coefficient / loss_terms
        self.entropy_scale = heads.routing_entropy_coefficient / loss_terms
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

    def forward(self, x, kept=None, query_norms=None):
        """Gates, loss and selection of the tokens.

        x: [s/tp, b, d], the normalised input of the attention layer. query_norms: [s, b, h], only for
        ``query_norm``. kept: see ``unselected``. Returns gates [s/tp, b, h] (fp32 or wider); the loss, a scalar whose
        terms add up over the tp ranks; what ``RouterStatistics`` keeps of each sequence, [b, 2 + E]; and which routed
        experts are selected, 0 or 1 [s/tp, b, E]. The last three are None if the layer has no routed heads.
        """
        if self.routing == "query_norm":
            shared, kinds = torch.ones_like(query_norms[..., : self.num_shared]), None
            scores = self.query_norm_scores(query_norms)
        else:
            shared, scores, kinds = self.scores(x)
            shared = shared.softmax(-1)
        if self.num_routed == 0:
            return self.per_head(self.scale_shared(shared)), None, None, None
        selected = self.select(scores, kept)  # [s/tp, b, E]
        probability = scores.softmax(-1)
        routed = self.routed_gates(probability, selected)
        a1 = None
        if self.num_shared == 0:
            gates = routed
        else:
            a1, a2 = self.type_weights(kinds)
            gates = torch.cat((self.scale_shared(shared) * a1, routed * a2), dim=-1)  # [s/tp, b, n]
        balance_loss, statistics = self.load_balance(probability, selected, a1)
        loss = self.balance_scale * balance_loss
        if self.top_p is not None:
            loss = loss + self.entropy_scale * self.entropy(scores)
        return self.per_head(gates), loss, statistics, selected

    def unselected(self, x):
        """``kept`` of ``forward`` for the first pass over x [s/tp, b, d]: there is no selection to be kept yet.

        It is a pair: whether to keep, a bool scalar, and the selection to keep. That of a pass which computes again is
        (true, selection of the first pass). Both passes are one graph to torch.compile, which saves the same tensors.
        """
        if self.num_routed == 0:
            return None
        tokens = x.shape[0] * (group_size(self.group) if self.routing == "query_norm" else 1)
        shape = (tokens, x.shape[1], self.num_routed)
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.new_zeros((), dtype=torch.bool), x.new_zeros(shape, dtype=wide)

    def per_head(self, experts):
        """What is said of experts [..., n], for each of their heads: [..., h]."""
        size = self.heads_per_expert
        return experts if size == 1 else experts.unsqueeze(-1).expand(*experts.shape, size).flatten(-2)

    def select(self, scores, kept):
        selected = select(scores.detach(), self.num_active, self.top_p)
        return selected if kept is None else torch.where(*kept, selected)

    def scores(self, x):
        """W_s x, W_r x and W_h x: [s/tp, b, d] -> [s/tp, b, n_s], [s/tp, b, E] and [s/tp, b, 2], or 0 where there is no
        weight."""
        weights = [self.w_shared, self.w_routed, self.w_type]
        rows = [0 if weight is None else weight.shape[0] for weight in weights]
        weight = replicate(torch.cat([weight for weight in weights if weight is not None]), self.group)
        return wide_linear(x, weight).split(rows, dim=-1)

    def type_weights(self, kinds):
        """[a1, a2] of Eq. 6, each [s/tp, b, 1]; 1 without the second stage. The released code doubles them."""
        if self.w_type is None:
            return 1, 1
        weights = kinds.softmax(-1)
        return (weights * 2 if self.routing == "released" else weights).split(1, dim=-1)

    def scale_shared(self, shared):
        return shared * self.num_shared if self.routing == "released" else shared

    def routed_gates(self, probability, selected):
        """Gates of the routed experts [s/tp, b, E] before a2; exactly 0 where not selected."""
        kept = probability * selected
        if self.routing == "released":
            return kept / kept.sum(-1, keepdim=True) * selected.sum(-1, keepdim=True)
        if self.routing == "query_norm":
            # Straight-through (Eq. 10): 1 forward, the gradient of the score backward.
            return kept + (selected - kept).detach()
        return kept

    def query_norm_scores(self, query_norms):
        """|q_i| / std(|q|) of the routed experts (Eq. 9): [s, b, h] -> [s, b, E]. q_i of a group: all of its heads'."""
        if self.heads_per_expert > 1:
            query_norms = query_norms.unflatten(-1, (-1, self.heads_per_expert)).norm(dim=-1)
        norms = query_norms[..., self.num_shared :]
        if self.num_routed == 1:  # the unbiased deviation of one number is not defined
            return norms
        return norms / norms.std(-1, keepdim=True).clamp_min(1e-6)  # a token of zeros has equal norms

    def entropy(self, scores):
        """- sum_i p_i ln p_i of the routed experts, the mean over tokens; p = softmax(scores), scores [s/tp, b, E]."""
        log_p = scores.log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1).mean() / group_size(self.group)

    def load_balance(self, probability, selected, a1):
        """L_b = sum_i f_i P_i (Eq. 7), the mean over sequences, and a row of ``RouterStatistics`` for each of them.

        probability, selected: [s/tp, b, E]. f is the share of the tokens that select expert i: of each sequence, or of
        the whole previous step (``global_batch``; uniform before the first). P is the mean probability. ``released``
        multiplies by E. a1: [s/tp, b, 1], or a number without the second stage.
        """
        tokens = probability.shape[0] * group_size(self.group)  # of one sequence
        selections = selected.sum(0)  # [b, E]
        whole = selections
        if self.scope == "global_batch":
            share = self.statistics.previous_share  # [E]
            if share is None:
                share = torch.full_like(selections[0], self.num_active / self.num_routed)
        else:
            if self.group is not None:
                whole = selections.clone()
                dist.all_reduce(whole, group=self.group)
            share = whole / tokens  # [b, E]
        if self.routing == "query_norm":  # every rank has all tokens: the sums above count each of them tp times
            selections = selections / group_size(self.group)
        losses = (share * probability.sum(0)).sum(-1) / tokens  # [b]
        if self.routing == "released":
            losses = losses * self.num_routed
        weights = a1.detach().sum(0) if isinstance(a1, torch.Tensor) else torch.zeros_like(losses)[:, None]  # [b, 1]
        return losses.mean(), torch.cat((losses.detach()[:, None], weights, selections), dim=1)


def select(scores, k, top_p=None):
    """1 for the k largest scores of each token, else 0: [..., E] -> [..., E]; equal scores: the lower index first.

    top_p: only for the fewest of them whose softmax, which runs over all scores, adds up to it; or for all k.
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    if top_p is None:
        return torch.zeros_like(scores).scatter(-1, order, 1)
    probability = scores.softmax(-1).gather(-1, order)
    before = F.pad(probability.cumsum(-1)[..., :-1], (1, 0))  # of the larger scores; 0 for the largest
    return torch.zeros_like(scores).scatter(-1, order, (before < top_p).to(scores.dtype))


class RouterStatistics:
    """What one layer says of each sequence, kept until ``take`` is called: [b, 2 + E] for each micro-batch.

    The columns: the sequence's L_b, a1 summed over its tokens (0 without the second stage), and how often each routed
    expert was selected; of this rank's tokens, so that all of them add up over the tp ranks. Rows are added in the
    backward pass, which runs once per micro-batch even if activations are recomputed, and in the order of the
    micro-batches. ``previous_share`` [E] is f of Eq. 7 for the scope ``global_batch``: the share of the tokens of the
    whole previous step, over all ranks, that selected each expert; None before the first step.
    """

    def __init__(self):
        self.previous_share = None
        self.rows = []

    def add(self, rows):
        self.rows.append(rows)

    def take(self):
        """[n, 2 + E] float64: a row for each sequence of this rank since the last call, in their order."""
        rows, self.rows = torch.cat(self.rows).double(), []
        return rows


def attach_loss(hidden, loss, rows, statistics):
    """Return ``hidden`` unchanged; its backward pass also starts that of ``loss``, as if it were added to L_task.

    So the loss of a router needs no road of its own through the layers, stages and micro-batches that follow.
    rows: added to the ``RouterStatistics`` then.
    """
    return AttachLoss.apply(hidden, loss, rows, statistics)


class AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, loss, rows, statistics):
        ctx.save_for_backward(loss, rows)
        ctx.statistics = statistics
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        loss, rows = ctx.saved_tensors
        ctx.statistics.add(rows)
        return gradient, torch.ones_like(loss), None, None
