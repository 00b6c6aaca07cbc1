"""The engine of language models: the loss of tokens, evaluation by source, and pipeline stages.

Shapes: b batch, s sequence.
"""

import math
import os
from dataclasses import replace

import torch

from moh_lm.build import Settings, build_attention, build_model, layer_backends, moving_windows
from moh_lm.cost.layers import pipeline_costs, stage_bounds
from moh_lm.model.transformer import DecoderLayer
from moh_lm.parallel.groups import group_size
from moh_lm.parallel.layers import even_partition
from moh_lm.parallel.ulysses import local_shard
from moh_lm.training.captured import CapturedMicroBatch
from moh_lm.training.deepspeed.pipeline import PipelineCausalLM
from moh_lm.training.engine import Engine
from moh_lm.training.sinks import Sinks, with_numbers
from moh_lm.training.step_check import StepCheck
from moh_lm.training.step_sums import StepSums

COMPARED_TOKENS = 4096  # the most tokens with which kernels are compared with torch


class TextEngine(Engine):
    """Training and evaluation over ``MicroBatch``es of moh_lm.data.loader. config: a checked ``Config``."""

    def __init__(self, config, groups, device, num_sources):
        super().__init__(config, groups, device, num_sources, DecoderLayer)
        self.windows = moving_windows(self.model, config, groups, device)
        self.captured = CapturedMicroBatch(self.model, self.recorders, device) if config.run.cuda_graph else None
        if self.captured:
            self.model.use_captured(self.captured)

    def build_model(self):
        run = self.config.run
        model = build_model(self.config.model, **self.settings()._asdict())
        model.initialize(run.seed)
        return model.to(self.device, torch.bfloat16 if run.precision == "bf16" else torch.float32)

    def settings(self):
        """Return what the layers need to know about the run."""
        run = self.config.run
        return Settings(
            group=self.groups.tensor,
            context=self.groups.context,
            recompute=run.recompute,
            backends=layer_backends(self.config, self.device),
            seed=run.seed,
            watched=run.window_strategy == "entropy",
            z_loss=self.config.optimizer.z_loss,
            fused_loss=run.fused_loss,
            fused_router=run.fused_router,
            fused_projections=run.fused_projections,
        )

    def compare_kernels(self):
        comparisons = {"--fused-loss": self.compare_loss, "--fused-router": self.compare_routers}
        run = self.config.run
        asked = [name for name, is_on in zip(comparisons, (run.fused_loss, run.fused_router), strict=True) if is_on]
        if asked and self.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(f"{asked[0]}: its kernels need a GPU, and this run has none; leave it out")
        dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
        found = [f"{name}: compared with torch on {comparisons[name](dtype)}" for name in asked]
        return found + ([self.compare_graph()] if self.captured else [])

    def compare_loss(self, dtype):
        from moh_lm.parallel.triton_cross_entropy import compare_with_torch

        run, group = self.config.run, self.groups.tensor
        partition = even_partition(0, self.config.model.vocab_size, group)
        tokens = min(run.micro_batch_size * run.seq_length, COMPARED_TOKENS)
        loss, gradient = compare_with_torch(tokens, dtype, self.device, partition, group, self.config.optimizer.z_loss)
        found = f"losses differ by at most {loss:.1e}, gradients by at most {gradient:.1e} of the largest"
        return f"{tokens:,} tokens: {found}"

    def compare_routers(self, dtype):
        """Compare a router of each kind, with weights of its own, on a micro-batch of random tokens."""
        from moh_lm.model.fused_router import compare_with_torch

        model, run, settings = self.config.model, self.config.run, self.settings()
        ranks = group_size(settings.group) * (settings.context.size() if settings.context else 1)
        shape = run.seq_length // ranks, run.micro_batch_size, model.hidden_size
        kinds = {layer._replace(index=0): layer.index for layer in model.gated_layers()}
        found = []
        for index in kinds.values():
            router = build_attention(model, index, settings).router.to(self.device, dtype)
            found.append(compare_with_torch(router, shape))
        gate, gradient, others = map(max, zip(*found, strict=True))
        found = f"gates differ by at most {gate:.1e}, gradients by at most {gradient:.1e} of the largest"
        return f"{math.prod(shape[:2]):,} tokens: {found}; {others:.2%} of the tokens select other heads"

    def compare_graph(self):
        """Capture a made-up micro-batch with the shapes of the run, and compare it with an uncaptured one."""
        run, data, size = self.config.run, self.config.data, self.config.run.micro_batch_size
        token = torch.arange(size * run.seq_length, device=self.device).view(size, -1)
        ids = local_shard(token * 7919 % self.config.model.vocab_size, self.groups.context)
        positions = token % run.seq_length if data.reset_at_documents or data.seq_length_warmup else None
        self.engine.train()
        self.step_check = StepCheck(self.sums, self.guard, self.largest_weight)  # for a step that is never taken
        self.model.batch.feed([positions], [token[:, 0]])
        self.captured(ids, ids.roll(-1, 1))
        loss, gradient = self.captured.differences
        found = f"losses differ by {loss:.1e}, gradients by at most {gradient:.1e} of the largest"
        return f"--cuda-graph: compared with a micro-batch without a graph: {found}"

    def recorders(self):
        """Return the ``MicroBatchParts`` that a micro-batch adds to in its backward pass."""
        return [self.step_check.gradient_not_finite, *(block.rows for block in self.blocks)]

    def own_part(self, micro_batches):
        """Return the micro-batches, reduced to the tokens and labels of this rank's part of the sequences."""
        context = self.groups.context
        return [
            batch._replace(tokens=local_shard(batch.tokens, context), labels=local_shard(batch.labels, context))
            for batch in micro_batches
        ]

    def loss(self, batch):
        self.model.batch.feed([batch.positions], [batch.samples])
        tokens, labels, sources = (self.on_device(part) for part in (batch.tokens, batch.labels, batch.sources))
        mean, losses = self.engine(tokens, labels)
        self.sums.add(losses, labels, sources)
        return mean

    def evaluate(self, micro_batches):
        """Return (loss summed over tokens, number of tokens) over the micro-batches of all data-parallel ranks."""
        return tuple(self.evaluate_rows(micro_batches, self.num_sources).sum(0).tolist()[:2])

    @torch.no_grad()
    def evaluate_rows(self, micro_batches, num_rows):
        """Return the same and the number of sequences for each source number below ``num_rows``: [num_rows, 3]."""
        self.sums = StepSums(num_rows, self.groups, self.device)
        self.evaluation_forward(self.own_part(micro_batches))
        return self.sums.reduce()

    def evaluation_forward(self, micro_batches):
        self.engine.eval()
        for batch in micro_batches:
            self.loss(batch)

    def sinks(self, micro_batches):
        """Return the mean attention to the first token in each layer over these micro-batches; see sinks.py."""
        sinks = Sinks(self.model, self.config.model.num_layers, self.groups, self.device)
        with sinks.measured():
            self.evaluate_rows([with_numbers(batch) for batch in micro_batches], self.num_sources)
        return sinks.means()

    def after_step(self, skipped):
        """Update the windows from the entropies of the step."""
        if self.windows:
            self.windows.move(skipped)

    def state(self):
        return {"windows": [self.windows.widths, self.windows.entropies]} if self.windows else {}

    def restore(self, saved):
        if self.windows and "windows" in saved:
            self.windows.set(*saved["windows"])

    def config_now(self):
        """Return the configuration with the current windows."""
        if not self.windows:
            return self.config
        return replace(self.config, model=replace(self.config.model, window=tuple(self.windows.widths)))


