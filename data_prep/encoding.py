"""From a unit of work to its shard: read, encode with SentencePiece, shuffle, write.

Every document is encoded by itself and followed by the end-of-sequence token; there is no beginning-of-sequence token.
Special tokens that are spelled out in a text stay text: SentencePiece never turns them into control ids.
"""

import hashlib
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from data_prep.documents import documents
from data_prep.units import Unit
from moh_lm.config import ConfigError
from moh_lm.data.shards import ShardWriter, sha256_of

CHUNK = 1 << 18  # characters that are encoded at once, where a text can be cut
REPORT = 1 << 20  # bytes of text between two reports of progress
BUCKETS, BUCKET_MEMORY = 64, 1 << 20


@dataclass(frozen=True)
class Options:
    """What determines a shard besides its inputs and the tokenizer."""

    text_key: str = "text"
    shuffle: bool = True


class Tokenizer:
    """A SentencePiece model. Raises ConfigError if ``path`` is not one, or if it has no end-of-sequence piece."""

    def __init__(self, path: str):
        if not os.path.isfile(path):
            raise ConfigError([f"--tokenizer {path}: no such file; give a SentencePiece model"])
        try:
            self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise ConfigError([f"--tokenizer {path}: not a SentencePiece model ({error})"]) from error
        self.vocab_size = self.model.vocab_size()
        self.eos_id = self.model.eos_id()
        if self.eos_id < 0:
            raise ConfigError([
                f"--tokenizer {path}: has no end-of-sequence piece to separate documents; give a model with one"
            ])
        self.description = {
            "sha256": sha256_of(path),
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
            "engine": f"sentencepiece {sentencepiece.__version__}",
        }
        self.chunk = CHUNK if self.newlines_separate() else None
        self.prefix = len(self.model.encode("\n")) - 1  # tokens of the space that the model puts before a text

    def newlines_separate(self) -> bool:
        """Whether a text may be cut before any newline, so that the tokens of its parts are those of the whole.

        True for BPE without normalisation if no piece, and no run of unknown characters, can reach across the cut.
        """
        model = sentencepiece_model_pb2.ModelProto.FromString(self.model.serialized_model_proto())
        trainer, normalizer = model.trainer_spec, model.normalizer_spec
        return (
            trainer.model_type == trainer.BPE
            and not trainer.treat_whitespace_as_suffix
            and not normalizer.precompiled_charsmap
            and not normalizer.remove_extra_whitespaces
            and not any("\n" in piece.piece[1:] for piece in model.pieces)
            and self.model.unk_id() not in self.model.encode("\n")
        )

    def encode(self, text: str) -> np.ndarray:
        """The ids of one document and the end-of-sequence id, int32 [tokens].

        SentencePiece takes about 45 bytes of memory per byte of text: long ones are cut at newlines if that is exact.
        """
        parts = []
        for number, chunk in enumerate(cut_before_newlines(text, self.chunk or len(text))):
            parts.append(np.array(self.model.encode(chunk)[self.prefix if number else 0 :], dtype=np.int32))
        return np.concatenate([*parts, np.array([self.eos_id], dtype=np.int32)])


def cut_before_newlines(text: str, size: int) -> Iterator[str]:
    """Parts of ``text`` of at least ``size`` characters, all but the first beginning with a newline."""
    start = 0
    while (cut := text.find("\n", start + size)) >= 0:
        yield text[start:cut]
        start = cut
    yield text[start:]


def tokenize_unit(
    unit: Unit, tokenizer: Tokenizer, options: Options, output: str, report: Callable[[int, int], None]
) -> dict:
    """Write the shard of ``unit`` below the data directory ``output``; returns its sidecar.

    ``report`` is called now and then with the bytes of input read and the tokens made since the last call. Raises
    InputError if an input cannot be read to its end, OSError if the shard cannot be written.
    """
    dropped, text_bytes = Counter(), 0

    def encoded():
        nonlocal text_bytes
        unreported = [0, 0, 0]  # bytes of text, bytes of input, tokens
        for piece in unit.pieces:
            position = 0
            for document in documents(piece, options.text_key):
                unreported[1] += document.position - position
                position = document.position
                if document.text is None:
                    dropped[document.dropped] += 1
                    continue
                ids = tokenizer.encode(document.text)
                text_bytes += document.num_bytes
                unreported[0] += document.num_bytes
                unreported[2] += len(ids)
                if unreported[0] >= REPORT:
                    report(*unreported[1:])
                    unreported = [0, 0, 0]
                yield ids
        report(*unreported[1:])

    prefix = Path(output, unit.source, unit.name)
    with ShardWriter(prefix, tokenizer.vocab_size) as shard:
        for ids in shuffled(encoded(), unit.name, prefix.parent) if options.shuffle else encoded():
            shard.add(ids)
        return shard.commit({
            "text_bytes": text_bytes,
            "dropped": dict(sorted(dropped.items())),
            "tokenizer": tokenizer.description,
            "options": vars(options),
            "inputs": [
                {"path": part.path, "size": part.size, "container": part.container, "range": [part.start, part.end]}
                for part in unit.pieces
            ],
        })


def shuffled(arrays: Iterable[np.ndarray], key: str, directory: Path) -> Iterator[np.ndarray]:
    """``arrays`` (int32) in the order of a keyed hash of their position: a fixed random order.

    In two passes with bounded memory: arrays are dealt to buckets by the first bits of their hash, on disk in
    ``directory`` if they are large; then each bucket is sorted by itself.
    """
    buckets = [([], array("q"), SpooledTemporaryFile(BUCKET_MEMORY, dir=directory)) for _ in range(BUCKETS)]  # noqa: SIM115
    for position, ids in enumerate(arrays):
        digest = hashlib.blake2b(position.to_bytes(8, "little"), key=key.encode()[-64:], digest_size=8).digest()
        hashes, lengths, file = buckets[digest[0] * BUCKETS // 256]
        hashes.append(digest)
        lengths.append(len(ids))
        file.write(ids.tobytes())
    for hashes, lengths, file in buckets:
        with file:
            file.seek(0)
            ids = np.frombuffer(file.read(), dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        for i in sorted(range(len(hashes)), key=hashes.__getitem__):
            yield ids[ends[i] - lengths[i] : ends[i]]
