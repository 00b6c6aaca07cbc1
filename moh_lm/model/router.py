"""The router: which heads a token uses, with what weight, and at what loss (paper, section 3.2).

The first n_s experts are shared: every token uses them. Of the E others a token uses the K with the largest scores;
equal scores: the lower index first. What the scores are and how they become gates is the routing form's
(moh_lm/model/gates.py, Eq. 5, 6, 9, 10). The balance loss is in moh_lm/model/balance.py (Eq. 7, 8).

Some things go beyond the paper. With ``routing_unit`` key_value_group the r heads that share a key/value head are one
expert, and the gate of a group is that of each of its heads. With ``routing_top_p`` P, K is only the most: a token
selects the fewest experts, the largest first, whose probabilities add up to P, and the entropy H of these
probabilities keeps them few (Huang et al. 2024, "Harder Tasks Need More Experts"). ``router_z_loss`` keeps the scores
small (Zoph et al. 2022, arXiv 2202.08906). ``load_balance_bias_rate`` u balances without a gradient (Wang et al. 2024,
arXiv 2408.15664): a token selects the K largest of (affinity + u n_i), which no gate sees. The affinity is the form's.
After each step n_i grows by sign(mean load - load_i), loads of the whole global batch. In a dense warm-up every head
has gate 1, there is no loss and no bias moves. The loss of a layer otherwise is

    beta L_b + gamma H + zeta Z
    H = mean over tokens of - sum over routed i of p_i ln p_i,   p = softmax(W_r x_t)
    Z = mean over tokens of (ln sum over routed i of exp (W_r x_t)_i)^2

Shapes: s sequence, b batch, tp tensor-parallel ranks, d hidden size, h heads, n = h / r experts (r = 1: heads). The
router works on its slice of the sequence, in fp32 or wider whatever the precision of the model. Forms that read queries
work on the whole sequence, on every rank: s/tp below then is s.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from moh_lm.kernels.wide_linear import wide_linear
from moh_lm.model.balance import RouterStatistics, balance_loss, make_rows
from moh_lm.model.gates import FORMS
from moh_lm.parallel.groups import group_rank, group_size
from moh_lm.parallel.layers import make_parameter
from moh_lm.parallel.mappings import replicate

WEIGHTS = ("w_shared", "w_routed", "w_type")
BIAS = "bias_steps"  # n: counts, so that neither a precision nor an order of sums can change the selection


class RouterOutput(NamedTuple):
    """What a router says besides the gates: the loss, a scalar whose terms add up over the tp ranks; the rows of
    moh_lm/model/balance.py, [b, 4 + E]; the selection of routed experts, 0 or 1 [s/tp, b, E]."""

    loss: torch.Tensor
    rows: torch.Tensor
    selection: torch.Tensor


class SelectionReplay(NamedTuple):
    """The selection of an earlier pass over the same tokens, [s/tp, b, E], to be used where ``use``, a bool scalar.

    A pass that computes activations again must not select other heads because of its rounding. Both passes are one
    graph to torch.compile, since both have this argument and save the same tensors.
    """

    use: torch.Tensor
    selection: torch.Tensor


class HeadRouter(nn.Module):
    """Gates of all heads and the loss of the router, for one layer.

    Parameters: w_shared [n_s, d], w_routed [E, d], w_type [2, d]; each only where the form has a use for it. Buffer:
    bias_steps, int32 [E], the bias over its rate; or None.
    loss_terms: layers times micro-batches, over whose losses Eq. 8 takes the mean. context: ``ContextGroups`` or None;
    DeepSpeed takes the mean of their ranks' gradients. resting: in a dense warm-up. noise: a ``GumbelNoise`` on the
    scores by which experts are selected in training, of sequences whose numbers ``samples``, int64 [b], are known.
    """

    resting, noise, samples = False, None, None

    def __init__(self, config, layer_index, init_std, group, loss_terms=1, context=None):
        super().__init__()
        heads = config.heads
        self.layer = config.routed_layer(layer_index)
        self.form = FORMS[heads.routing](self.layer, heads.two_stage)
        loss_terms = loss_terms / context.size() if context else loss_terms
        self.loss_terms = loss_terms
        self.balance_scale = heads.load_balance_coefficient / loss_terms  # beta of Eq. 8
        self.entropy_scale = heads.routing_entropy_coefficient / loss_terms
        self.z_scale = heads.router_z_loss / loss_terms
        self.group = group
        self.slices = context.sequence if context else group  # the ranks that have a slice of the sequence each
        stretch = context.rank() if context else 0
        self.copies = group_size(group) if self.form.reads_queries else 1  # of each token's row, one on each tp rank
        self.first_slice = stretch if self.form.reads_queries else group_rank(self.slices)
        self.scope = heads.load_balance_scope
        self.ranked_in_bf16 = heads.routing_dtype == "bf16"
        self.statistics = RouterStatistics()
        self.bias_rate = heads.load_balance_bias_rate
        biased = self.bias_rate and self.layer.num_routed
        self.register_buffer(BIAS, torch.zeros(self.layer.num_routed, dtype=torch.int32) if biased else None)
        weights = self.form.weights(init_std, config.hidden_size)
        if "w_type" in weights:  # two scores at every width, of all heads together: an output of width transfer
            weights["w_type"] = (2, init_std * math.sqrt(config.width_ratio))
        for name in WEIGHTS:
            rows, deviation = weights.get(name, (0, None))
            parameter = make_parameter((rows, config.hidden_size), deviation) if rows else None
            self.register_parameter(name, parameter)

    def forward(self, x, replay=None, query_norms=None):
        """Gates [s/tp, b, h], fp32 or wider, and a ``RouterOutput``; None in its place while the router rests.

        x: [s/tp, b, d], the normalised input of the attention layer. query_norms: [s, b, h], for forms that read
        queries. replay: a ``SelectionReplay``.
        """
        if self.resting:
            return self.gates_at_rest(x if query_norms is None else query_norms), None
        kinds = None
        if self.form.reads_queries:
            wide = torch.promote_types(x.dtype, torch.float32)
            shared, scores = (part.to(wide) for part in self.form.scores(query_norms))
        else:
            shared, scores, kinds = self.scores(x)
        shared = self.form.shared_gates(shared)
        if self.layer.num_routed == 0:
            return self.per_head(shared), self.nothing_routed(shared)
        probability = self.form.probability(scores)
        selected = self.select(self.ranking(scores, probability), replay)  # [s/tp, b, E]
        gates, a1 = self.form.routed_gates(scores, probability, selected), None
        if self.form.two_stage:
            a1, a2 = self.form.type_weights(kinds)
            shared, gates = shared * a1, gates * a2
        if self.layer.num_shared:
            gates = torch.cat((shared, gates), dim=-1)  # [s/tp, b, n]
        loss, rows = self.loss(scores, probability, selected, gates, a1)
        return self.per_head(gates), RouterOutput(loss, rows, selected)

    def gates_at_rest(self, x):
        """1 for every head, [s/tp, b, h]. The weights get gradients of 0, which every engine understands."""
        zero = sum((weight.sum() * 0 for weight in self.parameters()), x.new_zeros(()))
        gates = x.new_ones((*x.shape[:2], sum(self.layer[1:3]) * self.layer.heads_per_expert))
        return (gates + zero).to(torch.promote_types(x.dtype, torch.float32))

    def scores(self, x):
        """W_s x, W_r x and W_h x: [s/tp, b, d] -> [s/tp, b, n_s], [s/tp, b, E] and [s/tp, b, 2]; of width 0 where there
        is no weight."""
        weights = [self.w_shared, self.w_routed, self.w_type]
        rows = [0 if weight is None else weight.shape[0] for weight in weights]
        weight = replicate(torch.cat([weight for weight in weights if weight is not None]), self.group)
        return wide_linear(x, weight).split(rows, dim=-1)

    def ranking(self, scores, probability):
        """What is selected by, [s/tp, b, E]: the scores with their noise, or with a bias their affinities and it."""
        scores, probability = scores.detach(), probability.detach()
        if self.noise is not None and self.training and self.samples is not None:
            scores = scores + self.noise.draw(self.samples, self.first_slice * scores.shape[0], scores)
            probability = self.form.probability(scores)
        if self.bias_steps is None:
            return scores
        affinity = self.form.affinity(scores, probability)
        return affinity + self.bias_rate * self.bias_steps.to(affinity)

    def select(self, ranking, replay):
        if not self.form.causal:
            tokens = max(1, round(len(ranking) * self.layer.num_active / self.layer.num_routed))
            selected = select(ranking.transpose(0, -1), tokens).transpose(0, -1)
        elif self.layer.by_sign:
            selected = (ranking > 0).to(ranking)
        else:
            selected = select(ranking, self.layer.num_active, self.layer.top_p, self.ranked_in_bf16)
        return selected if replay is None else torch.where(*replay, selected)

    def loss(self, scores, probability, selected, gates, a1):
        """beta L_b + gamma H + zeta Z of this rank's tokens, [], and their rows."""
        size = group_size(self.slices)
        previous = None
        if self.scope == "global_batch":
            previous = self.statistics.previous_share
            if previous is None:
                previous = selected.new_full((self.layer.num_routed,), self.layer.uniform_load)
        together = self.scope == "micro_batch"
        losses, selections = balance_loss(probability, selected, self.slices, previous, together)  # Eq. 7
        if self.form.balance_factor != 1:
            losses = losses * self.form.balance_factor
        l1 = self.statistics.l1
        loss = (self.balance_scale if l1 is None else l1 / self.loss_terms) * losses.mean()
        if self.layer.top_p is not None:
            log_p = scores.log_softmax(-1)
            loss = loss + self.entropy_scale * (-(log_p.exp() * log_p).sum(-1).mean() / size)
        if self.z_scale:
            loss = loss + self.z_scale * (scores.logsumexp(-1).square().mean() / size)
        return loss, make_rows(losses, a1, gates, selections, self.copies)

    def nothing_routed(self, gates):
        """The ``RouterOutput`` of a layer whose heads are all shared: no loss, and a row with the sums of its gates."""
        selection = gates.new_zeros((*gates.shape[:2], 0))
        losses = gates.new_zeros(gates.shape[1])
        return RouterOutput(losses.sum(), make_rows(losses, None, gates, selection.sum(0), self.copies), selection)

    def move_bias(self, counts):
        """Move the bias by its rate, up where the load is below the mean. counts: [E], selections of a whole step."""
        counts = counts.round()  # those of forms that read queries are sums of tp parts
        self.bias_steps += (counts.sum() - len(counts) * counts).sign().to(self.bias_steps)

    def norms(self, query):
        """Norms of the queries [..., e], in the dtype in which they are ranked: [...]."""
        dtype = torch.bfloat16 if self.ranked_in_bf16 else torch.promote_types(query.dtype, torch.float32)
        return query.to(dtype).norm(dim=-1)

    def no_replay(self, x):
        """The ``SelectionReplay`` of the first pass over x [s/tp, b, d]: nothing to recall yet."""
        tokens = x.shape[0] * (group_size(self.group) if self.form.reads_queries else 1)
        shape = (tokens, x.shape[1], self.layer.num_routed)
        wide = torch.promote_types(x.dtype, torch.float32)
        return SelectionReplay(x.new_zeros((), dtype=torch.bool), x.new_zeros(shape, dtype=wide))

    def per_head(self, experts):
        """What is said of experts [..., n], for each of their heads: [..., h]."""
        size = self.layer.heads_per_expert
        return experts if size == 1 else experts.unsqueeze(-1).expand(*experts.shape, size).flatten(-2)

    def heads_in_use(self, selection):
        """The selection of routed experts [..., E] -> 1 for the heads that are on, shared or selected: [..., h]."""
        return self.per_head(F.pad(selection, (self.layer.num_shared, 0), value=1))


