"""A tokenizer of Hugging Face: ``tokenizer.json``, which the package tokenizers reads, and ``tokenizer_config.json``.

Ids are those of transformers with ``add_special_tokens=False`` and ``split_special_tokens=True``: nothing is added, and
a special token that is spelled out in a text stays text. Documents end with the ``eos_token`` of tokenizer_config.json.
"""

import json
from pathlib import Path

import numpy as np

from moh_lm.config import ConfigError


class HuggingFaceModel:
    """The tokenizer of a directory, with the methods of SentencePieceProcessor that encoding needs."""

    def __init__(self, directory: str | Path):
        try:
            import tokenizers  # optional: few need it
        except ImportError as error:
            remedy = "needs the package tokenizers; pip install tokenizers"
            raise ConfigError([f"--tokenizer {directory}: {remedy}"]) from error
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(Path(directory, "tokenizer.json")))
            eos = json.loads(Path(directory, "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
        except Exception as error:  # tokenizers raises no other class
            raise ConfigError([f"--tokenizer {directory}: not a tokenizer of Hugging Face ({error})"]) from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True
        self.engine = f"tokenizers {tokenizers.__version__}"
        eos = eos.get("content") if isinstance(eos, dict) else eos
        found = self.tokenizer.token_to_id(eos) if eos else None
        self.eos = -1 if found is None else found
        if self.eos in self.encode(f"a {eos} b{eos}"):
            raise ConfigError([
                f"--tokenizer {directory}: a text that spells {eos} would end there, since its letters make up the "
                "end-of-sequence token; give another tokenizer"
            ])

    def vocab_size(self) -> int:
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def eos_id(self) -> int:
        return self.eos

    def encode(self, text: str, out_type: str = "numpy") -> np.ndarray:
        """The ids of ``text``, uint32 [tokens]."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``, special tokens left out."""
        return self.tokenizer.decode(ids)
