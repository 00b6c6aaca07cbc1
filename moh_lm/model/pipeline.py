"""The model as one ordered list of layers, for pipeline parallelism.

Every stage holds a run of consecutive layers, and one tensor [s/tp, b, d] passes between them; losses of routers start
where they are computed (``attach_loss``) and need no passage. Each layer stands in the list with the prefix that turns
its parameter names into those of ``CausalLM``. moh_lm/training/deepspeed/pipeline.py makes a stage of the list.
"""

import math
from itertools import accumulate

from moh_lm.model.positions import LearnedPositions
from moh_lm.model.transformer import INIT_STD, CausalLM, DecoderLayer, FinalNorm, loss_terms
from moh_lm.parallel.layers import ColumnParallelLinear, VocabParallelEmbedding, even_partition
from moh_lm.parallel.mappings import gather_sequence


class LayerSpec:
    """A layer that is made only by the stage that holds it: ``kind(*arguments)``, an nn.Module."""

    def __init__(self, kind, *arguments):
        self.kind, self.arguments = kind, arguments

    def build(self):
        return self.kind(*self.arguments)


class TiedLayerSpec(LayerSpec):
    """A layer that stands in several places of the list, under one ``key``, with the same weights in all of them.

    forward_fn: (layer, x) -> what it computes in this place; None: as it computes otherwise.
    """

    def __init__(self, key, kind, *arguments, forward_fn=None):
        super().__init__(kind, *arguments)
        self.key, self.forward_fn = key, forward_fn


class Head(ColumnParallelLinear):
    """Last layer of the list: [s/tp, b, d] -> [s, b, d]. ``PipelineCausalLM`` multiplies by its weight."""

    def __init__(self, config, group):
        super().__init__(config.hidden_size, config.vocab_size, INIT_STD, even_partition(0, config.vocab_size, group))
        self.group = group

    def forward(self, x):
        return gather(self, x)


def gather(layer, x):
    """[s/tp, b, d] -> [s, b, d], what the output head reads; layer: it, or the tied embedding."""
    return gather_sequence(x, layer.group)


def layer_list(
    config, seq_length, group, micro_batches, recompute, documents=None, attention_backend="auto", context=None
):
    """[(prefix of the parameter names, LayerSpec, cost in multiplications per token)] of the whole model.

    The cost of a layer is that of all its heads, which the dense backend computes.
    """
    common = (loss_terms(config, micro_batches), recompute, group, documents, attention_backend, context)
    blocks = [
        (
            f"model.layers.{i}.",
            LayerSpec(DecoderLayer, config, i, *common),
            round(DecoderLayer.cost(config, i, seq_length)["dense"]),
        )
        for i in range(config.num_layers)
    ]
    table = (VocabParallelEmbedding, config.vocab_size, config.hidden_size, INIT_STD, group)
    if config.tie_embeddings:
        embedding = TiedLayerSpec("embed", *table)
        head = ("model.embed_tokens.", TiedLayerSpec("embed", *table, forward_fn=gather))
    else:
        embedding = LayerSpec(*table)
        head = ("lm_head.", LayerSpec(Head, config, group))
    norm = ("model.norm.", LayerSpec(FinalNorm, config, group), 0)
    first = [("model.embed_tokens.", embedding, 0)]
    if "learned" in config.position:
        positions = LayerSpec(LearnedPositions, config, INIT_STD, group, documents, context)
        first.append(("model.embed_positions.", positions, 0))
    return [*first, *blocks, norm, (*head, CausalLM.head_cost(config))]


def stage_bounds(layers, num_stages):
    """First layer of every stage, and the end, so that the costs of the stages differ as little as possible.

    A costly output head may be a stage of its own. layers: of ``layer_list``. The best split of the first layers into
    one stage more is made from the best split of fewer layers, as DeepSpeed's ``partition_balanced`` does it.
    """
    count = len(layers)
    if count <= num_stages:
        return [min(stage, count) for stage in range(num_stages + 1)]
    costs = [0, *accumulate(max(1, cost) for _, _, cost in layers)]
    best = {0: (0, math.inf, [0])}  # {layers before this stage: (cost of the largest stage, of the smallest, bounds)}
    for _ in range(num_stages):
        longer = {}
        for end in range(1, count + 1):
            splits = [
                (max(most, costs[end] - costs[start]), min(least, costs[end] - costs[start]), [*bounds, end])
                for start, (most, least, bounds) in reversed(best.items())  # of equal splits the last start
                if start < end
            ]
            if splits:
                longer[end] = min(splits, key=lambda split: split[0] - split[1])
        best = longer
    return best[count][2]
