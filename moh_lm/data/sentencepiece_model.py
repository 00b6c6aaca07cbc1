"""What a SentencePiece model says about itself: its user-defined symbols, and whether an export can convert it."""

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from moh_lm.units import listing

SPACE = "\u2581"  # SentencePiece's visible space


def proto_of(model: sentencepiece.SentencePieceProcessor) -> sentencepiece_model_pb2.ModelProto:
    return sentencepiece_model_pb2.ModelProto.FromString(model.serialized_model_proto())


def user_defined(proto: sentencepiece_model_pb2.ModelProto) -> list[str]:
    """Return the user-defined symbols, in the order of their ids."""
    return [piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED]


def conversion_problem(proto: sentencepiece_model_pb2.ModelProto) -> str:
    """Return a clause if no tokenizer.json gives the ids of the model, else an empty text."""
    trainer, spec, reason = proto.trainer_spec, proto.normalizer_spec, ""
    if trainer.model_type not in (trainer.UNIGRAM, trainer.BPE):
        reason = f"its model type is {trainer.ModelType.Name(trainer.model_type).lower()}, not bpe or unigram"
    elif trainer.treat_whitespace_as_suffix:
        reason = "it was trained with treat_whitespace_as_suffix"
    elif not spec.escape_whitespaces:
        reason = "it was trained with escape_whitespaces=false"
    elif changed := changed_symbols(proto):
        reason = f"its normalization changes the user-defined symbols {listing([*map(repr, changed)])}"
    elif cut := cut_symbols(proto):
        reason = f"as a unigram model it may cut the user-defined symbols {listing([*map(repr, cut)])}"
    return f"an export can hold no tokenizer.json of this model, because {reason}" if reason else ""


def changed_symbols(proto: sentencepiece_model_pb2.ModelProto) -> list[str]:
    """Return the user-defined symbols that normalization changes.

    SentencePiece exempts them from it, but a tokenizer.json finds symbols in normalized text only.
    """
    trims, model = proto.normalizer_spec.remove_extra_whitespaces, proto.SerializeToString()
    options = {"add_dummy_prefix": False, "escape_whitespaces": False, "remove_extra_whitespaces": trims}
    normalize = sentencepiece.SentencePieceNormalizer(model_proto=model, **options).normalize

    def is_kept(symbol):
        text = f"a{symbol}b"
        return normalize(text) == text and not (trims and symbol.endswith(SPACE))

    return [symbol for symbol in user_defined(proto) if not is_kept(symbol)]


def cut_symbols(proto: sentencepiece_model_pb2.ModelProto) -> list[str]:
    """Return the user-defined symbols that a unigram model may cut, because others or pieces of words overlap them.

    BPE models and a tokenizer.json always take the first symbol of a text, and the longest one there.
    """
    is_unigram = proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM
    symbols = [symbol for symbol in user_defined(proto) if is_unigram and " " not in symbol]
    begins = {symbol[:length] for symbol in symbols for length in range(1, len(symbol))}

    def is_cut(symbol):
        return SPACE in symbol or any(symbol[start:] in begins for start in range(1, len(symbol)))

    return [symbol for symbol in symbols if is_cut(symbol)]
