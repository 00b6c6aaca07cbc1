"""Token shards and the directory that holds them: the format, the writer and the manifest.

A shard is the two files of Megatron-LM's IndexedDataset, byte for byte, and a JSON sidecar.

    PREFIX.bin    token ids of all documents, end to end, little-endian: uint16 for up to 65,536 pieces, else int32
    PREFIX.idx    lengths and offsets of the documents (index.py)
    PREFIX.json   counts, largest id, tokenizer, inputs, options, the checksums of the other two files and its own
                  (files.py)

The sidecar is written last: a shard without one is unfinished. docs/data.md lists what a data directory holds. The
manifest holds what a run has to know about each shard before it starts, so that a start only looks at file sizes, on
one rank of each machine. The first read of a shard compares its files with their sidecar, and the sidecar with the
manifest.
"""

import os
from array import array
from collections.abc import Sequence
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path
from types import NoneType
from typing import NamedTuple

import numpy as np

from moh_lm.data import files
from moh_lm.data.files import ShardError
from moh_lm.data.hugging_face_model import DOCUMENT_END, numbers_of
from moh_lm.data.index import DTYPES, index_bytes, token_code
from moh_lm.data.reader import Shard, open_shard

UNIT = {  # the types of the values of an entry in the manifest
    "dtype": {str}, "sequences": {int}, "documents": {int}, "tokens": {int}, "largest_id": {int},
    "text_bytes": {int, NoneType}, "content": {str}, "bytes": {dict}, "cuts": {list},
}  # fmt: skip
SUFFIXES = (".bin", ".idx", ".json")
REPLACING = ".replacing"  # in the directory of a source: sidecars whose text newer shards also have, or soon will
UNFINISHED = ".unfinished"  # in the directory of a source while its shards are made
REPLACED = " replaced"  # after the name of a sidecar there: others have all of its text
NUMPY_TYPES = {np.dtype(code).name: np.dtype(code) for code in DTYPES.values()}
# A tokenizer is the first of these (SentencePiece's, LLaMA-3's), or the others (Hugging Face's; the last is optional).
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
LONGEST_DOCUMENT = 2**31 - 1  # lengths are int32
CUTS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)  # fractions whose cuts the manifest records


def tokenizer_files(directory: str | Path) -> list[Path]:
    """Return the tokenizer's files in a directory; the file with the pieces is first."""
    model, *hugging_face = (Path(directory, name) for name in TOKENIZER_FILES)
    if os.path.exists(model):
        return [model]
    return [path for path in hugging_face if os.path.exists(path)] if os.path.exists(hugging_face[0]) else []


def tokenizer_file(directory: str | Path) -> Path | None:
    """Return the file with the pieces of the tokenizer in a directory, or None if there is no tokenizer."""
    return next(iter(tokenizer_files(directory)), None)


