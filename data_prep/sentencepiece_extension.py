"""Extends a vocabulary for another kind of text, such as Chinese for LLaMA. Old ids stay, and no token is split.

    python data_prep/tokenize.py extend --tokenizer OLD --vocab-size N --input GLOB [--old-input GLOB] --output NEW
    python data_prep/tokenize.py extend --tokenizer OLD --add-pieces FILE [--old-input GLOB] --output NEW

OLD is a SentencePiece BPE model, or LLaMA-3's tiktoken file (data_prep/tiktoken_extension.py). The first new tokens are
frequent characters of the new text that are not tokens yet. The others are what further BPE training joins in that text
(data_prep/bpe_continuation.py). Characters and pairs that are as frequent in text of the old kind are left out.
Alternatively, FILE lists the new tokens, one per line, and the prefixes from which they are joined are added. The
command prints how many tokens lines of both kinds of text have before and after, and how many of these lines change.
Training does not use these lines, except for copies of lines that a mix repeats.
"""

import os
import unicodedata
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import numpy as np
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from data_prep import bpe_continuation as bpe
from data_prep.encoding import Tokenizer
from data_prep.output import check_model_file
from data_prep.report import table, told
from data_prep.tiktoken_extension import extended_ranks
from data_prep.training_sample import SAMPLED_UNIT, read_sample, sample_sentences
from data_prep.units import plan_units
from moh_lm.config import ConfigError
from moh_lm.data.files import publish
from moh_lm.data.hugging_face_model import HuggingFaceModel
from moh_lm.data.sentencepiece_model import SPACE as MARK
from moh_lm.data.tiktoken_model import is_tiktoken
from moh_lm.data.tokenizer import model_file

HELD_OUT = 50  # one in this many lines is held out
OLD_BYTES = 16 << 20  # bytes of the old kind of text
COVERAGE = 0.9995  # share of the occurrences of new characters
BATCH = 10_000  # lines per batch
OUTSIDE, SPACE, LETTER, EASTERN, DIGIT, OTHER = range(6)  # kinds of characters; tokens that join nothing are OUTSIDE


def run(flags) -> int:
    """Run the command and return its exit code. Raises ConfigError."""
    output = flags.output
    source = str(model_file(flags.tokenizer))
    if os.path.realpath(output) == os.path.realpath(source):
        raise ConfigError([f"--output {flags.output}: is the --tokenizer, which its shards need; give another file"])
    old = Tokenizer(flags.tokenizer)
    if isinstance(old.model, HuggingFaceModel):
        by_hand = "add the tokens with transformers (add_tokens, then save_pretrained DIR) and give DIR as --tokenizer"
        reason = f"is a Hugging Face tokenizer, which this command does not extend; {by_hand} of other commands"
        raise ConfigError([f"--tokenizer {flags.tokenizer}: {reason}"])
    if flags.vocab_size and flags.vocab_size <= old.vocab_size:
        raise ConfigError([f"--vocab-size {flags.vocab_size}: {flags.tokenizer} already has {old.vocab_size}"])
    if old.vocab_size > (most := bpe.MOST_TOKENS):
        raise ConfigError([f"--tokenizer {flags.tokenizer}: has {old.vocab_size} tokens; give one with at most {most}"])
    check_model_file(output)
    lines = read_sample(flags) if flags.vocab_size or flags.input or flags.source else []
    old_lines = []
    if flags.old_input:
        units = plan_units("--old-input ", "", flags.old_input, text_key=flags.text_key, unit_size=SAMPLED_UNIT)
        old_lines += sample_sentences(units, flags.text_key, OLD_BYTES)
    measured = {"new": lines[::HELD_OUT], "old": old_lines[::2]}
    del lines[::HELD_OUT], old_lines[::2]
    if flags.add_pieces:
        model = model_with(source, listed_pieces(flags.add_pieces))
    else:
        print(f"extending {old.vocab_size:,} to {flags.vocab_size:,} on {sum(map(len, lines)):,} bytes", flush=True)
        extend = extended_ranks if is_tiktoken(source) else extended_model
        new_texts, old_texts = ([line.decode() for line in part] for part in (lines, old_lines))
        with told("extending"):
            model = extend(source, new_texts, old_texts, flags.vocab_size)
    publish(output, model)
    new = Tokenizer(str(output))
    print(f"wrote {output}: ids 0 to {old.vocab_size - 1:,} as before, {new.vocab_size - old.vocab_size:,} new ones")
    changes = [[name, *change(lines, old, new)] for name, lines in measured.items() if lines]
    print("\n".join(table(["text", "bytes", "tokens before", "tokens after", "lines that change"], changes)))
    return 0


def change(lines: list[bytes], old: Tokenizer, new: Tokenizer) -> list:
    before, after = (list(tokenizer.encode_all(line.decode() for line in lines)) for tokenizer in (old, new))
    differ = sum(not np.array_equal(*pair) for pair in zip(before, after, strict=True))
    tokens = [sum(map(len, encoded)) - len(lines) for encoded in (before, after)]
    return [sum(map(len, lines)), *tokens, f"{differ / len(lines):.2%}"]


def bpe_model(path: str):
    proto = sentencepiece_model_pb2.ModelProto.FromString(Path(path).read_bytes())
    if proto.trainer_spec.model_type != proto.trainer_spec.BPE:
        kind = proto.trainer_spec.ModelType.Name(proto.trainer_spec.model_type).lower()
        raise ConfigError([f"--tokenizer {path}: is a {kind} model, and only BPE models can be extended"])
    return proto


