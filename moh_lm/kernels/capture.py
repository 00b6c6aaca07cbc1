"""CUDA graphs (``--cuda-graph``): all kernels of a function are launched at once, repeatedly and without Python.

A graph reads and writes the tensors that the function used when it was captured. Its callers therefore keep inputs and
state in tensors of their own, and compare one replay with the function itself before they trust a graph.
"""

import torch

WARMUPS = 3  # runs in which libraries choose kernels and make allocations that a capture forbids


def capture_on_gpu(function, warm_up=None, pool=None):
    """Return a CUDA graph of ``function``, which takes nothing, and what it returned during the capture.

    warm_up: called once before; by default ``function`` runs a few times. pool: memory that graphs share; a replay may
    overwrite the outputs of graphs that were captured later. By default the graph has its own.
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
    # in the thread's mode, since the loader's thread pins memory meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = function()
    return graph, outputs