class ShardWriter:
    """Writes one shard: ``with ShardWriter(prefix, vocab_size) as shard: shard.add(ids); ...; shard.commit(facts)``.

    Nothing appears under a final name before ``commit``; leaving the block without it keeps an older shard as it was. A
    ``commit`` first removes an older sidecar, so that a sidecar never describes other bytes.
    """

    def __init__(self, prefix: str | Path, vocab_size: int):
        self.prefix = Path(prefix)
        self.vocab_size = vocab_size
        self.dtype = np.dtype(DTYPES[token_code(vocab_size)])
        self.lengths = array("i")
        self.largest_id = -1
        self.description = files.Description()

    def __enter__(self):
        self.temporary = files.temporary_name(files.beside(self.prefix, ".bin"))
        self.temporary.unlink(missing_ok=True)  # left by a killed process with the same number
        self.file = open(self.temporary, "xb")  # noqa: SIM115 (closed by __exit__)
        self.began = self.temporary.stat().st_mtime_ns
        return self

    def __exit__(self, *exception):
        self.file.close()
        self.temporary.unlink(missing_ok=True)

    def add(self, document: Sequence[int] | np.ndarray):
        """Append one document: a 1-d sequence of ids, its end-of-sequence token included.

        Raises ShardError if it is empty, too long for the format, or holds an id outside the vocabulary.
        """
        ids = np.asarray(document)
        if not 1 <= len(ids) <= LONGEST_DOCUMENT:
            raise ShardError(f"{self.prefix}: document of {len(ids):,} tokens; allowed are 1 to {LONGEST_DOCUMENT:,}")
        smallest, largest = int(ids.min()), int(ids.max())
        if smallest < 0 or largest >= self.vocab_size:  # check before narrowing, which would wrap silently
            raise ShardError(f"{self.prefix}: ids {smallest}..{largest} exceed the vocabulary 0..{self.vocab_size - 1}")
        data = ids.astype(self.dtype).tobytes()
        self.file.write(data)
        self.description.update(data)
        self.lengths.append(len(ids))
        self.largest_id = max(self.largest_id, largest)

    def commit(self, facts: dict) -> dict:
        """Publish .bin, .idx and, last, the sidecar; returns the sidecar. ``facts`` are further entries for it."""
        lengths = np.array(self.lengths, dtype="<i4")
        index = index_bytes(lengths, token_code(self.vocab_size))
        self.file.flush()
        os.fsync(self.file.fileno())
        sidecar = {
            "version": files.VERSION,
            "dtype": self.dtype.name,
            "documents": len(lengths),
            "tokens": int(lengths.sum(dtype=np.int64)),
            "largest_id": self.largest_id,
            **facts,
            "bin": self.description.facts(),
            "idx": files.Description(index).facts(),
        }
        files.beside(self.prefix, ".json").unlink(missing_ok=True)
        os.replace(self.temporary, files.beside(self.prefix, ".bin"))
        files.publish(files.beside(self.prefix, ".idx"), index)
        path = files.beside(self.prefix, ".json")
        files.publish(path, files.seal(files.json_bytes(sidecar)))
        os.utime(path, ns=(self.began, self.began))  # an input that was changed since then is newer
        return sidecar


def write_manifest(data_dir: str | Path, leaving: Sequence[Path] = ()) -> dict:
    """Make DATA_DIR/manifest.json from the shards found below ``data_dir``; returns it. leaving: sidecars of shards
    that it does not name, because the caller removes them afterwards. Nor are those that notes call replaced.

    {"version", "tokenizer": {"sha256", "vocab_size", "eos_id"}, "cut_fractions": [...],
     "sources": {NAME: {"tokens", "documents", "units": {UNIT: result of ``unit_entry``}}}}

    Raises ShardError if shards differ in their tokenizer, if two shards of a source were made from the same input, or
    if a command was stopped before it had made all shards of a source, or had removed those that it replaced.
    """
    leaving = set(leaving)
    for problem in unfinished_sources(data_dir).values():
        raise ShardError(problem)
    for note in sorted(Path(data_dir).glob(f"[!.]*/{REPLACING}")):
        noted = read_note(note)
        leaving |= {path for path, is_replaced in noted.items() if is_replaced}
        there = [shard for shard in noted if shard.exists() and shard not in leaving]
        if there:
            what = "may have text that newer shards also have"
            remedy = f"run data_prep/tokenize.py for {note.parent.name} again, or delete it"
            raise ShardError(f"{there[0]}: {what}; {remedy}")
    sources, inputs, tokenizers = {}, [], {}
    for path in sorted({*Path(data_dir).glob("[!.]*/*.json")} - leaving):
        shard = open_shard(path.with_suffix(""))
        sidecar = shard.sidecar
        source = sources.setdefault(path.parent.name, {"tokens": 0, "documents": 0, "units": {}})
        source["tokens"] += sidecar["tokens"]
        source["documents"] += sidecar["documents"]
        source["units"][path.stem] = unit_entry(shard)
        inputs += [(path.parent.name, made_of["path"], *made_of["range"], path) for made_of in sidecar["inputs"]]
        tokenizers.setdefault(sidecar["tokenizer"]["sha256"], (path, sidecar["tokenizer"]))
    if len(tokenizers) > 1:
        (one, first), (other, second), *_ = tokenizers.values()
        raise ShardError(
            f"{one} and {other} were made with different tokenizers ({first['sha256']} and {second['sha256']}); "
            "keep one data directory for each tokenizer"
        )
    for (source, made_of, _, end, one), (next_source, next_made_of, start, _, other) in pairwise(sorted(inputs)):
        if (source, made_of) == (next_source, next_made_of) and start < end:
            raise ShardError(
                f"{one} and {other} were made from the same part of {made_of}; "
                f"run data_prep/tokenize.py for {source} again"
            )
    tokenizer = {key: value for _, used in tokenizers.values() for key, value in used.items() if key != "engine"}
    manifest = {"version": files.VERSION, "tokenizer": tokenizer, "cut_fractions": list(CUTS), "sources": sources}
    files.publish(Path(data_dir) / "manifest.json", files.seal(files.json_bytes(manifest)))
    return manifest


