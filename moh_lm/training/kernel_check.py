"""Before the first step of a run, its kernels are compared with torch on the micro-batch of that step.

The micro-batch passes through the model as in an evaluation. Whenever it arrives at a ``Compared`` module, a hook gives
the inputs to both forms of the module. A difference beyond rounding ends the run on every rank.
"""

import contextlib
import socket
from functools import partial
from typing import NamedTuple

import torch

from moh_lm.compared import Compared, Differences
from moh_lm.model.block import modules_of
from moh_lm.parallel.consensus import from_all_ranks


class Worst(NamedTuple):
    """differences: the largest of any module. place: of the module with the largest excess."""

    differences: Differences
    place: str

    def and_also(self, other):
        differences = Differences(*map(max, zip(self.differences, other.differences, strict=True)))
        return Worst(differences, max(self, other, key=excess_of).place)


def excess_of(worst):
    return worst.differences.excess


class KernelCheck:
    """The ``Worst`` of the modules of this pipeline stage, by their flags."""

    def __init__(self, model):
        self.batch, self.blocks = model.batch, modules_of(model)
        named = model.named_modules()
        self.modules = [(name, module) for name, module in named if isinstance(module, Compared) and module.flag]
        self.found = {}

    @contextlib.contextmanager
    def attached(self):
        """Compare in each forward pass. Layers then run without torch.compile, and routers select heads even in a dense
        warm-up."""
        with contextlib.ExitStack() as stack:
            for block in self.blocks:
                stack.enter_context(block.uncompiled())
            for name, module in self.modules:
                stack.enter_context(module.register_forward_pre_hook(partial(self.compare, name)))
            dense_warmup, micro_batches = self.batch.kind()
            stack.callback(self.batch.begin, dense_warmup, micro_batches)
            self.batch.begin(False, micro_batches)
            yield

    def compare(self, name, module, inputs):
        module.train()  # as it will be in the steps
        with torch.enable_grad():
            found = module.compare(*inputs)
        module.eval()
        if found is not None:
            worst = Worst(found, f"{name} on {socket.gethostname()}")
            self.found[module.flag] = worst.and_also(self.found.get(module.flag, worst))

    def sentences(self):
        """Yield a sentence for each flag of any rank. All ranks call it together. Raises ``Differs``."""
        of_ranks = from_all_ranks(self.found)
        for flag in sorted({flag for found in of_ranks for flag in found}):
            ranks = [(rank, found[flag]) for rank, found in enumerate(of_ranks) if flag in found]
            rank, worst = max(ranks, key=lambda pair: excess_of(pair[1]))
            worst.differences.checked(flag, f"rank {rank}, {worst.place},")
            for _, other in ranks:
                worst = worst.and_also(other)
            yield f"{flag}: compared with torch on the first micro-batch: {worst.differences}"
