"""The model as one ordered list of layers, DeepSpeed's ``PipelineModule``. Each pipeline stage holds a consecutive
part.

One tensor [s/tp, b, d] passes between the stages; losses of routers start where they are computed (``attach_loss``) and
need not be passed on. Each layer in the list comes with the prefix that turns its parameter names into those of
``CausalLM``.
"""

import contextlib
from collections import deque

import torch
from deepspeed import pipe
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from moh_lm.build import decoder_layers
from moh_lm.model.positions import LearnedPositions
from moh_lm.model.transformer import INIT_STD, FinalNorm, initialize
from moh_lm.parallel.layers import ColumnParallelLinear, VocabParallelEmbedding, even_partition
from moh_lm.parallel.mappings import gather_sequence


class Head(ColumnParallelLinear):
    """The last layer of the list, [s/tp, b, d] -> [s, b, d]; ``PipelineCausalLM`` multiplies by its weight."""

    def __init__(self, config, group):
        super().__init__(config.hidden_size, config.vocab_size, INIT_STD, even_partition(0, config.vocab_size, group))
        self.group = group

    def forward(self, x):
        return gather(self, x)


def gather(layer, x):
    """Gather [s/tp, b, d] to [s, b, d] for the output head. layer: the head, or the tied embedding."""
    return gather_sequence(x, layer.group)


def layer_list(config, settings, batch):
    """Return [(prefix of parameter names, LayerSpec)]. settings: ``Settings`` of moh_lm/build.py."""
    group = settings.group
    blocks = [
        (f"model.layers.{index}.", pipe.LayerSpec(make.func, *make.args))
        for index, make in enumerate(decoder_layers(config, batch, settings))
    ]
    table = (VocabParallelEmbedding, config.vocab_size, config.hidden_size, INIT_STD, group)
    if config.tie_embeddings:
        embedding = pipe.TiedLayerSpec("embed", *table)
        head = ("model.embed_tokens.", pipe.TiedLayerSpec("embed", *table, forward_fn=gather))
    else:
        embedding = pipe.LayerSpec(*table)
        head = ("lm_head.", pipe.LayerSpec(Head, config, group))
    first = [("model.embed_tokens.", embedding)]
    if "learned" in config.position:
        positions = pipe.LayerSpec(LearnedPositions, config, INIT_STD, group, batch, settings.context)
        first.append(("model.embed_positions.", positions))
    return [*first, *blocks, ("model.norm.", pipe.LayerSpec(FinalNorm, config, group)), head]


class PipelineCausalLM(pipe.PipelineModule):
    """This rank's pipeline stage of the model, with initialized parameters.

    The last stage computes the loss inside ``forward``. In bf16 DeepSpeed clears gradients when the backward pass
    arrives at the output, so the gradient of a weight that is used after the output would be lost.
    ``loss_fn(mean, labels)`` gets the mean; ``losses`` [s, b] are those of the last micro-batch.
    """

    def __init__(self, config, settings, bounds, groups_shape, loss_fn):
        """settings: ``Settings``. bounds: first layer of every stage, and the end. groups_shape: [pipeline, data,
        tensor]."""
        pipeline, data, tensor = groups_shape
        batch, self.bounds = settings.batch_context(config), bounds
        self.layers = layer_list(config, settings, batch)
        # DeepSpeed prints the list on every start, and broadcasts tied weights, of which autograd would warn.
        with contextlib.redirect_stdout(None), torch.no_grad():
            super().__init__(
                [spec for _, spec in self.layers],
                topology=PipeModelDataParallelTopology(num_pp=pipeline, num_mp=tensor, num_dp=data),
                loss_fn=loss_fn,
            )
        self.batch = batch
        self.tied, self.loss = config.tie_embeddings, settings.loss()
        self.group = settings.group
        self.vocab_partition = even_partition(0, config.vocab_size, settings.group)
        self.labels = deque()
        self.losses = None
        initialize(self.canonical_parameters(), settings.seed)

    def feed(self, micro_batches):
        """Store what the next forward passes need besides their input. micro_batches: [MicroBatch], in their order."""
        self.batch.feed([batch.positions for batch in micro_batches], [batch.samples for batch in micro_batches])
        if self.stage_id == self.num_stages - 1:
            self.labels.extend(batch.labels for batch in micro_batches)

    def forward(self, x):
        self.batch.advance(x.device)
        x = super().forward(x)
        if self.stage_id < self.num_stages - 1:
            return x
        weight = (self.tied_modules["embed"] if self.tied else self.forward_funcs[-1]).weight
        labels = self.labels.popleft().to(x.device, non_blocking=True).t()  # [s, b]
        mean, self.losses = self.loss(x, weight, labels, self.vocab_partition)
        return mean

    def _partition_layers(self, method):
        """Give the stages equal costs, not DeepSpeed's equal numbers of parameters: an embedding costs nothing."""
        self.parts = self.bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def canonical_parameters(self):
        """Yield (name, parameter) of this stage, with the names of ``CausalLM``."""
        seen = set()
        for (prefix, spec), function in zip(
            self.layers[self._local_start : self._local_stop], self.forward_funcs, strict=True
        ):
            layer = self.tied_modules[spec.key] if isinstance(spec, pipe.TiedLayerSpec) else function
            for name, parameter in layer.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield prefix + name, parameter

    def tied_parameters(self):
        """Yield (name, parameter, group of the stages that hold it) for the tied embedding, if this stage has it."""
        for tied in self.tied_comms.values():
            yield "model.embed_tokens.weight", tied["module"].weight, tied["group"]
