"""The decoder: embedding, L blocks of (RMSNorm, MoH attention, RMSNorm, SwiGLU) with residuals, RMSNorm, output head.

The architecture is LLaMA's. Parameters have the names of Hugging Face's LLaMA, so an export needs no map of names.
Every layer takes the tensor-parallel group, which is None on one rank. Activations between layers are [s/tp, b, d].
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import nn

from moh_lm.model.block import RoutedBlock, modules_of
from moh_lm.model.positions import LearnedPositions
from moh_lm.parallel.layers import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    even_partition,
    separate,
)
from moh_lm.parallel.mappings import gather_sequence

INIT_STD = 0.02


def init_stds(config):
    """Return the initial standard deviations of weights that read x, and of weights that write to it."""
    init_std = INIT_STD * math.sqrt(config.width_ratio)
    return init_std, init_std / math.sqrt(2 * config.num_layers)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), columns split over the ranks. products: see ``Attention``."""

    def __init__(self, config, init_std, output_std, group, products=separate):
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        columns = even_partition(0, inner, group) if group is not None else None
        rows = even_partition(1, inner, group) if group is not None else None
        self.gate_proj = ColumnParallelLinear(d, inner, init_std, columns)
        self.up_proj = ColumnParallelLinear(d, inner, init_std, columns)
        self.down_proj = RowParallelLinear(inner, d, output_std, rows, group)
        self.group, self.products = group, products

    def forward(self, x):
        x = gather_sequence(x, self.group)  # [s, b, d]
        gate, up = self.products(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)  # [s/tp, b, d]


