"""How long a function takes: by the clock and by CPU time, or on a GPU by its events.

A GPU may replay the work from a CUDA graph, so that small kernels do not wait for Python.
"""

import time

import torch


def seconds(function, device, repeats=10):
    """(seconds on the wall, CPU seconds of the process) of a call, or on a GPU (seconds on the device,) of one of so
    many."""
    if device.type == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            function()
        stop.record()
        stop.synchronize()
        return (start.elapsed_time(stop) / 1e3 / repeats,)
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - wall, time.process_time() - cpu


def recorded(function, repeats=1):
    """A CUDA graph of so many calls. ``function`` runs once before: kernels are compiled and chosen then."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            function()
    graph.replay()  # the first replay is slower
    return graph
