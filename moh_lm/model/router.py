"""The routers choose the heads of each token, weigh them and compute a balance loss (paper, section 3.2).

All kinds are called as ``router(x, inputs, replay)`` and return a ``RouterOutput``:

    AllHeads     ordinary attention: no gates
    GatedHeads   a gate for every head and no choice among them
    HeadRouter   the mixture of heads: some heads are shared, and each token selects K of the others

``StaticHeads`` always uses the same first heads, for ablations. In a ``HeadRouter`` the first n_s experts are shared:
every token uses them. Of the E others a token uses the K with the largest scores; if scores are equal, the lower index
wins. The routing form turns scores into gates (gates.py, Eq. 5, 6, 9, 10); balance.py has the balance loss (Eq. 7, 8).

Some options go beyond the paper. With ``routing_unit`` key_value_group the r heads that share a key/value head are one
expert with one gate. With head_in_group, heads compete only inside their group; see ``InGroups`` in gates.py. With
``routing_top_p`` P a token selects the fewest experts whose probabilities add up to P, at most K of them, and a loss on
the entropy H keeps their number low (Huang et al. 2024, "Harder Tasks Need More Experts"). ``router_z_loss`` keeps the
scores small (Zoph et al. 2022, arXiv 2202.08906). ``load_balance_bias_rate`` u balances without a gradient (Wang et al.
2024, arXiv 2408.15664): a token selects the K largest of (affinity + u n_i), which no gate sees. After each step n_i
grows by sign(mean load - load_i), where loads are those of the global batch. In a dense warm-up every head has gate 1,
and there is no loss and no bias update. Otherwise the loss of a layer is

    beta L_b + gamma H + zeta Z
    H = mean over tokens of - sum over routed i of p_i ln p_i,   p = softmax(W_r x_t)
    Z = mean over tokens of (ln sum over routed i of exp (W_r x_t)_i)^2

Shapes: s sequence, b batch, tp tensor-parallel ranks, d hidden size, h heads, n = h / r experts (r = 1: heads). A
router processes this rank's slice of the sequence in fp32 or wider, whatever the precision of the model. Forms that
read queries process the whole sequence on every rank; s/tp below is then s.
"""

import math
from typing import NamedTuple

import torch
from torch import nn

from moh_lm.kernels.wide_linear import wide_linear
from moh_lm.model.balance import balance_loss, make_rows
from moh_lm.model.gates import form_of
from moh_lm.model.selection import SelectionReplay, top_k_mask
from moh_lm.parallel.groups import group_rank, group_size
from moh_lm.parallel.head_partition import HeadPartition
from moh_lm.parallel.layers import make_parameter
from moh_lm.parallel.mappings import gather_sequence, replicate

WEIGHTS = ("w_shared", "w_routed", "w_type")
BIAS = "bias_steps"  # n: counts, so that neither a precision nor an order of sums can change the selection


class RouterOutput(NamedTuple):
    """What a router returns for its tokens.

    gates: [s, b, h/tp], fp32 or wider, or 0 and 1 in the dtype of x; None if all are 1. selected: [s, b, h/tp], 1 for
    heads in use, else 0; None if all are used or gates of 0 mark the others. loss: a scalar that is summed over the tp
    ranks. rows: [b, 4 + E], see balance.py. Both are None without gradients, which alone need them. selection: [s/tp,
    b, E], 1 for selected routed experts, else 0.
    """

    gates: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    selection: torch.Tensor | None = None


class AllHeads(nn.Module):
    """Ordinary attention: every token uses every head with gate 1."""

    def forward(self, x, inputs=None, replay=None):
        return RouterOutput()

    def no_replay(self, x):
        """Return the ``SelectionReplay`` of a first pass: None, since nothing is selected."""
        return None


class StaticHeads(AllHeads):
    """Every token uses the first heads, ``num_used`` of this rank's ``num_heads``, and never the others."""

    def __init__(self, num_heads, num_used, group=None):
        super().__init__()
        self.num_heads, self.num_used, self.group = num_heads, num_used, group

    def forward(self, x, inputs=None, replay=None):
        used = (torch.arange(self.num_heads, device=x.device) < self.num_used).to(x.dtype)
        gates = used.expand(x.shape[0] * group_size(self.group), x.shape[1], -1)
        return RouterOutput(gates, gates)


