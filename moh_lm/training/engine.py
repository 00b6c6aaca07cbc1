"""The training engine: the model in DeepSpeed's hands.

DeepSpeed shards the optimizer, sums and clips the gradients and keeps the fp32 masters. The learning rate and the
position in the data are the caller's: DeepSpeed's own counters drift when a step is skipped.

Shapes: s sequence, b batch, E routed experts of a layer, heads or key/value groups.
"""

import contextlib
import time
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import set_z3_leaf_modules

from moh_lm.model.pipeline import PipelineCausalLM
from moh_lm.model.transformer import CausalLM, DecoderLayer, compile_layers
from moh_lm.parallel.agreement import problems_of_all_ranks
from moh_lm.parallel.cross_entropy import IGNORED
from moh_lm.parallel.groups import group_rank, group_size
from moh_lm.parallel.layers import VocabParallelEmbedding
from moh_lm.training.deepspeed_config import deepspeed_config
from moh_lm.training.guard import DIVERGENCE, GRADIENT, Divergence, Guard
from moh_lm.training.optimizer import Fragment, ShardedAdamW, make_adamw
from moh_lm.training.replicas import replica_differences


class StepResult(NamedTuple):
    """Sums over the global batch, equal on every rank; float64 on the device, so that reading them is the caller's
    choice.

    losses: [num_sources, 3], loss summed over tokens, number of tokens, number of sequences. routers: [num_sources, sum
    of (2 + E)], for every router in turn the sums over sequences of what ``RouterStatistics`` keeps. loss: mean per
    token. grad_norm: before clipping. verdict: a code of guard.REASONS. skipped: whether the gradients were left out.
    seconds: {"forward_backward", "optimizer"}, the first with the reduction of the gradients and their norm.
    """

    losses: torch.Tensor
    routers: torch.Tensor
    loss: float
    grad_norm: float
    verdict: int
    skipped: bool
    seconds: dict


