"""Assembles a model from its parts: the one place that knows every kind of attention, router, core and position.

The ordinary parts are in moh_lm/model, the experimental ones in moh_lm/extras. The configuration chooses each kind
here, once for a run, so that the layers themselves have no branch on kind, backend or machine.
"""

from functools import partial
from typing import NamedTuple

import torch

from moh_lm.extras.cope import ContextualPositions, CoPECore
from moh_lm.extras.cpu_rows import CPURowAttention
from moh_lm.extras.cpu_sparse import CPU_SPARSE
from moh_lm.extras.element_gates import ElementGatedAttention
from moh_lm.extras.entropy_windows import EntropyWindows
from moh_lm.extras.gumbel import GumbelNoise
from moh_lm.extras.heterogeneous_heads import HeterogeneousAttention, HeterogeneousPositions
from moh_lm.kernels.choose import choose_backend, estimated_ratio
from moh_lm.kernels.core_attention import CoreAttention
from moh_lm.kernels.gated_attention import TRITON
from moh_lm.kernels.heads_in_groups import HeadsInGroups
from moh_lm.kernels.masks import mean_keys, share_of_scores
from moh_lm.model.attention import Attention
from moh_lm.model.batch_context import BatchContext
from moh_lm.model.head_positions import HeadPositions
from moh_lm.model.mla import LatentCore, MultiLatentAttention
from moh_lm.model.positions import RotaryPositions
from moh_lm.model.query_norm import QueryNormAttention
from moh_lm.model.rotary import rotary_of
from moh_lm.model.router import AllHeads, GatedHeads, HeadRouter, StaticHeads
from moh_lm.model.transformer import INIT_STD, CausalLM, DecoderLayer, init_stds, loss_terms
from moh_lm.parallel.cross_entropy import linear_cross_entropy
from moh_lm.parallel.groups import group_size
from moh_lm.parallel.head_partition import HeadPartition
from moh_lm.parallel.layers import Joined, separate
from moh_lm.parallel.ulysses import ContextGroups, UlyssesAttention, UlyssesExchange

BACKENDS = {"dense": None, "groups": None, "triton": TRITON, "cpu_sparse": CPU_SPARSE}


class Settings(NamedTuple):
    """What the layers of a model need to know about the run.

    group: tensor-parallel group, or None. context: ``ContextGroups``, or None. recompute: whether activations are
    recomputed. backends: the attention backend of each layer, or of all layers; see ``layer_backends``. seed: of the
    run. watched: whether every layer must go through its core attention while it trains, for hooks to see. z_loss: see
    ``linear_cross_entropy``. fused_loss, fused_router: whether Triton kernels compute the loss and the routers; see
    triton_cross_entropy.py and fused_router.py. fused_projections: whether layers of the same input share a product.
    """

    group: object = None
    context: ContextGroups | None = None
    recompute: bool = False
    backends: tuple[str, ...] | str = "dense"
    seed: int = 0
    watched: bool = False
    z_loss: float = 0.0
    fused_loss: bool = False
    fused_router: bool = False
    fused_projections: bool = False

    @property
    def products(self):
        return Joined() if self.fused_projections else separate

    def backend(self, layer_index):
        return self.backends if isinstance(self.backends, str) else self.backends[layer_index]

    def loss(self):
        """``linear_cross_entropy`` of (hidden states, weight, labels, partition of the vocabulary)."""
        if self.fused_loss:
            from moh_lm.parallel.triton_cross_entropy import FusedLoss

            return FusedLoss(self.group, self.z_loss)
        return partial(linear_cross_entropy, group=self.group, z_loss=self.z_loss)

    def router(self):
        """Return the class of routers that choose heads."""
        if self.fused_router:
            from moh_lm.model.fused_router import FusedRouter

            return FusedRouter
        return HeadRouter

    def batch_context(self, config):
        """Return the ``BatchContext`` of a ``ModelConfig``. Layers with a window or with CoPE make their own masks."""
        whole = [layer for layer, window in enumerate(config.window) if not window and config.position[layer] != "cope"]
        return BatchContext(makes_masks=any(self.backend(layer) in ("dense", "groups") for layer in whole))


def build_model(config, **settings):
    """Return the ``CausalLM`` of a ``ModelConfig``, with weights not yet drawn. settings: see ``Settings``."""
    settings = Settings(**settings)
    batch = settings.batch_context(config)
    layers = decoder_layers(config, batch, settings)
    return CausalLM(config, batch, layers, settings.loss(), settings.group, settings.context)


def decoder_layers(config, batch, settings):
    """Return for each layer a function without arguments that makes its ``DecoderLayer``."""
    return [
        partial(
            DecoderLayer, config, index, batch, partial(build_attention, config, index, settings),
            settings.recompute, settings.group, settings.products,
        )
        for index in range(config.num_layers)
    ]  # fmt: skip


def moving_windows(model, config, groups, device):
    """Return the ``EntropyWindows`` that adapt the windows of ``model`` in a run, or None if windows are fixed.

    config: ``Config``. groups: ``ParallelGroups``.
    """
    follows = config.run.window_strategy == "entropy"
    return EntropyWindows(model, config, groups, device) if follows else None


