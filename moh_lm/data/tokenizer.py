"""The tokenizer beside the shards: a SentencePiece model, LLaMA-3's vocabulary, or a tokenizer of Hugging Face.

All three have the methods of SentencePieceProcessor: encode, decode, eos_id, bos_id, id_to_piece and vocab_size.
"""

import os
from pathlib import Path

import sentencepiece

from moh_lm.config import ConfigError
from moh_lm.data.hugging_face_model import HuggingFaceModel
from moh_lm.data.shards import TOKENIZER_FILES, tokenizer_file
from moh_lm.data.tiktoken_model import TiktokenModel, is_tiktoken

OPTIONAL = TOKENIZER_FILES[-1]  # among the files of Hugging Face


def model_files(path: str | Path) -> dict[str, Path]:
    """Return {name in a data directory: file} of the tokenizer at ``path``; the file with the pieces is first."""
    path = Path(path)
    if os.path.isdir(path):
        path = tokenizer_file(path) or path / TOKENIZER_FILES[1]
    if path.suffix == ".json":
        files = {name: path.with_name(name) for name in TOKENIZER_FILES[1:]}
        return {name: file for name, file in files.items() if os.path.isfile(file) or name != OPTIONAL}
    return {TOKENIZER_FILES[0]: path}


def model_file(path: str | Path) -> Path:
    """Return the file with the pieces of the tokenizer at ``path``."""
    return next(iter(model_files(path).values()))


def read_model(path: str | Path) -> sentencepiece.SentencePieceProcessor | TiktokenModel | HuggingFaceModel:
    """Read the model at ``path``. Raises ConfigError if there is none."""
    if str(path).endswith(".json") and Path(path).name not in TOKENIZER_FILES and not os.path.isdir(path):
        names = "the files of a tokenizer of Hugging Face are named tokenizer.json and tokenizer_config.json"
        raise ConfigError([f"--tokenizer {path}: {names}; give their directory"])
    if missing := [file for file in model_files(path).values() if not os.path.isfile(file)]:
        raise ConfigError([
            f"--tokenizer {path}: no such file as {missing[0]}; give a SentencePiece model, or a directory with one or "
            "with tokenizer.json and tokenizer_config.json"
        ])
    model = model_file(path)
    if model.suffix == ".json":
        return HuggingFaceModel(model.parent)
    try:
        if is_tiktoken(model):
            return TiktokenModel(model)
        processor = sentencepiece.SentencePieceProcessor()
        processor.LoadFromSerializedProto(model.read_bytes())  # SentencePiece opens only paths that are UTF-8
        return processor
    except PermissionError as error:
        raise ConfigError([f"--tokenizer {model}: permission denied; make it readable"]) from error
    except (RuntimeError, OSError) as error:
        raise ConfigError([f"--tokenizer {path}: not a SentencePiece model ({error}); give another"]) from error


def continuation(tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """Return the text that ``tokens`` add to ``prompt``; a token may be part of a character or start with a space."""
    return tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :]