def unfinished_sources(data_dir: str | Path) -> dict[str, str]:
    """Return {name of a source with only some of its shards: a sentence}."""
    marks = {path.parent.name: path for path in sorted(Path(data_dir).glob(f"[!.]*/{UNFINISHED}"))}
    return {
        name: f"{mark.parent}: is not finished, because its command was stopped; run data_prep/tokenize.py for {name} "
        f"again, or remove {mark} to use the shards that are there"
        for name, mark in marks.items() if any(mark.parent.glob("*.json"))
    }  # fmt: skip


def read_note(note: Path) -> dict[Path, bool]:
    """Return {sidecar: whether other shards have all of its text} of a ``REPLACING`` file; {} if there is none."""
    lines = note.read_text().splitlines() if note.exists() else []
    return {note.parent / line.removesuffix(REPLACED): line.endswith(REPLACED) for line in lines}


def unit_entry(shard: Shard) -> dict:
    """Return what a run has to know about a shard before it starts; ``cuts`` belong to the fractions ``CUTS``."""
    with shard.document_starts() as starts:
        cuts = [starts.cut(fraction) for fraction in CUTS]
    return {
        "dtype": shard.dtype.name,
        "sequences": shard.num_sequences,
        "documents": shard.num_documents,
        "tokens": shard.num_tokens,
        "largest_id": shard.largest_id,
        "text_bytes": shard.sidecar.get("text_bytes"),
        "content": shard.content,
        "bytes": {suffix: os.stat(f"{shard.prefix}{suffix}").st_size for suffix in SUFFIXES},
        "cuts": cuts,
    }


@files.patient
def read_manifest(data_dir: str | Path) -> dict:
    """Return the manifest of a data directory. Raises ShardError if it is damaged or for another tokenizer."""
    path = Path(data_dir) / "manifest.json"
    manifest = files.read_facts(path)
    files.check_facts(path, manifest, {"tokenizer": dict, "sources": dict, "cut_fractions": list})
    for name, source in manifest["sources"].items():
        files.check_facts(path, source, {"tokens": int, "documents": int, "units": dict}, f"{name} ")
        if wrong := wrong_value(list(source["units"].values()), len(manifest["cut_fractions"])):
            raise ShardError(f"{path}: is damaged: a shard of {name} has a wrong {wrong}; {files.REMEDY}")
    if manifest["sources"]:
        files.check_facts(path, manifest["tokenizer"], {"sha256": str, "vocab_size": int}, "tokenizer ")
        if tokenizer := tokenizer_file(data_dir):
            check_tokenizer(tokenizer, manifest["tokenizer"]["sha256"])
            if tokenizer.name != TOKENIZER_FILES[0]:
                check_end(tokenizer, manifest["tokenizer"].get("eos_id"))
    return manifest


def wrong_value(entries: list, num_cuts: int) -> str | None:
    """Return what is missing, or of a wrong type, in any of the ``entries`` of a manifest. There can be thousands, so
    each kind of value is checked for all of them at once."""
    try:
        columns = {key: list(map(itemgetter(key), entries)) for key in UNIT}
        columns |= {suffix: list(map(itemgetter(suffix), columns["bytes"])) for suffix in SUFFIXES}
    except (LookupError, TypeError):
        return "entry"
    types = UNIT | dict.fromkeys(SUFFIXES, {int})
    wrong = [key for key, values in columns.items() if not set(map(type, values)) <= types[key]]
    if wrong or not set(columns["dtype"]) <= NUMPY_TYPES.keys():
        return wrong[0] if wrong else "dtype"
    cuts = columns["cuts"]
    sound = set(map(len, cuts)) <= {num_cuts} and set(map(type, chain.from_iterable(cuts))) <= {int}
    return None if sound else "cuts"


