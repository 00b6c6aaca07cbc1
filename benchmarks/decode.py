"""Attention of one new token per row to a cache: all heads against the selected ones, in turns in one process.

    python benchmarks/decode.py [--shapes llm-s llm-b llama3-8b] [--lengths 2048 8192 32768] [--batches 1 4]
                                [--active 50 75] [--threads 1] [--rounds 9] [--dtype float32]

It times one layer of a model, without projections and router. Heads are drawn at random for each row; in ``llama3-8b``
four query heads share keys and values, and a token selects heads or (``groups``) whole groups of them. Every contestant
reads one cache after another, so many that none stays in the processor's own (``CACHES_BYTES``). The program shows the
share of the keys and values that is read, the median time of a token in a layer, and the median over the rounds of its
ratio to the base in the same round.

    all, equal lengths     scaled dot-product attention without a mask: the base
    all, mask              the same with a mask of each row's length, as generation computes it with ``dense``
    all, as selected       the next one with every head selected
    selected               on a CPU loops over rows and heads, on a GPU the backend triton
    own keys               selected heads that keep only their own tokens (--routed-keys selected; CPU)

Times are those of benchmarks/attention.py. On a GPU, the program first finds the fastest tiles and number of splits for
the longest length, one row and 50%, prints them, and uses them.
"""

import os
import sys

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from benchmarks.flags import checked, decode_flags

    options = checked(decode_flags, sys.argv[1:])  # before the imports that take seconds

import contextlib
import itertools
from math import ceil
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.attention import budgets, describe
from benchmarks.flags import SHAPES
from benchmarks.timing import in_turns, ratio, recorded, seconds, set_up, stopwatch
from moh_lm.inference import decode
from moh_lm.inference.decode import decode_attention
from moh_lm.inference.selected_kv_cache import SelectedKVCache
from moh_lm.kernels.measured import TRITON_HEAD_DIMS
from moh_lm.model.router import select

CACHES_BYTES = 256 * 2**20  # more than a processor's cache, or the 50 MB of an H200
BASE = "all, equal lengths"
TILES = [(16, 32, 4, 3), (16, 32, 4, 4), (16, 32, 8, 4), (16, 64, 4, 3), (16, 64, 8, 3), (16, 128, 8, 2)]
PROGRAMS = (4, 8, 16)  # programs per multiprocessor


def main(options):
    device, dtype = set_up(options)
    print(describe(device, dtype))
    for shape in options.shapes:
        if device.type == "cuda":
            tune(SHAPES[shape], max(options.lengths), device, dtype)
        for length, batch in itertools.product(options.lengths, options.batches):
            inputs = make_inputs(SHAPES[shape], length, batch, device, dtype)
            found = contestants(SHAPES[shape], options.active, inputs)
            report(f"{shape} T={length} b={batch}", found, options.rounds, device)


def make_inputs(shape, length, batch, device, dtype):
    """Return (query [b, h, e], [(keys, values) of each layer], lengths) with full caches."""
    _, heads, kv_heads, head_dim = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size):
        return torch.randn(*size, generator=generator, device=device).to(dtype)

    size = (batch, kv_heads, length, head_dim)
    layers = ceil(CACHES_BYTES / (2 * batch * kv_heads * length * head_dim * dtype.itemsize))
    caches = [(normal(*size), normal(*size)) for _ in range(layers)]
    return normal(batch, heads, head_dim), caches, torch.full((batch,), length, dtype=torch.int32, device=device)


