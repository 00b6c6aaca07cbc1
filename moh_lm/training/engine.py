"""The training engine: the model in DeepSpeed's hands.

DeepSpeed shards the optimizer, sums and clips the gradients and keeps the fp32 masters. The learning rate and the
position in the data are the caller's: DeepSpeed's own counters drift when a step is skipped.

Shapes: b batch, E routed experts of a layer, heads or key/value groups.
"""

import functools
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from moh_lm.build import Settings, build_model, layer_backends
from moh_lm.checkpoint.fragments import MOMENTS, Fragment
from moh_lm.cost.layers import pipeline_costs, stage_bounds
from moh_lm.extras.entropy_windows import EntropyWindows
from moh_lm.model.block import modules_of
from moh_lm.model.router import BIAS
from moh_lm.model.transformer import DecoderLayer, compile_layers
from moh_lm.parallel.consensus import problems_of_all_ranks
from moh_lm.parallel.groups import group_rank, group_size
from moh_lm.parallel.layers import VocabParallelEmbedding, make_parameter
from moh_lm.parallel.ulysses import local_shard
from moh_lm.training.deepspeed.adapter import set_z3_leaf_modules, wrap
from moh_lm.training.deepspeed.pipeline import PipelineCausalLM
from moh_lm.training.deepspeed.sharded_optimizer import ShardedOptimizer
from moh_lm.training.deepspeed.shards import is_tied_copy
from moh_lm.training.frozen import FrozenWeights
from moh_lm.training.guard import DIVERGENCE, BadNumbers, Guard, largest
from moh_lm.training.parameter_groups import make_optimizer
from moh_lm.training.replicas import replica_differences
from moh_lm.training.sinks import Sinks, with_numbers
from moh_lm.training.step_check import StepCheck
from moh_lm.training.step_sums import RouterSums, StepSums


class StepResult(NamedTuple):
    """Sums over the global batch, equal on every rank; float64 on the device, so that reading them is the caller's
    choice.

    losses: [num_sources, 3], loss summed over tokens, number of tokens, number of sequences. routers: [num_sources, sum
    of (4 + E)], for every router in turn the sums over sequences of what ``RouterStatistics`` keeps. loss: mean per
    token. grad_norm: before clipping. code: of guard.REASONS. skipped: whether the gradients were left out.
    seconds: {"forward_backward", "optimizer"}, the first with the reduction of the gradients and their norm.
    """

    losses: torch.Tensor
    routers: torch.Tensor
    loss: float
    grad_norm: float
    code: int
    skipped: bool
    seconds: dict


