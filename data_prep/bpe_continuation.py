"""BPE training that continues an existing vocabulary: it joins more tokens, the most frequent pair first.

New tokens come after all old ones in the order of joining. The larger vocabulary therefore first encodes a text with
the old tokens, exactly as before, and then joins some neighbours; no old token is ever split.

SentencePiece's own trainer does the work, on a text in a private alphabet: each old token becomes a character of
Unicode's private planes, and each word a line with the number of its occurrences. The trainer then joins old tokens.
"""

import io
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import sentencepiece

from moh_lm.config import ConfigError

LETTERS = np.concatenate([np.arange(0xF0000, 0xFFFFE), np.arange(0x100000, 0x10FFFE), np.arange(0xE000, 0xF900)])
BETWEEN = "\n"  # separates words
MOST_TOKENS = len(LETTERS)  # largest vocabulary that can be extended
MOST_JOINED = 16  # largest number of old tokens in a new one


def spelled(ids: np.ndarray, ends_word: np.ndarray) -> str:
    """Spell ``ids`` int [tokens] in the private alphabet, with BETWEEN where bool ``ends_word`` [tokens] is true."""
    letters = np.insert(LETTERS[ids], np.flatnonzero(ends_word) + 1, ord(BETWEEN))
    return letters.astype("<u4").tobytes().decode("utf-32-le")


def typical(found: Counter[str], old: Counter[str]) -> Counter[str]:
    """Return the items of ``found`` in the new text whose share there is larger than in the ``old`` text."""
    ratio = found.total() / old.total() if old else 0
    return Counter({item: count for item, count in found.items() if count > ratio * old[item]})


def cut_where_old(words: Counter[str], old_words: Counter[str]) -> Counter[str]:
    """Cut ``words`` between tokens whose pairs are a larger share of the old text than of the new."""
    kept = typical(neighbours(words), neighbours(old_words))
    parts = Counter()
    for word, count in words.items():
        cut = "".join(left if left + right in kept else left + BETWEEN for left, right in pairwise(word))
        for part in (cut + word[-1:]).split(BETWEEN):
            parts[part] += count
    return parts


def neighbours(words: Counter[str]) -> Counter[str]:
    pairs = Counter()
    for word, count in words.items():
        for left, right in pairwise(word):
            pairs[left + right] += count
    return pairs


def joined_tokens(words: Counter[str], number: int) -> list[list[int]]:
    """Return up to ``number`` new tokens in the order of joining, each as the old ids from which it is joined.

    ``words``: words in the private alphabet, and how often they occur.
    """
    joinable = {word: count for word, count in sorted(words.items()) if len(word) > 1}
    if not joinable:
        return []
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(f"{word}\t{count}" for word, count in joinable.items()),
        input_format="tsv",
        model_writer=model,
        model_type="bpe",
        vocab_size=1 + len(set().union(*joinable)) + number,
        hard_vocab_limit=False,
        character_coverage=1.0,
        max_sentencepiece_length=MOST_JOINED,
        max_sentence_length=1 << 20,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_by_unicode_script=False,
        split_by_number=False,
        split_by_whitespace=False,
        bos_id=-1,
        eos_id=-1,
        minloglevel=2,
    )
    trained = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [trained.id_to_piece(index) for index in range(1, trained.vocab_size())]
    order = {piece: index for index, piece in enumerate(pieces) if len(piece) > 1}
    # In a small text the trainer also joins pairs that no longer occur; tokens that are in no word are left out.
    found = {piece for word in joinable for piece in trained.encode(word, out_type=str)}
    useful = {step for piece in found for step in steps(list(piece), order)}
    ids = {chr(letter): index for index, letter in enumerate(LETTERS.tolist())}
    return [[ids[letter] for letter in piece] for piece in order if piece in useful]


def steps(parts: list, order: dict) -> Iterator:
    """Join neighbours among ``parts`` as BPE does, the lowest in ``order`` first; yields what each step has joined."""
    while pairs := [(order[a + b], place) for place, (a, b) in enumerate(pairwise(parts)) if a + b in order]:
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
        yield parts[place]


def too_little_text(asked: int, possible: int, before: int) -> ConfigError:
    remedy = f"give at most {possible}, or more text" if possible > before else "it has no token to add; give more text"
    return ConfigError([f"--vocab-size {asked}: the text is too small for it; {remedy}"])