class DecoderLayer(RoutedBlock):
    """x + Attention(RMSNorm(x)), then x + MLP(RMSNorm(x)); with --post-norm x + RMSNorm(Attention(x)) and so on.

    make_attention: a function without arguments that returns the ``Attention``; see moh_lm/build.py. products: of the
    MLP; see there.
    """

    def __init__(self, config, layer_index, batch, make_attention, recompute=False, group=None, products=separate):
        super().__init__(layer_index, batch, recompute)
        init_std, output_std = init_stds(config)
        d, eps = config.hidden_size, config.rms_norm_eps
        self.post_norm = config.post_norm
        self.input_layernorm = nn.Identity() if self.post_norm else RMSNorm(d, eps, group)
        self.self_attn = make_attention()
        self.post_attention_layernorm = RMSNorm(d, eps, group)
        self.mlp = MLP(config, init_std, output_std, group, products)
        if self.post_norm:
            self.post_feedforward_layernorm = RMSNorm(d, eps, group)

    def forward(self, x):
        return super().forward(x, self.batch.documents(x.dtype))

    def router(self):
        return self.self_attn.router

    def block(self, x, mask, inputs, replay):
        """Apply the layer to x [s/tp, b, d]. Returns its output and the ``RouterOutput``. For the arguments see
        ``Attention``."""
        attention, routing = self.self_attn(self.input_layernorm(x), inputs, mask, replay)
        return self.finish(x, attention), routing

    def finish(self, x, attention):
        """Return the layer's output from its input x and the output of its attention, all [s/tp, b, d]."""
        if self.post_norm:
            x = x + self.post_attention_layernorm(attention)
            return x + self.post_feedforward_layernorm(self.mlp(x))
        x = x + attention
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, blocks and final norm: tokens [b, s] -> [s/tp, b, d].

    batch: ``BatchContext``. layers: functions without arguments that return each ``DecoderLayer``.
    """

    def __init__(self, config, batch, layers, group=None, context=None):
        super().__init__()
        self.batch = batch
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, INIT_STD, group)
        self.embed_positions = None
        if "learned" in config.position:
            self.embed_positions = LearnedPositions(config, INIT_STD, group, batch, context)
        self.layers = nn.ModuleList(make() for make in layers)
        self.norm = FinalNorm(config, group)

    def forward(self, tokens):
        self.batch.advance(tokens.device)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def embed(self, tokens, positions=None):
        """Return the input of the first layer for tokens [b, s]. positions: see ``LearnedPositions``."""
        x = self.embed_tokens(tokens)
        return x if self.embed_positions is None else self.embed_positions(x, positions)


class FinalNorm(RMSNorm):
    """The norm before the output head. Its weight starts at W / d, the multiplier of logits in width transfer."""

    def __init__(self, config, group):
        super().__init__(config.hidden_size, config.rms_norm_eps, group, init_value=config.width_ratio)


class WholeModel(nn.Module):
    """What the engine needs from a model on one pipeline stage besides its forward pass."""

    def initialize(self, seed):
        """Draw every parameter from a generator seeded with (seed, name): the same whole matrix in every layout."""
        initialize(self.named_parameters(), seed)

    def tied_parameters(self):
        """Return the weights that have a copy in another pipeline stage: none."""
        return ()


class CausalLM(WholeModel):
    """The whole model on one pipeline stage. Parameters are left empty; ``initialize`` draws them.

    group: tensor-parallel group. batch: ``BatchContext``. layers: see ``Decoder``. loss: see ``Settings.loss``.
    context: ``ContextGroups`` whose ranks hold s/cp of the s tokens of a sequence, or None.
    """

    def __init__(self, config, batch, layers, loss, group=None, context=None):
        super().__init__()
        self.config, self.group, self.batch = config, group, batch
        self.vocab_partition = even_partition(0, config.vocab_size, group)
        self.model = Decoder(config, batch, layers, group, context)
        if not config.tie_embeddings:
            self.lm_head = ColumnParallelLinear(config.hidden_size, config.vocab_size, INIT_STD, self.vocab_partition)
        self.tied, self.loss = config.tie_embeddings, loss
        self.captured = None

    def forward(self, tokens, labels=None):
        """Map tokens, int64 [b, s], to logits [s, b, vocab/tp], padding columns included, in the dtype of the weights.

        With labels, int64 [b, s], return the mean loss and the losses [s, b] of ``linear_cross_entropy`` instead.
        """
        if labels is None:
            return self.logits(gather_sequence(self.model(tokens), self.group))
        replayed = self.captured and self.training and torch.is_grad_enabled()
        return (self.captured if replayed else self.losses)(tokens, labels)

    def losses(self, tokens, labels):
        """Return the mean loss of tokens [b, s] and their losses [s, b]; see ``forward``."""
        x = gather_sequence(self.model(tokens), self.group)  # [s, b, d]
        return self.loss(x, self.head_weight(), labels.t(), self.vocab_partition)

    def use_captured(self, captured):
        """Use ``captured`` in place of ``losses`` when gradients are computed."""
        self.captured = captured

    def logits(self, x):
        """Map normalised hidden states [..., d] to logits [..., vocab/tp]."""
        return F.linear(x, self.head_weight())

    def head_weight(self):
        return (self.model.embed_tokens if self.tied else self.lm_head).weight

    def in_order(self):
        """Return [(prefix of its parameter names, module)] from tokens to logits; a tied embedding comes twice."""
        first = [("model.embed_tokens.", self.model.embed_tokens)]
        if self.model.embed_positions is not None:
            first.append(("model.embed_positions.", self.model.embed_positions))
        blocks = [(f"model.layers.{index}.", layer) for index, layer in enumerate(self.model.layers)]
        head = first[0] if self.tied else ("lm_head.", self.lm_head)
        return [*first, *blocks, ("model.norm.", self.model.norm), head]


def compile_layers(model, backend="inductor", kind=DecoderLayer, batch_sizes=1):
    """Let torch.compile build the kernels of every layer of a ``kind`` of ``RoutedBlock`` in ``model``.

    Layers with equal head budgets share a graph of attention, router, norms and MLP. Each shape of a micro-batch needs
    its own graph, as do evaluation, a dense warm-up and each of the ``batch_sizes`` of --batch-warmup. Raises torch's
    errors for graph breaks and beyond the recompile limit.
    """
    layers = modules_of(model, kind)
    settings = torch._dynamo.config  # loaded here because it takes a second, which most commands can save
    graphs = 40 + len(layers) * (batch_sizes + 3)
    settings.recompile_limit = max(settings.recompile_limit, graphs)
    settings.accumulated_recompile_limit = max(settings.accumulated_recompile_limit, graphs)
    block = torch.compile(kind.block, backend=backend, fullgraph=True, dynamic=False)
    for layer in layers:
        layer.use_compiled(block)


def saved_tensors(module):
    """Yield (name, tensor) of what checkpoints and exports hold: parameters, and the counts of biased routers."""
    yield from module.named_parameters()
    kept = module.state_dict().keys()  # tables that follow from the configuration are not
    yield from ((name, tensor) for name, tensor in module.named_buffers() if name in kept)


def loss_terms(config):
    """Return the number of layers with routed heads, over whose losses Eq. 8 takes the mean."""
    return max(1, len(config.routed_layers()))


@torch.no_grad()
def initialize(named_parameters, seed):
    """Fill parameters with init_value, with N(0, init_std), or uniformly within +-init_bound.

    They are drawn on the CPU for the whole parameter, then sliced.
    """
    for name, parameter in named_parameters:
        whole = torch.full(parameter.whole_shape, parameter.init_value)
        bound = getattr(parameter, "init_bound", None)
        if parameter.init_std is not None or bound is not None:
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
            if bound is None:
                whole.normal_(0, parameter.init_std, generator=generator)
            else:
                whole.uniform_(-bound, bound, generator=generator)
        parameter.copy_(whole if parameter.tensor_partition is None else parameter.tensor_partition.take(whole))
