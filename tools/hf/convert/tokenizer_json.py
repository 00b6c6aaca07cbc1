"""Converts SentencePiece's ``tokenizer.model`` to Hugging Face's ``tokenizer.json`` and its config, with equal ids.

The files are written in the form that ``tokenizers`` reads, from the protobuf that SentencePiece stores; no library of
Hugging Face is needed. The class is PreTrainedTokenizerFast: LlamaTokenizer would replace the normalizer by its own.

The tokenizer gives the ids that the model was trained on:
- nothing is added: training puts EOS after each document and BOS nowhere. A document begins after the EOS of the one
  before it, so EOS is also declared as the BOS token that evaluation and generation put before an empty context. If
  documents begin with BOS, ``begin_texts`` has it put before every text.
- batches are padded on the left, by the model's padding piece, or else by the piece of unknown text. EOS is not used:
  collators of training exclude padding from the loss, and the model would not learn to end.
- ``split_special_tokens``: the text ``</s>`` in a document is encoded as text, as by SentencePiece, and never as EOS.

moh_lm/data/sentencepiece_model.py says which models are supported. Ids can differ only for a text that is a single
user-defined symbol besides spaces that are removed; in a unigram model, for splits of equal score and the text of a
control piece with letters that the model does not know; in a model with NFKC normalization, for combining marks out of
canonical order or after a compatibility character.
"""

import base64
import json
import re
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2

from moh_lm.data.files import read_json
from moh_lm.data.hugging_face_model import numbers_of, text_of
from moh_lm.data.sentencepiece_model import SPACE, conversion_problem

CLASS = "PreTrainedTokenizerFast"  # in config.json too
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # ModelProto.SentencePiece.Type


def read_model(path):
    """The ModelProto of a tokenizer.model. Raises ValueError if the file is not such a model, or is of an unsupported
    kind."""
    proto = sentencepiece_model_pb2.ModelProto()
    try:
        proto.ParseFromString(Path(path).read_bytes())
    except Exception as error:  # protobuf's DecodeError, whose module depends on the version
        raise ValueError(f"{path}: not a SentencePiece model ({error})") from error
    if problem := conversion_problem(proto) if proto.pieces else "not a SentencePiece model (it has no pieces)":
        raise ValueError(f"{path}: {problem}; tools/generate.py and --eval-tasks use the run as it is")
    return proto


def special_ids(proto):
    """Return {"bos", "eos", "pad", "unk"} -> id, or None if the model has none. BOS is EOS, see above."""
    trainer = proto.trainer_spec
    pad = trainer.unk_id if trainer.pad_id < 0 else trainer.pad_id
    ids = {"bos": trainer.eos_id, "eos": trainer.eos_id, "pad": pad, "unk": trainer.unk_id}
    return {name: index if 0 <= index < len(proto.pieces) else None for name, index in ids.items()}


def tokenizer_json(proto):
    added = [(index, piece) for index, piece in enumerate(proto.pieces) if is_special(piece) or is_symbol(piece)]
    return content_of(
        added=[(index, piece.piece, is_special(piece)) for index, piece in added],
        normalizer={"type": "Sequence", "normalizers": normalizers(proto)},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders(proto)},
        model=bpe(proto) if proto.trainer_spec.model_type == BPE else unigram(proto),
    )


def is_special(piece):
    return piece.type in (UNKNOWN, CONTROL)


def is_symbol(piece):
    """Return whether ``piece`` is a user-defined symbol that SentencePiece can find. In a text that it searches spaces
    are U+2581, so it finds none with a plain space."""
    return piece.type == USER_DEFINED and " " not in piece.piece


def content_of(added, normalizer, pre_tokenizer, decoder, model):
    """Assemble ``tokenizer_json``. added: (id, text, whether it is special) of tokens besides the model's."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": content, **flags, "normalized": not special, "special": special}
            for index, content, special in added
        ],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def tokenizer_config(proto, max_length):
    """Content of tokenizer_config.json; ``max_length`` is the model's context in tokens."""
    ids = {name: index for name, index in special_ids(proto).items() if index is not None}
    return config_with({f"{name}_token": proto.pieces[index].piece for name, index in ids.items()}, max_length)


def config_with(tokens, max_length):
    """``tokenizer_config`` with ``tokens``, {"eos_token": its text, ...}."""
    return {
        "tokenizer_class": CLASS,
        **tokens,
        "add_bos_token": False,
        "add_eos_token": False,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
    }


