"""A source of a run: its shards, and which parts of them are used for training or held out.

Every shard is cut once. The heads of a source's shards, end to end, are its training stream; the tails are its
validation stream. Windows may cross from shard to shard inside their stream but never the cut, so validation shares no
token with training. The cut depends on the shard and the fraction only: it stays when other shards come or go.

    shard    |------------- head ------------|-- tail --|         tail = about validation_fraction, whole documents
    stream   head 1 | head 2 | ...     windows of S + 1 tokens at stride S, ordered by Mixture
             tail 1 | tail 2 | ...     windows of S + 1 tokens at stride S, ordered by a permutation of their own
"""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from moh_lm.data.files import patient
from moh_lm.data.mixture import Permutation
from moh_lm.data.shards import OpenedSource, Shard


class Stream:
    """Parts of shards joined end to end and addressed by token position. ``parts`` are (shard, first token, end)."""

    def __init__(self, parts: Iterable[tuple[Shard, int, int]]):
        self.parts = [part for part in parts if part[1] < part[2]]
        self.ends = np.cumsum([end - first for _, first, end in self.parts], dtype=np.int64)
        self.num_tokens = int(self.ends[-1]) if self.parts else 0

    def pieces(self, position: int, count: int) -> Iterator[tuple[Shard, int, int]]:
        """Yield (shard, first token, end) of the pieces that form ``count`` tokens from ``position`` on."""
        part = int(np.searchsorted(self.ends, position, side="right"))
        while count:
            shard, _, end = self.parts[part]
            left = int(self.ends[part]) - position
            taken = min(left, count)
            yield shard, end - left, end - left + taken
            position += taken
            count -= taken
            part += 1

    def read(self, position: int, count: int) -> np.ndarray:
        """Return token ids int64 [count] from ``position`` on. Raises ShardError if a file is damaged."""
        pieces = [shard.read(first, end - first) for shard, first, end in self.pieces(position, count)]
        return np.concatenate(pieces).astype(np.int64)

    @patient
    def document_starts(self, position: int, count: int) -> list[int]:
        """Return the offsets, 1 to count - 1, at which documents or parts of the stream begin among ``count`` tokens
        from ``position`` on. Found by search in the indexes. Raises ShardError."""
        found, done = [], 0
        for shard, first, end in self.pieces(position, count):
            with shard.document_starts() as starts:
                found += [done, *(done + start - first for start in starts.inside(first + 1, end))]
            done += end - first
        return found[1:]


class Source:
    """One source of a run: its shards, their streams, and the windows held out.

    bytes_per_token: UTF-8 bytes of text per token, from the manifest; None for shards of other tools.
    """

    def __init__(self, name: str, opened: OpenedSource, seq_length: int, bytes_per_token: float | None = None):
        self.name = name
        self.bytes_per_token = bytes_per_token
        self.shards, cuts, self.unlisted = opened
        self.seq_length = seq_length
        parts = list(zip(self.shards, cuts, strict=True))
        self.training = Stream((shard, 0, cut) for shard, cut in parts)
        self.validation = Stream((shard, cut, shard.num_tokens) for shard, cut in parts)
        self.cut_texts = [shard for shard, cut in parts if 0 < cut < shard.num_tokens and shard.num_documents == 1]
        self.validation_windows = max(0, self.validation.num_tokens - 1) // seq_length

    def validation_positions(self, num_samples: int) -> np.ndarray:
        """Return the first tokens of ``num_samples`` held-out windows, in an order that mixes the shards."""
        order = Permutation(self.validation_windows, f"validation/{self.name}")
        return order(np.arange(min(num_samples, self.validation_windows))) * self.seq_length

    def identity(self) -> str:
        """Return a hash of the contents of all shards."""
        return hashlib.sha256("".join(shard.content for shard in self.shards).encode()).hexdigest()

    def problems(self, fraction: float) -> list[str]:
        """Return the reasons why a run with this source cannot start."""
        needed, training, held_out = self.seq_length + 1, self.training.num_tokens, self.validation.num_tokens
        if training < needed:
            return [
                f"source {self.name} has {training} training tokens, but a sample of --seq-length {self.seq_length} "
                f"takes {needed}: prepare more text, leave the source out of --data-mix, or shorten --seq-length"
            ]
        if fraction and not self.validation_windows:
            enough = self.sufficient_fraction()
            remedy = f"raise it to about {enough:g}" if enough else "prepare more text"
            return [
                f"--validation-fraction {fraction:g} holds out {held_out} of {training + held_out} tokens of source "
                f"{self.name}, but a sample of --seq-length {self.seq_length} takes {needed}: {remedy}, or set it to 0 "
                "for no validation"
            ]
        return []

    def sufficient_fraction(self) -> float | None:
        """Return about the smallest fraction that holds out a window, since every shard rounds its share down."""
        tokens, needed = np.array([shard.num_tokens for shard in self.shards]), self.seq_length + 1
        fraction = least = 1.1 * needed / tokens.sum()
        while fraction <= 0.5:
            shown = float(f"{fraction:.2g}")
            held_out = int((tokens * shown).astype(np.int64).sum())
            if held_out >= needed:
                return shown if tokens.sum() - 2 * held_out >= needed else None  # a tail may be twice as long
            fraction += least / 10
        return None

    def notes(self, fraction: float) -> list[str]:
        """Return remarks for the user of this source."""
        cut, total = (sum(shard.num_tokens for shard in shards) for shards in (self.cut_texts, self.shards))
        if 2 * cut <= total:
            return []
        return [
            f"source {self.name}: {len(self.cut_texts)} of its {len(self.shards)} shards hold one document each, whose "
            f"end is held out (--validation-fraction {fraction:g}): training reads these documents without their "
            "end-of-sequence token, and validation reads ends alone; put the texts into one .jsonl file, a document "
            "per line, or give --validation-fraction 0"
        ]
