"""Lets a process on a CPU keep its memory between steps.

Every step allocates tensors of the same sizes as the step before. By default glibc returns blocks above 32 MiB to the
system when they are freed. The system then has to clear new pages for the next tensors, with a page fault for each 4
KiB, which takes longer than most operations on them.
"""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # from glibc's malloc.h


def keep_freed_memory():
    """Make malloc return no memory to the system.

    This has no effect without glibc, or if the environment configures malloc, such as by MALLOC_TRIM_THRESHOLD_.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
