"""The output head and its loss, forward and backward, by torch and by the kernels of --fused-loss, timed in turns.

    python benchmarks/loss.py [--shapes llm-s llm-b] [--tokens 16384] [--vocab-size 65536] [--rounds 7]

Both forms are compared before anything is timed; a difference ends the program. For the times see
benchmarks/attention.py.
"""

import os
import sys

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from benchmarks.flags import checked, loss_flags

    options = checked(loss_flags, sys.argv[1:])  # before the imports that take seconds

from functools import partial

import torch

from benchmarks.attention import describe
from benchmarks.flags import SHAPES
from benchmarks.timing import report, set_up
from moh_lm.parallel.cross_entropy import linear_cross_entropy
from moh_lm.parallel.layers import even_partition
from moh_lm.parallel.triton_cross_entropy import FusedLoss, triton_differentiate


def main(options):
    device, dtype = set_up(options)
    print(describe(device, dtype))
    for shape in options.shapes:
        compare(shape, options, device, dtype)


def compare(shape, options, device, dtype):
    hidden, partition = SHAPES[shape][0], even_partition(0, options.vocab_size, None)
    torch.manual_seed(0)
    x = torch.randn(options.tokens, hidden, device=device).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(options.vocab_size, hidden, device=device)).to(dtype).requires_grad_()
    labels = torch.randint(options.vocab_size, (options.tokens,), device=device)
    loss = FusedLoss(None, 0.0)
    print(f"{shape}: {loss.compare(x, weight, labels, partition).checked(loss.flag, shape)}")

    def call(differentiate):
        mean, _ = linear_cross_entropy(x, weight, labels, partition, None, differentiate=differentiate)
        return mean, *torch.autograd.grad(mean, (x, weight))

    forms = {"torch": partial(call, None), "fused": partial(call, triton_differentiate)}
    report(f"loss {shape} {options.tokens} tokens x {options.vocab_size}", forms, device, options.rounds)


if __name__ == "__main__":
    main(options)
