"""A data directory copied from anywhere that fsspec reads, shard by shard.

    DIR/SOURCE/UNIT.bin.part    a file that is being copied; a later start resumes at its end
    DIR/.fetch                  the manifest and the tokenizer until all shards are complete

No file gets its final name before its SHA-256 was compared: .bin and .idx with the sidecar, the sidecar with the
manifest, which is sealed itself. The sidecar is written last, and the manifest after all sidecars.
"""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor

from fsspec.implementations.local import LocalFileSystem

from data_prep.output import check_tokenizer_files, writable_directory
from data_prep.report import progress_bar
from data_prep.storage import BLOCK, file_system, persistently, read_part
from moh_lm.checkpoint.writing import free_bytes
from moh_lm.config import ConfigError
from moh_lm.data.files import ShardError, beside, flush, json_bytes, publish, seal, sha256_of
from moh_lm.data.reader import content_of, open_shard, read_sidecar, verify_shard
from moh_lm.data.shards import TOKENIZER_FILES, read_manifest
from moh_lm.supervise.run_directory import lock_run_directory
from moh_lm.units import counted

SHORT = 2**24  # fewer bytes than this need no progress bar
SUFFIXES = (".bin", ".idx")


def fetch(url, output, workers, verify):
    """Copy the data directory at ``url`` to ``output``. Returns (shards copied, shards that already existed). verify:
    whether the latter are read, and copied again if they are damaged.

    Raises ConfigError for what the user has to fix, ShardError or OSError for files that are damaged or unreachable.
    """
    origin = Origin(url)
    if origin.is_directory(output):
        raise ConfigError([f"FROM {url}: is --output; give another directory, since a copy replaces damaged shards"])
    writable_directory(output)
    with lock_run_directory(output, "--output"):
        staged = output / ".fetch"
        manifest = stage(origin, output, staged)
        units = [(name, unit, entry) for name, of in manifest["sources"].items() for unit, entry in of["units"].items()]
        missing = missing_shards(output, units, workers, verify)
        size = sum(sum(entry["bytes"].values()) for *_, entry in missing)
        need = size - sum(bytes_there(output / source / unit) for source, unit, _ in missing)
        if need > free_bytes(output):
            problem = f"no space left: {need:,} more bytes are needed, {free_bytes(output):,} are free"
            raise ConfigError([f"--output {output}: {problem}; give a directory on a larger disk"])
        with progress_bar("copying", size, SHORT) as bar, ThreadPoolExecutor(workers) as pool:
            jobs = [pool.submit(fetch_unit, origin, output, *found, bar.update) for found in missing]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for path in sorted(staged.iterdir(), key=lambda path: path.name == "manifest.json"):
            os.replace(path, output / path.name)
        flush(output)
        staged.rmdir()
    return len(missing), len(units) - len(missing)


class Origin:
    """The directory ``url``. Raises ConfigError if there is no such protocol, or its package is missing."""

    def __init__(self, url):
        self.url = url.rstrip("/")
        self.files, self.root = file_system(self.url)

    def is_directory(self, path):
        """Whether this is the local directory ``path``."""
        is_local = isinstance(self.files, LocalFileSystem)
        return is_local and os.path.exists(self.root) and os.path.exists(path) and os.path.samefile(self.root, path)

    def path(self, name):
        return f"{self.root.rstrip('/')}/{name}"

    def small_file(self, name):
        """The bytes of a file; None if it is absent. Raises OSError."""
        try:
            return persistently(f"{self.url}/{name}", lambda: self.files.cat_file(self.path(name)))
        except FileNotFoundError:
            return None

    def part(self, name, start, end):
        """Bytes ``start`` to ``end`` - 1 of a file, as far as it has them. Raises OSError."""
        found = persistently(f"{self.url}/{name}", lambda: read_part(self.files, self.path(name), start, end))
        if len(found) > end - start:
            raise OSError(f"{self.url}/{name}: the server gave the whole file for a part; copy it by other means")
        return found


def stage(origin, output, staged):
    """Copy the manifest and the tokenizer into the directory ``staged``; returns the manifest, after checking its
    names. The copy also lists the sources that only ``output`` has.

    Raises ConfigError if there is none, or ``output`` holds data of another tokenizer; ShardError.
    """
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    for name in ("manifest.json", *TOKENIZER_FILES):
        content = origin.small_file(name)
        if content is not None:
            publish(staged / name, content)
        elif name == "manifest.json":
            staged.rmdir()
            advice = "give a directory that data_prep/tokenize.py has finished"
            raise ConfigError([f"FROM {origin.url}: has no manifest.json; {advice}"])
    manifest = read_manifest(staged)
    for name in [*manifest["sources"], *(unit for of in manifest["sources"].values() for unit in of["units"])]:
        if os.path.basename(name) != name or name.startswith("."):
            raise ShardError(f"{origin.url}/manifest.json: {name!r} is not the name of a source or a shard")
    check_tokenizer_files(output, {path.name: path.read_bytes() for path in staged.iterdir()})
    if others := other_sources(output, manifest):
        sources = dict(sorted((manifest["sources"] | others).items()))
        publish(staged / "manifest.json", seal(json_bytes(manifest | {"sources": sources})))
    return manifest