class Gates(nn.Module):
    """The common part of routers with gates: the weights of the routing form, and the gates of this rank's heads.

    config: ``ModelConfig``, or a layer of an image model. heads: ``HeadPartition`` of the layer, by default for one
    rank. Parameters: w_shared [n_s, w], w_routed [E, w] and w_type [2, w], where the form needs them. They read the
    first w channels of the input: ``gate_width`` of them, or all d.
    """

    def __init__(self, config, layer_index, init_std, group=None, heads=None):
        super().__init__()
        self.layer = config.routed_layer(layer_index)
        options, groups = config.heads, self.layer.groups
        self.form = form_of(options.routing, self.layer.of_group(), options.two_stage, groups)
        self.group = group
        size, shared = self.layer.heads_per_expert, self.layer.num_shared
        self.heads = heads or HeadPartition(size * (shared + self.layer.num_routed), size * shared, None)
        self.copies = group_size(group) if self.form.reads_queries else 1  # of each token's row, one on each tp rank
        self.width = options.gate_width or config.hidden_size
        weights = self.form.weights(init_std, self.width)
        if "w_type" in weights:  # two scores at every width: width transfer treats them as an output
            weights["w_type"] = (2, init_std * math.sqrt(config.width_ratio))
        for name in WEIGHTS:
            rows, deviation = weights.get(name, (0, None))
            parameter = make_parameter((rows, self.width), deviation) if rows else None
            self.register_parameter(name, parameter)

    def dense_warmup_output(self, x):
        """Return gate 1 for every head; the weights get zero gradients. x: [s/tp, b, ...]."""
        zero = sum((weight.sum() * 0 for weight in self.parameters()), x.new_zeros(()))
        gates = x.new_ones((*x.shape[:2], self.heads.num_heads))
        return RouterOutput(self.local(gates + zero).to(torch.promote_types(x.dtype, torch.float32)))

    def products(self, x, weight):
        """Return the scores [s/tp, b, n] of this rank's tokens x [s/tp, b, d] by a weight [n, w]."""
        return wide_linear(x[..., : self.width], replicate(weight, self.group))

    def local(self, per_head):
        """Exchange values of all heads and this rank's tokens, [s/tp, b, h], for this rank's heads and all tokens, [s,
        b, h/tp]."""
        whole = per_head if self.form.reads_queries else gather_sequence(per_head, self.group)
        return self.heads.take(whole)

    def per_head(self, experts):
        """Repeat values of experts [..., n] for each of their heads: [..., h]."""
        size = self.layer.heads_per_expert
        return experts if size == 1 else experts.unsqueeze(-1).expand(*experts.shape, size).flatten(-2)


class GatedHeads(Gates):
    """A gate for every head, computed by one product and the routing form. All heads are used, and there is no loss."""

    def forward(self, x, inputs, replay=None):
        """x: [s/tp, b, d], the normalised input of the attention layer. inputs: ``RouterInputs``."""
        if inputs.dense_warmup:
            return self.dense_warmup_output(x)
        gates = self.form.shared_gates(self.products(x, self.w_shared))
        of_heads = self.local(self.per_head(gates))
        if not torch.is_grad_enabled():
            return RouterOutput(of_heads)
        losses = gates.new_zeros(gates.shape[1])
        rows = make_rows(losses, None, gates, gates.new_zeros(gates.shape[1], 0), self.copies)
        return RouterOutput(of_heads, None, losses.sum(), rows)

    def no_replay(self, x):
        """See ``AllHeads``."""
        return None


