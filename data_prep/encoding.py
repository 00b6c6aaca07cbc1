"""Encodes text as token ids, with a SentencePiece model, LLaMA-3's tokenizer, or a Hugging Face tokenizer.

Every document is encoded by itself and followed by the end-of-sequence token; a beginning-of-sequence token comes
before it if --bos is given. Control tokens that are spelled out in a text stay text. User-defined pieces of
SentencePiece do not, even if they look like control tokens, as Gemma's <start_of_turn> does.

If a model allows it, SentencePiece only encodes segments that were not seen before (data_prep/segment_cache.py). A
Hugging Face tokenizer, or gigatoken in its place (--engine), encodes documents in batches. One document in a thousand
is then also encoded alone in the ordinary way, and the results must agree.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import sentencepiece

from data_prep.segment_cache import SegmentCache, segment_cache
from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import ShardError, json_bytes, sha256_of
from moh_lm.data.hugging_face_model import (
    DOCUMENT_END,
    IN_BRACKETS,
    SPECIAL,
    HuggingFaceModel,
    ends_of_model,
    named_tokens,
)
from moh_lm.data.sentencepiece_model import SPACE, conversion_problem, proto_of, user_defined
from moh_lm.data.shards import TOKENIZER_FILES
from moh_lm.data.tokenizer import model_file, model_files, read_model
from moh_lm.parsing import parse_json
from moh_lm.units import listing

BATCH = 1 << 17  # characters of text that are encoded together
CONFIG = TOKENIZER_FILES[2]  # tokenizer_config.json
CHECKED = 1000  # one in this many documents is encoded twice,
LONGEST_CHECKED = 1 << 20  # unless it has more characters: SentencePiece needs about 45 bytes for each


@dataclass(frozen=True)
class Options:
    """Options that determine a shard besides its inputs and the tokenizer. bos: put a beginning-of-sequence token
    before each document. engine: "own", or "gigatoken", which gives the same ids."""

    text_key: str = "text"
    shuffle: bool = True
    bos: bool = False
    engine: str = "own"

    def facts(self) -> dict:
        """The options for a sidecar and for the name of a unit; BOS is among the tokenizer's facts."""
        return {"text_key": self.text_key, "shuffle": self.shuffle}


class Batches:
    """Texts encoded together: ``ids_of`` gives the ids of each of them, and ``eos_id`` follows."""

    def __init__(self, name: str, ids_of: Callable[[list[str]], Iterable[np.ndarray]], eos_id: int):
        self.name, self.ids_of, self.eos_id = name, ids_of, eos_id

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.append(ids, self.eos_id).astype(np.int32) for ids in self.ids_of(texts)]


def gigatoken_batches(model, eos_id: int) -> Batches:
    """gigatoken with the vocabulary of a Hugging Face tokenizer. Raises ConfigError."""
    try:
        import gigatoken  # optional
        if not isinstance(model, HuggingFaceModel):
            raise ValueError("it is for tokenizer.json of Hugging Face")
        facts = parse_json(model.tokenizer.to_str())
        facts |= dict.fromkeys(("truncation", "padding", "post_processor"))
        facts["added_tokens"] = [token for token in facts["added_tokens"] if not token["special"]]  # they stay text
        encode = gigatoken.Tokenizer.from_json(json.dumps(facts)).encode
    except (ImportError, ValueError, RuntimeError) as error:
        remedy = "pip install gigatoken, or leave the flag out"
        raise ConfigError([f"--engine gigatoken: cannot encode with this tokenizer ({error}); {remedy}"]) from error
    return Batches("gigatoken", lambda texts: map(encode, texts), eos_id)


