"""Text to token ids, with a SentencePiece model, LLaMA-3's, or a tokenizer of Hugging Face.

Every document is encoded by itself and followed by the end-of-sequence token; there is no beginning-of-sequence token.
Special tokens that are spelled out in a text stay text: no engine turns them into control ids.

Where a model allows it, SentencePiece is asked only for what is not known yet (data_prep/segment_cache.py). One
document in a thousand is then encoded by SentencePiece as well, and must come out the same.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import sentencepiece

from data_prep.segment_cache import SegmentCache, segment_cache
from moh_lm.config import ConfigError
from moh_lm.data.files import ShardError, sha256_of
from moh_lm.data.tokenizer import model_files, read_model

BATCH = 1 << 17  # characters of text that are encoded together
CHECKED = 1000  # one document in so many is encoded twice, unless
LONGEST_CHECKED = 1 << 20  # it has more characters: SentencePiece takes about 45 bytes of memory for each


@dataclass(frozen=True)
class Options:
    """What determines a shard besides its inputs and the tokenizer."""

    text_key: str = "text"
    shuffle: bool = True


class Tokenizer:
    """The model at ``path``. Raises ConfigError if it is none, or has no end-of-sequence token."""

    def __init__(self, path: str):
        self.model = read_model(path)
        self.files = model_files(path)
        plain = isinstance(self.model, sentencepiece.SentencePieceProcessor)
        engine = f"sentencepiece {sentencepiece.__version__}" if plain else self.model.engine
        self.vocab_size = self.model.vocab_size()
        self.eos_id = self.model.eos_id()
        if self.eos_id < 0:
            raise ConfigError([
                f"--tokenizer {path}: has no end-of-sequence piece to separate documents; give a model with one"
            ])
        self.description = {
            "sha256": sha256_of(next(iter(self.files.values()))),
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
            "engine": engine,
        }
        self.num_encoded = 0

    @property
    def identity(self) -> str:
        """What names a unit of work: the file's hash, and the end-of-sequence id where another file tells it."""
        digest = self.description["sha256"]
        return f"{digest}, {self.eos_id}" if len(self.files) > 1 else digest

    @cached_property
    def cache(self) -> SegmentCache | None:
        """Made when the first text is encoded; None if the model allows none."""
        return segment_cache(self.model) if isinstance(self.model, sentencepiece.SentencePieceProcessor) else None

    def encode_all(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of each document and the end-of-sequence id, int32 [tokens], in the order of ``texts``.

        Texts are taken some at a time. Raises ShardError if the segment cache and SentencePiece disagree.
        """
        batch, size = [], 0
        for text in texts:
            batch.append(text)
            size += len(text)
            if size >= BATCH:
                yield from self.encode_batch(batch)
                batch, size = [], 0
        if batch:
            yield from self.encode_batch(batch)

    def encode(self, text: str) -> np.ndarray:
        """The ids of one document and the end-of-sequence id, int32 [tokens]."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        if self.cache is None:
            return [self.encode_plainly(text) for text in texts]
        encoded = self.cache.encode(texts)
        for index in range(-self.num_encoded % CHECKED, len(texts), CHECKED):
            text = texts[index]
            if len(text) <= LONGEST_CHECKED and not np.array_equal(encoded[index], self.encode_plainly(text)):
                raise ShardError(
                    f"the segment cache and SentencePiece encode a document differently; please report this, with the "
                    f"tokenizer and the document that begins {text[:100]!r}"
                )
        self.num_encoded += len(texts)
        return encoded

    def encode_plainly(self, text: str) -> np.ndarray:
        return np.append(self.model.encode(text, out_type="numpy").astype(np.int32), np.int32(self.eos_id))
