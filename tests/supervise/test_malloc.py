"""What a process frees is there for its next tensors."""

import subprocess
import sys

FAULTS = """
import ctypes, resource
from moh_lm.supervise.malloc import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
print(faults(), faults())
"""


def test_a_large_block_takes_the_pages_of_the_one_before(monkeypatch):
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    first, second = map(int, subprocess.check_output([sys.executable, "-c", FAULTS]).split())
    assert first > 1000 and second < 100
    monkeypatch.setenv("MALLOC_MMAP_MAX_", "65536")  # glibc's own
    assert int(subprocess.check_output([sys.executable, "-c", FAULTS]).split()[1]) > 1000