class Tokenizer:
    """The model at ``path``; bos: whether documents begin with its beginning-of-sequence token; engine: see
    ``Options``.

    Raises ConfigError if it is not a tokenizer, lacks one of these tokens, or gives a text different ids each time.
    """

    def __init__(self, path: str, bos: bool = False, engine: str = "own"):
        self.model = read_model(path)
        self.path, self.files = model_file(path), model_files(path)
        self.is_sentencepiece = isinstance(self.model, sentencepiece.SentencePieceProcessor)
        library = f"sentencepiece {sentencepiece.__version__}" if self.is_sentencepiece else self.model.engine
        self.vocab_size = self.model.vocab_size()
        self.eos_id = self.model.eos_id()
        self.bos_ids = np.array([self.model.bos_id()] if bos else [], np.int32)
        problems = []
        if self.eos_id < 0:
            problems.append("has no end-of-sequence piece to separate documents; give a model with one")
        if bos and self.model.bos_id() < 0:
            problems.append("has no beginning-of-sequence token; leave --bos out")
        if dropout := getattr(self.model, "dropout", None):
            remedy = 'write "dropout": null in tokenizer.json'
            problems.append(f"encodes a text differently each time, with BPE dropout {dropout:g}; {remedy}")
        raise_any([f"--tokenizer {path}: {problem}" for problem in problems])
        self.description = {
            "sha256": sha256_of(self.path),
            "vocab_size": self.vocab_size,
            "eos_id": self.eos_id,
            **({"bos_id": int(self.bos_ids[0])} if bos else {}),
            **({"control_tokens": unmarked} if (unmarked := getattr(self.model, "unmarked", [])) else {}),
            "engine": library,
        }
        self.num_encoded = 0
        self.gigatoken = gigatoken_batches(self.model, self.eos_id) if engine == "gigatoken" else None

    @cached_property
    def takes_mark_for_space(self) -> bool:
        """Whether U+2581 in a text becomes a space, as it does with SentencePiece."""
        return np.array_equal(*(self.model.encode(f"a{space}b", out_type="numpy") for space in (" ", SPACE)))

    @property
    def identity(self) -> str:
        """The tokenizer's part in the name of a unit: the file's hash, and, if other files or flags set them, the
        end-of-sequence id, control tokens and BOS."""
        digest = self.description["sha256"]
        identity = f"{digest}, {self.eos_id}" if len(self.files) > 1 else digest
        if control := self.description.get("control_tokens"):
            identity += f", without {json.dumps(control)}"
        return f"{identity}, after {self.bos_ids[0]}" if len(self.bos_ids) else identity

    def contents(self) -> dict[str, bytes]:
        """The files of a data directory by name: those of the tokenizer, and in them the end of a document and the
        control tokens that they do not name."""
        found = {name: path.read_bytes() for name, path in self.files.items()}
        if isinstance(self.model, HuggingFaceModel):
            end = self.model.id_to_piece(self.eos_id)
            config, more = parse_json(found[CONFIG]), {}
            if end != config.get(DOCUMENT_END, self.model.eos_token):
                more[DOCUMENT_END] = end
            if not named_tokens(config).issuperset(self.model.unmarked):
                listed = config.get(SPECIAL) or []
                more[SPECIAL] = [*listed, *(token for token in self.model.unmarked if token not in listed)]
            if more:
                found[CONFIG] = json_bytes({**config, **more})
        return found

    def ends(self) -> str:
        """Return a sentence on the tokens at the ends of documents, and on others that the model might have there."""
        end, begin = self.model.id_to_piece(self.eos_id), self.model.bos_id()
        named, of_model = getattr(self.model, "eos_token", end), ends_of_model(self.path.parent)
        sentence = f"documents end with {end} (id {self.eos_id})"
        if named not in (end, None):
            sentence += f", since {named} only ends a turn in this model's chats"
        elif of_model and self.eos_id not in of_model:
            sentence += f", but the config.json beside the tokenizer says that texts end with id {listing(of_model)}"
        if begin < 0:
            return sentence
        begin = f"{self.model.id_to_piece(begin)} (id {begin})"
        if len(self.bos_ids):
            return f"{sentence} and begin with {begin}"
        usual = ", as transformers does" if getattr(self.model, "begins", False) else ""
        return f"{sentence}; no token begins them (--bos puts {begin} there{usual})"

    def spelled(self) -> str:
        """Return what to add about user-defined pieces that look like control tokens, or lost characters."""
        if isinstance(self.model, HuggingFaceModel) and self.model.drops_characters():
            return "; characters that the vocabulary lacks are dropped"
        if not self.is_sentencepiece:
            return ""
        found = [*filter(IN_BRACKETS.fullmatch, user_defined(proto_of(self.model)))]
        return f"; a text that spells {listing(found)} gets their ids" if found else ""

    def export_problem(self) -> str:
        """Return a clause if no export can convert this tokenizer, else an empty text."""
        return conversion_problem(proto_of(self.model)) if self.is_sentencepiece else ""

    @cached_property
    def cache(self) -> SegmentCache | Batches | None:
        """The segment cache, made when the first text is encoded, or batches: both encode many texts faster than one by
        one. None if the model allows neither."""
        if isinstance(self.model, HuggingFaceModel):
            return self.gigatoken or Batches("encoding in batches", self.model.encode_batch, self.eos_id)
        return segment_cache(self.model) if self.is_sentencepiece else None

    def encode_all(self, texts: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of each document and those at its ends, int32 [tokens], in the order of ``texts``.

        Texts are encoded in batches. Raises ShardError if these differ from ids of the text by itself.
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
        """The ids of one document and those at its ends, int32 [tokens]."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self.encode_with_cache(texts) if self.cache else [self.encode_plainly(text) for text in texts]
        return [np.concatenate([self.bos_ids, ids]) for ids in encoded] if len(self.bos_ids) else encoded

    def encode_with_cache(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self.cache.encode(texts)
        for index in range(-self.num_encoded % CHECKED, len(texts), CHECKED):
            text = texts[index]
            if len(text) <= LONGEST_CHECKED and not np.array_equal(encoded[index], self.encode_plainly(text)):
                raise ShardError(
                    f"{self.cache.name} and {self.description['engine']} encode a document differently; please report "
                    f"this with the tokenizer and the document, which begins {text[:100]!r}"
                )
        self.num_encoded += len(texts)
        return encoded

    def encode_plainly(self, text: str) -> np.ndarray:
        return np.append(self.model.encode(text, out_type="numpy").astype(np.int32), np.int32(self.eos_id))