def layer_backends(config, device):
    """Return the attention backend of each layer, chosen for the shape of a training micro-batch; never ``auto``.

    config: ``Config``. Raises RuntimeError if a backend requested by name cannot run on the device.
    """
    run, model = config.run, config.model
    dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
    ranks = config.parallel.tensor_parallel_size * config.parallel.context_parallel_size
    names = []
    for index in range(model.num_layers):
        of = model.of_layer(index)
        shape = (run.seq_length, run.micro_batch_size, of.num_attention_heads // ranks, of.query_dim)
        seen = share_of_scores(run.seq_length, widest_window(model, index, run))
        share = model.active_heads(index) / of.num_attention_heads * seen
        name = choose_backend(
            run.attention_backend, device, dtype, shape, share, dense_only=of.position[index] == "cope",
            own_keys=model.own_keys(index), compiled=run.compile or run.cuda_graph,
            estimate=estimate(model, index, run), in_groups=model.chooses_in_groups,
        )  # fmt: skip
        names.append(name)
    return tuple(names)


def estimate(model, index, run):
    """Return the ``estimated_ratio`` of a layer."""
    of = model.of_layer(index)
    heads, shared = of.num_attention_heads, model.always_on_heads(index)
    projections = 2 * of.hidden_size * of.head_dim * (heads + of.num_key_value_heads)
    core = 2 * mean_keys(run.seq_length, widest_window(model, index, run)) * heads * of.head_dim
    return estimated_ratio(core, projections, shared / heads, (model.active_heads(index) - shared) / heads)


def widest_window(model, index, run):
    """Return the window of a layer, or the widest that it may have if windows move, so that a resume chooses the same
    backend as the start."""
    return run.window_max if run.window_strategy == "entropy" else model.window[index]


def build_attention(config, layer_index, settings):
    """Return the ``Attention`` of a layer. config: ``ModelConfig`` of the whole model."""
    of, group, context = config.of_layer(layer_index), settings.group, settings.context
    init_std, output_std = init_stds(config)
    heads = HeadPartition(of.num_attention_heads, config.always_on_heads(layer_index), group)
    local = of.num_attention_heads // group_size(group)
    exchange = UlyssesExchange(local, heads.num_always_on, context) if context else None
    counted = ContextualPositions(of, INIT_STD, heads, exchange) if of.position[layer_index] == "cope" else None
    core = build_core(config, layer_index, (exchange or heads).num_always_on, counted, settings)
    router = build_router(of, layer_index, heads, core, init_std, loss_terms(config), settings)
    kind, positions = attention_kind(of, layer_index, router, core, settings), RotaryPositions
    rotary = rotary_of(of, layer_index)
    if of.head_dims:
        positions = partial(HeterogeneousPositions, of, layer_index, heads)
    if of.own_positions(layer_index):  # the layer itself rotates nothing
        core, rotary = HeadPositions(core, rotary), rotary._replace(head_dim=0)
    core = UlyssesAttention(core, exchange) if exchange else core
    positions = positions(rotary, context)
    attention = kind(of, heads, router, core, positions, init_std, output_std, settings.products)
    if counted is not None:
        attention.add_module("cope", counted)
    return attention


def build_core(config, layer_index, num_shared, counted, settings):
    """Return the ``CoreAttention`` of a layer. counted: its ``ContextualPositions``, or None."""
    of, name = config.of_layer(layer_index), settings.backend(layer_index)
    options = dict(window=of.window[layer_index], num_shared=num_shared, own_keys=config.own_keys(layer_index))
    if counted is not None:
        return CoPECore(counted, **options)  # without a backend, because it needs all scores
    if name == "groups":
        return HeadsInGroups(config.active_heads(layer_index) // of.num_key_value_heads, **options)
    return (LatentCore if of.attention == "latent" else CoreAttention)(BACKENDS[name], **options)


def build_router(config, layer_index, heads, core, init_std, terms, settings):
    """Return the router of a layer configured by ``config``; see moh_lm/model/router.py. terms: ``loss_terms``."""
    if config.heads.head_selection == "all":
        return AllHeads()
    if config.heads.head_selection == "static":
        local = heads.num_heads // group_size(settings.group)
        return StaticHeads(local, heads.num_always_on, settings.group)
    reads_queries = config.heads.routing == "query_norm"
    if config.routed_layer(layer_index).num_routed == 0 and not reads_queries and not settings.fused_router:
        return GatedHeads(config, layer_index, init_std, settings.group, heads)
    return settings.router()(
        config,
        layer_index,
        init_std,
        settings.group,
        heads,
        terms,
        settings.context,
        gumbel_noise(config.heads, settings.seed, layer_index),
        says_selected=reads_queries or core.reads_selection,
    )


def gumbel_noise(heads, seed, layer_index):
    """Return the ``GumbelNoise`` of a layer, or None if it has none. seed: that of the run."""
    scale = heads.router_gumbel_noise
    return GumbelNoise(scale, seed, layer_index) if scale else None


class QueryNormMLA(QueryNormAttention, MultiLatentAttention):
    """Multi-head latent attention, routed by the norms of its queries."""


class QueryNormHeterogeneous(QueryNormAttention, HeterogeneousAttention):
    """Heads of several widths, routed by the norms of their queries."""


def attention_kind(config, layer_index, router, core, settings):
    """Return the class of an attention layer, whose configuration is ``config``."""
    by_queries = isinstance(router, HeadRouter) and router.form.reads_queries
    if config.head_dims:
        return QueryNormHeterogeneous if by_queries else HeterogeneousAttention
    if config.attention == "latent":
        return QueryNormMLA if by_queries else MultiLatentAttention
    if by_queries:
        return QueryNormAttention
    if config.element_gates:
        return ElementGatedAttention
    by_rows = core.backend is CPU_SPARSE and isinstance(router, HeadRouter)
    elsewhere = settings.context or settings.watched or config.own_positions(layer_index)  # the core does more
    return CPURowAttention if by_rows and not elsewhere else Attention