def check_end(path: Path, recorded: int | None):
    """Raise ShardError unless the tokenizer_config.json at ``path`` ends documents as recorded."""
    config = path.with_name(TOKENIZER_FILES[2])
    try:
        pieces, settings = files.read_json(path), files.read_json(config)
        end = settings.get(DOCUMENT_END, settings.get("eos_token"))
        end = end["content"] if isinstance(end, dict) else end
        found = numbers_of(pieces).get(end)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ShardError(f"{config}: is not that of the tokenizer beside it ({error}); restore it") from error
    if found != recorded and recorded is not None:
        named = f"not with {end!r}, id {found}" if found is not None else "its eos_token is no piece"
        raise ShardError(f"{config}: documents end with id {recorded}, and {named}; restore it")


def check_tokenizer(path: Path, recorded: str):
    """Raise ShardError unless the tokenizer at ``path`` has the SHA-256 ``recorded``."""
    found = files.sha256_of(path, files.opened)
    if found != recorded:
        raise ShardError(
            f"{path}: is not the tokenizer of the shards: its SHA-256 begins with {found[:12]}, that in manifest.json "
            f"with {recorded[:12]}; restore it"
        )


class OpenedSource(NamedTuple):
    shards: list[Shard]
    cuts: list[int]  # the token position where the held-out tail of each shard starts
    unlisted: list[str]  # finished shards that are not in the manifest


@files.patient
def open_source(
    data_dir: str | Path, name: str, manifest: dict, fraction: float, *, compares_sizes: bool = True
) -> OpenedSource:
    """Return the shards of a source in the order of the manifest, with ``fraction`` of their tokens held out.

    Only names and sizes of the files are checked, and the parts of the indexes that are read for a fraction whose cuts
    the manifest does not record. Raises ShardError for a file that is missing or has another size.
    Unless this call ``compares_sizes``, the manifest is believed, and there are no unlisted shards.
    """
    units, directory = manifest["sources"][name]["units"], os.path.join(data_dir, name)
    recorded = {unit + suffix: size for unit, entry in units.items() for suffix, size in entry["bytes"].items()}
    sizes = file_sizes(directory) if compares_sizes else recorded
    wrong = [*(recorded.keys() - sizes.keys())]
    # A sidecar has its own hash, and data_prep writes it again when inputs have moved.
    wrong += [file for file, size in recorded.items() - sizes.items() if not file.endswith(".json")]
    if wrong:
        file = min(wrong)
        raise ShardError(wrong_size(os.path.join(directory, file), sizes.get(file), recorded[file]))
    facts = itemgetter("sequences", "documents", "tokens", "largest_id", "content")
    shards = [Shard(f"{directory}/{unit}", NUMPY_TYPES[entry["dtype"]], *facts(entry)) for unit, entry in units.items()]
    if not fraction:
        cuts = [shard.num_tokens for shard in shards]
    elif fraction in manifest["cut_fractions"]:
        known = manifest["cut_fractions"].index(fraction)
        cuts = [entry["cuts"][known] for entry in units.values()]
    else:
        cuts = []
        for shard in shards:
            with shard.document_starts() as starts:
                cuts.append(starts.cut(fraction))
    finished = {file[: -len(".json")] for file in sizes.keys() - recorded.keys() if file.endswith(".json")}
    return OpenedSource(shards, cuts, sorted(finished))


def file_sizes(directory) -> dict[str, int]:
    """Return the size of each file in ``directory``; empty if it is absent."""
    try:
        with os.scandir(directory) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    except OSError as error:
        raise ShardError(f"{directory}: {error.strerror}") from error


def wrong_size(path, size, expected) -> str:
    if size is not None:
        return f"{path}: {size} bytes, but manifest.json records {expected}; {files.REMEDY}"
    if path.endswith(".json"):
        return f"{path} is missing: the shard is unfinished; run data_prep/tokenize.py again"
    return f"{path} is missing; {files.REMEDY}"
