"""A stage of the model in DeepSpeed's hands: its ``PipelineModule`` over the layers of moh_lm/model/pipeline.py."""

import contextlib
from collections import deque

from deepspeed import pipe
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from moh_lm.kernels.masks import Documents
from moh_lm.model.pipeline import TiedLayerSpec, layer_list, stage_bounds
from moh_lm.model.transformer import initialize
from moh_lm.parallel.cross_entropy import linear_cross_entropy
from moh_lm.parallel.layers import even_partition


class PipelineCausalLM(pipe.PipelineModule):
    """This rank's stage of the model, its parameters drawn.

    The last stage computes the loss inside ``forward``, where DeepSpeed sees all that takes part in it: in bf16 it
    clears gradients when the backward pass arrives at the output, and so those of a weight that is used after it.
    ``loss_fn(mean, labels)`` gets the mean; ``losses`` [s, b] are those of the last micro-batch.
    """

    def __init__(
        self, config, seq_length, groups_shape, group, micro_batches, recompute, attention_backend, z_loss, seed,
        loss_fn, context=None,
    ):  # fmt: skip
        pipeline, data, tensor = groups_shape
        documents = Documents(attention_backend)
        self.layers = layer_list(
            config, seq_length, group, micro_batches, recompute, documents, attention_backend, context
        )
        with contextlib.redirect_stdout(None):  # DeepSpeed prints the list on every start
            super().__init__(
                [deepspeed_spec(spec) for _, spec, _ in self.layers],
                topology=PipeModelDataParallelTopology(num_pp=pipeline, num_mp=tensor, num_dp=data),
                loss_fn=loss_fn,
            )
        self.documents = documents
        self.tied, self.z_loss = config.tie_embeddings, z_loss
        self.group = group
        self.vocab_partition = even_partition(0, config.vocab_size, group)
        self.labels = deque()
        self.losses = None
        initialize(self.canonical_parameters(), seed)

    def feed(self, micro_batches):
        """Take what the coming forward passes need besides their input. micro_batches: [MicroBatch], in their order."""
        self.documents.feed([batch.positions for batch in micro_batches], [batch.samples for batch in micro_batches])
        if self.stage_id == self.num_stages - 1:
            self.labels.extend(batch.labels for batch in micro_batches)

    def forward(self, x):
        self.documents.advance(x.device)
        x = super().forward(x)
        if self.stage_id < self.num_stages - 1:
            return x
        weight = (self.tied_modules["embed"] if self.tied else self.forward_funcs[-1]).weight
        labels = self.labels.popleft().to(x.device, non_blocking=True).t()  # [s, b]
        mean, self.losses = linear_cross_entropy(x, weight, labels, self.vocab_partition, self.group, self.z_loss)
        return mean

    def _partition_layers(self, method):
        """Give the stages equal costs, not DeepSpeed's equal numbers of parameters: an embedding costs nothing."""
        self.parts = stage_bounds(self.layers, self.num_stages)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def canonical_parameters(self):
        """(name, parameter) of this stage, with the names of ``CausalLM``."""
        seen = set()
        for (prefix, spec, _), function in zip(
            self.layers[self._local_start : self._local_stop], self.forward_funcs, strict=True
        ):
            layer = self.tied_modules[spec.key] if isinstance(spec, TiedLayerSpec) else function
            for name, parameter in layer.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield prefix + name, parameter

    def tied_parameters(self):
        """(name, parameter, group of the stages that hold it) of the tied embedding, if this stage has it."""
        for tied in self.tied_comms.values():
            yield "model.embed_tokens.weight", tied["module"].weight, tied["group"]


def deepspeed_spec(spec):
    """DeepSpeed's own kind of ``LayerSpec``."""
    if isinstance(spec, TiedLayerSpec):
        return pipe.TiedLayerSpec(spec.key, spec.kind, *spec.arguments, forward_fn=spec.forward_fn)
    return pipe.LayerSpec(spec.kind, *spec.arguments)
