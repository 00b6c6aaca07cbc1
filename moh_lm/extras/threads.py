"""Computes independent pieces of work in parallel, each in one thread.

torch divides every operation among its threads, which costs more than it saves if there are many small ones. Here each
thread computes whole pieces alone; torch's operations release Python's lock.
"""

import os
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch


def in_threads(function, pieces):
    """Call ``function(*piece)`` for ``pieces``, started in this order, in as many threads as torch has; no gradients.

    No two pieces may write to the same memory. Raises what ``function`` raises.
    """
    num_threads = torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()  # each thread has its own modes
    remaining = iter(list(pieces))

    def work():
        torch.set_num_threads(1)  # for this thread, and for any that starts before the end
        with torch.inference_mode(inference), torch.no_grad():
            for piece in remaining:
                function(*piece)

    helpers = [team(num_threads - 1).submit(work) for _ in range(num_threads - 1)]
    try:
        work()
    finally:
        try:
            wait(helpers)
        finally:
            torch.set_num_threads(num_threads)
    for helper in helpers:
        helper.result()


@cache
def team(size):
    return ThreadPoolExecutor(size, thread_name_prefix="cpu_sparse", initializer=let_idle_threads_sleep)


os.register_at_fork(after_in_child=team.cache_clear)  # a child has none of the threads


def let_idle_threads_sleep():
    """Make OpenMP count one more thread. If it then counts more threads than cores, idle threads sleep at once.

    They would otherwise spin for 8 ms after every operation of torch, on the cores that the pieces need (GNU libgomp,
    GOMP_SPINCOUNT). OpenMP counts one more after an operation with two threads that this thread starts.
    """
    torch.get_num_threads()  # the first call of a thread undoes what it set before
    torch.set_num_threads(2)
    torch.ones(1 << 20).exp_()
