"""What inspect_data.py reads of shards: their counts, the lengths of their documents, the checksums of their files."""

import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import numpy as np
from tqdm import tqdm

from moh_lm.config import ConfigError
from moh_lm.data.files import ShardError, beside
from moh_lm.data.index import verify_arrays
from moh_lm.data.reader import open_shard, verify_shard
from moh_lm.data.shards import read_manifest

SHORT = 2**28  # bytes that are read before a bar would be of use


def open_directory(path):
    """({source: its shards}, sentences for what cannot be opened or is not as in the manifest).

    Without a manifest the shards may be those of other tools: every pair of files below ``path``, or the one pair that
    it is the prefix of, each under the name of its directory. Raises ConfigError if there is none.
    """
    path = Path(path)
    if (path / "manifest.json").exists():
        return open_listed(path, read_manifest(path))
    if path.is_dir():
        prefixes = [index.with_suffix("") for index in sorted(path.rglob("*.idx"))]
    else:
        prefixes = [path] if beside(path, ".idx").exists() else []
    if not prefixes:
        raise ConfigError([f"{path}: no shard here; give a data directory, or the PREFIX of PREFIX.bin and PREFIX.idx"])
    sources, problems = {}, []
    for prefix in prefixes:
        inside = path.is_dir() and prefix.parent != path
        name = str(prefix.parent.relative_to(path)) if inside else prefix.parent.resolve().name
        try:
            sources.setdefault(name, []).append(open_shard(prefix, foreign=True))
        except ShardError as error:
            problems.append(str(error))
    return sources, problems


def open_listed(path, manifest):
    sources, problems = {}, []
    for name, source in manifest["sources"].items():
        sources[name] = []
        for unit, entry in source["units"].items():
            try:
                shard = open_shard(path / name / unit)
                sources[name].append(shard)
                if shard.content != entry["content"]:
                    problems.append(f"{shard.prefix}.json: has other checksums than manifest.json")
            except ShardError as error:
                problems.append(str(error))
        found = sorted((path / name).glob("*.json"))
        problems += [f"{file}: is not in manifest.json" for file in found if file.stem not in source["units"]]
    return sources, problems


def summarize(sources):
    """(one dict for each source, sentences for indexes that contradict themselves)."""
    problems, size = [], sum(index_size(shard) for shards in sources.values() for shard in shards)
    with progress("reading indexes", size) as report:
        rows = [summarize_source(name, shards, problems, report) for name, shards in sources.items()]
    return rows, problems


def summarize_source(name, shards, problems, report):
    lengths, dropped = Counter(), Counter()
    documents = tokens = longest = 0
    for shard in shards:
        try:
            found = document_lengths(shard)
        except ShardError as error:
            problems.append(str(error))
            continue
        documents += len(found)
        tokens += int(found.sum())
        longest = max(longest, int(found.max(initial=0)))
        lengths.update(histogram(found))
        report(index_size(shard))
    sidecars = [shard.sidecar or {} for shard in shards]
    for sidecar in sidecars:
        dropped.update(sidecar.get("dropped", {}))
    text_bytes = [sidecar.get("text_bytes") for sidecar in sidecars]
    return {
        "name": name,
        "shards": len(shards),
        "dtypes": sorted({shard.dtype.name for shard in shards}),
        "documents": documents,
        "tokens": tokens,
        "text_bytes": None if None in text_bytes else sum(text_bytes),
        "dropped": dict(sorted(dropped.items())),
        "longest": longest,
        "lengths": {str(shortest): lengths[shortest] for shortest in sorted(lengths)},
    }


def index_size(shard):
    return 12 * shard.num_sequences + 8 * shard.num_documents


def document_lengths(shard):
    """Tokens of each document, int64 [documents]. Raises ShardError if the index contradicts itself."""
    lengths, pointers, bounds = shard.index()
    verify_arrays(f"{shard.prefix}.idx", shard.dtype.itemsize, lengths, pointers, bounds)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    return np.diff(ends[bounds])


def histogram(lengths):
    """{2^k: documents of 2^k to 2^(k + 1) - 1 tokens}, and 0 for empty ones."""
    counts = np.bincount(np.frexp(lengths.astype(np.float64))[1])
    return {2**power // 2: int(count) for power, count in enumerate(counts) if count}


def verify(shards):
    """A sentence for each file of ``shards`` that is not as it was written; reads all of them, on all cores."""
    size = sum(os.path.getsize(f"{shard.prefix}{suffix}") for shard in shards for suffix in (".bin", ".idx"))
    with progress("verifying", size) as report, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(pool.map(lambda shard: list(verify_shard(shard, report)), shards))
    return sum(found, [])


@contextmanager
def progress(title, size):
    """A bar with MB/s and the time left, on standard error; gives the function that moves it by a number of bytes."""
    lock = Lock()
    bar = tqdm(
        desc=title,
        total=size,
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 30,
        disable=size < SHORT,
    )

    def move(num_bytes):
        with lock:
            bar.update(num_bytes)

    with bar:
        yield move
