"""Measures the limits of a device: bytes copied, FLOPs of matrix products, and the host's time for an operation.

    python benchmarks/ceilings.py [--rounds 7] [--dtype bfloat16]

The products are those of a layer and of the output head of LLM-S and LLM-B with 16,384 tokens, and a square one.
"""

import os
import sys

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from benchmarks.flags import ceiling_flags, checked

    options = checked(ceiling_flags, sys.argv[1:])  # before the imports that take seconds

import time
from statistics import median

import torch

from benchmarks.attention import describe
from benchmarks.timing import set_up, stopwatch

PRODUCTS = [(8192, 8192, 8192)]
PRODUCTS += [(16384, *sides) for sides in ((768, 768), (768, 2304), (768, 2048), (2048, 768))]
PRODUCTS += [(16384, *sides) for sides in ((1536, 1536), (1536, 4608), (1536, 4096), (4096, 1536))]
PRODUCTS += [(4096, 768, 65536), (4096, 65536, 768), (65536, 4096, 768)]
OPERATIONS = 200


def main(options):
    device, dtype = set_up(options)
    print(describe(device, dtype))
    numbers = max(1, 2**30 // options.divisor)
    print(f"copy: {copied(numbers, device, dtype, options) / 1e12:.2f} TB/s")
    for rows, inner, columns in PRODUCTS:
        rows, inner, columns = (max(1, size // options.divisor) for size in (rows, inner, columns))
        x = torch.randn(rows, inner, device=device).to(dtype)
        weight = torch.randn(inner, columns, device=device).to(dtype)
        seconds = fastest(lambda x=x, weight=weight: x @ weight, device, options)
        rate = 2 * rows * inner * columns / seconds / 1e12
        print(f"product {rows} x {inner} x {columns}: {1e6 * seconds:.1f} us, {rate:.0f} TFLOP/s")
    forward, backward = host_seconds(device)
    print(f"host: {1e6 * forward:.1f} us for an operation, {1e6 * backward:.1f} us in the backward pass")


def copied(numbers, device, dtype, options):
    """Return the bytes read and written per second by a copy of this many numbers."""
    source = torch.zeros(numbers, dtype=dtype, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / fastest(lambda: target.copy_(source), device, options)


def fastest(function, device, options):
    """Return the median of the seconds of a call, or on a GPU of a replayed CUDA graph."""
    clock = stopwatch(function, device, "ceilings")
    clock()
    return median(clock()[0] for _ in range(options.rounds))


def host_seconds(device):
    """Return the seconds that the host needs to start a small operation, forward and backward."""
    x = torch.ones(16, device=device, requires_grad=True)
    for _ in range(2):  # the first time does not count
        y, started = x, time.perf_counter()
        for _ in range(OPERATIONS):
            y = y + 1
        forward = time.perf_counter() - started
        started = time.perf_counter()
        y.sum().backward()
        backward = time.perf_counter() - started
    return forward / OPERATIONS, backward / OPERATIONS


if __name__ == "__main__":
    main(options)
