"""The engine of language models: the loss of tokens, evaluation by source, and pipeline stages.

Shapes: b batch, s sequence.
"""

from dataclasses import replace

import torch

from moh_lm.build import Settings, build_model, layer_backends, moving_windows
from moh_lm.cost.layers import pipeline_costs, stage_bounds
from moh_lm.model.transformer import DecoderLayer
from moh_lm.parallel.consensus import from_all_ranks
from moh_lm.parallel.groups import group_size
from moh_lm.parallel.ulysses import local_shard
from moh_lm.training.captured import CapturedMicroBatch
from moh_lm.training.deepspeed.pipeline import PipelineCausalLM
from moh_lm.training.engine import Engine
from moh_lm.training.kernel_check import KernelCheck
from moh_lm.training.sinks import Sinks, with_numbers
from moh_lm.training.step_check import StepCheck
from moh_lm.training.step_sums import StepSums


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

    def compare_kernels(self, first):
        check, sentences = KernelCheck(self.model), []
        checks = any(from_all_ranks(bool(check.modules)))
        batch = first() if checks or self.captured else None
        if checks:
            with check.attached():
                self.evaluate_rows([batch], self.num_sources)
            sentences += check.sentences()
        if self.captured:
            sentences.append(self.compare_graph(*self.own_part([batch])))
        return sentences

    def compare_graph(self, batch):
        """Capture this micro-batch, and compare the graph with an uncaptured one."""
        self.engine.train()
        self.step_check = StepCheck(self.sums, self.guard, self.largest_weight)  # for a step that is never taken
        self.model.batch.feed([batch.positions], [batch.samples])
        self.captured(*map(self.on_device, (batch.tokens, batch.labels)))
        loss, gradient = self.captured.differences
        found = f"losses differ by {loss:.1e}, gradients by {gradient:.1e}"
        return f"--cuda-graph: compared without a graph on the first micro-batch: {found}"

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
        """Return the same and the number of sequences, with those that only fill batches, for each source number below
        ``num_rows``: [num_rows, 3]."""
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

    def close(self):
        if self.captured:
            self.captured.close()

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
        self.engine.timers("train_batch").reset()  # DeepSpeed would keep the CUDA events of every step

    def stage_inputs(self, micro_batches):
        """Yield the inputs of DeepSpeed's first and last stage: tokens, and what the loss needs."""
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
