"""Checks and tunes the Triton backend on a GPU before it is timed: part of benchmarks/attention.py.

It compares errors against float64 with those of scaled dot-product attention in the same precision, finds the fastest
tiles, and checks that nothing waits for the device, so that a replayed CUDA graph can compute another routing.
"""

import itertools
import traceback

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.timing import recorded, seconds
from moh_lm.kernels import measured, triton_attention
from moh_lm.kernels.gated_attention import TRITON, gated_attention
from moh_lm.kernels.masks import document_bounds
from moh_lm.model.selection import top_k_mask

# block of slots, block of keys, warps, stages
CANDIDATES = {
    "forward": [
        (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3),
        (128, 128, 8, 2), (128, 128, 8, 3),
    ],
    "query": [
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2),
    ],
    "key": [
        (32, 64, 4, 2), (32, 64, 4, 3), (64, 64, 4, 2), (32, 128, 8, 2), (32, 128, 8, 3), (64, 128, 8, 2),
    ],
}  # fmt: skip

NAMES = ("output", "dq", "dk", "dv", "dgates")


def check_and_tune(new, shapes, lengths, device, dtype):
    """Return ``new`` with the fastest tiles, which the kernels use from now on, and whether every check passed."""
    cases = itertools.product(shapes, sorted(lengths))
    passed = [attempt(tune, new, shape, length, device, dtype) for shape, length in cases]
    passed += [
        attempt(errors, shape, device, dtype, of_documents=mean)
        for shape, mean in itertools.product(shapes, (None, 300))
    ]
    passed.append(attempt(replays, shapes[0], device, dtype))
    return new, all(passed)


def attempt(check, *arguments, **options):
    """Return what ``check`` returns, or print why it failed and continue, because time on a GPU is scarce."""
    try:
        return check(*arguments, **options)
    except Exception:
        print(f"{check.__name__} FAILED\n{traceback.format_exc()}", flush=True)
        return False


