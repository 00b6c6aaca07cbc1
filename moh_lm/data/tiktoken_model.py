"""LLaMA-3's ``tokenizer.model``: a vocabulary in the format of tiktoken, the library that encodes with it.

    IQ== 0         one line per token: its bytes in base64 and its rank, which is its id
    ...
    IHRoZQ== 279

BPE joins the neighbours that together have the lowest rank. The file contains neither the regular expression that first
cuts a text into words nor the special tokens. Both are taken from LLaMA-3 here: 256 special ids follow the 128,000 of
the file, ``<|begin_of_text|>`` and ``<|end_of_text|>`` first. Tokens that were added to the vocabulary later have ids
after these, so the special ids are the first gap in the ranks. A special token that is spelled out in a text stays
text.
"""

import re
from base64 import b64decode
from itertools import pairwise
from pathlib import Path

import numpy as np

from moh_lm.config import ConfigError

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
NUM_ORDINARY, NUM_SPECIAL = 128_000, 256
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>")  # the first special tokens
FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
LONG_RUN = re.compile(r"\s{25000}")  # the longest run of white space in LLaMA-3's own code


def is_tiktoken(path: str | Path) -> bool:
    with open(path, "rb") as file:
        return FIRST_LINE.match(file.read(1024)) is not None


def read_ranks(path: str | Path) -> tuple[dict[bytes, int], int]:
    """Return {token: id} of the file and the id of the first special token. Raises ConfigError."""
    ranks = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            if token.startswith(b"="):  # Python 3.10 decodes it
                raise ValueError
            ranks[b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ConfigError([f"--tokenizer {path}: line {number} is not a token in base64 and its rank"]) from error
    ids = set(ranks.values())
    special = next(index for index in range(len(ids) + 1) if index not in ids)
    problem = None
    if len(ids) < number:
        problem = f"{number:,} lines hold only {len(ranks):,} different tokens and {len(ids):,} different ranks"
    elif any(bytes([byte]) not in ranks for byte in range(256)):
        problem = "not every byte is a token"
    elif min(ids) < 0 or not ids.isdisjoint(range(special, special + NUM_SPECIAL)):
        problem = f"the {NUM_SPECIAL} special tokens of LLaMA-3 find no free ranks from {special} on"
    elif special != NUM_ORDINARY:  # vocabularies of GPT-4, Qwen or LLaMA-4 differ in words and special tokens
        problem = f"{special:,} tokens precede the special ones, but in LLaMA-3 there are {NUM_ORDINARY:,}"
    if problem:
        remedy = "give LLaMA-3's, undamaged, or the tokenizer.json of another model"
        raise ConfigError([f"--tokenizer {path}: {problem}; {remedy}"])
    return ranks, special


class TiktokenModel:
    """A vocabulary in tiktoken's format, with the methods of SentencePieceProcessor that encoding needs."""

    def __init__(self, path: str | Path):
        try:
            import tiktoken  # optional: few need it
        except ImportError as error:
            raise ConfigError([f"--tokenizer {path}: needs the package tiktoken; pip install tiktoken"]) from error
        self.ranks, special = read_ranks(path)
        self.special = special
        self.size = max(special + NUM_SPECIAL, max(self.ranks.values()) + 1)
        self.engine = f"tiktoken {tiktoken.__version__}"
        self.tokens = set(self.ranks.values())
        self.encoding = tiktoken.Encoding("llama3", pat_str=WORDS, mergeable_ranks=self.ranks, special_tokens={})

    def vocab_size(self) -> int:
        return self.size

    def eos_id(self) -> int:
        return self.special + 1

    def bos_id(self) -> int:
        return self.special

    def id_to_piece(self, index: int) -> str:
        """Return the text of the token that begins or ends a document."""
        return SPECIAL[index - self.special]

    def encode(self, text: str, out_type: str = "numpy") -> np.ndarray:
        """Return the ids of ``text``, uint32 [tokens]."""
        try:
            return self.encoding.encode_to_numpy(text)
        except ValueError:  # the regular expression fails at runs of a million spaces
            cuts = [0, *(match.end() for match in LONG_RUN.finditer(text)), len(text)]
            parts = [text[start:end] for start, end in pairwise(cuts)]
            return np.concatenate([self.encoding.encode_to_numpy(part) for part in parts if part])

    def decode(self, ids: list[int]) -> str:
        """Return the text of ``ids`` without special tokens; incomplete characters become U+FFFD."""
        return self.encoding.decode_bytes([index for index in ids if index in self.tokens]).decode(errors="replace")