def add_pieces(proto, pieces: Iterable[str]):
    """Append ``pieces`` that are new; their scores let them be joined after all others, in this order."""
    known = {piece.piece for piece in proto.pieces}
    score = np.float32(min(piece.score for piece in proto.pieces))  # LLaMA's lowest, of spaces, are -1e9
    for text in pieces:
        if text not in known:
            known.add(text)
            score -= max(1, np.spacing(-score))
            proto.pieces.add(piece=text, score=score)
    proto.trainer_spec.vocab_size = len(proto.pieces)


def extended_model(path: str, texts: list[str], old_texts: list[str], vocab_size: int) -> bytes:
    """The serialized model with ``vocab_size`` pieces. Raises ConfigError if ``texts`` do not give so many."""
    proto = bpe_model(path)
    before = len(proto.pieces)
    characters = bpe.typical(new_characters(proto, texts), new_characters(proto, old_texts))
    add_pieces(proto, frequent(characters, (vocab_size - len(proto.pieces)) // 2))
    room = vocab_size - len(proto.pieces)
    words = bpe.cut_where_old(words_of(proto, texts), words_of(proto, old_texts))
    joined = bpe.joined_tokens(words, room + room // 20 + 10)
    pieces = [piece.piece for piece in proto.pieces]
    add_pieces(proto, ["".join(pieces[index] for index in ids) for ids in joined])
    if len(proto.pieces) < vocab_size:
        raise bpe.too_little_text(vocab_size, len(proto.pieces), before)
    del proto.pieces[vocab_size:]
    proto.trainer_spec.vocab_size = vocab_size
    return proto.SerializeToString()


def new_characters(proto, texts: list[str]) -> Counter[str]:
    """Return the visible characters of ``texts`` that are not pieces yet."""
    model = SentencePieceProcessor(model_proto=proto.SerializeToString())
    characters = Counter()
    for start in range(0, len(texts), BATCH):
        characters.update("".join(model.normalize(texts[start : start + BATCH])))
    known = {piece.piece for piece in proto.pieces}
    return Counter({c: count for c, count in characters.items() if c not in known and kind_of(c) != OUTSIDE})


def frequent(characters: Counter[str], at_most: int) -> list[str]:
    """Return the most frequent ``characters``, up to COVERAGE of their occurrences."""
    chosen, covered = [], 0
    for character, count in sorted(characters.items(), key=lambda item: (-item[1], item[0]))[:at_most]:
        if covered >= COVERAGE * characters.total():
            break
        chosen.append(character)
        covered += count
    return chosen


def listed_pieces(path: str) -> list[str]:
    """Return the pieces in a file: its lines, each up to the first tab, as in SentencePiece's .vocab files."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"--add-pieces {path}: {error}"]) from error
    return [piece for line in lines if (piece := line.split("\t")[0].rstrip("\r").replace(" ", MARK))]


def model_with(path: str, pieces: list[str]) -> bytes:
    """Return the serialized model with ``pieces``, their characters, and the prefixes from which they are joined."""
    if is_tiktoken(path):
        needed = "which --add-pieces needs; give --vocab-size instead"
        raise ConfigError([f"--tokenizer {path}: is not a SentencePiece model, {needed}"])
    proto = bpe_model(path)
    add_pieces(proto, dict.fromkeys("".join(pieces)))
    bare = sentencepiece_model_pb2.ModelProto.FromString(proto.SerializeToString())
    bare.normalizer_spec.add_dummy_prefix = bare.normalizer_spec.remove_extra_whitespaces = False
    bare.normalizer_spec.precompiled_charsmap = b""  # listed pieces are not normalised
    tokens = SentencePieceProcessor(model_proto=bare.SerializeToString()).encode(pieces, out_type=str)
    add_pieces(proto, (beginning for parts in tokens for beginning in accumulate(parts)))
    return proto.SerializeToString()


def words_of(proto, texts: list[str]) -> Counter[str]:
    """Return the words of ``texts`` in the private alphabet: tokens that may be joined, as in LLaMA's vocabulary.

    A word has letters of one kind, or other characters, after at most one space. Digits stay single if they were.
    """
    model = SentencePieceProcessor(model_proto=proto.SerializeToString())
    first, last = token_kinds(proto)
    words = Counter()
    for start in range(0, len(texts), BATCH):
        lines = model.encode(texts[start : start + BATCH], out_type="numpy")
        ids = np.concatenate(lines)
        if not ids.size:
            continue  # blank lines only
        before, after = last[ids[:-1]], first[ids[1:]]
        ends_word = np.append((after <= SPACE) | (before == OUTSIDE) | (after != before) & (before != SPACE), True)
        ends_word[np.cumsum([len(line) for line in lines]) - 1] = True
        words.update(bpe.spelled(ids, ends_word).split(bpe.BETWEEN))
    return words


def token_kinds(proto) -> tuple[np.ndarray, np.ndarray]:
    """The kind of the first, and of the last, character of each piece; int [pieces] each."""
    outside = {OUTSIDE, DIGIT} if proto.trainer_spec.split_digits else {OUTSIDE}
    kinds = np.full((2, len(proto.pieces)), OUTSIDE)
    for index, piece in enumerate(proto.pieces):
        spaces = len(piece.piece) > 1 and not piece.piece.strip(MARK)
        if piece.type == piece.NORMAL and not spaces:
            ends = kind_of(piece.piece[0]), kind_of(piece.piece[-1])
            if outside.isdisjoint(ends):
                kinds[:, index] = ends
    return kinds[0], kinds[1]


def kind_of(character: str) -> int:
    if character == MARK:
        return SPACE
    category = unicodedata.category(character)[0]
    if category in "CZ":
        return OUTSIDE
    if category in "LM":
        return EASTERN if character >= "\u2e80" else LETTER
    return DIGIT if category == "N" else OTHER
