"""Before the first step of a run, its kernels are compared with torch on the micro-batch of that step.

The micro-batch passes through the model as in an evaluation. Whenever it arrives at a ``Compared`` module, a hook gives
the inputs to both forms of the module. A difference beyond rounding ends the run on every rank.
"""

import contextlib

import torch

from moh_lm.compared import Compared, Differences
from moh_lm.model.block import modules_of
from moh_lm.parallel.consensus import from_all_ranks


class KernelCheck:
    """The largest ``Differences`` of the modules of this pipeline stage, by their flags."""

    def __init__(self, model):
        self.batch, self.blocks = model.batch, modules_of(model)
        self.modules = [module for module in modules_of(model, Compared) if module.flag]
        self.found = {}

    @contextlib.contextmanager
    def attached(self):
        """Compare in each forward pass. Layers then run without torch.compile, and routers select heads even in a dense
        warm-up."""
        with contextlib.ExitStack() as stack:
            for block in self.blocks:
                stack.enter_context(block.uncompiled())
            for module in self.modules:
                stack.enter_context(module.register_forward_pre_hook(self.compare))
            dense_warmup, micro_batches = self.batch.kind()
            stack.callback(self.batch.begin, dense_warmup, micro_batches)
            self.batch.begin(False, micro_batches)
            yield

    def compare(self, module, inputs):
        with torch.enable_grad():
            found = module.compare(*inputs)
        worst = zip(found, self.found.get(module.flag, found), strict=True)
        self.found[module.flag] = Differences(*map(max, worst))

    def sentences(self):
        """Return a sentence for each flag of any rank. All ranks call it together. Raises ``Differs``."""
        of_ranks = from_all_ranks(self.found)
        for flag in sorted({flag for found in of_ranks for flag in found}):
            worst = Differences(*map(max, zip(*(found[flag] for found in of_ranks if flag in found), strict=True)))
            yield f"{flag}: compared with torch on the first micro-batch: {worst.allowed(flag)}"