def named_ids(directory):
    """Return {"bos", "eos", "pad"} -> id, or None, for the special tokens named in the files of another tokenizer."""
    tokenizer, config = read_files(directory)
    ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    return {name: ids.get(text_of(config.get(f"{name}_token"))) for name in ("bos", "eos", "pad")}


def write_tokenizer(proto, directory, max_length):
    """Write both files; returns ``special_ids``. Equal models give equal bytes."""
    write_files(directory, tokenizer_json(proto), tokenizer_config(proto, max_length))
    return special_ids(proto)


def begin_texts(directory, bos):
    """Let the tokenizer in ``directory`` put the token with id ``bos`` before each text, as documents of the data have
    it."""
    tokenizer, config = read_files(directory)
    text = next(text for text, index in numbers_of(tokenizer).items() if index == bos)
    first, second = (
        [{"SpecialToken": {"id": text, "type_id": number}}, {"Sequence": {"id": name, "type_id": number}}]
        for number, name in enumerate("AB")
    )
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": first,
        "pair": first + second,
        "special_tokens": {text: {"id": text, "ids": [bos], "tokens": [text]}},
    }
    write_files(directory, tokenizer, config | {"bos_token": text, "add_bos_token": True})


def read_files(directory):
    """Return (content of tokenizer.json, content of tokenizer_config.json)."""
    return tuple(read_json(Path(directory, name)) for name in ("tokenizer.json", "tokenizer_config.json"))


def write_files(directory, tokenizer, config):
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        (Path(directory) / name).write_text(text, encoding="utf-8")


def bpe(proto):
    vocabulary = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    return bpe_model(vocabulary, merges(proto), proto.trainer_spec.unk_piece, proto.trainer_spec.byte_fallback)


def bpe_model(vocabulary, merges, unknown=None, byte_fallback=False, ignore_merges=False):
    """vocabulary: {text: id}. merges: [[left, right]]. unknown: the token of unknown text, if there is one."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": unknown is not None,
        "byte_fallback": byte_fallback,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary,
        "merges": merges,
    }


def merges(proto):
    """Return every split of a normal piece into two. The pair whose result has the highest score is merged first."""
    ids = {piece.piece: index for index, piece in enumerate(proto.pieces) if piece.type == NORMAL}
    ranked = []
    for text, index in ids.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in ids and right in ids:
                ranked.append((-proto.pieces[index].score, ids[left], ids[right], [left, right]))
    return [pair for *_, pair in sorted(ranked)]


def unigram(proto):
    """Return a unigram model whose control pieces score below their letters, as SentencePiece never finds them."""
    lowest = min(piece.score for piece in proto.pieces)

    def score(piece):
        found = piece.type in (NORMAL, USER_DEFINED)
        return piece.score if found else lowest * (len(piece.piece) + 1)

    return {
        "type": "Unigram",
        "unk_id": proto.trainer_spec.unk_id,
        "vocab": [[piece.piece, score(piece)] for piece in proto.pieces],
        "byte_fallback": proto.trainer_spec.byte_fallback,
    }


def normalizers(proto):
    """The steps that SentencePiece applies to a text before splitting it."""
    spec = proto.normalizer_spec
    steps = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode("ascii")
        # Precompiled treats letters with several marks unlike SentencePiece; after NFC there are hardly any.
        compose = [{"type": "NFC"}] if "nfkc" in spec.name else []
        steps += [*compose, {"type": "Precompiled", "precompiled_charsmap": charsmap}, *compose]
    if spec.remove_extra_whitespaces:
        steps += [replace_regex(r"\A +", ""), replace_regex(" {2,}", " ")]
    if spec.add_dummy_prefix:
        steps.append(dummy_prefix(proto))
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    if spec.remove_extra_whitespaces:
        steps.append(replace_regex(SPACE + r"+\z", ""))
    return steps


def dummy_prefix(proto):
    """The space before a text. User-defined symbols are normalized like a text, by themselves, and must not get one."""
    symbols = [re.escape(piece.piece) for piece in proto.pieces if is_symbol(piece)]
    if not symbols:
        return {"type": "Prepend", "prepend": SPACE}
    return replace_regex(rf"\A(?!\z|(?:{'|'.join(symbols)})\z)", SPACE)


def replace_regex(pattern, content):
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def decoders(proto):
    steps = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    if proto.trainer_spec.byte_fallback:
        steps.append({"type": "ByteFallback"})
    steps.append({"type": "Fuse"})
    if proto.normalizer_spec.add_dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps
