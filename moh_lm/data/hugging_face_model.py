"""A Hugging Face tokenizer: ``tokenizer.json``, which the package tokenizers reads, and ``tokenizer_config.json``.

Ids are those of transformers with ``add_special_tokens=False`` and ``split_special_tokens=True``: nothing is added, and
a control token that is spelled out in a text stays text, even if ``tokenizer.json`` does not call it special. BPE
dropout, which gives a text different tokens each time, is switched off.

A document ends with the token that ended documents in the model's pretraining, usually the ``eos_token``. In the
directory of a chat model the ``eos_token`` may end a turn of a chat instead. Documents then end with another token of
that model, which data directories record as ``document_end`` in their ``tokenizer_config.json``.
"""

import re
from pathlib import Path

import numpy as np

from moh_lm.config import ConfigError
from moh_lm.data.files import read_json

DOCUMENT_END, SPECIAL = "document_end", "additional_special_tokens"  # keys of tokenizer_config.json
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")  # usual ends of a text in pretraining
CONTROL = re.compile(r"<[|｜].+[|｜]>|<(/?s|bos|eos|pad|unk|mask)>|\[(CLS|SEP|PAD|UNK|MASK)\]")
RARE = "\U00013000"  # a hieroglyph
IN_BRACKETS = re.compile(r"<\S+>|\[\S+\]")  # a control token if the chat template has it


class HuggingFaceModel:
    """The tokenizer of a directory, with the methods of SentencePieceProcessor that encoding needs.

    eos_token: its text, or None; documents may end with another token. begins: whether transformers puts the
    beginning-of-sequence token before a text. dropout: the rate that was switched off, or None. unmarked: control
    tokens that tokenizer.json does not call special, sorted.
    """

    def __init__(self, directory: str | Path):
        try:
            import tokenizers  # optional: few need it
        except ImportError as error:
            remedy = "needs the package tokenizers; pip install tokenizers"
            raise ConfigError([f"--tokenizer {directory}: {remedy}"]) from error
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(Path(directory, "tokenizer.json")))
            config = read_json(Path(directory, "tokenizer_config.json"))
            more = optional_json(Path(directory, "special_tokens_map.json"))
            model = self.tokenizer.model
            template = str(config.get("chat_template", "")) + (template_file(directory) or "")
            self.dropout = getattr(model, "dropout", None)
            if self.dropout:
                model.dropout = None
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()
            added = self.tokenizer.encode("").tokens
            self.unmarked = []
            for token in self.tokenizer.get_added_tokens_decoder().values():
                if is_control(token.content, named_tokens(config) | named_tokens(more) | {*added}, template):
                    self.unmarked += [] if token.special else [token.content]
                    token.special = True
                    self.tokenizer.add_special_tokens([token])
            self.unmarked.sort()
            self.eos_token, begin = (text_of(config.get(name)) for name in ("eos_token", "bos_token"))
            self.eos, self.bos = self.number(self.document_end(directory, config, template)), self.number(begin)
        except Exception as error:  # tokenizers raises no other class
            raise ConfigError([f"--tokenizer {directory}: not a tokenizer of Hugging Face ({error})"]) from error
        self.begins = begin is not None and begin in added
        self.tokenizer.encode_special_tokens = True
        self.engine = f"tokenizers {tokenizers.__version__}"
        end = self.id_to_piece(self.eos)
        if self.eos in self.encode(f"a {end} b{end}"):
            raise ConfigError([
                f"--tokenizer {directory}: a text that spells {end} would end there, since its letters make up the "
                "end-of-sequence token; give another tokenizer"
            ])

    def document_end(self, directory, config, template) -> str | None:
        named = config.get(DOCUMENT_END, self.eos_token)
        ids = ends_of_model(directory)
        if DOCUMENT_END in config or not ids or (named and named not in template):
            return named
        others = [*map(self.id_to_piece, ids), *ENDS]
        return next((end for end in others if self.number(end) >= 0 and end not in template), named)

    def number(self, token: str | None) -> int:
        found = self.tokenizer.token_to_id(token) if token else None
        return -1 if found is None else found

    def id_to_piece(self, index: int) -> str | None:
        return self.tokenizer.id_to_token(index) if index >= 0 else None

    def vocab_size(self) -> int:
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def eos_id(self) -> int:
        return self.eos

    def bos_id(self) -> int:
        return self.bos

    def control_tokens(self) -> set[str]:
        """Return the texts of special tokens, which are found in no text."""
        return {token.content for token in self.tokenizer.get_added_tokens_decoder().values() if token.special}

    def encode(self, text: str, out_type: str = "numpy") -> np.ndarray:
        """Return the ids of ``text``, uint32 [tokens]."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def drops_characters(self) -> bool:
        """Return whether a character that the vocabulary lacks leaves no ids: neither an unknown token nor bytes."""
        try:
            return np.array_equal(self.encode(f"a {RARE} b"), self.encode("a  b"))
        except Exception:  # of tokenizers, which has no other class: the model needs an unknown token
            return False

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        found = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # without offsets in the text
        return [np.array(encoding.ids, np.uint32) for encoding in found]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ``ids`` without special tokens."""
        return self.tokenizer.decode(ids)


def is_control(token: str, named: set[str], template: str) -> bool:
    """Return whether an added token is a control token, judging by ``named``, its form, or the chat template."""
    in_template = IN_BRACKETS.fullmatch(token) and token in template
    return token in named or bool(CONTROL.fullmatch(token) or in_template)


def named_tokens(config: dict) -> set[str | None]:
    """Return the special tokens that tokenizer_config.json or special_tokens_map.json names."""
    found = [value for key, value in config.items() if key.endswith("_token")]
    for key in (SPECIAL, "extra_special_tokens"):
        more = config.get(key) or []
        found += more.values() if isinstance(more, dict) else more
    decoder = (config.get("added_tokens_decoder") or {}).values()
    found += [token for token in decoder if isinstance(token, dict) and token.get("special")]
    return {text_of(token) for token in found}


def text_of(token: object) -> str | None:
    """Return the text of a token in a configuration: a string, or an object with its ``content``."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def numbers_of(tokenizer: dict) -> dict[str, int]:
    """Return {text: id} from the content of a tokenizer.json."""
    vocabulary = tokenizer["model"]["vocab"]
    if not isinstance(vocabulary, dict):
        vocabulary = {text: index for index, (text, _) in enumerate(vocabulary)}
    return vocabulary | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}


def template_file(directory: str | Path) -> str | None:
    """Return the chat template that has a file of its own, or None."""
    path = Path(directory, "chat_template.jinja")
    return path.read_text(encoding="utf-8") if path.is_file() else None


def optional_json(path: Path) -> dict:
    return read_json(path) if path.is_file() else {}


def ends_of_model(directory: str | Path) -> list[int]:
    """Return the ids that end a text of the model in a directory, without repetitions. Raises ConfigError."""
    found = []
    for path in (Path(directory, name) for name in ("config.json", "generation_config.json")):
        try:
            value = optional_json(path).get("eos_token_id")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError([f"{path}: cannot be read ({error}); fix it, or copy the tokenizer elsewhere"]) from error
        found += value if isinstance(value, list) else [value]
    return list(dict.fromkeys(index for index in found if isinstance(index, int)))
