"""The decoder: embedding, L blocks of (RMSNorm, MoH attention, RMSNorm, SwiGLU) with residuals, RMSNorm, output head.

The shape is LLaMA's and so are the parameter names, those of Hugging Face, so that an export needs no map of names.
Every layer takes the tensor-parallel group; ``None`` is one rank. Activations between layers are [s/tp, b, d].
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import nn

from moh_lm.build import attention_kind
from moh_lm.kernels.choose import fastest
from moh_lm.kernels.masks import Documents
from moh_lm.model.block import RoutedBlock
from moh_lm.model.positions import LearnedPositions
from moh_lm.parallel.cross_entropy import linear_cross_entropy
from moh_lm.parallel.layers import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    even_partition,
)
from moh_lm.parallel.mappings import gather_sequence

INIT_STD = 0.02


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), columns split over the ranks."""

    def __init__(self, config, init_std, output_std, group):
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        columns = even_partition(0, inner, group) if group is not None else None
        rows = even_partition(1, inner, group) if group is not None else None
        self.gate_proj = ColumnParallelLinear(d, inner, init_std, columns)
        self.up_proj = ColumnParallelLinear(d, inner, init_std, columns)
        self.down_proj = RowParallelLinear(inner, d, output_std, rows, group)
        self.group = group

    def forward(self, x):
        x = gather_sequence(x, self.group)  # [s, b, d]
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # [s/tp, b, d]

    @staticmethod
    def cost(config):
        """Multiplications of a token in the forward pass."""
        return 3 * config.hidden_size * config.intermediate_size

    @staticmethod
    def activation_bytes(config, width, tp):
        """Bytes that autograd keeps for a token on one rank: the gathered input; of the rank's columns gate, up, silu
        and their product."""
        return width * (4 * config.intermediate_size / tp + config.hidden_size)


class DecoderLayer(RoutedBlock):
    """x + Attention(RMSNorm(x)), then x + MLP(RMSNorm(x)); with --post-norm x + RMSNorm(Attention(x)) and so on."""

    def __init__(
        self, config, layer_index, loss_terms, recompute, group, documents, attention_backend="auto", context=None
    ):
        super().__init__(recompute)
        init_std = INIT_STD * math.sqrt(config.width_ratio)
        output_std = init_std / math.sqrt(2 * config.num_layers)
        d, eps = config.hidden_size, config.rms_norm_eps
        self.post_norm = config.post_norm
        self.input_layernorm = nn.Identity() if self.post_norm else RMSNorm(d, eps, group)
        kind = attention_kind(config)
        self.self_attn = kind(
            config, layer_index, init_std, output_std, loss_terms, group, attention_backend, context=context
        )
        self.post_attention_layernorm = RMSNorm(d, eps, group)
        self.mlp = MLP(config, init_std, output_std, group)
        if self.post_norm:
            self.post_feedforward_layernorm = RMSNorm(d, eps, group)
        self.documents = documents

    def forward(self, x):
        if self.self_attn.router is not None:
            self.self_attn.router.samples = self.documents.samples
        return super().forward(x, self.documents.boundaries)

    def router(self):
        return self.self_attn.router

    def block(self, x, *arguments, attend=None):
        """The output [s/tp, b, d] and what else the attention layer returns; arguments: its own after x.

        attend: in place of the attention layer.
        """
        attention, routed = (attend or self.self_attn)(self.input_layernorm(x), *arguments)
        if self.post_norm:
            x = x + self.post_attention_layernorm(attention)
            return x + self.post_feedforward_layernorm(self.mlp(x)), routed
        x = x + attention
        return x + self.mlp(self.post_attention_layernorm(x)), routed

    @staticmethod
    def cost(config, layer_index, seq_length, active_heads=None):
        """``Attention.cost`` of the whole layer."""
        mlp = MLP.cost(config)
        attention = attention_kind(config).cost(config, layer_index, seq_length, active_heads)
        return {kind: value + mlp for kind, value in attention.items()}

    @staticmethod
    def activation_bytes(config, width, tp, counted=0):
        """Bytes that autograd keeps for a token on one rank; width, counted: as of ``Attention.activation_bytes``.

        Besides those of attention and MLP, of the slice of the sequence: the inputs of both norms in fp32, and
        normalised.
        """
        norms = (2 * 4 + 2 * width) * config.hidden_size / tp
        kind = attention_kind(config)
        layers = [config.of_layer(layer) for layer in range(len(config.head_counts))]  # their mean
        attention = sum(kind.activation_bytes(layer, width, tp, counted) for layer in layers) / len(layers)
        return norms + attention + MLP.activation_bytes(config, width, tp)