class PipelineEngine(TextEngine):
    """A ``TextEngine`` over several pipeline stages; DeepSpeed schedules the micro-batches (1F1B)."""

    def build_model(self):
        run, parallel = self.config.run, self.config.parallel
        return PipelineCausalLM(
            self.config.model,
            self.settings(),
            stage_bounds(pipeline_costs(self.config.model, run.seq_length), parallel.pipeline_parallel_size),
            (parallel.pipeline_parallel_size, group_size(self.groups.data), parallel.tensor_parallel_size),
            self.last_stage_loss,
        )

    def last_stage_loss(self, mean, labels_and_sources):
        self.sums.add(self.model.losses, *labels_and_sources)
        return mean

    def step(self, micro_batches):
        self.model.feed(micro_batches)
        self.engine.train_batch(self.stage_inputs(micro_batches))

    def stage_inputs(self, micro_batches):
        """Return the inputs of DeepSpeed's first and last stage: tokens, and what the loss needs."""
        for batch in micro_batches:
            tokens, labels, sources = (self.on_device(part) for part in (batch.tokens, batch.labels, batch.sources))
            yield tokens, (labels, sources)

    def evaluation_forward(self, micro_batches):
        if micro_batches:
            self.model.feed(micro_batches)
            self.engine.eval_batch(self.stage_inputs(micro_batches), num_micro_batches=len(micro_batches))

    def named_parameters(self):
        return self.model.canonical_parameters()


def make_engine(config, groups, device, num_sources):
    """Return a ``TextEngine``, or a ``PipelineEngine`` with several stages."""
    engine = TextEngine if config.parallel.pipeline_parallel_size == 1 else PipelineEngine
    return engine(config, groups, device, num_sources)
