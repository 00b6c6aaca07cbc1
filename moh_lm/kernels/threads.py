"""Independent pieces of work side by side, each computed by one thread.

torch divides every operation among its threads, which for many small ones costs more than it saves. Here each of these
threads takes whole pieces, and computes them alone; torch's operations release Python's lock.
"""

from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch


def in_threads(function, pieces):
    """``function(*piece)`` for each of ``pieces``, begun in this order, in as many threads as torch has; no gradients.

    No two pieces may write to the same memory. Raises what ``function`` raises.
    """
    num_threads = torch.get_num_threads()
    remaining = iter(list(pieces))

    @torch.no_grad()
    def work():
        torch.set_num_threads(1)  # those of the thread that says so
        for piece in remaining:
            function(*piece)

    helpers = [team(num_threads - 1).submit(work) for _ in range(num_threads - 1)]
    try:
        work()
    finally:
        wait(helpers)
        torch.set_num_threads(num_threads)
    for helper in helpers:
        helper.result()


@cache
def team(size):
    return ThreadPoolExecutor(size, thread_name_prefix="cpu_sparse", initializer=let_idle_threads_sleep)


def let_idle_threads_sleep():
    """Have OpenMP count more threads than cores: then those without work sleep at once (GNU libgomp, GOMP_SPINCOUNT).

    They would spin for 8 ms after every operation of torch, on the cores that the pieces need. What makes it count more
    is an operation with two threads, begun by this one.
    """
    torch.get_num_threads()  # the first call of a thread undoes what it set before
    torch.set_num_threads(2)
    torch.ones(1 << 20).exp_()
