"""Time on a GPU alone: work is recorded in a CUDA graph and replayed, so that small kernels do not wait for Python."""

import torch


def record(call, repeats=1):
    """A CUDA graph of ``call()`` so many times. It ran once before: kernels are compiled and chosen then."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    graph.replay()  # the first replay is slower
    return graph


def seconds(graph, repeats=1):
    """Of one of ``repeats`` replays."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / repeats
