"""Times functions that are called in turns: by the clock and by CPU time, or on a GPU by its events.

A GPU may replay the work from a CUDA graph, so that small kernels do not wait for Python.
"""

import functools
import time
from statistics import median

import torch

from moh_lm.kernels.capture import capture_on_gpu


def set_up(options):
    """(device, dtype) of ``device_flags``."""
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device, getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))


class Waits(RuntimeError):
    """A call waits for the GPU, so it cannot be in a CUDA graph."""


def stopwatch(function, device, name):
    """Return a function that runs ``function`` and gives its ``seconds``; on a GPU those of its CUDA graph, then those
    of a call. A function that waits for the GPU has no graph: both are of calls, and a line says so for ``name``."""
    if device.type == "cpu":
        return lambda: seconds(function, device)
    try:
        replay = recorded(function, first_graph().pool()).replay
    except Waits:
        print(f"{name}: waits for the GPU, so it has no CUDA graph; all its times are of eager calls")
        replay = function
    return lambda: seconds(replay, device) + seconds(function, device)


def in_turns(clocks, rounds):
    """Return {key: [result of its clock in each round]}. clocks: {key: function}. The first round does not count."""
    taken = {key: [] for key in clocks}
    for number in range(rounds + 1):
        for key, clock in clocks.items():
            spent = clock()
            if number:
                taken[key].append(spent)
    return taken


def ratio(mine, base, clock):
    """Return the median over the rounds of the ratio of two times by the same clock."""
    return median(m[clock] / b[clock] for m, b in zip(mine, base, strict=True))


def report(title, forms, device, rounds, layers=1):
    """Take the functions ``forms`` in turns. Print the times of each, divided by ``layers``, and their ratios to those
    of the first."""
    clocks = {name: stopwatch(call, device, f"{title}: {name}") for name, call in forms.items()}
    taken = in_turns(clocks, rounds)
    first, *_ = taken.values()
    for name, spent in taken.items():
        times = [1e3 * median(one[clock] for one in spent) / layers for clock in range(len(spent[0]))]
        ratios = [ratio(spent, first, clock) for clock in range(len(times))]
        words = "  ".join(f"{time:10.4f} ms {against:6.3f}" for time, against in zip(times, ratios, strict=True))
        print(f"{title}  {name:6}{words}", flush=True)


def seconds(function, device, repeats=10):
    """Return (wall seconds, CPU seconds of the process) of a call, or on a GPU (seconds on the device,) of one of
    ``repeats`` calls."""
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


def recorded(function, pool=None):
    """Return a CUDA graph of a call. ``function`` runs twice before: kernels are compiled and chosen then, and a wait
    raises ``Waits`` outside of a capture, since torch before 2.13 does not recover from a failed one. pool: see
    ``capture_on_gpu``."""

    def warm_up():
        function()
        without_waiting(function)

    graph, _ = capture_on_gpu(function, warm_up, pool)
    graph.replay()  # the first replay is slower
    return graph


@functools.cache
def first_graph():
    """Return a small graph whose memory all graphs share that are replayed one at a time for their times.

    It is never freed, because torch fails to capture into the pool of graphs that are all gone.
    """
    return capture_on_gpu(functools.partial(torch.zeros, 1, device="cuda"))[0]


def without_waiting(function):
    """Call ``function``. Raises ``Waits`` if it waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    except RuntimeError as error:
        if "synchronizing CUDA operation" in str(error):
            raise Waits("it waits for the GPU, and a CUDA graph cannot") from error
        raise
    finally:
        torch.cuda.set_sync_debug_mode("default")