def other_sources(output, manifest):
    """Return the sources that only the manifest of ``output`` has. Raises ConfigError if it also lists shards that
    would be lost, because their source is in ``manifest`` without them."""
    try:
        there = read_manifest(output) if (output / "manifest.json").exists() else manifest
    except ShardError as error:
        own = {path.parent.name for path in output.glob("[!.]*/*.json")} - manifest["sources"].keys()
        remedy = "" if own else ", or remove it and run this command again"
        raise ShardError(f"{error}{remedy}") from error
    for key in ("tokenizer", "cut_fractions"):
        if there[key] != manifest[key]:
            raise ConfigError([f"--output {output}: has shards of another {key}; give another directory"])
    for name, source in there["sources"].items():
        listed = manifest["sources"].get(name, source)["units"]
        lost = [unit for unit in source["units"] if unit not in listed and (output / name / f"{unit}.json").exists()]
        if lost:
            what = f"has {counted(len(lost), 'shard')} of source {name} that FROM lacks, such as {lost[0]}"
            remedy = f"give another directory, or remove {output / name} to have it copied as it is in FROM"
            raise ConfigError([f"--output {output}: {what}; {remedy}"])
    return {name: source for name, source in there["sources"].items() if name not in manifest["sources"]}


def missing_shards(output, units, workers, verify):
    """Return those of ``units`` whose shards are still to be copied."""
    size = sum(sum(entry["bytes"].values()) for *_, entry in units) if verify else 0
    with progress_bar("verifying", size, SHORT) as bar, ThreadPoolExecutor(workers) as pool:
        complete = pool.map(lambda found: is_complete(output, *found, verify, bar.update), units)
        return [found for found, there in zip(units, complete, strict=True) if not there]


def is_complete(output, source, unit, entry, verify, report):
    """Whether the shard of a manifest's ``entry`` exists and, if ``verify``, every byte of it is right. Otherwise its
    bytes are compared when a run first reads them."""
    try:
        shard = open_shard(output / source / unit)
        return shard.content == entry["content"] and not (verify and any(verify_shard(shard, report)))
    except ShardError:
        return False


def bytes_there(prefix):
    """The bytes of a shard that is not complete: of its parts, or of damaged files, which are removed before a copy."""
    files = (beside(prefix, f"{suffix}{end}") for suffix in SUFFIXES for end in ("", ".part"))
    return sum(file.stat().st_size for file in files if file.exists())


def fetch_unit(origin, output, source, unit, entry, report):
    """Copy a shard. report: called with numbers of bytes. Raises ShardError or OSError."""
    prefix = output / source / unit
    prefix.parent.mkdir(exist_ok=True)
    sidecar, staged = beside(prefix, ".json"), beside(prefix, ".json.part")
    if sidecar.exists():  # the sidecar of another shard with this name
        for suffix in (".json", *SUFFIXES):
            beside(prefix, suffix).unlink(missing_ok=True)
    content = origin.small_file(f"{source}/{unit}.json")
    if content is None:
        raise ShardError(f"{origin.url}/{source}/{unit}.json: is missing; run data_prep/tokenize.py there again")
    staged.write_bytes(content)
    facts = read_sidecar(staged)
    if content_of(facts) != entry["content"]:
        raise ShardError(f"{origin.url}/{source}/{unit}.json: has other checksums than manifest.json")
    for suffix in SUFFIXES:
        name, target = f"{source}/{unit}{suffix}", beside(prefix, suffix)
        if target.exists():  # there is no sidecar, so its shard is not complete
            os.replace(target, beside(target, ".part"))
        copy = origin, name, target, facts[suffix[1:]], report
        if not (is_copied(*copy) or is_copied(*copy)):  # the first may have continued a part of another file
            raise ShardError(f"{origin.url}/{name}: differs from its sidecar; restore it there")
    flush(staged)
    os.replace(staged, sidecar)
    flush(prefix.parent)


def is_copied(origin, name, target, facts, report):
    """Copy what is missing at the end of a file's part; returns whether its hash is that in ``facts`` and it got its
    final name."""
    unfinished, size = beside(target, ".part"), facts["bytes"]
    with open(unfinished, "ab") as part:
        report(part.tell())
        while (start := part.tell()) < size and (block := origin.part(name, start, min(start + BLOCK, size))):
            part.write(block)
            report(len(block))
    if sha256_of(unfinished) != facts["sha256"]:
        unfinished.unlink()
        return False
    flush(unfinished)
    os.replace(unfinished, target)
    return True
