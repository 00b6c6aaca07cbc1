"""The loader on a directory of 10,000 shards and 50 million samples: start-up, and micro-batches per second.

    python benchmarks/loader.py [--shards 10000] [--starts 5] [--cold] [DIRECTORY]

DIRECTORY is filled on the first use (one gigabyte: indexes of 5,000 documents each, and .bin files that are holes on
the disk, all zeros), and kept. A start is a fresh process: seconds of ``Dataset.open`` and ``fingerprint``, and what
they add to the peak of its memory; the best of them. The cuts for a fraction of 0.001 are in the manifest, those for
0.003 are looked up in the indexes. --cold has the system forget the contents of DIRECTORY's files before each start.
Reading: windows per second on the first pass, which checks every shard that it meets, and again without the disk, with
and without the checksums of blocks; and how long a training loop that computes for 0.2 s per step waits for its
micro-batches, with and without reading ahead.
"""

import os
import sys

if __name__ == "__main__":  # the root of the checkout, not this folder, whose tokenize.py hides a standard module
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from moh_lm.config import DataConfig
from moh_lm.data import loader as loader_module
from moh_lm.data.dataset import Dataset
from moh_lm.data.files import BLOCK, VERSION, Description, beside, json_bytes, seal
from moh_lm.data.index import index_bytes
from moh_lm.data.loader import Loader
from moh_lm.data.reader import Sums
from moh_lm.data.shards import write_manifest

MIX = {"book": "4.24", "wikipedia": "3.50", "arxiv": "4.37", "stackexchange": "3.19", "c4": "10.94", "dolma": "61.28",
       "pile": "12.48"}  # fmt: skip
DOCUMENTS, TOKENS = 5_000, 10_240_000  # of a shard; 10,000 of them hold 50 million windows
SEQ_LENGTH, BATCH = 2048, 256
START = """
import json, sys, time
from moh_lm.config import DataConfig
from moh_lm.data.dataset import Dataset
mix = tuple(json.loads(sys.argv[2]).items())
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
before, start, cpu = peak(), time.perf_counter(), time.process_time()
data = DataConfig(data_dir=sys.argv[1], data_mix=mix, validation_fraction=float(sys.argv[3]))
dataset = Dataset.open(data, seq_length=2048, seed=1, vocab_size=65536)
dataset.fingerprint()
print(json.dumps([time.perf_counter() - start, time.process_time() - cpu, peak() - before]))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", help="kept between uses (default: a temporary one)")
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--starts", type=int, default=5, help="of each kind, of which the best counts (default: 5)")
    parser.add_argument("--cold", action="store_true", help="measure starts with nothing in the page cache too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(arguments.directory or scratch)
        if not (directory / "manifest.json").exists():
            make_directory(directory, arguments.shards)
        for caches in ("warm", "cold") if arguments.cold else ("warm",):
            for mix in (MIX, {}):
                for fraction in (0.001, 0.003):
                    show_start(directory, caches, mix, fraction, arguments.starts)
        show_reading(directory)


def make_directory(directory, num_shards):
    random, names = np.random.default_rng(0), list(MIX)
    shares = np.cumsum([float(weight) for weight in MIX.values()])
    hole = Description(bytes(BLOCK)).facts()["crc32"]
    for number in range(num_shards):
        source = names[np.searchsorted(shares, number / num_shards * shares[-1], side="right")]
        prefix = directory / source / f"part-{number:05d}-{number:016x}"
        prefix.parent.mkdir(parents=True, exist_ok=True)
        lengths = random.multinomial(TOKENS - DOCUMENTS, random.dirichlet(np.full(DOCUMENTS, 0.7))) + 1
        index = index_bytes(lengths.astype("<i4"), 8)
        with open(beside(prefix, ".bin"), "wb") as file:
            file.truncate(2 * TOKENS)
        beside(prefix, ".idx").write_bytes(index)
        sidecar = {
            "version": VERSION, "dtype": "uint16", "documents": DOCUMENTS, "tokens": TOKENS, "largest_id": 0,
            "tokenizer": {"sha256": "0" * 64, "vocab_size": 65536, "eos_id": 2}, "inputs": [],
            "bin": {"bytes": 2 * TOKENS, "sha256": f"{number:064x}", "crc32": hole * (2 * TOKENS // BLOCK)},
            "idx": Description(index).facts(),
        }  # fmt: skip
        if tail := 2 * TOKENS % BLOCK:
            sidecar["bin"]["crc32"] += Description(bytes(tail)).facts()["crc32"]
        beside(prefix, ".json").write_bytes(seal(json_bytes(sidecar)))
    write_manifest(directory)


def show_start(directory, caches, mix, fraction, number):
    command = [sys.executable, "-c", START, str(directory), json.dumps(mix), str(fraction)]
    starts = []
    for _ in range(number):
        if caches == "cold":
            forget(directory)
        starts.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    seconds, cpu, megabytes = min(starts)
    weights = "seven weights" if mix else "by tokens"
    times = f"{seconds:5.2f} s ({cpu:.2f} s of CPU), {megabytes:.0f} MiB"
    print(f"start, {caches}, {weights:13}, fraction {fraction}: {times}", flush=True)


def forget(directory):
    """Take the contents of all files from the page cache: what was not yet written cannot go, and is written first."""
    os.sync()
    for path in directory.rglob("*.*"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def show_reading(directory):
    data = DataConfig(data_dir=str(directory), data_mix=tuple(MIX.items()))
    dataset = Dataset.open(data, seq_length=SEQ_LENGTH, seed=1, vocab_size=65536)
    for kind, resets in (("plain", False), ("with resets", True)):
        loader = make_loader(dataset, reset_at_documents=resets)
        read = {"first pass": timed(loader.read_step, 0)}
        read["checked"] = min(timed(loader.read_step, 0) for _ in range(5))
        shards = [shard for source in dataset.sources for shard in source.shards if shard.sums]
        sums = [shard.sums for shard in shards]
        for shard in shards:
            shard.sums = Sums(None, None)
        read["unchecked"] = min(timed(loader.read_step, 0) for _ in range(5))
        for shard, kept in zip(shards, sums, strict=True):
            shard.sums = kept
        print(f"reading, {kind}: " + ", ".join(f"{pass_} {BATCH / read[pass_]:,.0f} windows/s" for pass_ in read))
    for ahead in (0, loader_module.AHEAD):
        loader_module.AHEAD = ahead
        loader = make_loader(dataset)
        waits = []
        for step in range(8):
            waits.append(timed(loader.train_step, step * BATCH))
            time.sleep(0.2)
        loader.close()
        print(f"waiting per step of {BATCH} windows, {ahead} steps ahead: {np.mean(waits[1:]) * 1e3:.1f} ms")


def make_loader(dataset, **options):
    return Loader(
        dataset, global_batch_size=BATCH, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=1, **options
    )


def timed(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
