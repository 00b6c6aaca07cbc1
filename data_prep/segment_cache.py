"""Gives the ids of SentencePiece's BPE several times faster, because it does not encode repeated segments again.

BPE joins neighbours that together form a piece. If two adjacent bytes are adjacent in no piece of the vocabulary,
nothing is ever joined across them and the text can be cut there: its tokens are those of its parts, end to end. With a
vocabulary such as LLaMA's, these places are before the space of a word, between letters and punctuation, around digits
and line ends. The parts, called segments, are mostly words, and most of them were seen before.

numpy handles all segments of a window of text together. The tokens of a segment of up to 23 bytes are found in a table
that works like a processor's cache: the bytes determine the slot, where a segment replaces the previous one. A row of
the table has four uint64 words: three of bytes, with the length in the last byte, and one for the span of the tokens,
``position << 32 | number`` in the array ``tokens``. A segment that is not in the table is looked up in a dictionary;
segments that are missing there too are encoded by SentencePiece in one call. All three stores are bounded.
"""

from collections.abc import Iterator

import numpy as np
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from moh_lm.data.sentencepiece_model import SPACE, proto_of

WINDOW = 1 << 16  # bytes of text that are handled together: many for numpy, few for caches that all cores share
SLOT_BITS = 20
KEY_WORDS = 3
LONGEST = 8 * KEY_WORDS - 1  # bytes of a segment in the table
STORED_TOKENS, STORED_SEGMENTS = 1 << 23, 1 << 18  # tables of 32 MB each, and about 50 MB of dictionary
SPAN = 32  # bits for the number of tokens
MARK = SPACE.encode()
END = 0xFF  # a byte that UTF-8 does not have, after each text
SEPARATORS = b"\n" + bytes(range(1, 32))
MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xBF58476D1CE4E5B9], np.uint64)
PROBE = " two  spaces\n\t\r\n line\u2581mark 2024 caf\u00e9 e\u0301 \u6587\U0001f600 \0</s><unk> <0x41>x.\u201dx  "


def joined_bytes(proto: sentencepiece_model_pb2.ModelProto) -> np.ndarray | None:
    """Return whether each byte may be joined to each next one, bool [256, 256], or None if texts must stay whole.

    Texts must stay whole unless the model is BPE without a normalizer, which looks at several characters at once.
    """
    trainer, normalizer, kind = proto.trainer_spec, proto.normalizer_spec, proto.SentencePiece
    pieces = [piece.piece for piece in proto.pieces if piece.type in (kind.NORMAL, kind.USER_DEFINED)]
    if (
        trainer.model_type != trainer.BPE
        or trainer.treat_whitespace_as_suffix
        or normalizer.precompiled_charsmap
        or normalizer.remove_extra_whitespaces
        or not normalizer.escape_whitespaces
        or any(piece.type == kind.UNUSED for piece in proto.pieces)  # unused pieces are split as elsewhere in the text
        or any(" " in piece for piece in pieces)  # a piece that distinguishes the space from its mark
    ):
        return None
    text = np.frombuffer(bytes([END]).join([piece.encode() for piece in pieces]).replace(MARK, b" "), np.uint8)
    joined = np.zeros((256, 256), dtype=bool)
    joined[text[:-1], text[1:]] = True
    if not trainer.byte_fallback:
        known = np.isin(np.arange(256), [ord(piece) for piece in pieces if len(piece) == 1 and piece < "\x80"])
        known[ord(" ")] = MARK.decode() in pieces
        joined |= ~known[:, None] & ~known  # two unknown neighbours are one token
    joined[:, 0x80:0xC0] = True  # within a character
    joined[END, :] = joined[:, END] = False
    return joined


def find_separator(model: SentencePieceProcessor, joined: np.ndarray) -> int | None:
    """Return a character that is one token everywhere, and whose token means nothing else."""
    for byte in SEPARATORS:
        if not joined[:, byte].any() and not np.delete(joined[byte], np.s_[0x80:0xC0]).any():
            ids = model.encode(bytes([byte]) * 3)
            if len(ids) >= 3 and ids[-3] == ids[-1] != model.unk_id():
                return byte
    return None