class Engine:
    """One training step and one evaluation, over ``MicroBatch``es of moh_lm.data.loader; one pipeline stage.

    config: a checked ``Config``. groups: ``ParallelGroups``. device: of this rank. num_sources: data sources of the
    mixture. layer: the ``RoutedBlock`` that the model is made of.
    """

    layer, ema_decay = DecoderLayer, 0.0

    def __init__(self, config, groups, device, num_sources):
        self.config = config
        self.groups = groups
        self.device = device
        self.num_sources = num_sources
        self.micro_batches = config.gradient_accumulation_steps(dist.get_world_size())
        self.guard = Guard(config.reliability)
        self.dense_warmup = False  # see ``begin``
        self.sums = None  # of the step, or of the evaluation
        self.step_check = None  # of the newest step
        self.model = self.build_model()
        self.blocks = modules_of(self.model)
        if config.run.compile:
            compile_layers(self.model, kind=self.layer)
            if config.parallel.zero_stage == 3:  # a layer's weights come and go together, outside its graph
                set_z3_leaf_modules(self.model, [self.layer])
        self.attach_measurements()
        self.windows = None
        if config.run.window_strategy == "entropy":
            self.windows = EntropyWindows(self.model, config, groups, device)
        self.freeze()  # before there is an optimizer, which has no state for a frozen parameter
        self.wrap()
        self.address_weights()  # where DeepSpeed has put them

    def build_model(self):
        run = self.config.run
        model = build_model(self.config.model, self.config.optimizer.z_loss, **self.settings()._asdict())
        model.initialize(run.seed)
        return model.to(self.device, torch.bfloat16 if run.precision == "bf16" else torch.float32)

    def settings(self):
        """What the layers need to know of the run."""
        run = self.config.run
        return Settings(
            group=self.groups.tensor,
            context=self.groups.context,
            micro_batches=self.micro_batches,
            recompute=run.recompute,
            backends=layer_backends(self.config, self.device),
            seed=run.seed,
            watched=run.window_strategy == "entropy",
        )

    def attach_measurements(self):
        """Have the model keep what a step needs to know of it: gradients that are not finite, and loads of routers."""
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.register_forward_hook(self.watch_gradient)
        self.router_sums = RouterSums(
            self.blocks,
            self.model.batch,
            self.config.model.gated_layers(),
            self.num_sources,
            self.config.run.tokens_per_iteration,
            self.groups,
            self.device,
        )

    def freeze(self):
        """Leave only the parameters to be trained that --train-only names."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self.config.optimizer.train_only == "all" or ".router." in name)

    def wrap(self):
        """Hand the model to DeepSpeed, which shards it, and have every step checked before it changes a weight."""
        config = self.config
        names = {parameter: name for name, parameter in self.named_parameters()}
        optimizer = make_optimizer([(names[p], p) for p in self.model.parameters()], config)
        self.engine = wrap(self.model, optimizer, config, self.groups, self.micro_batches)
        self.optimizer = ShardedOptimizer(
            self.engine.optimizer,
            config.parallel.zero_stage,
            group_rank(self.groups.data),
            lambda norm, copies: self.step_check.examine(norm, copies),
            config.optimizer.router_gradient_clipping,
            self.ema_decay,
        )

    def address_weights(self):
        """Find this rank's part of frozen weights and of matrices for Muon, and the weights that other ranks have."""
        self.frozen = FrozenWeights([parameter for _, parameter in self.named_parameters()], self.groups.data)
        if self.config.optimizer.optimizer == "muon":
            self.optimizer.distribute(self.named_parameters(), self.config, self.groups, self.device)
        self.compare_replicas = functools.partial(
            replica_differences,
            list(self.named_parameters()),
            list(self.model.tied_parameters()),
            list(self.named_biases()),
            self.config.parallel,
            self.groups,
        )

    def begin(self, step):
        """Make the model that of the iteration after ``step`` complete ones: in a dense warm-up all heads are on."""
        self.dense_warmup = self.config.model.after(step) != self.config.model
        self.model.batch.begin(self.dense_warmup)

    def train_step(self, micro_batches, learning_rate, check_replicas=False):
        """Forward and backward of this rank's micro-batches and one optimizer step; returns a ``StepResult``.

        check_replicas: compare the weights that several ranks hold. Raises BadNumbers.
        """
        started = time.perf_counter()
        scale = self.config.optimizer.router_learning_rate_scale
        self.optimizer.set_learning_rates(learning_rate, 0.0 if self.dense_warmup else learning_rate * scale)
        self.sums = StepSums(self.num_sources, self.groups, self.device)
        compare = self.compare_replicas if check_replicas else None
        self.step_check = StepCheck(self.sums, self.guard, self.largest_weight, compare)
        self.step(self.own_tokens(micro_batches))
        stats = self.step_check.result()
        skipped = self.guard.skips(stats.code)
        if skipped:
            self.optimizer.drop_gradients()
            self.optimizer.refresh_weights()  # a weight that was not finite, or differed, is as its master again
            self.refuse_lasting_faults(stats.code)
        else:
            self.optimizer.average()
            if self.dense_warmup:
                self.optimizer.rest()
        sources = [batch.sources for batch in micro_batches]
        routers = self.router_sums.take(sources, frozen=skipped or self.dense_warmup)
        if self.windows:
            self.windows.move(skipped)
        torch.get_device_module(self.device).synchronize()
        seconds = {"forward_backward": stats.time - started, "optimizer": time.perf_counter() - stats.time}
        return StepResult(self.sums.losses, routers, stats.mean, stats.grad_norm, stats.code, skipped, seconds)

    def refuse_lasting_faults(self, code):
        """Raise what is wrong with the masters themselves, after a step that was skipped with this ``code``."""
        out_of_range = problems_of_all_ranks(self.out_of_range_weights())
        if out_of_range:
            more = [f"and {len(out_of_range) - 3} more"] if len(out_of_range) > 3 else []
            raise BadNumbers("; ".join(out_of_range[:3] + more))
        lasting = problems_of_all_ranks(self.compare_replicas()) if code == DIVERGENCE else []
        if lasting:
            raise BadNumbers(f"{'; '.join(lasting)}; still so after weights were written from their fp32 masters again")

    def largest_weight(self):
        """Largest magnitude of a master, or of a frozen weight, of this rank, []; NaN if one is."""
        sizes = map(largest, [*self.optimizer.masters(), *self.frozen.weights().values()])
        return torch.stack([size.to(self.device, torch.float64) for size in sizes]).max()

    def out_of_range_weights(self):
        """Sentences for the weights of this rank that cannot come from training: masters, or else frozen ones."""
        masters = {fragment.name: fragment.tensors["master"] for fragment in self.fragments()}
        # not the biases of routers: counts, which grow with the steps
        masters = {name: master for name, master in masters.items() if master.is_floating_point()}
        names, frozen = {p: name for name, p in self.named_parameters()}, self.frozen.weights()
        frozen = {names[parameter]: weight for parameter, weight in frozen.items()}
        found = self.guard.out_of_range_weights(masters, "in its fp32 master")
        return found or self.guard.out_of_range_weights(frozen, "and is frozen")

    def watch_gradient(self, module, inputs, output):
        if output.requires_grad:
            self.step_check.watch_gradient(output)

    def step(self, micro_batches):
        self.engine.train()
        for batch in micro_batches:
            self.engine.backward(self.loss(batch))
            self.engine.step()

    def evaluate(self, micro_batches):
        """(loss summed over tokens, number of tokens) over the micro-batches of all data-parallel ranks."""
        return tuple(self.evaluate_rows(micro_batches, self.num_sources).sum(0).tolist()[:2])

    @torch.no_grad()
    def evaluate_rows(self, micro_batches, num_rows):
        """The same, and the number of sequences, for each number below ``num_rows`` that a sequence may have as its
        source: [num_rows, 3]."""
        self.sums = StepSums(num_rows, self.groups, self.device)
        self.evaluation_forward(self.own_tokens(micro_batches))
        return self.sums.reduce()

    def sinks(self, micro_batches):
        """The mean attention to the first token in each layer (moh_lm.training.sinks), over these micro-batches."""
        sinks = Sinks(self.model, self.config.model.num_layers, self.groups, self.device)
        with sinks.measured():
            self.evaluate_rows([with_numbers(batch) for batch in micro_batches], self.num_sources)
        return sinks.means()

    def own_tokens(self, micro_batches):
        """The micro-batches with the tokens and labels that this rank has of their sequences."""
        context = self.groups.context
        return [
            batch._replace(tokens=local_shard(batch.tokens, context), labels=local_shard(batch.labels, context))
            for batch in micro_batches
        ]

    def evaluation_forward(self, micro_batches):
        self.engine.eval()
        for batch in micro_batches:
            self.loss(batch)

    def loss(self, batch):
        self.model.batch.feed([batch.positions], [batch.samples])
        tokens, labels, sources = (self.on_device(part) for part in (batch.tokens, batch.labels, batch.sources))
        mean, losses = self.engine(tokens, labels)
        self.sums.add(losses, labels, sources)
        return mean

    def on_device(self, tensor):
        return tensor.to(self.device, non_blocking=True)  # the other way this process waits for all earlier kernels

    def named_parameters(self):
        """(canonical name, parameter) of what this rank holds."""
        return self.model.named_parameters()

    def named_biases(self):
        """(canonical name, counts) of the routers of this rank that select with a bias."""
        for block in self.blocks:
            steps = getattr(block.router(), BIAS, None)
            if steps is not None:
                yield f"model.layers.{block.index}.self_attn.router.{BIAS}", steps

    def fragments(self):
        """``Fragment``s of what this rank's optimizer owns, of what is frozen, and of the biases of routers."""
        for name, parameter in self.named_parameters():
            owned = (self.optimizer if parameter.requires_grad else self.frozen).fragment(parameter)
            if owned is not None:
                start, tensors = owned
                yield Fragment(name, parameter, start, self.is_copy(parameter), tensors)
        copy = group_rank(self.groups.data) > 0 or group_rank(self.groups.tensor) > 0
        for name, steps in self.named_biases():
            tensors = {"master": steps, **{moment: torch.zeros_like(steps) for moment in MOMENTS}}
            yield Fragment(name, make_parameter(steps.shape), 0, copy, tensors)

    def is_copy(self, parameter):
        """Whether another rank holds the same parameter and speaks for it: a replicated weight, or a tied one."""
        replicated = parameter.tensor_partition is None and group_rank(self.groups.tensor) > 0
        return replicated or is_tied_copy(parameter)

    def adopt(self, optimizer_steps, shares, l1_steps=0, rested_steps=0, frozen_steps=0):
        """Go on from ``fragments`` that were filled from a checkpoint, and from what its routers followed."""
        self.frozen.refresh()  # before ``adopt``, which gathers what ZeRO-3 keeps whole
        self.optimizer.adopt(optimizer_steps, rested_steps, frozen_steps)
        self.router_sums.set_l1_steps(torch.tensor(l1_steps, device=self.device))
        self.router_sums.set_shares([torch.tensor(share, dtype=torch.float64, device=self.device) for share in shares])


class PipelineEngine(Engine):
    """The same over several pipeline stages: DeepSpeed schedules the micro-batches (1F1B)."""

    def build_model(self):
        run, parallel = self.config.run, self.config.parallel
        return PipelineCausalLM(
            self.config.model,
            self.settings(),
            stage_bounds(pipeline_costs(self.config.model, run.seq_length), parallel.pipeline_parallel_size),
            (parallel.pipeline_parallel_size, group_size(self.groups.data), parallel.tensor_parallel_size),
            self.config.optimizer.z_loss,
            self.last_stage_loss,
        )

    def last_stage_loss(self, mean, labels_and_sources):
        self.sums.add(self.model.losses, *labels_and_sources)
        return mean

    def step(self, micro_batches):
        self.model.feed(micro_batches)
        self.engine.train_batch(self.stage_inputs(micro_batches))

    def stage_inputs(self, micro_batches):
        """What DeepSpeed's first and last stage take: tokens, and what the loss needs. Copies of its own would wait."""
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
    engine = Engine if config.parallel.pipeline_parallel_size == 1 else PipelineEngine
    return engine(config, groups, device, num_sources)
