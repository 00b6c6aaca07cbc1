"""The training engine: the model in DeepSpeed's hands.

DeepSpeed shards the optimizer, sums and clips the gradients and keeps the fp32 masters. What it gets wrong unless
told is set here, in one place. The learning rate and the position in the data are the caller's: DeepSpeed's own
counters drift when a step is skipped.

Shapes: s sequence, b batch, E routed heads of a layer.
"""

import contextlib
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist

from moh_lm.model.transformer import CausalLM
from moh_lm.parallel.cross_entropy import IGNORED, vocab_parallel_cross_entropy

MOMENTS = ("exp_avg", "exp_avg_sq")


class StepResult(NamedTuple):
    """Sums over the global batch, equal on every rank; float64 on the device, so that reading them is the caller's
    choice.

    losses: [num_sources, 2], loss summed over tokens and number of tokens. routers: [sum of (1 + E)], for every
    router in turn the sum of its balance loss over micro-batches and data-parallel ranks, and how often each routed
    head was selected.
    grad_norm: before clipping; inf if the step was skipped because a gradient was not finite.
    """

    losses: torch.Tensor
    routers: torch.Tensor
    grad_norm: float


class Fragment(NamedTuple):
    """``tensors`` ("master", "exp_avg", "exp_avg_sq"): the optimizer's own flat fp32 tensors, all of one length, of the
    elements from ``start`` of the flattened local ``parameter`` with the canonical ``name``."""

    name: str
    parameter: torch.nn.Parameter
    start: int
    tensors: dict[str, torch.Tensor]


class Engine:
    """One training step and one evaluation, over ``MicroBatch``es of moh_lm.data.loader.

    config: a checked ``Config``. groups: ``ParallelGroups``. device: of this rank. num_sources: data sources of the
    mixture.
    """

    def __init__(self, config, groups, device, num_sources):
        self.groups = groups
        self.device = device
        self.num_sources = num_sources
        self.micro_batches = config.gradient_accumulation_steps(dist.get_world_size())
        self.model = CausalLM(config.model, groups.tensor, self.micro_batches, config.run.recompute)
        self.model.initialize(config.run.seed)
        self.model.to(device)
        self.routers = self.model.routers()
        with contextlib.redirect_stdout(None):  # DeepSpeed prints pages about memory
            self.engine, *_ = deepspeed.initialize(
                model=self.model,
                optimizer=make_optimizer(self.model, config.optimizer),
                config=deepspeed_config(config, self.micro_batches),
                mpu=groups if groups.tensor is not None else None,
                dist_init_required=False,
            )
        self.optimizer = self.engine.optimizer
        create_adam_state(self.optimizer)

    def train_step(self, micro_batches, learning_rate):
        """Forward and backward of this rank's micro-batches and one optimizer step; returns a ``StepResult``."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.train()
        sums = self.zero_sums(self.num_sources)
        for batch in micro_batches:
            losses, labels = self.losses(batch)  # [s, b]
            sums.index_add_(0, batch.sources.to(self.device), sample_sums(losses, labels))
            self.engine.backward(losses.mean())
            self.engine.step()
        dist.all_reduce(sums, group=self.groups.data)
        return StepResult(sums, self.router_sums(), float(self.engine.get_global_grad_norm()))

    @torch.no_grad()
    def evaluate(self, micro_batches):
        """(loss summed over tokens, number of tokens) over the micro-batches of all data-parallel ranks."""
        self.engine.eval()
        sums = self.zero_sums(1)
        for batch in micro_batches:
            sums += sample_sums(*self.losses(batch)).sum(0)
        dist.all_reduce(sums, group=self.groups.data)
        return tuple(sums[0].tolist())

    def losses(self, batch):
        """Loss of every position and its label, both [s, b]."""
        labels = batch.labels.to(self.device).t()
        logits = self.engine(batch.tokens.to(self.device))  # [s, b, vocab/tp]
        return vocab_parallel_cross_entropy(logits, labels, self.model.vocab_partition, self.groups.tensor), labels

    def router_sums(self):
        """``StepResult.routers``; also gives each router the step's shares, which ``global_batch`` balances against."""
        if not self.routers:
            return self.zero_sums(0).flatten()
        rows = [router.statistics.take() for router in self.routers]  # each [1 + E]
        sums = torch.cat(rows)
        for group in (self.groups.tensor, self.groups.data):
            if group is not None:
                dist.all_reduce(sums, group=group)
        for router, row in zip(self.routers, sums.split([len(row) for row in rows]), strict=True):
            counts = row[1:]
            router.statistics.previous_share = (counts * router.num_active / counts.sum()).float()
        return sums

    def zero_sums(self, rows):
        return torch.zeros(rows, 2, dtype=torch.float64, device=self.device)

    def fragments(self):
        """``Fragment``s of what this rank's optimizer owns: of each parameter a range of its flattened elements."""
        for name, parameter in self.model.named_parameters():
            mapping = parameter._hp_mapping
            if mapping is not None:
                moments = {key: mapping.get_hp_fragment(key) for key in MOMENTS}
                tensors = {"master": mapping.get_hp_fragment(), **moments}
                yield Fragment(name, parameter, mapping.lp_fragment_address.start, tensors)

    @property
    def optimizer_steps(self):
        """Steps that AdamW has taken; skipped ones do not count."""
        return int(max(state["step"] for state in self.optimizer.optimizer.state.values()))

    @torch.no_grad()
    def adopt(self, optimizer_steps, shares):
        """Go on from ``fragments`` that were filled from a checkpoint, and from the ``shares`` of its routers."""
        for state in self.optimizer.optimizer.state.values():
            state["step"].fill_(optimizer_steps)
        self.optimizer.update_lp_params()  # the weights of the model follow their masters
        for router, share in zip(self.routers, shares, strict=True):
            router.statistics.previous_share = torch.tensor(share, device=self.device)

    def shares(self):
        """For every router, the share of the last step's tokens that selected each of its heads."""
        return [router.statistics.previous_share.tolist() for router in self.routers]


def sample_sums(losses, labels):
    """[s, b] -> [b, 2] float64: the loss of each sequence, summed, and its number of labels."""
    return torch.stack((losses.detach().double().sum(0), (labels != IGNORED).double().sum(0)), dim=1)


def make_optimizer(model, settings):
    """AdamW; matrices decay, norms do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    betas = (settings.adam_beta1, settings.adam_beta2)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=1e-8, fused=True)


def deepspeed_config(config, micro_batches):
    """DeepSpeed's settings, derived; there is no second file to keep in step."""
    return {
        "train_micro_batch_size_per_gpu": config.run.micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": config.optimizer.gradient_clipping,  # DeepSpeed would clip at 1.0 unasked
        "zero_optimization": {"stage": config.parallel.zero_stage},
        "bf16": {"enabled": config.run.precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 2**62,
    }


@torch.no_grad()
def create_adam_state(optimizer):
    """Zero moments before the first step, linked to the parameters, so that a checkpoint can always be written and
    read.

    DeepSpeed links them after the first parameter group has stepped, and would leave those of the second group
    unlinked.
    """
    for group in optimizer.param_groups:
        for master in group["params"]:
            state = optimizer.optimizer.state[master]
            state["step"] = torch.zeros((), device=master.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(master)
    optimizer._lazy_init_hp_params_optimizer_state()