def make(shape, length, device, dtype, seed=0, batch=1):
    """Return (query, key, value, gates), upstream gradient and selection at 50%, a quarter of the heads shared."""
    _, heads, kv_heads, head_dim = shape
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator, device=device)

    tensors = [normal(length, batch, n, head_dim).to(dtype) for n in (heads, kv_heads, kv_heads)]
    tensors.append(normal(length, batch, heads).abs())
    upstream = normal(length, batch, heads, head_dim).to(dtype)
    routed = top_k_mask(normal(length, batch, heads - heads // 4), heads // 4)
    return [tensor.requires_grad_() for tensor in tensors], upstream, F.pad(routed, (heads // 4, 0), value=1)


def with_gradients(function, tensors, upstream):
    output = function(*tensors)
    return [output, *torch.autograd.grad(output, tensors, upstream)]


def triton(selected, num_shared, documents=None):
    return lambda *tensors: gated_attention(*tensors, selected, num_shared, documents, TRITON)


def errors(shape, device, dtype, length=1000, of_documents=None):
    """Return the largest error of every result relative to the dense backend's, both against float64, and whether the
    heads of our kernels repeat bit for bit. of_documents: their length; None: one document."""
    tensors, upstream, selected = make(shape, length, device, dtype)
    num_shared = shape[1] // 4
    documents = of_documents and document_bounds(torch.arange(length, device=device)[None] % of_documents, dtype)

    def dense(*tensors):
        return gated_attention(*tensors, selected, num_shared, documents)

    with sdpa_kernel(SDPBackend.MATH):
        wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
        exact = with_gradients(dense, wide, upstream.double())
    sparse = triton(selected, num_shared, documents)
    ours, theirs, again = (with_gradients(f, tensors, upstream) for f in (sparse, dense, sparse))
    ratios = [
        ((a.double() - e).abs().max() / (b.double() - e).abs().max()).item()
        for a, b, e in zip(ours, theirs, exact, strict=True)
    ]
    shown = ", ".join(f"{name} {value:.2f}" for name, value in zip(NAMES, ratios, strict=True))
    same = equal_bits(ours, again, 0 if documents else num_shared)
    passed = all(value <= 2 for value in ratios) and same  # false for NaN, unlike a comparison of the largest
    title = f"e={shape[3]} T={length}{f', documents of {of_documents}' * bool(documents)}"
    verdict = "as it should be" if passed else "WRONG"
    print(f"errors {title}, triton / dense {dtype}: {shown}; repeats bit for bit: {same}: {verdict}")
    return passed


def equal_bits(results, others, num_shared):
    """Return whether two calls gave the same bits, except in the heads of shared groups: the backward pass of scaled
    dot-product attention, which computes those, adds atomically."""
    heads, kv_heads = results[0].shape[2], results[2].shape[2]
    groups = num_shared * kv_heads // heads
    own = [groups * tensor.shape[2] // kv_heads for tensor in results]  # the first head that is not in a shared group
    return all(torch.equal(a[:, :, n:], b[:, :, n:]) for a, b, n in zip(results, others, own, strict=True))


def tune(new, shape, length, device, dtype):
    """Time every choice of tiles for each kernel, including that of its table, and print them in order. Add the fastest
    choices that agree with the dense backend to ``new.tiles``. Returns whether each kernel has one."""
    tensors, upstream, selected = make(shape, length, device, dtype, batch=max(1, 16384 // length))
    num_shared = shape[1] // 4
    groups = num_shared * shape[2] // shape[1]
    first = groups * shape[1] // shape[2]
    routed = [tensors[0][:, :, first:], *(t[:, :, groups:] for t in tensors[1:3]), tensors[3][..., first:]]
    inputs = [tensor.detach() for tensor in routed]
    gradient = upstream[:, :, first:]
    selected = selected[..., first:]
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    expected = with_gradients(lambda *tensors: gated_attention(*tensors, selected), leaves, gradient)
    kept = triton_attention.head_sparse_attention(*inputs, selected)[1:]

    def forward():
        return triton_attention.head_sparse_attention(*inputs, selected)[:1]

    def backward():
        return triton_attention.head_sparse_attention_backward(gradient, *inputs, None, None, None, *kept)[:4]

    complete = True
    for kernel, call in {"forward": forward, "query": backward, "key": backward}.items():
        wanted = expected[:1] if call is forward else expected[1:]
        found = []
        usual = triton_attention.tiles(kernel, dtype, shape[3], torch.cuda.get_device_capability(device))
        for choice in dict.fromkeys([tuple(usual), *CANDIDATES[kernel]]):
            measured.keep(new._replace(tiles=[*new.tiles, [kernel, length, shape[3], choice]]))
            try:
                if not all(map(agree, call(), wanted)):
                    raise ArithmeticError("another result than that of the dense backend")
                found.append((1e3 * seconds(recorded(call).replay, device)[0], choice))
            except Exception as error:  # this GPU lacks shared memory, or Triton cannot compile it
                print(f"tiles {kernel} e={shape[3]} T={length} {choice}: {type(error).__name__} {str(error)[:80]}")
        found.sort()
        new.tiles.extend([kernel, length, shape[3], choice] for _, choice in found[:1])
        measured.keep(new)
        shown = "; ".join(f"{time:.3f} ms {choice}" for time, choice in found[:4])
        print(f"tiles {kernel} e={shape[3]} T={length}, with the rest of its pass: {shown}", flush=True)
        complete = complete and bool(found)
    return complete


def agree(tensor, other):
    """Return whether the L2 distance of two results is within the rounding of 16-bit numbers."""
    return bool((tensor.double() - other.double()).norm() <= 0.03 * other.double().norm())


def replays(shape, device, dtype, length=1024):
    """Return whether a CUDA graph of forward and backward, replayed with other inputs and another routing, equals the
    eager result to the bit in the heads of our kernels."""
    tensors, upstream, selected = make(shape, length, device, dtype)
    function = triton(selected, shape[1] // 4)
    results = []
    graph = recorded(lambda: results.append(with_gradients(function, tensors, upstream)))
    others, _, other_selected = make(shape, length, device, dtype, seed=1)
    with torch.no_grad():
        for tensor, other in zip(tensors, others, strict=True):
            tensor.copy_(other)
        selected.copy_(other_selected)
    graph.replay()
    expected = with_gradients(triton(other_selected, shape[1] // 4), others, upstream)
    same = equal_bits(results[-1], expected, shape[1] // 4)
    print(f"a CUDA graph replayed with another routing gives the eager bits: {same}")
    return same
