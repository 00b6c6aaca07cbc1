"""The routing forms: how the scores of a token become the gates of its heads.

An expert is a head, or with ``routing_unit`` key_value_group the heads that share a key/value head. With head_in_group,
heads compete only inside their key/value group (``InGroups``). A token x_t has n_s shared experts and E routed ones, of
which K are selected:

    paper          shared  g_i = a1 softmax(W_s x_t)_i                                       (Eq. 5)
                   routed  g_i = a2 softmax(W_r x_t)_i for the K largest, else 0             (Eq. 5)
                   [a1, a2] = softmax(W_h x_t)                                               (Eq. 6)
    paper_scaled   the same, times 2 n_s and 2 E: every gate is 1 where the scores are equal
    released       as in the authors' vision code: routed gates are divided by their sum over the selected experts and
                   multiplied by the number of these, shared ones by n_s, [a1, a2] by 2
    sigmoid        g_i = 2 sigmoid(s_i) for shared and selected experts; no competition, no second stage. W_s begins
                   with zeros, so that these gates begin with exactly 1. With all heads shared it is the head-wise gate
                   of Gated Attention (Qiu et al. 2025, arXiv 2505.06708), times 2
    softplus       g_i = softplus(s_i) = ln(1 + exp s_i), the head-wise gate of Laguna, without an upper bound. Scores
                   are ranked and balanced as those of sigmoid are. Gates of shared heads begin with ln 2
    relu           g_i = ReLU(s_i): routed experts with a score above 0 are selected, however many. Shared ones as with
                   sigmoid. W_r is drawn so that the gates of selected experts begin with 1 on average. L_b is the L1
                   norm of the gates, weighed by the load, and its coefficient steers the mean number of selected
                   experts to K (ReMoE, Wang et al. 2024, arXiv 2412.14711; moh_lm/training/step_sums.py)
    query_norm     as in the authors' MoH-LLaMA3, without weights. The score is the norm of the expert's query before
                   rotary, divided by the deviation of these norms if there are three or more. A gate is 1 forward (the
                   quantiser, Eq. 9) and has the gradient of the softmax of the scores (the straight-through estimator,
                   Eq. 10)

A form is a class of a few lines. To add one: write it here, name it in ``FORMS`` and in the choices of ``routing`` in
moh_lm/config/heads.py, and give it its formula in float64 in tests/reference.py. Exports carry a copy of this file as
moh_gates.py, so it imports nothing but torch and the standard library.

Shapes: a dot stands for tokens, [s, b] or a slice of them; kv key/value groups.
"""

import math

import torch
import torch.nn.functional as F


class Paper:
    """The gates of Eq. 5 and 6 exactly as in the paper, and the interface that other forms override.

    layer: ``RoutedLayer`` with the numbers of experts, in one group if only those compete. reads_queries: whether
    scores are norms of queries instead of products with router weights. has_types: whether a second stage weighs shared
    against routed experts (Eq. 6). by_sign: whether a token selects all routed experts with scores above 0 instead of
    the K largest. balance_factor: multiplies L_b of Eq. 7. first_score: mean score of a selected expert at
    initialization. groups: number of groups whose experts compete among themselves.
    """

    reads_queries, has_types, by_sign = False, True, False
    first_score = 0.0
    type_scale = groups = 1

    def __init__(self, layer, two_stage):
        self.layer = layer
        self.two_stage = two_stage and self.has_types and layer.num_shared > 0 and layer.num_routed > 0
        self.balance_factor = 1

    def weights(self, init_std, width):
        """Return {name: (rows, standard deviation of the initial values)} of the router matrices [rows, width]."""
        rows = {"w_shared": self.layer.num_shared, "w_routed": self.layer.num_routed, "w_type": 2 * self.two_stage}
        return {name: (count, init_std) for name, count in rows.items() if count}

    def shared_gates(self, scores):
        """Map W_s x [., n_s] to gates before a1 (Eq. 5)."""
        return scores.softmax(-1)

    def probability(self, scores):
        """Map W_r x [., E] to the probabilities whose mean is P of Eq. 7; they sum to 1."""
        return scores.softmax(-1)

    def affinity(self, scores, probability):
        """Return the values [., E] to which a selection bias is added: between 0 and 1, ordered like the scores except
        where fp32 rounds those of different scores to one number, as sigmoid does with scores above 17."""
        return probability

    def routed_gates(self, scores, probability, selected):
        """Map W_r x, its ``probability`` and the selection, each [., E], to gates before a2 (Eq. 5)."""
        return probability * selected

    def type_weights(self, scores):
        """Map W_h x [., 2] to [a1, a2] of Eq. 6, each [., 1]."""
        weights = scores.softmax(-1)
        return (weights * self.type_scale if self.type_scale != 1 else weights).split(1, dim=-1)

    def rivals(self, routed):
        """Reshape values of routed experts [., E] so that those which compete share the last dimension."""
        return routed

    def in_order(self, shared, routed):
        """Join values of shared and of routed experts in the order of the experts: [., n]."""
        return torch.cat((shared, routed), dim=-1)


class PaperScaled(Paper):
    type_scale = 2

    def shared_gates(self, scores):
        return scores.softmax(-1) * self.layer.num_shared

    def routed_gates(self, scores, probability, selected):
        return probability * selected * self.layer.num_routed


class Released(PaperScaled):
    def __init__(self, layer, two_stage):
        super().__init__(layer, two_stage)
        self.balance_factor = layer.num_routed

    def routed_gates(self, scores, probability, selected):
        shares = scores.masked_fill(selected == 0, -math.inf).softmax(-1)  # probabilities over their sum may be 0 / 0
        return shares * selected.sum(-1, keepdim=True)


