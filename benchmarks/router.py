"""The router and gates of an attention layer, forward and backward, by torch and by the kernels of --fused-router.

    python benchmarks/router.py [--shapes llm-s llm-b llama3-8b] [--tokens 16384] [--routing sigmoid paper] [--rounds 7]

Half of the heads are on, and half of those are shared. Both forms are compared before anything is timed; a difference
ends the program. Times are those of benchmarks/attention.py.
"""

import os
import sys

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from benchmarks.flags import checked, router_flags

    options = checked(router_flags, sys.argv[1:])  # before the imports that take seconds

from functools import partial
from itertools import product

import torch

from benchmarks.attention import budgets, describe
from benchmarks.flags import SHAPES
from benchmarks.timing import report, set_up
from moh_lm.build import Settings, build_attention
from moh_lm.config import HeadsConfig, ModelConfig
from moh_lm.model.batch_context import RouterInputs
from moh_lm.model.router import HeadRouter


def main(options):
    device, dtype = set_up(options)
    print(describe(device, dtype))
    for shape, routing in product(options.shapes, options.routing):
        compare(shape, routing, options, device, dtype)


def compare(shape, routing, options, device, dtype):
    hidden, heads, kv_heads, head_dim = SHAPES[shape]
    config = HeadsConfig("mixture", *((number,) for number in budgets(heads, 50)), routing=routing)
    model = ModelConfig(1, hidden, 4 * hidden, heads, kv_heads, head_dim, heads=config)
    router = build_attention(model, 0, Settings(backends="triton", fused_router=True)).router.to(device, dtype)
    length = min(2048, options.tokens)
    size = length, options.tokens // length, hidden
    for weight in router.parameters():
        weight.data.normal_(0, hidden**-0.5)
    x, upstream = torch.randn(size, device=device).to(dtype).requires_grad_(), torch.ones((), device=device)
    print(f"{shape} {routing}: {router.compare(x, RouterInputs()).checked(router.flag, shape)}")
    of_gates = torch.ones(*size[:2], heads, device=device)

    def call(forward):
        output = forward(router, x, RouterInputs())
        return torch.autograd.grad((output.gates, output.loss), (x, *router.parameters()), (of_gates, upstream))

    forms = {"torch": partial(call, HeadRouter.forward), "fused": partial(call, type(router).forward)}
    report(f"router {shape} {routing} {options.tokens} tokens", forms, device, options.rounds)


if __name__ == "__main__":
    main(options)