def routers_of(model):
    """The ``HeadRouter``s of a model, or of its stage of a pipeline, in the order of layers."""
    return [module for module in model.modules() if isinstance(module, HeadRouter)]


def stored_dtype(name, dtype):
    """Of the tensor ``name`` in files whose weights are of ``dtype``: counts stay whole."""
    return torch.int32 if name.endswith(BIAS) else dtype


def select(scores, k, top_p=None, in_bf16=False):
    """1 for the k largest scores of each token, else 0: [..., E] -> [..., E]; equal scores: the lower index first.

    top_p: only for the fewest of them whose softmax, which runs over all scores, adds up to it; or for all k. in_bf16:
    by the softmax of the scores in bf16, where many are equal: torch.topk decides, as in the released MoH-LLaMA3.
    """
    if in_bf16:
        best = scores.bfloat16().softmax(-1).topk(k).indices
        expert = torch.arange(scores.shape[-1], device=scores.device)
        return (best.unsqueeze(-1) == expert).any(-2).to(scores.dtype)
    order, ones = scores.sort(dim=-1, descending=True, stable=True).indices, 1.0
    if top_p is not None:
        probability = scores.softmax(-1).gather(-1, order[..., :k])
        before = F.pad(probability.cumsum(-1)[..., :-1], (1, 0))  # of the larger scores; 0 for the largest
        ones = (before < top_p).to(scores.dtype)
    if torch.compiler.is_compiling():  # inductor of torch 2.13 lets what reads a scatter, as Recall does, run before it
        k = k if top_p is None else ones.sum(-1, keepdim=True)
        return (order.argsort(-1) < k).to(scores.dtype)
    return torch.zeros_like(scores).scatter(-1, order[..., :k], ones)