class Decoder(nn.Module):
    """Embedding, blocks and final norm: tokens [b, s] -> [s/tp, b, d].

    ``step``(layer, x) takes x [s/tp, b, d] through a ``DecoderLayer``.
    """

    def __init__(self, config, loss_terms, recompute, group, attention_backend, context=None):
        super().__init__()
        self.documents = Documents(attention_backend)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, INIT_STD, group)
        self.embed_positions = None
        if "learned" in config.position:
            self.embed_positions = LearnedPositions(config, INIT_STD, group, self.documents, context)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, loss_terms, recompute, group, self.documents, attention_backend, context)
            for index in range(config.num_layers)
        )
        self.norm = FinalNorm(config, group)

    def forward(self, tokens, step=DecoderLayer.__call__, positions=None):
        self.documents.advance(tokens.device)
        x = self.embed(tokens, positions)
        for layer in self.layers:
            x = step(layer, x)
        return self.norm(x)

    def embed(self, tokens, positions=None):
        """What the first layer reads of tokens [b, s]. positions: as of ``LearnedPositions``."""
        x = self.embed_tokens(tokens)
        return x if self.embed_positions is None else self.embed_positions(x, positions)


class FinalNorm(RMSNorm):
    """The norm before the output head. Its weight begins with W / d: that is the multiplier of the logits of width
    transfer, where every export and a tied embedding have it too (moh_lm/training/parameter_groups.py)."""

    def __init__(self, config, group):
        super().__init__(config.hidden_size, config.rms_norm_eps, group, init_value=config.width_ratio)


class WholeModel(nn.Module):
    """What the engine asks of a model on one pipeline stage besides its forward pass."""

    def initialize(self, seed):
        """Draw every parameter from a generator of (seed, name): the same whole matrix in every layout."""
        initialize(self.named_parameters(), seed)

    def tied_parameters(self):
        """Weights with a copy in another pipeline stage: none."""
        return ()


class CausalLM(WholeModel):
    """The whole model on one pipeline stage.

    group: tensor-parallel group. micro_batches: micro-batches of a step, over which the losses of the routers are
    averaged. attention_backend: of ``moh_attention``. z_loss: of ``linear_cross_entropy``. context: ``ContextGroups``,
    whose ranks have s/cp tokens of a sequence of s, or None. Parameters are left empty; ``initialize`` draws them.
    """

    def __init__(
        self, config, group=None, micro_batches=1, recompute=False, attention_backend="auto", z_loss=0.0, context=None
    ):
        super().__init__()
        self.group = group
        self.vocab_partition = even_partition(0, config.vocab_size, group)
        self.model = Decoder(config, loss_terms(config, micro_batches), recompute, group, attention_backend, context)
        if not config.tie_embeddings:
            self.lm_head = ColumnParallelLinear(config.hidden_size, config.vocab_size, INIT_STD, self.vocab_partition)
        self.tied, self.z_loss = config.tie_embeddings, z_loss
        self.documents = self.model.documents

    def forward(self, tokens, labels=None):
        """tokens: int64 [b, s] -> logits [s, b, vocab/tp] in the dtype of the weights, padding columns included.

        With labels, int64 [b, s]: mean loss and losses [s, b], as of ``linear_cross_entropy``, and no logits.
        """
        x = gather_sequence(self.model(tokens), self.group)  # [s, b, d]
        if labels is None:
            return self.logits(x)
        return linear_cross_entropy(x, self.head_weight(), labels.t(), self.vocab_partition, self.group, self.z_loss)

    def logits(self, x):
        """[..., d], normalised -> [..., vocab/tp]."""
        return F.linear(x, self.head_weight())

    def head_weight(self):
        return (self.model.embed_tokens if self.tied else self.lm_head).weight

    @staticmethod
    def head_cost(config):
        """Multiplications of a token in the output head."""
        return config.hidden_size * config.vocab_size


def compile_layers(model, backend="inductor", kind=DecoderLayer):
    """Have torch.compile make the kernels of every layer of a ``kind`` of ``RoutedBlock`` in ``model``.

    Layers with equal head budgets share a graph: attention, router, norms and MLP. A graph is made for each shape of a
    micro-batch, and again for evaluation. What is no graph, or one graph too many, raises an error of torch.
    """
    layers = [module for module in model.modules() if isinstance(module, kind)]
    torch.compiler.assume_constant_result(fastest)  # the choice of ``auto``, which no graph needs to follow
    settings = torch._dynamo.config  # loaded here: it takes a second, which most commands need not wait
    settings.recompile_limit = max(settings.recompile_limit, 8 + 4 * len(layers))
    block = torch.compile(kind.block, backend=backend, fullgraph=True, dynamic=False)
    for layer in layers:
        layer.run = block


def saved_tensors(module):
    """(name, tensor) of what checkpoints and exports hold: parameters, then the counts of biased routers."""
    yield from module.named_parameters()
    kept = module.state_dict().keys()  # tables that follow from the configuration are not
    yield from ((name, tensor) for name, tensor in module.named_buffers() if name in kept)


def loss_terms(config, micro_batches):
    """Losses of routers in a step, of which Eq. 8 takes the mean: of layers with routed heads, and micro-batches."""
    return max(1, len(config.routed_layers())) * micro_batches


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
