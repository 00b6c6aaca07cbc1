"""The data directory while it is written: which shards are finished, replaced or left over.

All of this is read from the directory itself, so that a run may be stopped anywhere and the next one continues.
``SOURCE/groups.jsonl`` records which small files form a unit together (data_prep/units.py), a list of names per line.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from data_prep.documents import STDIN, STREAM
from data_prep.encoding import Tokenizer
from data_prep.inputs import LEFT_OUT, Source, same_content
from data_prep.storage import exists, is_remote
from data_prep.units import Unit
from moh_lm.config import ConfigError
from moh_lm.data.files import ShardError, beside, json_bytes, publish, read_json, seal
from moh_lm.data.reader import open_shard, read_sidecar
from moh_lm.data.shards import REPLACED, REPLACING, TOKENIZER_FILES, read_note
from moh_lm.parsing import parse_json
from moh_lm.units import listing

SHARD_FILE = re.compile(r"(?P<unit>.+-[0-9a-f]{16})\.(bin|idx|json|rejects\.jsonl)(?P<temporary>\.tmp-\d+)?")
FILES = "|".join(map(re.escape, ("stdin", "groups.jsonl", "manifest.json", LEFT_OUT, REPLACING, *TOKENIZER_FILES)))
SETTLED = ("sha256", "eos_id", "bos_id", "control_tokens")  # facts of a tokenizer that settle the ids of a text
TEMPORARY = re.compile(rf"({FILES})\.tmp-\d+")


def writable_directory(path: str | Path) -> Path:
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return Path(path)
    except OSError as error:
        raise ConfigError([f"--output {path}: cannot be written ({error.strerror}); choose another place"]) from error


def check_model_file(path: Path):
    """Raise ConfigError if no model can be written to ``path``."""
    if path.is_dir():
        raise ConfigError([f"--output {path}: is a directory; give a file name such as {path / 'tokenizer.model'}"])
    if path.name in TOKENIZER_FILES and (path.parent / "manifest.json").exists():
        raise ConfigError([f"--output {path}: is the tokenizer of the shards in its directory; give another file"])
    writable_directory(path.parent)


def check_tokenizer_files(output: Path, contents: dict[str, bytes]):
    """Raise ConfigError if ``output`` is not a data directory yet but holds other tokenizer files than these, or if its
    manifest.json belongs to something else."""
    with suppress(OSError, ValueError):  # absent or damaged
        found = read_json(output / "manifest.json")
        if not isinstance(found, dict) or "sources" not in found:
            raise ConfigError([f"--output {output}: has a manifest.json of something else; give another directory"])
    for name in TOKENIZER_FILES if not (output / "manifest.json").exists() else ():
        if (output / name).exists() and contents.get(name) != (output / name).read_bytes():
            problem = f"has {name} of another tokenizer; remove it, or choose another directory"
            raise ConfigError([f"--output {output}: {problem}"])


def check_source_names(output: Path, names: Iterable[str]):
    """Raise ConfigError for sources that a disk which ignores case would keep in one directory, and for a new one whose
    loss would be taken for the mean of all."""
    stored = {path.parent.name for path in output.glob("[!.]*/*.json")}
    if "mean" in {*names} - stored:
        problem = "would have the name under which runs show the mean loss of all sources"
        raise ConfigError([f"--output {output}: source mean {problem}; choose another name for it"])
    there = sorted({*names, *stored})
    alike = ((name, other) for name in names for other in there if name != other and name.lower() == other.lower())
    for name, other in alike:
        problem = f"differs from source {other} only in capitals, and some disks would keep both in one directory"
        raise ConfigError([f"--output {output}: source {name} {problem}; choose another name for it"])


def replaced_shards(
    output: Path, sources: dict[str, Source], units: list[Unit], tokenizer: Tokenizer
) -> tuple[list[Path], set[str]]:
    """Sidecars of shards that an earlier run made of inputs of ``sources``, in other units, and the sources where such
    a shard has a file that cannot be read now.

    A file of the same content is the same input: it was moved, or is a copy. Raises ConfigError, before any work is
    done, if such a shard also holds other files, which would be lost with it, if a shard was made with a different
    tokenizer, or if a source that gets standard input has shards of another one.
    """
    planned = {(unit.source, unit.name) for unit in units}
    inputs = {(name, piece.origin) for name, source in sources.items() for piece in source.pieces + source.copies}
    streamed = {name for name, source in sources.items() if any(piece.name == STDIN for piece in source.pieces)}
    contents = {  # shards made before 2026-11-28 record the version of a remote file
        (name, piece.size, known): piece
        for name, source in sources.items() for piece in source.pieces for known in (piece.version, piece.sample)
    }  # fmt: skip

    @cache
    def real_paths():
        return {(name, os.path.realpath(path)) for name, path in inputs if not is_remote(path)}

    @cache
    def input_of(source, path, size, sample):
        if source not in sources:
            return None
        if (source, path) in inputs:
            return path
        if not is_remote(path) and (source, os.path.realpath(path)) in real_paths():
            return path
        piece = contents.get((source, size, sample)) if size else None
        if piece is None:
            return None
        unchanged = os.path.isfile(path) and os.path.getsize(path) == size
        return piece.origin if not unchanged or same_content(piece, replace(piece, path=path)) else None

    replaced, unread = [], set()
    for path in sorted(output.glob("[!.]*/*.json")):
        source = path.parent.name
        if (source, path.stem) in planned:
            continue
        try:
            sidecar = read_sidecar(path)
        except ShardError as error:
            raise ConfigError([f"--output {output}: {error}; move it away, or choose another directory"]) from error
        used, given = sidecar["tokenizer"], tokenizer.description
        if any(used.get(key) != given.get(key) for key in SETTLED):
            raise ConfigError([
                f"--output {output}: source {source} was made with another tokenizer, SHA-256 "
                f"{describe_tokenizer(used)}; --tokenizer has {describe_tokenizer(given)}; choose another directory, "
                "or the same tokenizer"
            ])
        named = {
            made_of["path"]: input_of(source, made_of["path"], made_of["size"], made_of["sample"])
            for made_of in sidecar["inputs"]
        }
        mine = list(filter(None, named.values()))
        if not mine and source in streamed and any(file.startswith(STREAM) for file in named):
            raise ConfigError([
                f"--source {source}=-: {path} was made from other standard input, to which this text would be added; "
                f"remove {path.parent}/stdin-*.json to replace that text, or give another source name"
            ])
        if not mine:
            continue
        unnamed = [file for file in named if not named[file]]
        if not sources[source].paths.isdisjoint(unnamed):
            unread.add(source)
        others = [file for file in unnamed if file not in sources[source].paths and exists(file)]
        if others:
            raise ConfigError([
                f"--source {source}: {path} was made from files of this command, such as {mine[0]}, and from "
                f"{len(others)} others, such as {others[0]}; name all of them, or none"
            ])
        replaced.append(path)
    return replaced, unread


def describe_tokenizer(facts: dict) -> str:
    begin = f" after each and {facts['bos_id']} before" if "bos_id" in facts else ""
    control = facts.get("control_tokens", [])
    more = f" and {len(control)} more control tokens ({listing(control)})" if control else ""
    return f"{facts['sha256']} with end-of-sequence id {facts['eos_id']}{begin}{more}"


def doubled_shards(shards: list[Path], finished: dict[Unit, dict]) -> list[Path]:
    """Return the sidecars in ``shards`` with an input that a finished unit of their source also has."""
    made = {(unit.source, piece["size"], piece["sample"]) for unit in finished for piece in finished[unit]["inputs"]}
    made |= {(unit.source, piece.size, piece.version) for unit in finished for piece in unit.pieces}
    return [
        path
        for path in shards
        if any((path.parent.name, piece["size"], piece["sample"]) in made for piece in read_sidecar(path)["inputs"])
    ]


def noted_shards(output: Path, sources: Iterable[str]) -> dict[Path, bool]:
    """The sidecars that the notes of ``sources`` name, and whether they are replaced: other shards have their text, or
    soon will."""
    return {path: whole for name in sources for path, whole in read_note(output / name / REPLACING).items()}


def note_shards(output: Path, sources: Iterable[str], sidecars: Iterable[Path], replaced: Iterable[Path] = ()):
    """Write such notes about those of ``sidecars`` that exist. A manifest is refused until they are gone, but for those
    that are ``replaced``: others have all of their text, and it leaves them out."""
    for name in sources:
        note = output / name / REPLACING
        left = sorted(path for path in sidecars if path.parent.name == name and path.exists())
        if left:
            lines = [f"{path.name}{REPLACED if path in replaced else ''}\n" for path in left]
            publish(note, "".join(lines).encode())
        else:
            note.unlink(missing_ok=True)


def not_planned(sidecars: Iterable[Path], units: list[Unit]) -> set[Path]:
    """Those of ``sidecars`` whose shard is not that of one of ``units``: what else has its text is not known here."""
    planned = {(unit.source, unit.name) for unit in units}
    return {path for path in sidecars if (path.parent.name, path.stem) not in planned}


def is_unchanged(path: str, size: int, since: float) -> bool:
    """Whether a file exists with ``size`` bytes and has not been written to since."""
    return os.path.isfile(path) and os.path.getsize(path) == size and os.path.getmtime(path) <= since


def finished_sidecars(output: Path, units: list[Unit]) -> dict[Unit, dict]:
    """The sidecars of the units whose shards are complete and not older than their inputs.

    Raises ConfigError if one was made of a different file that the name of a unit does not distinguish from the input.
    """
    finished, same = {}, cache(same_content)
    for unit in units:
        prefix = output / unit.source / unit.name
        try:
            sidecar = open_shard(prefix).sidecar
        except ShardError:
            continue
        written = beside(prefix, ".json").stat().st_mtime
        for piece, made_of in zip(unit.pieces, sidecar["inputs"], strict=False):
            path, whole = made_of["path"], replace(piece, start=0, end=0, num_bytes=0)  # the whole file, compared once
            comparable = path != piece.origin and is_unchanged(path, piece.size, written)
            if comparable and not same(whole, replace(whole, path=path)):
                raise ConfigError([
                    f"source {unit.source}: {prefix} was made of {path}; {piece.path} has the same name, size, first "
                    "and last bytes, and differs in between: give one of the files another name"
                ])
        local = [piece.path for piece in unit.pieces if not is_remote(piece.path)]  # the name has etags of the others
        if all(os.path.getmtime(path) <= written for path in local):
            finished[unit] = sidecar
    return finished


def record_moves(output: Path, finished: dict[Unit, dict]):
    """Write where the inputs of finished units are now into their sidecars, whose times stay. Otherwise, a new file at
    an old path would be taken for the old input."""
    for unit, sidecar in finished.items():
        paths = [piece.origin for piece in unit.pieces]
        if [made_of["path"] for made_of in sidecar["inputs"]] != paths:
            sidecar["inputs"] = [
                made_of | {"path": path} for made_of, path in zip(sidecar["inputs"], paths, strict=True)
            ]
            path = beside(output / unit.source / unit.name, ".json")
            times = path.stat()
            publish(path, seal(json_bytes(sidecar)))
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def recorded_groups(directory: Path) -> list[list[str]]:
    """The groups of small files that earlier runs have formed in a source. Raises ConfigError."""
    path = directory / "groups.jsonl"
    try:
        return [parse_json(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ConfigError([f"{path}: not a list of names per line ({error}); remove it"]) from error


def record_groups(directory: Path, units: list[Unit]):
    """Record the groups in ``units``; those of earlier runs stay, since their files may return."""
    recorded = list(map(json.dumps, recorded_groups(directory)))
    formed = [json.dumps([piece.name for piece in unit.pieces]) for unit in units if len(unit.pieces) > 1]
    lines = list(dict.fromkeys([*recorded, *formed]))
    if lines != recorded:
        publish(directory / "groups.jsonl", "".join(f"{line}\n" for line in lines).encode())


def has_shard(output: Path, unit: Unit) -> bool:
    """Whether there is a shard of a unit, even if its inputs have been rewritten since."""
    return beside(output / unit.source / unit.name, ".json").exists()


def sweep(output: Path, sources: Iterable[str], failed: Iterable[Unit] = ()):
    """Remove what a stopped run left behind: temporary files, files of shards without a sidecar, and empty directories
    of sources.

    The bad records of units that have ``failed`` stay for inspection.
    """
    kept = {beside(output / unit.source / unit.name, ".rejects.jsonl") for unit in failed}
    for directory in [output, *(output / source for source in sources)]:
        found = list(directory.iterdir()) if directory.is_dir() else []
        names = {path.name for path in found}  # asking a network disk for each takes minutes
        for path in found:
            match = directory != output and SHARD_FILE.fullmatch(path.name)
            unfinished = match and f"{match['unit']}.json" not in names
            if TEMPORARY.fullmatch(path.name) or (match and match["temporary"]) or (unfinished and path not in kept):
                path.unlink()
        if directory != output:
            with suppress(OSError):  # the directory is absent or not empty
                directory.rmdir()
