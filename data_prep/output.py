"""The data directory while it is written: one run at a time, what is finished, what is replaced, what is left over.

All of it is read from the directory itself, so that a run may be stopped anywhere, and the next one finds its way.
"""

import fcntl
import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

from data_prep.encoding import Tokenizer
from data_prep.units import Unit
from moh_lm.config import ConfigError
from moh_lm.data.shards import ShardError, beside, open_shard, read_sidecar

SHARD_FILE = re.compile(r"(?P<unit>.+-[0-9a-f]{16})\.(bin|idx|json)(?P<temporary>\.tmp-\d+)?")


def writable_directory(path: str | Path) -> Path:
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Path(path)
    except OSError as error:
        raise ConfigError([f"--output {path}: cannot be written ({error.strerror}); choose another place"]) from error


@contextmanager
def only_run(output: Path):
    """Holds the data directory for this run; the lock ends with the process, however it ends. Raises ConfigError."""
    directory = os.open(output, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError([f"--output {output}: another run is writing to it; wait for its end"]) from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(directory)


def replaced_shards(output: Path, units: list[Unit], tokenizer: Tokenizer) -> list[Path]:
    """Sidecars of shards that an earlier run made of inputs of this run, in other units. Raises ConfigError.

    All shards of a data directory are made with one tokenizer: another one is refused here, before any work is done.
    """
    planned = {(unit.source, unit.name) for unit in units}
    inputs = {(unit.source, piece.path) for unit in units for piece in unit.pieces}
    replaced = []
    for path in sorted(output.glob("[!.]*/*.json")):
        source = path.parent.name
        if (source, path.stem) in planned:
            continue
        try:
            sidecar = read_sidecar(path)
        except ShardError as error:
            raise ConfigError([f"--output {output}: {error}; move it away, or choose another directory"]) from error
        used, given = sidecar["tokenizer"]["sha256"], tokenizer.description["sha256"]
        if used != given:
            raise ConfigError([
                f"--output {output}: source {source} was made with another tokenizer, SHA-256 {used}; --tokenizer has "
                f"{given}; choose another directory, or the same tokenizer"
            ])
        if any((source, made_of["path"]) in inputs for made_of in sidecar["inputs"]):
            replaced.append(path)
    return replaced


def finished_sidecar(output: Path, unit: Unit) -> dict | None:
    """The sidecar of a unit whose shard is complete and not older than its inputs."""
    prefix = output / unit.source / unit.name
    try:
        sidecar = open_shard(prefix).sidecar
    except ShardError:
        return None
    written = beside(prefix, ".json").stat().st_mtime
    return sidecar if all(os.path.getmtime(piece.path) <= written for piece in unit.pieces) else None


def sweep(output: Path, sources: Iterable[str]):
    """Remove what a run that was stopped has left over: temporary files, and token files without a sidecar."""
    for source in sources:
        directory = output / source
        directory.mkdir(exist_ok=True)
        for path in directory.iterdir():
            match = SHARD_FILE.fullmatch(path.name)
            if match and (match["temporary"] or not beside(directory / match["unit"], ".json").exists()):
                path.unlink()
