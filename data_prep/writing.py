"""Makes the shard of a unit of work: reads, encodes, shuffles and writes documents, and counts dropped records.

    UNIT.bin, UNIT.idx, UNIT.json    the shard (moh_lm/data/shards.py); the sidecar counts what was dropped by reason
    UNIT.rejects.jsonl               the first bad records, if any: {"file", "offset", "reason", "excerpt"}
"""

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import SpooledTemporaryFile

import numpy as np

from data_prep.containers import InputError
from data_prep.documents import HARMLESS, Document, Piece, documents
from data_prep.encoding import Options, Tokenizer
from data_prep.units import Unit
from moh_lm.data.files import beside, publish
from moh_lm.data.sentencepiece_model import SPACE
from moh_lm.data.shards import ShardWriter

REPORT = 1 << 20  # bytes of text, or of input, between two reports of progress
BUCKETS, BUCKET_MEMORY = 256, 1 << 18
EXAMPLES = 20  # bad records shown
USUAL_FRACTION, USUAL_NUMBER = 0.01, 1000  # default limits of bad records; the number holds up to nine tenths of all


@dataclass
class Account:
    """The results for the records of a unit."""

    documents: int = 0
    text_bytes: int = 0
    altered: int = 0  # documents with U+2581, which the tokenizer treats as a space
    dropped: Counter = field(default_factory=Counter)
    rejects: list[dict] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # a sentence for each file with bad records and no document

    def drop(self, piece: Piece, document: Document):
        self.dropped[document.dropped] += 1
        if document.dropped not in HARMLESS and len(self.rejects) < EXAMPLES:
            excerpt = document.excerpt.decode(errors="backslashreplace")
            reject = {"file": piece.origin, "offset": document.offset, "reason": document.dropped, "excerpt": excerpt}
            self.rejects.append(reject)


def too_many_bad(dropped: dict[str, int], documents: int, max_bad_fraction: float | None) -> str | None:
    """Return a sentence if there are more bad records than ``max_bad_fraction`` or, without it, the defaults allow."""
    bad = sum(count for reason, count in dropped.items() if reason not in HARMLESS)
    good = documents + dropped.get("of another set", 0)
    total = bad + good
    if max_bad_fraction is None and bad <= USUAL_NUMBER and (bad <= 9 * good or not good):
        return nothing_read(dropped, documents)
    allowed = USUAL_FRACTION if max_bad_fraction is None else max_bad_fraction
    if bad <= allowed * total:
        return None
    reasons = bad_records(dropped)
    return f"{bad:,} of {total:,} records are bad ({reasons}), more than --max-bad-fraction {allowed:g} allows"


def nothing_read(dropped: dict[str, int], documents: int) -> str | None:
    """Return a sentence if there are bad records but no document of this source or another one."""
    reasons = bad_records(dropped)
    if documents or not reasons or "of another set" in dropped:
        return None
    not_text = dropped.get("bad UTF-8")
    remedy = "convert it, for example with iconv" if not_text else "give the right --text-key, convert the file"
    return f"holds no document ({reasons}); {remedy}, or leave it out"


def bad_records(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()) if reason not in HARMLESS)


def tokenize_unit(
    unit: Unit,
    tokenizer: Tokenizer,
    options: Options,
    output: str,
    max_bad_fraction: float | None,
    report: Callable[[int, int], None],
) -> dict:
    """Write the shard of ``unit`` below the data directory ``output``; returns its sidecar.

    ``report`` is called regularly with the bytes of input read and the tokens made since the last call. Raises
    InputError if an input cannot be read to its end or has too many bad records, OSError if the shard cannot be
    written; then there is no shard.
    """
    prefix = Path(output, unit.source, unit.name)
    account = Account()
    with ShardWriter(prefix, tokenizer.vocab_size) as shard:
        ids = encoded(unit, tokenizer, options, account, report)
        for document in shuffled(ids, unit.name, prefix.parent) if options.shuffle else ids:
            shard.add(document)
        write_rejects(beside(prefix, ".rejects.jsonl"), account.rejects)
        problem = account.lost[0] if account.lost and max_bad_fraction is None else None
        if problem is None and (bad := too_many_bad(account.dropped, account.documents, max_bad_fraction)):
            problem = f"{unit.pieces[0].origin}: {bad}"
        if problem:
            more = f"; {len(account.lost) - 1} other files have none either" if len(account.lost) > 1 else ""
            raise InputError(f"{problem}{more}; the first bad records are in {prefix}.rejects.jsonl")
        return shard.commit({
            "text_bytes": account.text_bytes,
            **({"altered": account.altered} if account.altered else {}),
            "dropped": dict(sorted(account.dropped.items())),
            "tokenizer": tokenizer.description,
            "options": options.facts(),
            "inputs": [
                {
                    "path": piece.origin,
                    "size": piece.size,
                    "sample": piece.sample,
                    "container": piece.container,
                    "range": [piece.start, piece.end],
                }
                for piece in unit.pieces
            ],
        })


def encoded(unit, tokenizer, options, account, report) -> Iterator[np.ndarray]:
    """Yield the ids of each document of ``unit``, int32, and update ``account``."""
    unreported = [0, 0, 0]  # bytes of text, bytes of input, tokens

    def texts():
        for piece in unit.pieces:
            position, documents_before, dropped_before = 0, account.documents, Counter(account.dropped)
            for document in documents(piece, options.text_key):
                unreported[1] += document.position - position
                position = document.position
                if document.text is None:
                    account.drop(piece, document)
                else:
                    account.documents += 1
                    account.text_bytes += document.num_bytes
                    account.altered += SPACE in document.text and tokenizer.takes_mark_for_space
                    unreported[0] += document.num_bytes
                    yield document.text
                if max(unreported[:2]) >= REPORT:
                    report(*unreported[1:])
                    unreported[:] = [0, 0, 0]
            dropped, made = account.dropped - dropped_before, account.documents - documents_before
            if problem := nothing_read(dropped, made):
                account.lost.append(f"{piece.origin}: {problem}")

    for ids in tokenizer.encode_all(texts()):
        unreported[2] += len(ids)
        yield ids
    report(*unreported[1:])


def write_rejects(path: Path, rejects: list[dict]):
    if rejects:
        publish(path, "".join(json.dumps(reject) + "\n" for reject in rejects).encode())
    else:
        path.unlink(missing_ok=True)


def shuffled(arrays: Iterable[np.ndarray], key: str, directory: Path) -> Iterator[np.ndarray]:
    """Yield ``arrays`` (int32) in the order of a keyed hash of their position, a fixed random order.

    There are two passes with bounded memory: the first bits of their hash assign arrays to buckets, on disk in
    ``directory`` if they are large; then each bucket is sorted by itself.
    """
    buckets = [(array("Q"), array("q"), SpooledTemporaryFile(BUCKET_MEMORY, dir=directory)) for _ in range(BUCKETS)]  # noqa: SIM115
    for position, ids in enumerate(arrays):
        digest = hashlib.blake2b(position.to_bytes(8, "little"), key=key.encode()[-64:], digest_size=8).digest()
        hashes, lengths, file = buckets[digest[0] * BUCKETS // 256]
        hashes.append(int.from_bytes(digest, "big"))
        lengths.append(len(ids))
        file.write(ids.tobytes())
    for hashes, lengths, file in buckets:
        with file:
            file.seek(0)
            ids = np.frombuffer(file.read(), dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        for i in np.argsort(hashes, kind="stable"):
            yield ids[ends[i] - lengths[i] : ends[i]]
