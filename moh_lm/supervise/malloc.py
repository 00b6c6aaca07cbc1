"""How a process on a CPU keeps its memory between steps.

Every step allocates tensors of the same sizes as the step before. By default glibc returns blocks above 32 MiB to the
system when they are freed. The system then has to clear new pages for the next tensors, with a page fault for each 4
KiB, which takes longer than most operations on them.
"""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h


def keep_freed_memory():
    """Have malloc return nothing to the system.

    Nothing is done without glibc, or where the environment has settings of its malloc, such as MALLOC_TRIM_THRESHOLD_.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not any(name.startswith("MALLOC_") for name in os.environ):
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)
