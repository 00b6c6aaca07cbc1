"""The training engine: the model, trained by DeepSpeed.

DeepSpeed shards the optimizer, sums and clips the gradients and keeps the fp32 masters. The learning rate and the
position in the data are the caller's: DeepSpeed's own counters drift when a step is skipped.

Shapes: b batch, E routed experts of a layer, heads or key/value groups.
"""

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from moh_lm.checkpoint.fragments import MOMENTS, Fragment
from moh_lm.model.block import modules_of
from moh_lm.model.router import BIAS
from moh_lm.model.transformer import compile_layers
from moh_lm.parallel.consensus import problems_of_all_ranks
from moh_lm.parallel.groups import group_rank
from moh_lm.parallel.layers import VocabParallelEmbedding, make_parameter
from moh_lm.training.deepspeed.adapter import accumulate, set_z3_leaf_modules, wrap
from moh_lm.training.deepspeed.sharded_optimizer import ShardedOptimizer
from moh_lm.training.deepspeed.shards import is_tied_copy
from moh_lm.training.frozen import FrozenWeights
from moh_lm.training.guard import DIVERGENCE, BadNumbers, Guard, largest
from moh_lm.training.parameter_groups import make_optimizer
from moh_lm.training.replicas import Replicas
from moh_lm.training.step_check import StepCheck
from moh_lm.training.step_sums import RouterSums, StepSums


class StepResult(NamedTuple):
    """Sums over the global batch, equal on every rank, in float64 on the device, so that reading them is the caller's
    choice.

    losses: [num_sources, 3], loss summed over tokens, number of tokens, number of sequences. routers: [num_sources, sum
    of (4 + E)], the rows of every router summed over sequences. loss: mean per token. grad_norm: norm before clipping.
    code: one of guard.REASONS. skipped: whether the gradients were not applied. seconds: {"forward_backward",
    "optimizer"} on the host, which waits for the device between the two. The first includes the reduction of the
    gradients, their norm, and the rest of the previous step on the device. flags: see ``GradientStats``.
    """

    losses: torch.Tensor
    routers: torch.Tensor
    loss: float
    grad_norm: float
    code: int
    skipped: bool
    seconds: dict
    flags: list


