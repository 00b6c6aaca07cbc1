"""CUDA graphs (``--cuda-graph``): all kernels of a function are launched at once, repeatedly and without Python.

A graph reads and writes the tensors that the function used when it was captured. Its callers therefore keep inputs and
state in tensors of their own, and compare one replay with the function itself before they trust a graph.
"""

import torch

WARMUPS = 3  # runs in which libraries choose kernels and make allocations that a capture forbids
TOLERANCE = 1e-4  # largest difference from the form without a flag, besides rounding


class Differs(RuntimeError):
    """A form requested by a ``flag`` differs from the form without it. what, found: in words."""

    def __init__(self, flag, what, found):
        remedy = "leave the flag out, and report the device and the versions of torch and triton"
        super().__init__(f"{flag}: {what}, by {found}; {remedy}")


def capture_on_gpu(function, warm_up=None):
    """Return a CUDA graph of ``function``, which takes nothing, and what it returned during the capture.

    warm_up: called once before; by default ``function`` runs a few times.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        if warm_up:
            warm_up()
        else:
            for _ in range(WARMUPS):
                function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the loader's thread pins memory meanwhile
        outputs = function()
    return graph, outputs


def rounding(dtype):
    """Return the difference that rounding to ``dtype`` explains, relative to the largest number."""
    return 2 * torch.finfo(dtype).eps + TOLERANCE


def distance(found, exact):
    """Return the largest difference over the largest exact number. Values not finite in both count as equal."""
    found, exact = (tensor.nan_to_num().float() for tensor in (found, exact))
    return ((found - exact).abs().max() / exact.abs().max().clamp_min(1e-30)).item()