def route(shape, active, batch, device, unit=1, seed=0):
    """Return (active heads, gates) of a token per row, both [b, h], for experts of ``unit`` heads."""
    heads = shape[1]
    num_shared, num_active = (number // unit for number in budgets(heads, active))
    scores = torch.rand(batch, heads // unit, generator=torch.Generator().manual_seed(seed))
    routed = select(scores[:, num_shared:], num_active)
    on = F.pad(routed, (num_shared, 0), value=1).repeat_interleave(unit, 1) > 0
    return on.to(device), (on * (scores.repeat_interleave(unit, 1) + 0.1)).to(device)


def contestants(shape, percents, inputs):
    """Return {name: (function that reads every cache, its layers, share of the keys and values that it reads)}."""
    query, caches, lengths = inputs
    batch, heads = query.shape[:2]
    group = heads // shape[2]
    sparse = "triton" if query.is_cuda else "loops"
    everything = torch.ones(batch, heads, dtype=torch.bool, device=query.device)
    gates = torch.rand(batch, heads, device=query.device)

    def plain():
        return [
            F.scaled_dot_product_attention(query.unflatten(1, (shape[2], group)), keys, values).flatten(1, 2)
            * gates.unsqueeze(-1).to(query.dtype)
            for keys, values in caches
        ]

    def attend(active, gates, backend):
        return lambda: [decode_attention(query, *cache, lengths, active, gates, backend) for cache in caches]

    found = {
        BASE: (plain, everything),
        "all, mask": (attend(everything, gates, "dense"), everything),
        "all, as selected": (attend(everything, gates, sparse), everything),
    }
    for percent in percents:
        for unit in sorted({1, group}):
            name = f"selected {percent}%{', groups' * (unit > 1)}"
            routing = route(shape, percent, batch, query.device, unit)
            found[name] = (attend(*routing, sparse), routing[0])
            if not query.is_cuda:
                name = name.replace("selected", "own keys")
                found[name] = own_keys(shape, percent, unit, inputs, *routing)
    return {
        name: (function, len(caches), active.unflatten(1, (-1, group)).amax(-1).float().mean().item())
        for name, (function, active) in found.items()
    }


def own_keys(shape, percent, unit, inputs, active, gates):
    """Return the same for ``SelectedKVCache``; every token of a cache has its own routing."""
    query, caches, lengths = inputs
    _, _, kv_heads, head_dim = shape
    used, _ = route(shape, percent, int(lengths[0]), query.device, unit, seed=1)
    kept = [SelectedKVCache(len(query), kv_heads, head_dim, query) for _ in caches]
    for own, cache in zip(kept, caches, strict=True):
        for row, (keys, values) in enumerate(zip(*cache, strict=True)):
            own.add(row, keys.transpose(0, 1), values.transpose(0, 1), used)
    share = active * used.float().mean(0)  # share of the tokens that a head reads
    return lambda: [own.attend(query, active) * gates.unsqueeze(-1) for own in kept], share


def report(title, functions, rounds, device):
    """Take the contestants in turns, and print a line for each."""
    clocks = {name: stopwatch(function, device, f"{title}: {name}") for name, (function, *_) in functions.items()}
    times = in_turns(clocks, rounds)
    print(title)
    for name, (_, layers, share) in functions.items():
        columns = ""
        for clock in range(2):
            middle = median(time[clock] for time in times[name]) / layers
            columns += f"  {1e6 * middle:9.1f} us {ratio(times[name], times[BASE], clock):.2f}"
        print(f"    {name:22s} reads {share:4.0%}{columns}", flush=True)


def tune(shape, length, device, dtype):
    """Time every choice of tiles and number of programs, print the fastest, and use it from here on."""
    triton_decode = decode.triton_decode
    too_large = triton_decode.triton.runtime.errors.OutOfResources  # of shared memory
    function = contestants(shape, [50], make_inputs(shape, length, 1, device, dtype))["selected 50%"][0]
    found = []
    for tile, programs in itertools.product(TILES, PROGRAMS):
        use(triton_decode, dtype, tile, programs)
        with contextlib.suppress(too_large):
            function()
            found.append((seconds(recorded(function).replay, device)[0], tile, programs))
    if not found:
        return print(f"no tiles fit, e={shape[3]}")
    found.sort()
    use(triton_decode, dtype, *found[0][1:])
    shown = "; ".join(f"{time / found[0][0]:.2f} {tile} {programs}" for time, tile, programs in found[:5])
    print(f"tiles and programs per multiprocessor, e={shape[3]} T={length}, fastest = 1: {shown}", flush=True)


def use(triton_decode, dtype, tile, programs):
    triton_decode.TILES[min(dtype.itemsize, 4)] = {max(TRITON_HEAD_DIMS): triton_decode.Tiles(*tile)}
    triton_decode.PROGRAMS_PER_MULTIPROCESSOR = programs


if __name__ == "__main__":
    main(options)