class Engine:
    """The training step of every task, and its state for checkpoints.

    Subclasses define ``build_model`` and ``loss``, which returns the mean loss of a micro-batch and adds it to
    ``self.sums``. config: a checked ``TaskConfig``. groups: ``ParallelGroups``. num_sources: number of sources whose
    losses are kept apart. layer: class of the model's ``RoutedBlock``s. ema_decay: decay of a moving average of the
    weights; 0: none.
    """

    def __init__(self, config, groups, device, num_sources, layer, ema_decay=0.0):
        self.config = config
        self.groups = groups
        self.device = device
        self.num_sources = num_sources
        self.ema_decay = ema_decay
        self.guard = Guard(config.reliability)
        self.sums = None  # sums of the step, or of the evaluation
        self.step_check = None  # check of the newest step
        self.model = self.build_model()
        self.blocks = modules_of(self.model)
        if config.run.compile:
            compile_layers(self.model, kind=layer, batch_sizes=len(config.run.stages))
            if config.parallel.zero_stage == 3:  # a layer's weights come and go together, outside its graph
                set_z3_leaf_modules(self.model, [layer])
        self.attach_measurements()
        self.freeze()  # before the optimizer exists, which keeps no state for frozen parameters
        self.wrap()
        self.address_weights()  # where DeepSpeed has put them
        self.begin(0)

    def attach_measurements(self):
        """Let the model record which gradients are not finite, and the loads of routers."""
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.register_forward_hook(self.watch_gradient)
        self.router_sums = RouterSums(
            self.blocks,
            self.model.batch,
            self.config.model.gated_layers(),
            self.num_sources,
            self.groups,
            self.device,
        )

    def freeze(self):
        """Freeze all parameters but those that --train-only names."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self.config.optimizer.train_only == "all" or ".router." in name)

    def wrap(self):
        """Hand the model to DeepSpeed, which shards it, and check every step before it changes a weight."""
        config = self.config
        names = {parameter: name for name, parameter in self.named_parameters()}
        optimizer = make_optimizer([(names[p], p) for p in self.model.parameters()], config)
        micro_batches = config.gradient_accumulation_steps(dist.get_world_size())
        self.engine = wrap(self.model, optimizer, config, self.groups, micro_batches)
        self.optimizer = ShardedOptimizer(
            self.engine.optimizer,
            config.parallel.zero_stage,
            group_rank(self.groups.data),
            lambda norm, copies: self.step_check.examine(norm, copies),
            config.optimizer.router_gradient_clipping,
            self.ema_decay,
        )

    def address_weights(self):
        """Find this rank's part of frozen weights and Muon's matrices, and the weights that other ranks also hold."""
        parameters, tied = [p for _, p in self.named_parameters()], list(self.model.tied_parameters())
        self.frozen = FrozenWeights(parameters, self.groups.data)
        if self.config.optimizer.optimizer == "muon":
            self.optimizer.distribute(self.named_parameters(), self.config, self.groups, self.device)
        self.optimizer.share_gradients(parameters, tied, self.groups, self.device)
        named, biases = list(self.named_parameters()), list(self.named_biases())
        self.replicas = Replicas(named, tied, biases, self.config.parallel, self.groups)

    def begin(self, step):
        """Prepare for the iteration after ``step`` complete ones: a dense warm-up turns all heads on, and a warm-up of
        the batch has fewer micro-batches."""
        config, samples = self.config, self.config.run.samples_after(step)
        self.dense_warmup = config.model.after(step) != config.model
        self.micro_batches = config.gradient_accumulation_steps(dist.get_world_size(), samples)
        accumulate(self.engine, self.micro_batches)
        self.model.batch.begin(self.dense_warmup, self.micro_batches)
        self.tokens = config.run.batch_at(samples) * config.seq_length  # tokens of all ranks

    def compare_kernels(self, first):
        """Compare the kernels of the run with torch and return sentences about them. All ranks call it together.

        first: a function that returns this rank's first micro-batch. Raises ``Differs`` on all ranks."""
        return []

    def train_step(self, micro_batches, learning_rate, check_replicas=False, flags=tuple):
        """Run this rank's micro-batches forward and backward and take one optimizer step. Returns a ``StepResult``.

        check_replicas: compare the weights that several ranks hold. flags: see ``StepCheck``. Raises BadNumbers.
        """
        started = time.perf_counter()
        scale = self.config.optimizer.router_learning_rate_scale
        self.optimizer.set_learning_rates(learning_rate, 0.0 if self.dense_warmup else learning_rate * scale)
        self.sums = StepSums(self.num_sources, self.groups, self.device)
        replicas = self.replicas if check_replicas else None
        self.step_check = StepCheck(self.sums, self.guard, self.largest_weight, replicas, flags)
        self.step(self.own_part(micro_batches))
        stats = self.step_check.result()
        skipped = self.guard.skips(stats.code)
        if skipped:
            self.optimizer.drop_gradients()
            self.frozen.repair()
            self.optimizer.refresh_weights()  # a weight that was not finite, or differed, is equal to its master again
            self.refuse_lasting_faults(stats.code)
        else:
            self.optimizer.average()
            if self.dense_warmup:
                self.optimizer.rest()
        sources = [batch.sources for batch in micro_batches]
        routers = self.router_sums.take(sources, self.tokens, frozen=skipped or self.dense_warmup)
        self.after_step(skipped)
        seconds = {"forward_backward": stats.time - started, "optimizer": time.perf_counter() - stats.time}
        return StepResult(
            self.sums.losses, routers, stats.mean, stats.grad_norm, stats.code, skipped, seconds, stats.flags
        )

    def refuse_lasting_faults(self, code):
        """Raise BadNumbers if a step was skipped with this ``code`` because the masters themselves are at fault."""
        out_of_range = problems_of_all_ranks(self.out_of_range_weights())
        if out_of_range:
            more = [f"and {len(out_of_range) - 3} more"] if len(out_of_range) > 3 else []
            raise BadNumbers("; ".join(out_of_range[:3] + more))
        lasting = problems_of_all_ranks(self.replicas.differences()) if code == DIVERGENCE else []
        if lasting:
            raise BadNumbers(f"{'; '.join(lasting)}, which cannot be repaired")

    def largest_weight(self):
        """Return the largest magnitude of this rank's master and frozen weights, []; NaN if one is NaN."""
        sizes = map(largest, [*self.optimizer.masters(), *self.frozen.weights().values()])
        return torch.stack([size.to(self.device, torch.float64) for size in sizes]).max()

    def out_of_range_weights(self):
        """Return sentences for this rank's master and frozen weights that cannot come from training."""
        masters = {fragment.name: fragment.tensors["master"] for fragment in self.fragments()}
        # not the biases of routers, whose counts grow with the steps
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

    def own_part(self, micro_batches):
        """Return the part of the data-parallel rank's micro-batches that this rank reads."""
        return micro_batches

    def after_step(self, skipped):
        """Do what follows a step."""

    def close(self):
        """Free what the process groups wait for when they are closed."""

    def state(self):
        """Return the engine's state besides weights, moments and routers, as a JSON-able object."""
        return {}

    def restore(self, saved):
        """Restore what ``state`` returned; ``saved`` may hold more."""

    def config_now(self):
        """Return the configuration, including what the steps have changed in it."""
        return self.config

    def on_device(self, tensor):
        return tensor.to(self.device, non_blocking=True)  # a blocking copy would wait for all earlier kernels

    def named_parameters(self):
        """Yield (canonical name, parameter) of each parameter that this rank holds."""
        return self.model.named_parameters()

    def named_biases(self):
        """Yield (canonical name, counts) of this rank's routers that select with a bias."""
        for block in self.blocks:
            steps = getattr(block.router(), BIAS, None)
            if steps is not None:
                yield f"model.layers.{block.index}.self_attn.router.{BIAS}", steps

    def fragments(self):
        """Yield ``Fragment``s of what this rank's optimizer owns, of frozen weights and of router biases."""
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
        """Return whether another rank counts and saves this replicated or tied weight."""
        replicated = parameter.tensor_partition is None and group_rank(self.groups.tensor) > 0
        return replicated or is_tied_copy(parameter)

    def adopt(self, optimizer_steps, shares, l1_steps=0, rested_steps=0, frozen_steps=0):
        """Resume from ``fragments`` that were filled from a checkpoint, and from its routers' state."""
        self.frozen.refresh()  # before ``adopt``, which gathers what ZeRO-3 keeps whole
        self.optimizer.adopt(optimizer_steps, rested_steps, frozen_steps)
        self.router_sums.set_l1_steps(torch.tensor(l1_steps, device=self.device))
        self.router_sums.set_shares([torch.tensor(share, dtype=torch.float64, device=self.device) for share in shares])
