"""Wraps a model in DeepSpeed's engine and names the groups of ranks that DeepSpeed asks for."""

import contextlib

import deepspeed
import torch
from deepspeed import utils
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

from moh_lm.parallel.groups import group_rank, group_size
from moh_lm.training.deepspeed.config import deepspeed_config
from moh_lm.training.muon import Muon

ZERO_SUPPORTED_OPTIMIZERS.append(Muon)  # else DeepSpeed refuses it, or warns about it at every start


class ModelParallelUnit:
    """The ``ParallelGroups`` under the names by which DeepSpeed asks its "mpu" for them."""

    def __init__(self, groups):
        self.groups = groups

    def get_model_parallel_rank(self):
        return group_rank(self.groups.tensor)

    def get_model_parallel_world_size(self):
        return group_size(self.groups.tensor)

    def get_model_parallel_group(self):
        return self.groups.tensor

    def get_data_parallel_rank(self):
        return group_rank(self.groups.data)

    def get_data_parallel_world_size(self):
        return group_size(self.groups.data)

    def get_data_parallel_group(self):
        return self.groups.data


def wrap(model, optimizer, config, groups, micro_batches):
    """Return DeepSpeed's engine for ``model``, sharded as ``config`` says.

    optimizer: a torch optimizer over parameters of ``model``. micro_batches: number of them per step and data-parallel
    rank; see ``accumulate``.
    """
    needs_groups = groups.tensor is not None and groups.pipeline is None  # a PipelineModule makes its own
    # DeepSpeed keeps views of weights. With gradients they would keep autograd's nodes of this stream, for which no
    # CUDA graph may wait. It also prints pages about memory.
    with torch.no_grad(), contextlib.redirect_stdout(None):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=deepspeed_config(config, micro_batches, sum(p.numel() for p in model.parameters())),
            mpu=ModelParallelUnit(groups) if needs_groups else None,
            dist_init_required=False,
        )
    return engine


def accumulate(engine, micro_batches):
    """Make DeepSpeed's ``engine`` sum the gradients of this many micro-batches per rank in the following steps."""
    if micro_batches != engine.gradient_accumulation_steps():
        engine.set_train_batch_size(micro_batches * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
        engine.optimizer.gradient_accumulation_steps = micro_batches
        engine.micro_steps = 0  # DeepSpeed divides it by that number to find the last micro-batch of a step


def set_z3_leaf_modules(model, kinds):
    """Make ZeRO-3 gather and release the weights of each module of these ``kinds`` together."""
    utils.set_z3_leaf_modules(model, kinds)
