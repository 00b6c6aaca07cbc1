"""Recognises the corpus of a record, first by its schema, then by its path. docs/data.md lists them.

``meta`` is an object, or a string that holds JSON or the representation of a Python dictionary, as in parquet files
that were converted from RedPajama. A SET of RedPajama is recognised by meta.source, by keys that only one set has, or
else by the path: ``arxiv/``, ``c4-train.00000-of-01024.jsonl``, ``book_sample.jsonl``. A record needs a text, so files
of attributes, such as Dolma's, are not a corpus.

Text for validation or tests and languages of C4 besides English belong to no source, although they are recognised.
"""

import ast
import re
from collections.abc import Iterable
from pathlib import PurePath

from moh_lm.parsing import parse_json

SET_COLUMNS = ("red_pajama_subset", "meta")  # parquet columns that identify the set of a row
# As they are spelled in records and paths, in lower case without punctuation.
NAMES = ("arxiv", "books", "c4", "commoncrawl", "github", "stackexchange", "wikipedia")
SETS = {name: name for name in NAMES} | {"book": "books", "cc": "commoncrawl", "wiki": "wikipedia"}
KEYS = {  # keys of ``meta`` that only one set has
    "arxiv": {"arxiv_id"},
    "books": {"short_book_title"},
    "commoncrawl": {"pred_label", "wiki_prob"},
    "github": {"content_hash"},
    "stackexchange": {"question_score"},
    "wikipedia": {"title", "language"},
}
FINEWEB = {"dump", "file_path", "language_score", "token_count"}
LONGEST_META = 1 << 16  # characters: as Python's syntax tree they take hundreds of times as many bytes
STATED_SET = re.compile(rb'"redpajama_set_name"\s*:\s*"(\w+)"')
DOLMA_PATH = re.compile(r"dolma-v1_")
SPLITS = {"test", "val", "valid", "validation", "dev", "heldout"}  # parts of names of files that are not for training
VARIANTS = {"en", "en.noblocklist", "en.noclean", "realnewslike"}  # folders of C4, which share most of their texts
NOT_FOR_TRAINING = "left out as validation or test text, which only --source NAME=GLOB reads"
OTHER_LANGUAGES = "left out as C4 in other languages, which only --source NAME=GLOB reads"


def recognize(record: dict, name: str, text_key: str, tabular: bool) -> list[str]:
    """Return the sources of a file's records, judging by one record: several if the file mixes sets, none if the corpus
    is unknown.

    ``name``: the informative part of the file's path. ``tabular``: whether it is parquet, where sets of RedPajama may
    be mixed without a sign of it.
    """
    if text_key not in record:
        return []
    meta = parsed(record.get("meta"))
    if isinstance(meta.get("pile_set_name"), str):
        return ["pile"]
    if "redpajama_set_name" in meta:
        return [f"slimpajama-{set_name}" for set_name in NAMES]
    own_schema = "id" not in record and ("meta" in record or KEYS["commoncrawl"] <= record.keys())
    if "red_pajama_subset" in record or (tabular and own_schema and source_of_record(record)):
        return [f"redpajama-{set_name}" for set_name in NAMES]
    if own_schema:
        source = source_of_record(record) or source_of_path(name)
        return [source] if source else []
    if "short_book_title" in record:
        return ["pg19"]
    if {"id", "source"} <= record.keys() or DOLMA_PATH.search(name):
        return ["dolma"]
    if record.keys() >= FINEWEB:
        return ["fineweb-edu" if "int_score" in record else "fineweb"]
    if "bff_contained_ngram_count_before_dedupe" in record:
        return ["dclm"]
    return ["c4"] if record.keys() == {text_key, "timestamp", "url"} else []


def reason_to_leave_out(name: str, sources: list[str]) -> str | None:
    """Return why the recognised file called ``name`` belongs to none of its ``sources``, or None if it does."""
    if not SPLITS.isdisjoint(re.split(r"[/._-]", name.lower())):
        return NOT_FOR_TRAINING
    return OTHER_LANGUAGES if sources == ["c4"] and "multilingual" in name.split("/") else None


def variants_of_c4(paths: Iterable[str]) -> list[str]:
    """Return the variants of C4 that the files at ``paths`` are from, sorted."""
    return sorted(VARIANTS.intersection(PurePath(path).parent.name for path in paths))


def source_of_record(record: dict) -> str | None:
    """The source of a record of RedPajama or SlimPajama, if the record shows it."""
    meta = parsed(record.get("meta")) or record
    if "redpajama_set_name" in meta:
        return named("slimpajama", meta["redpajama_set_name"])
    if "red_pajama_subset" in record:
        return named("redpajama", record["red_pajama_subset"])
    source = meta.get("source")
    if isinstance(source, str) and (found := named("redpajama", source.split("/")[0])):
        return found
    return next((f"redpajama-{set_name}" for set_name, keys in KEYS.items() if keys <= meta.keys()), None)


def source_of_line(line: bytes) -> str | None:
    """The source that a line of SlimPajama states, found without parsing it; None if it is not written as usual.

    Inside a text the quotes around the key would be escaped, so what is found is the key itself.
    """
    position = line.rfind(b'"redpajama_set_name"')
    match = STATED_SET.match(line, position) if position >= 0 else None
    return named("slimpajama", match[1].decode()) if match else None


def source_of_path(name: str) -> str | None:
    """The source of RedPajama that the nearest folder names, else the beginning of the file name."""
    path = PurePath(name)
    candidates = [*(folder.name for folder in path.parents), re.split(r"[^a-z0-9]", path.name.lower())[0]]
    return next(filter(None, (named("redpajama", candidate) for candidate in candidates)), None)


def named(corpus: str, set_name: object) -> str | None:
    """The source of a set as a corpus spells it, such as "RedPajamaCommonCrawl" or "common_crawl"."""
    spelling = re.sub("[^a-z0-9]", "", str(set_name).lower().removeprefix("redpajama"))
    return f"{corpus}-{SETS[spelling]}" if spelling in SETS else None


def parsed(meta) -> dict:
    """Return ``meta`` as a dictionary, empty if it cannot be read as one or is longer than any that names a set."""
    if isinstance(meta, str) and len(meta) <= LONGEST_META:
        try:
            meta = parse_json(meta)
        except ValueError:
            try:
                meta = ast.literal_eval(meta)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return {}
    return meta if isinstance(meta, dict) else {}
