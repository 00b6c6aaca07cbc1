"""Reads counts, lengths of documents and checksums from shards for inspect_data.py."""

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data_prep.report import progress_bar
from moh_lm.config import ConfigError
from moh_lm.data.files import ShardError, beside
from moh_lm.data.index import verify_arrays
from moh_lm.data.reader import open_shard, verify_shard
from moh_lm.data.shards import read_manifest

SHORT = 2**28  # fewer bytes than this need no progress bar


def open_directory(path):
    """Return ({source: its shards}, sentences for shards that cannot be opened or differ from the manifest).

    Without a manifest the shards may come from other tools: every pair of files below ``path``, or the pair with the
    prefix ``path``, each under the name of its directory. Raises ConfigError if there is none.
    """
    path = Path(path)
    if os.path.exists(path / "manifest.json"):
        return open_listed(path, read_manifest(path))
    if os.path.isdir(path):
        prefixes = [index.with_suffix("") for index in sorted(path.rglob("*.idx"))]
    else:
        prefixes = [path] if os.path.exists(beside(path, ".idx")) else []
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
                    problems.append(f"{shard.prefix}.json: its checksums differ from those in manifest.json")
            except ShardError as error:
                problems.append(str(error))
        found = sorted((path / name).glob("*.json"))
        problems += [f"{file}: is not in manifest.json" for file in found if file.stem not in source["units"]]
    there = {file.parent for file in path.glob("[!.]*/*.idx") if file.with_suffix(".json").exists()}
    problems += [f"{folder}: is not in manifest.json" for folder in sorted(there) if folder.name not in sources]
    return sources, problems


def summarize(sources):
    """Return (one dict for each source, sentences for indexes that contradict themselves)."""
    problems, size = [], sum(index_size(shard) for shards in sources.values() for shard in shards)
    with progress_bar("reading indexes", size, SHORT) as bar:
        rows = [
            sum_of(name, [summarize_shard(shard, problems, bar.update) for shard in shards])
            for name, shards in sources.items()
        ]
    return rows, problems


def summarize_shard(shard, problems, report):
    try:
        found = document_lengths(shard)
    except ShardError as error:
        problems.append(str(error))
        found = np.zeros(0, np.int64)
    report(index_size(shard))
    sidecar = shard.sidecar or {}
    return {
        "shards": 1,
        "dtypes": [shard.dtype.name],
        "documents": len(found),
        "tokens": int(found.sum()),
        "text_bytes": sidecar.get("text_bytes"),
        "dropped": sidecar.get("dropped", {}),
        "longest": int(found.max(initial=0)),
        "lengths": histogram(found),
    }


def sum_of(name, rows):
    """One row that sums up several rows, of shards or of sources."""
    text_bytes = [row["text_bytes"] for row in rows]
    return {
        "name": name,
        "shards": sum(row["shards"] for row in rows),
        "dtypes": sorted({dtype for row in rows for dtype in row["dtypes"]}),
        "documents": sum(row["documents"] for row in rows),
        "tokens": sum(row["tokens"] for row in rows),
        "text_bytes": None if None in text_bytes else sum(text_bytes),
        "dropped": dict(sorted(sum((Counter(row["dropped"]) for row in rows), Counter()).items())),
        "longest": max((row["longest"] for row in rows), default=0),
        "lengths": dict(sorted(sum((Counter(row["lengths"]) for row in rows), Counter()).items())),
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
    """Return a sentence for each file of ``shards`` that differs from what was written. Reads all on all cores."""
    size = sum(os.path.getsize(f"{shard.prefix}{suffix}") for shard in shards for suffix in (".bin", ".idx"))
    with progress_bar("verifying", size, SHORT) as bar, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(pool.map(lambda shard: list(verify_shard(shard, bar.update)), shards))
    return sum(found, [])