class Engine:
    """One training step and one evaluation, over ``MicroBatch``es of moh_lm.data.loader; one pipeline stage.

    config: a checked ``Config``. groups: ``ParallelGroups``. device: of this rank. num_sources: data sources of the
    mixture.
    """

    def __init__(self, config, groups, device, num_sources):
        self.config = config
        self.groups = groups
        self.device = device
        self.num_sources = num_sources
        self.micro_batches = config.gradient_accumulation_steps(dist.get_world_size())
        self.guard = Guard(config.reliability)
        self.shares = [
            torch.full((layer.num_routed,), layer.num_active / layer.num_routed, dtype=torch.float64, device=device)
            for layer in config.model.routed_layers()
        ]
        self.reset(check_replicas=False)
        self.model = self.build_model()
        if config.run.compile:
            compile_layers(self.model)
            if config.parallel.zero_stage == 3:  # a layer's weights come and go together, outside its graph
                set_z3_leaf_modules(self.model, [DecoderLayer])
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.register_forward_hook(self.watch_gradient)
        self.routers = self.model.routers()
        with contextlib.redirect_stdout(None):  # DeepSpeed prints pages about memory
            self.engine, *_ = deepspeed.initialize(
                model=self.model,
                optimizer=make_adamw(self.model.parameters(), config.optimizer),
                config=deepspeed_config(config, self.micro_batches, sum(p.numel() for p in self.model.parameters())),
                mpu=self.mpu(),
                dist_init_required=False,
            )
        self.optimizer = ShardedAdamW(
            self.engine.optimizer, config.parallel.zero_stage, group_rank(groups.data), self.examine
        )

    def build_model(self):
        run = self.config.run
        model = CausalLM(
            self.config.model, self.groups.tensor, self.micro_batches, run.recompute, run.attention_backend
        )
        model.initialize(run.seed)
        return model.to(self.device)

    def mpu(self):
        return self.groups if self.groups.tensor is not None else None

    def train_step(self, micro_batches, learning_rate, check_replicas=False):
        """Forward and backward of this rank's micro-batches and one optimizer step; returns a ``StepResult``.

        check_replicas: compare the weights that several ranks hold. Raises Divergence where they cannot be mended.
        """
        started = time.perf_counter()
        self.optimizer.set_learning_rate(learning_rate)
        self.reset(check_replicas)
        self.step(micro_batches)
        skipped = self.guard.skips(self.verdict)
        if skipped:
            self.optimizer.refresh_weights()  # a weight that was not finite, or differed, is as its master again
        lasting = problems_of_all_ranks(self.compare_replicas()) if self.verdict == DIVERGENCE else []
        if lasting:
            raise Divergence(f"{'; '.join(lasting)}; also in the fp32 masters")
        routers = self.router_sums([batch.sources for batch in micro_batches], keep_shares=skipped)
        get_accelerator().synchronize()
        seconds = {
            "forward_backward": self.gradients_done - started,
            "optimizer": time.perf_counter() - self.gradients_done,
        }
        return StepResult(self.sums, routers, self.mean, self.grad_norm, self.verdict, skipped, seconds)

    def reset(self, check_replicas):
        self.sums = self.zero_sums(self.num_sources)
        self.check_replicas = check_replicas
        self.loss_flags, self.gradient_flags, self.differences = [], [], []

    def examine(self, norm, copies):
        """The gradient norm of the step, or infinity if the step is to be skipped; all ranks decide together.

        copies: gradients that are not in the norm; see moh_lm.training.gradient_norm.
        """
        losses = self.reduce(self.sums, self.groups.data, self.groups.pipeline)
        numbers = torch.cat((losses.sum(0), norm.to(losses).reshape(1)))
        total, tokens, _, self.grad_norm = numbers.tolist()  # waits for the backward pass
        self.gradients_done = time.perf_counter()
        self.mean = total / tokens
        verdict = self.guard.judge(self.mean, self.grad_norm)
        if copies and not torch.stack([part.detach().float().norm() for part in copies]).isfinite().all():
            verdict = max(verdict, GRADIENT)
        if self.check_replicas:
            self.differences = self.compare_replicas()
            verdict = max(verdict, DIVERGENCE) if self.differences else verdict
        shared = torch.tensor(verdict, dtype=torch.int32, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        self.verdict = int(shared)
        return torch.full_like(norm, torch.inf) if self.guard.skips(self.verdict) else norm

    def compare_replicas(self):
        tied = self.model.tied_parameters()
        return replica_differences(self.named_parameters(), tied, self.config.parallel, self.groups)

    def watch_gradient(self, module, inputs, output):
        """Note the sequences whose gradient is not finite where it arrives at the embedding, and so anywhere above."""
        if output.requires_grad:
            output.register_hook(lambda grad: self.gradient_flags.append(~grad.sum((0, 2)).isfinite()))  # [b]

    def bad_sequences(self):
        """Places, in this rank's part of the step, of the sequences with a loss, or a gradient, that is not finite."""
        flags = {"loss": self.loss_flags, "gradient": self.gradient_flags}
        return {name: torch.cat(parts).nonzero()[:, 0].tolist() if parts else [] for name, parts in flags.items()}

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
        self.reset(check_replicas=False)
        self.sums = self.zero_sums(num_rows)
        self.evaluation_forward(micro_batches)
        return self.reduce(self.sums, self.groups.data, self.groups.pipeline)

    def evaluation_forward(self, micro_batches):
        self.engine.eval()
        for batch in micro_batches:
            self.loss(batch)

    def loss(self, batch):
        self.model.documents.feed([batch.positions])
        tokens, labels, sources = (self.on_device(part) for part in (batch.tokens, batch.labels, batch.sources))
        mean, losses = self.engine(tokens, labels)
        self.add_losses(losses, labels, sources)
        return mean

    def add_losses(self, losses, labels, sources):
        """Add the losses [s, b] of a micro-batch's sequences to the sums of their ``sources`` [b]."""
        counted = (labels != IGNORED).double().sum(1)
        per_sample = torch.stack((losses.double().sum(0), counted, torch.ones_like(counted)), dim=1)  # [b, 3]
        self.loss_flags.append(~per_sample[:, 0].isfinite())
        self.sums += one_hot(sources, len(self.sums)) @ per_sample  # index_add_ would not be deterministic on a GPU

    def router_sums(self, sources, keep_shares):
        """``StepResult.routers``; also gives each router the step's shares, which ``global_batch`` balances against.

        sources: [b] of each of this rank's micro-batches. keep_shares: leave the shares of the step before, if the
        numbers of this one are not to be trusted.
        """
        layers = self.config.model.routed_layers()
        widths = [2 + layer.num_routed for layer in layers]
        sums = torch.zeros(self.num_sources, sum(widths), dtype=torch.float64, device=self.device)
        parts = {layer.index: part for layer, part in zip(layers, sums.split(widths, dim=1), strict=True)}  # views
        of_source = one_hot(self.on_device(torch.cat(sources)), self.num_sources)
        for router in self.routers:
            parts[router.layer_index] += of_source @ router.statistics.take()
        self.reduce(sums, self.groups.tensor, self.groups.data, self.groups.pipeline)
        if not keep_shares:
            tokens = self.config.run.tokens_per_iteration
            self.set_shares([parts[layer.index][:, 2:].sum(0) / tokens for layer in layers])
        return sums

    def set_shares(self, shares):
        """``shares``: for each layer with routed heads, the share of a step's tokens that selected each of them."""
        self.shares = shares
        by_layer = {layer.index: share for layer, share in zip(self.config.model.routed_layers(), shares, strict=True)}
        for router in self.routers:
            router.statistics.previous_share = by_layer[router.layer_index].float()

    def on_device(self, tensor):
        return tensor.to(self.device, non_blocking=True)  # the other way this process waits for all earlier kernels

    def zero_sums(self, rows):
        return torch.zeros(rows, 3, dtype=torch.float64, device=self.device)

    @staticmethod
    def reduce(tensor, *groups):
        """Sum ``tensor`` over the ranks of each of ``groups``, in place."""
        for group in groups:
            if group is not None:
                dist.all_reduce(tensor, group=group)
        return tensor

    def named_parameters(self):
        """(canonical name, parameter) of what this rank holds."""
        return self.model.named_parameters()

    def fragments(self):
        """``Fragment``s of what this rank's optimizer owns."""
        for name, parameter in self.named_parameters():
            owned = self.optimizer.fragment(parameter)
            if owned is not None:
                start, tensors = owned
                yield Fragment(name, parameter, start, self.is_copy(parameter), tensors)

    def is_copy(self, parameter):
        """Whether another rank holds the same parameter and speaks for it: a replicated weight, or a tied one."""
        replicated = parameter.tensor_partition is None and group_rank(self.groups.tensor) > 0
        return replicated or getattr(parameter, "ds_pipe_replicated", False)

    def adopt(self, optimizer_steps, shares):
        """Go on from ``fragments`` that were filled from a checkpoint, and from the ``shares`` of its routers."""
        self.optimizer.adopt(optimizer_steps)
        self.set_shares([torch.tensor(share, dtype=torch.float64, device=self.device) for share in shares])


class PipelineEngine(Engine):
    """The same over several pipeline stages: DeepSpeed schedules the micro-batches (1F1B)."""

    def build_model(self):
        run, parallel = self.config.run, self.config.parallel
        return PipelineCausalLM(
            self.config.model,
            (parallel.pipeline_parallel_size, group_size(self.groups.data), parallel.tensor_parallel_size),
            self.groups.tensor,
            self.micro_batches,
            run.recompute,
            run.attention_backend,
            run.seed,
            self.last_stage_loss,
        )

    def mpu(self):
        return None  # PipelineModule brings its own

    def last_stage_loss(self, mean, labels_and_sources):
        self.add_losses(self.model.losses, *labels_and_sources)
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


def one_hot(sources, num_sources):
    """[b] -> [num_sources, b] float64: 1 where a sequence is of the source."""
    return (sources == torch.arange(num_sources, device=sources.device).unsqueeze(1)).double()


def make_engine(config, groups, device, num_sources):
    """The engine of the layout that ``config`` asks for."""
    engine = Engine if config.parallel.pipeline_parallel_size == 1 else PipelineEngine
    return engine(config, groups, device, num_sources)
