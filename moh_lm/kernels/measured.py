"""Measured times of sparse and dense attention, and the fastest tiles on a GPU.

    python benchmarks/attention.py --levels layer --save

measures the current machine and writes measured.json beside this file, a list of ``Measurement``. Each holds the time
of the attention layer, forward and backward, with the sparse backend relative to the dense one, and the fastest tiles
of a GPU. A quarter of the heads is routed, and a quarter or half of them are shared. A GPU uses only its own
measurements; a CPU without any uses those of another CPU with as many threads.
"""

import contextlib
import functools
import json
import os
import platform
from pathlib import Path
from typing import NamedTuple

import torch

from moh_lm.config import ConfigError
from moh_lm.parsing import read_json


class Measurement(NamedTuple):
    """One machine in one precision.

    machine: name of the GPU or processor. device: "cpu" or "cuda". dtype: such as "float32". num_threads: torch's
    threads on a CPU, 0 on a GPU. conditions: date, versions, command. elements: size of the queries [s, b, heads, e] in
    the smallest call. ratios: [sequence length, share of heads that a token uses, sparse / dense, the largest over
    shapes]; on a GPU for plain calls and for CUDA graphs. tiles: [kernel, sequence length, head dimension, ``Tiles``].
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
    """Return the entries of measured.json. Raises ConfigError if it is damaged."""
    try:
        return [Measurement(**entry) for entry in read_json(FILE)]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError([f"{FILE}: cannot be read ({error}); restore it, for example with git checkout"]) from error


MEASURED = read()

TRITON_HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128)  # head dimensions with kernels in moh_lm.kernels.triton_attention


def measurement(device, dtype):
    """Return the ``Measurement`` that applies to ``device``, or None."""
    key = key_of(device, dtype)
    own = [one for one in MEASURED if one.key == key]
    others = [one for one in MEASURED if one.key[1:] == key[1:] and one.device == "cpu"]
    return next(iter(own + others), None)


def key_of(device, dtype):
    """Return the ``Measurement.key`` of a measurement taken here."""
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    return machine(device), device.type, str(dtype).removeprefix("torch."), threads


def machine(device):
    """Return the name of the GPU, or of the processor."""
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else processor()


@functools.cache
def processor():
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return platform.processor() or "CPU"


@functools.cache
def measured_tiles(device, dtype, kernel, length, head_dim):
    """Return the fastest tiles at the next longer measured length, or at the longest; None without any."""
    found = measurement(device, dtype)
    rows = found.tiles if found else []
    tiles = {seq: tile for name, seq, size, tile in rows if (name, size) == (kernel, head_dim)}
    return tiles[min((seq for seq in tiles if seq >= length), default=max(tiles))] if tiles else None


def keep(new):
    """Use ``new`` from now on, instead of earlier measurements of its machine."""
    MEASURED[:] = [one for one in MEASURED if one.key != new.key] + [new]
    measured_tiles.cache_clear()


def save(new):
    """Write ``new`` to measured.json instead of earlier measurements of its machine. Entries that other processes wrote
    in the meantime are kept."""
    together = [one for one in read() if one.key != new.key] + [new]
    entries = ",\n".join(json.dumps(one._asdict()) for one in sorted(together, key=lambda one: one.key))
    file = FILE.with_suffix(f".{os.getpid()}.new")
    file.write_text(f"[\n{entries}\n]\n", encoding="utf-8")
    os.replace(file, FILE)
