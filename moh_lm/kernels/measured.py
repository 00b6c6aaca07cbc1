"""Where a sparse attention backend was measured to be faster than the dense one, and by which tiles of a GPU.

    python benchmarks/attention.py --levels layer --save

measures the machine at hand and writes measured.json beside this file, a list of ``Measurement``: the time of the
attention layer, forward and backward, by the sparse backend over that by the dense one, with a quarter of the heads
routed and a quarter or half of them shared; and the fastest tiles of a GPU. A GPU goes by its own figures only, a CPU
without its own by those of another with as many threads. Inside documents (``--documents``) the ratios are lower from
T = 1024 on, and where a CPU takes the sparse backend it is not slower at T = 512 either.
"""

import contextlib
import functools
import json
import os
import platform
from pathlib import Path
from typing import NamedTuple

import torch


class Measurement(NamedTuple):
    """One machine in one precision.

    machine: name of the GPU or processor. device: "cpu" or "cuda". dtype: "float32" and so on. num_threads: of torch
    on a CPU, 0 for a GPU. conditions: date, versions, command. elements: of the queries [s, b, heads, e] in the
    smallest call. ratios: [sequence length, share of its heads that a token uses, sparse / dense, the largest of the
    shapes]; of a GPU that of calls, then that of CUDA graphs, which do not wait for the host. tiles: [kernel, sequence
    length, head dimension, ``Tiles`` of moh_lm.kernels.triton_attention].
    """

    machine: str
    device: str
    dtype: str
    num_threads: int
    conditions: str
    elements: int
    ratios: list
    tiles: list

    @property
    def key(self):
        return self[:4]


FILE = Path(__file__).with_name("measured.json")


def read():
    return [Measurement(**entry) for entry in json.loads(FILE.read_text(encoding="utf-8"))]


MEASURED = read()

TRITON_HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128)  # what moh_lm.kernels.triton_attention has kernels for

def measurement(device, dtype):
    """The ``Measurement`` that holds for ``device``, or None."""
    key = key_of(device, dtype)
    own = [one for one in MEASURED if one.key == key]
    others = [one for one in MEASURED if one.key[1:] == key[1:] and one.device == "cpu"]
    return next(iter(own + others), None)


def key_of(device, dtype):
    """``Measurement.key`` of one that is taken here."""
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return machine(device), device.type, str(dtype).removeprefix("torch."), threads


def machine(device):
    """The name of the GPU, or of the processor."""
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else processor()


@functools.cache
def processor():
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return platform.processor() or "CPU"


@functools.cache
def measured_tiles(device, dtype, kernel, length, head_dim):
    """The tiles that were fastest there: of the shortest sequence not below ``length`` that was measured, or of the
    longest; None if none was."""
    found = measurement(device, dtype)
    rows = found.tiles if found else []
    tiles = {seq: tile for name, seq, size, tile in rows if (name, size) == (kernel, head_dim)}
    return tiles[min((seq for seq in tiles if seq >= length), default=max(tiles))] if tiles else None


def keep(new):
    """Go by ``new`` from here on, in place of what was measured on its machine before."""
    MEASURED[:] = [one for one in MEASURED if one.key != new.key] + [new]
    measured_tiles.cache_clear()


def save(new):
    """Write ``new`` to measured.json, in place of what was measured on its machine before. What other processes have
    written there in the meantime stays."""
    together = [one for one in read() if one.key != new.key] + [new]
    entries = ",\n".join(json.dumps(one._asdict()) for one in sorted(together, key=lambda one: one.key))
    file = FILE.with_suffix(f".{os.getpid()}.new")
    file.write_text(f"[\n{entries}\n]\n", encoding="utf-8")
    os.replace(file, FILE)