class HeadRouter(Gates):
    """The mixture of heads of one layer: its gates, selection and loss.

    The buffer bias_steps, int32 [E] or None, is the bias divided by its rate. loss_terms: number of layers over whose
    losses Eq. 8 takes the mean, besides micro-batches; DeepSpeed averages over context-parallel ranks. noise:
    ``GumbelNoise`` for the selection scores in training, or None. says_selected: whether the attention backend needs
    ``RouterOutput.selected`` in training; in evaluation it is always set.
    """

    def __init__(
        self, config, layer_index, init_std, group=None, heads=None, loss_terms=1, context=None, noise=None,
        says_selected=True,
    ):  # fmt: skip
        super().__init__(config, layer_index, init_std, group, heads)
        options = config.heads
        self.loss_terms = loss_terms / context.size() if context else loss_terms
        self.balance_coefficient = options.load_balance_coefficient  # beta of Eq. 8
        self.entropy_coefficient, self.z_coefficient = options.routing_entropy_coefficient, options.router_z_loss
        self.slices = context.sequence if context else group  # the ranks that have a slice of the sequence each
        stretch = context.rank() if context else 0
        self.first_slice = stretch if self.form.reads_queries else group_rank(self.slices)
        self.scope = options.load_balance_scope
        self.ranked_in_bf16 = options.routing_dtype == "bf16"
        self.noise, self.says_selected = noise, says_selected
        self.bias_rate = options.load_balance_bias_rate
        biased = self.bias_rate and self.layer.num_routed
        self.register_buffer(BIAS, torch.zeros(self.layer.num_routed, dtype=torch.int32) if biased else None)

    def forward(self, x, inputs, replay=None):
        """Route x [s/tp, b, d], the normalised input of the layer; for forms that read queries, the norms [s, b, h].

        inputs: ``RouterInputs``. replay: ``SelectionReplay``, or None.
        """
        if inputs.dense_warmup:
            return self.dense_warmup_output(x)
        shared, scores, types = self.scores(x)
        shared = self.form.shared_gates(shared)
        probability = self.form.probability(scores)
        selection = self.select(self.ranking(scores, probability, inputs.samples), replay)  # [s/tp, b, E]
        gates, a1 = self.form.routed_gates(scores, probability, selection), None
        if self.form.two_stage:
            a1, a2 = self.form.type_weights(types)
            shared, gates = shared * a1, gates * a2
        if self.layer.num_shared:
            gates = self.form.in_order(shared, gates)  # [s/tp, b, n]
        loss = rows = None
        if torch.is_grad_enabled():
            loss, rows = self.loss(scores, probability, selection, gates, a1, inputs)
        says_selected = self.layer.num_routed and (self.says_selected or not self.training)
        selected = self.heads_in_use(selection) if says_selected else None
        return RouterOutput(self.local(self.per_head(gates)), selected, loss, rows, selection)

    def scores(self, x):
        """Return W_s x, W_r x and W_h x: [s/tp, b, n_s], [s/tp, b, E] and [s/tp, b, 2], with width 0 for absent
        weights. Forms that read queries compute them from the norms."""
        if self.form.reads_queries:
            wide = torch.promote_types(x.dtype, torch.float32)
            return *(part.to(wide) for part in self.form.scores(x)), None
        weights = [self.w_shared, self.w_routed, self.w_type]
        rows = [0 if weight is None else weight.shape[0] for weight in weights]
        weight = torch.cat([weight for weight in weights if weight is not None])
        return self.products(x, weight).split(rows, dim=-1)

    def ranking(self, scores, probability, samples):
        """Return the values that rank the experts, [s/tp, b, E]: noisy scores, or affinities with their bias."""
        scores = scores.detach()
        noisy = self.noise is not None and self.training and samples is not None
        if noisy:
            scores = scores + self.noise.draw(samples, self.first_slice * scores.shape[0], scores)
        if self.bias_steps is None:
            return scores
        affinity = self.form.affinity(scores, self.form.probability(scores) if noisy else probability.detach())
        return affinity + self.bias_rate * self.bias_steps.to(affinity)

    def select(self, ranking, replay):
        """Return 1 for the experts that a token selects, else 0: [s/tp, b, E]."""
        if self.form.by_sign:
            selection = (ranking > 0).to(ranking)
        else:
            rivals, k = self.form.rivals(ranking), self.form.layer.num_active
            selection = top_k_mask(rivals, k, self.layer.top_p, self.ranked_in_bf16).reshape(ranking.shape)
        return selection if replay is None else torch.where(*replay, selection)

    def loss(self, scores, probability, selection, gates, a1, inputs):
        """Return beta L_b + gamma H + zeta Z of this rank's tokens, [], and their rows."""
        size, terms = group_size(self.slices), self.loss_terms * inputs.micro_batches
        previous, together = self.previous_share(inputs), self.scope == "micro_batch"
        losses, selections = balance_loss(probability, selection, self.slices, previous, together)  # Eq. 7
        if self.form.balance_factor != 1:
            losses = losses * self.form.balance_factor
        loss = (self.balance_coefficient if inputs.l1 is None else inputs.l1) / terms * losses.mean()
        if self.layer.top_p is not None:
            log_p = scores.log_softmax(-1)
            loss = loss + self.entropy_coefficient / terms * (-(log_p.exp() * log_p).sum(-1).mean() / size)
        if self.z_coefficient:
            loss = loss + self.z_coefficient / terms * (self.form.rivals(scores).logsumexp(-1).square().mean() / size)
        return loss, make_rows(losses, a1, gates, selections, self.copies)

    def previous_share(self, inputs):
        """Return f of Eq. 7 where it is that of the whole previous step, [E]; else None."""
        return inputs.previous_share if self.scope == "global_batch" else None

    def move_bias(self, counts):
        """Move the bias by its rate: up where the load is below the mean. counts: [E], selections in a whole step."""
        counts = self.form.rivals(counts.round())  # those of forms that read queries are sums of tp parts
        lacking = counts.sum(-1, keepdim=True) - counts.shape[-1] * counts
        self.bias_steps += lacking.sign().flatten().to(self.bias_steps)

    def norms(self, query):
        """Return the norms of queries [..., e] in the dtype in which they are ranked: [...]."""
        dtype = torch.bfloat16 if self.ranked_in_bf16 else torch.promote_types(query.dtype, torch.float32)
        return query.to(dtype).norm(dim=-1)

    def no_replay(self, x):
        """Return the ``SelectionReplay`` of a first pass over x [s/tp, b, d], which reuses nothing."""
        tokens = x.shape[0] * (group_size(self.group) if self.form.reads_queries else 1)
        shape = (tokens, x.shape[1], self.layer.num_routed)
        wide = torch.promote_types(x.dtype, torch.float32)
        return SelectionReplay(x.new_zeros((), dtype=torch.bool), x.new_zeros(shape, dtype=wide))

    def heads_in_use(self, selection):
        """Map the selection [s/tp, b, E] to 1 for this rank's heads that are on, else 0: [s, b, h/tp]."""
        whole = selection if self.form.reads_queries else gather_sequence(selection, self.group)
        always = whole.new_ones(()).expand(*whole.shape[:-1], self.layer.num_shared)
        return self.heads.take(self.per_head(self.form.in_order(always, whole)))


def stored_dtype(name, dtype):
    """Return the dtype of the tensor ``name`` in files whose weights have ``dtype``: counts stay integers."""
    return torch.int32 if name.endswith(BIAS) else dtype