class Sigmoid(Paper):
    has_types = False

    def weights(self, init_std, width):
        found = super().weights(init_std, width)
        return found | ({"w_shared": (self.layer.num_shared, 0.0)} if self.layer.num_shared else {})

    def shared_gates(self, scores):
        return 2 * scores.sigmoid()

    def probability(self, scores):
        """sigmoid(s_i) / sum_j sigmoid(s_j), as in DeepSeek-V3 (arXiv 2412.19437, Eq. 19)."""
        return F.logsigmoid(scores).softmax(-1)

    def affinity(self, scores, probability):
        return scores.sigmoid()

    def routed_gates(self, scores, probability, selected):
        return 2 * scores.sigmoid() * selected


class Softplus(Sigmoid):
    def shared_gates(self, scores):
        return F.softplus(scores)

    def routed_gates(self, scores, probability, selected):
        return F.softplus(scores) * selected


class Relu(Sigmoid):
    by_sign = True
    first_score = 1.0

    def __init__(self, layer, two_stage):
        super().__init__(layer, two_stage)
        self.balance_factor = layer.num_routed / max(1, layer.num_active)

    def weights(self, init_std, width):
        found = super().weights(init_std, width)
        deviation = math.sqrt(math.pi / (2 * width))  # scores of normalised inputs: N(0, pi / 2)
        return found | ({"w_routed": (self.layer.num_routed, deviation)} if self.layer.num_routed else {})

    def probability(self, scores):
        """Return the gates, whose mean is P of Eq. 7."""
        return scores.relu()

    def routed_gates(self, scores, probability, selected):
        return probability * selected


class QueryNorm(Paper):
    reads_queries, has_types = True, False

    def weights(self, init_std, width):
        return {}

    def scores(self, norms):
        """Map the norms of queries [., h] to scores of shared [., n_s] and of routed experts [., E]."""
        size, num_shared = self.layer.heads_per_expert, self.layer.num_shared
        if size > 1:
            norms = norms.unflatten(-1, (-1, size)).norm(dim=-1)
        shared, routed = norms.split([num_shared, self.layer.num_routed], dim=-1)
        return shared, self.over_deviation(routed)

    def over_deviation(self, routed):
        if routed.shape[-1] <= 2:  # one has no deviation; two would differ by sqrt(2) whatever they are
            return routed
        return routed / routed.std(-1, keepdim=True).clamp_min(1e-6)  # a token of zeros has equal norms

    def shared_gates(self, scores):
        return scores.new_ones(scores.shape)

    def routed_gates(self, scores, probability, selected):
        gates = probability * selected
        return gates + (selected - gates).detach()  # Eq. 9 forward, Eq. 10 backward


class InGroups:
    """A form whose heads compete only inside their key/value group (``routing_unit`` head_in_group).

    Eq. 5, 9 and 10 hold within each of the kv groups: its first n_s / kv heads are shared, K / kv of the others are
    selected, and softmaxes run over its heads. L_b is the mean over the groups (Eq. 7). [a1, a2] of Eq. 6 are the same
    in all groups. query_norm divides by the deviation over the routed heads of all groups, because two numbers divided
    by their own deviation always differ by the same amount.

    form: the form of one group. groups: kv. See ``Paper`` for the methods; experts [., n] are ordered by group.
    """

    def __init__(self, form, groups):
        self.form, self.groups, self.layer = form, groups, form.layer
        self.reads_queries, self.by_sign, self.two_stage = form.reads_queries, form.by_sign, form.two_stage
        self.first_score, self.type_weights = form.first_score, form.type_weights
        self.balance_factor = form.balance_factor / groups

    def weights(self, init_std, width):
        found = self.form.weights(init_std, width).items()
        return {name: (rows * (1 if name == "w_type" else self.groups), std) for name, (rows, std) in found}

    def scores(self, norms):
        parts = self.by_group(norms).split([self.layer.num_shared, self.layer.num_routed], dim=-1)
        shared, routed = (part.flatten(-2) for part in parts)
        return shared, self.form.over_deviation(routed)

    def shared_gates(self, scores):
        return self.form.shared_gates(self.by_group(scores)).flatten(-2)

    def probability(self, scores):
        return self.form.probability(self.by_group(scores)).flatten(-2)

    def affinity(self, scores, probability):
        return self.form.affinity(self.by_group(scores), self.by_group(probability)).flatten(-2)

    def routed_gates(self, scores, probability, selected):
        return self.form.routed_gates(*map(self.by_group, (scores, probability, selected))).flatten(-2)

    def rivals(self, routed):
        return self.by_group(routed)

    def in_order(self, shared, routed):
        return torch.cat((self.by_group(shared), self.by_group(routed)), dim=-1).flatten(-2)

    def by_group(self, experts):
        return experts.unflatten(-1, (self.groups, experts.shape[-1] // self.groups))


FORMS = {
    "paper": Paper,
    "paper_scaled": PaperScaled,
    "released": Released,
    "sigmoid": Sigmoid,
    "softplus": Softplus,
    "relu": Relu,
    "query_norm": QueryNorm,
}


def form_of(routing, layer, two_stage, groups=1):
    """Return the form named ``routing`` for experts that compete within ``groups`` groups. layer: the ``RoutedLayer``
    of one group."""
    form = FORMS[routing](layer, two_stage)
    return form if groups == 1 else InGroups(form, groups)