def segment_cache(model: SentencePieceProcessor) -> "SegmentCache | None":
    """The cache for ``model``; None if it would not be exact, or useless because words are not cut from each other."""
    joined = joined_bytes(proto_of(model))
    if joined is None or joined[ord("e"), ord(" ")]:
        return None
    separator = find_separator(model, joined)
    if separator is None:
        return None
    cache = SegmentCache(model, joined, separator)
    return cache if cache.encode([PROBE])[0][:-1].tolist() == model.encode(PROBE) else None


class SegmentCache:
    """Texts to ids; ``joined`` from ``joined_bytes``, ``separator`` from ``find_separator``."""

    name = "the segment cache"

    def __init__(self, model: SentencePieceProcessor, joined: np.ndarray, separator: int):
        self.model = model
        self.separator = bytes([separator])
        *dummy, self.separator_id = model.encode(self.separator)
        self.num_dummies = len(dummy)  # tokens of the space that the model inserts before a text
        self.before, self.after = b" " if dummy else b"", bytes([END])

        # A byte may be joined to the next if the next one's kind, a bit, is among those that may follow the first.
        kinds = np.full(256, 32, np.uint8)
        for bit, members in (
            (1, b" "), (2, self.separator), (4, b"0123456789"), (8, range(ord("a"), ord("z") + 1)),
            (16, range(ord("A"), ord("Z") + 1)), (64, range(0x80, 0xC0)), (128, range(0xC0, 0xFF)), (0, [END]),
        ):  # fmt: skip
            kinds[list(members)] = bit
        followers = sum(bit * joined[:, kinds == bit].any(axis=1) for bit in (1, 2, 4, 8, 16, 32, 64, 128))
        self.kinds, self.followers = kinds.tobytes(), followers.astype(np.uint8).tobytes()

        # By the length of a segment, or LONGEST + 1: which bytes of each word of its key belong to it.
        lengths = range(LONGEST + 2)
        in_word = [[min(max(min(length, LONGEST) - 8 * word, 0), 8) for length in lengths] for word in range(KEY_WORDS)]
        self.masks = np.array([[(1 << 8 * number) - 1 for number in numbers] for numbers in in_word], np.uint64)
        self.length_bytes = np.array(lengths, np.uint64) << np.uint64(56)
        self.empty(STORED_TOKENS)

    def empty(self, capacity: int):
        """Forget everything, and make room for ``capacity`` tokens."""
        self.table = np.zeros((1 << SLOT_BITS, KEY_WORDS + 1), np.uint64)
        self.tokens = np.empty(capacity, np.int32)
        self.tokens[:2] = self.separator_id, self.model.eos_id()
        self.num_tokens = 2
        self.forget_spans()

    def forget_spans(self):
        self.spans = {self.separator: 0 << SPAN | 1, self.after: 1 << SPAN | 1}

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text and the end-of-sequence id, int32 [tokens]."""
        data = b"".join([(self.before + text.encode() if text else b"") + self.after for text in texts])
        ids = np.concatenate(list(self.windows(data.replace(MARK, b" "))))
        ends = np.flatnonzero(ids == self.tokens[1]) + 1
        return np.split(ids, ends[:-1])

    def windows(self, data: bytes) -> Iterator[np.ndarray]:
        """The ids of ``data``, window by window; a window ends where it can be cut."""
        start, size = 0, WINDOW
        while start < len(data):
            window = data[start : start + size]
            kinds = np.frombuffer(window.translate(self.kinds), np.uint8)
            followers = np.frombuffer(window.translate(self.followers), np.uint8)
            cuts = np.flatnonzero((followers[:-1] & kinds[1:]) == 0) + 1
            if start + size < len(data):
                if not len(cuts):
                    size *= 2
                    continue
                window = window[: cuts[-1]]
            else:
                cuts = np.append(cuts, len(window))
            yield self.encode_segments(window, cuts)
            start, size = start + len(window), WINDOW

    def encode_segments(self, window: bytes, ends: np.ndarray) -> np.ndarray:
        """The ids of the segments of ``window`` that end at ``ends``, int64 [segments]."""
        if self.num_tokens + 2 * len(window) > len(self.tokens):
            self.empty(max(STORED_TOKENS, 2 * len(window) + 2))
        lengths = np.diff(ends, prepend=0)
        starts = ends - lengths
        keys = self.keys(window, starts, lengths)
        rows = self.table.take(slots := slots_of(keys), axis=0)
        found = (rows[:, 0] == keys[0]) & (rows[:, 1] == keys[1]) & (rows[:, 2] == keys[2])
        spans = rows[:, KEY_WORDS].astype(np.int64)
        missing = np.flatnonzero(~found)
        if len(missing):
            bounds = zip(starts[missing].tolist(), ends[missing].tolist(), strict=True)
            spans[missing] = self.find_spans([window[start:end] for start, end in bounds])
            short = missing[lengths[missing] <= LONGEST]
            self.table[slots[short]] = np.stack([*keys[:, short], spans[short].astype(np.uint64)], axis=1)
        return self.tokens.take(positions(spans >> SPAN, spans & ((1 << SPAN) - 1)))

    def keys(self, window: bytes, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the bytes and length of each segment; keys of segments longer than LONGEST match no table entry."""
        words = np.frombuffer(window + bytes(8 * KEY_WORDS + 8 + -len(window) % 8), "<u8")
        shift = ((starts & 7) << 3).astype(np.uint64)
        rest = np.uint64(63) - shift
        lengths = np.minimum(lengths, LONGEST + 1)
        keys = np.empty((KEY_WORDS, len(starts)), np.uint64)
        index = starts >> 3
        word = words.take(index)
        for key, masks in zip(keys, self.masks, strict=True):
            index += 1
            next_word = words.take(index)
            key[:] = ((word >> shift) | (next_word << np.uint64(1) << rest)) & masks.take(lengths)
            word = next_word
        keys[-1] |= self.length_bytes.take(lengths)
        return keys

    def find_spans(self, segments: list[bytes]) -> np.ndarray:
        """Return the spans of segments that are not in the table; new ones are encoded first."""
        if len(self.spans) > STORED_SEGMENTS:
            self.forget_spans()
        new = list(dict.fromkeys([segment for segment in segments if segment not in self.spans]))
        if new:
            joined = self.separator + self.separator.join(new)
            ids = self.model.encode(joined, out_type="numpy")[self.num_dummies :]
            separators = np.flatnonzero(ids == self.separator_id)
            numbers = np.diff(separators, append=len(ids)) - 1
            spans = (separators + self.num_tokens + 1) << SPAN | numbers
            self.spans.update(zip(new, spans.tolist(), strict=True))
            self.tokens[self.num_tokens : self.num_tokens + len(ids)] = ids
            self.num_tokens += len(ids)
        return np.fromiter(map(self.spans.__getitem__, segments), np.int64, len(segments))


def slots_of(keys: np.ndarray) -> np.ndarray:
    """The slot of each key: a hash; int64 [keys]."""
    mixed = keys[0] * MULTIPLIERS[0] ^ keys[1] * MULTIPLIERS[1] ^ keys[2] * MULTIPLIERS[2]
    mixed = (mixed ^ (mixed >> np.uint64(29))) * MULTIPLIERS[3]
    return (mixed >> np.uint64(64 - SLOT_BITS)).astype(np.int64)


def positions(starts: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return ``numbers[0]`` positions from starts[0] on, then those of the next start, and so on; int64 [sum]."""
    ends = np.cumsum(numbers)
    return np.arange(ends[-1]) + np.repeat(starts + numbers - ends, numbers)
