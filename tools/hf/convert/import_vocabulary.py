"""Enlarges a vocabulary: new rows of the embedding and of the output head, and the tokenizers to which they belong.

docs/continue.md says how new rows are made of means of old rows, and has measurements. A new row is the mean of the old
tokens that spell it (Gee et al. 2022, "Fast Vocabulary Transfer"), or the mean of all old tokens (Hewitt 2021,
"Initializing New Word Embeddings for Pretrained Language Models"). The latter also serves for ids beyond the new
tokenizer, or for all new ids without the old one. A tied matrix counts as the embedding.

Rows that only pad the old vocabulary are not tokens: means ignore them, and new tokens take their places.

Noise is added so that no two rows are equal: N(0, (NOISE x the deviation of that column over the old rows)^2), from a
generator seeded with (seed, name). Rows drawn like those of a new model would lie far from the others, and disturb
every prediction at first. Old rows stay unchanged, to the bit.
"""

import hashlib
from contextlib import suppress
from pathlib import Path

import torch
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from data_prep.bpe_continuation import steps
from data_prep.encoding import Tokenizer
from moh_lm.config import ConfigError, flag
from moh_lm.config.fields import fits
from moh_lm.data.hugging_face_model import DOCUMENT_END, HuggingFaceModel, optional_json, template_file
from moh_lm.data.sentencepiece_model import SPACE
from moh_lm.data.shards import TOKENIZER_FILES, tokenizer_files
from moh_lm.data.tiktoken_model import NUM_SPECIAL, is_tiktoken, read_ranks
from moh_lm.data.tokenizer import model_file, model_files
from tools.hf.convert.import_weights import EMBEDDING
from tools.hf.convert.source_tokenizer import cleaned

NOISE = 0.01
ROWS = 1024  # new rows made at once


def new_rows(source, pieces, seed, num_tokens, ids, name):
    """Yield the rows ``ids``, a range, of the matrix ``name``, fp32, in blocks. It holds the source's matrix in memory.

    pieces: {new id: ids of the old tokens that spell it}. num_tokens: number of tokens of the source; its other rows
    are padding.
    """
    old, pieces = source.whole(name)[:num_tokens], pieces if name == EMBEDDING else {}
    mean, deviation = old.mean(0), old.std(0)
    digest = hashlib.blake2b(f"{seed}/{name}/new rows".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    for start in range(0, len(ids), ROWS):
        rows = torch.stack([old[pieces[i]].mean(0) if i in pieces else mean for i in ids[start : start + ROWS]])
        yield rows + torch.empty_like(rows).normal_(generator=generator) * (NOISE * deviation)


def read_tokenizer(path, vocab_size, named):
    """{name in a step: bytes} of a tokenizer of any kind. Raises ConfigError naming the flag ``named``."""
    try:
        size = size_of(path)
    except ConfigError as error:
        raise ConfigError([text.replace("--tokenizer", named) for text in error.problems]) from error
    if size > vocab_size:
        remedy = f"give --extend-vocab {size}"
        raise ConfigError([f"{named} {path}: has {size} tokens, but the model has {vocab_size} rows; {remedy}"])
    return {name: kept_bytes(file) for name, file in model_files(path).items()}


def kept_bytes(file):
    """Return the bytes of a file of a tokenizer. tokenizer_config.json has no references to Python code, but the chat
    template and the end of documents that other files of its directory tell."""
    if not file.is_file():
        raise ConfigError([f"{file}: is not a file; restore it, or remove it"])
    content = file.read_bytes()
    try:
        return cleaned(content, of_other_files(file.parent)) if file.name == TOKENIZER_FILES[2] else content
    except (ValueError, AttributeError, TypeError) as error:
        raise ConfigError([f"{file}: cannot be read ({error}); fix it, or remove it"]) from error


def of_other_files(directory):
    """Return {key of tokenizer_config.json: value} of a Hugging Face tokenizer in ``directory``."""
    template = template_file(directory)
    found = {} if template is None else {"chat_template": template}
    with suppress(ConfigError):  # the package is absent
        model = HuggingFaceModel(directory)
        if model.eos_id() >= 0 and (end := model.id_to_piece(model.eos_id())) != model.eos_token:
            found[DOCUMENT_END] = end
    return found


def size_of(path):
    """Tokens of a tokenizer of any kind. Raises ConfigError."""
    first = model_file(path)
    if first.is_file() and is_tiktoken(first):  # its package may be absent
        ranks, special = read_ranks(first)
        return max(special + NUM_SPECIAL, max(ranks.values()) + 1)
    return Tokenizer(str(path)).vocab_size


def tokens_of(directory, old, vocab_size):
    """Return how many of the ``vocab_size`` rows are tokens of the model in ``directory``; all if nothing can be read.

    old: path of its tokenizer.model, or None. Files beside it may have more.
    """
    sizes, own = [], directory / TOKENIZER_FILES[1]
    for path in filter(None, (old, own if own.is_file() else None)):
        with suppress(ConfigError):
            sizes.append(size_of(path))
    if sizes:  # else the pieces are unknown, whatever is added to them
        sizes += [index + 1 for index in added_tokens(directory)]
    return min(max(sizes, default=vocab_size), vocab_size)


def spelled(old, new, num_tokens, vocab_size, is_compared=False):
    """{id: ids of the old tokens that spell it} of the tokens that the tokenizer ``new`` adds to ``old``.

    Raises ConfigError unless all ids of ``old`` mean the same in ``new``. is_compared: the ids of Hugging Face's form
    were compared with the model's in that form, or need not be. Then there is no spelling in it, {}.
    """
    old, new = model_file(old), model_file(new)
    if ".json" in (old.suffix, new.suffix):
        if is_compared:
            return {}
        remedy = "give one in the form of tokenizer.model, or leave the flag out"
        raise ConfigError([f"--tokenizer {new}: tokens of Hugging Face are not compared with those of {old}; {remedy}"])
    if is_tiktoken(old) != is_tiktoken(new):
        raise ConfigError([f"--tokenizer {new}: has another format than {old}"])
    if not is_compared:
        read_tokenizer(old, vocab_size, "--old-tokenizer")  # refuses other files
    table = spelled_tiktoken if is_tiktoken(old) else spelled_sentencepiece
    spelling = {index: ids for index, ids in table(old, new, vocab_size).items() if num_tokens <= index < vocab_size}
    return {index: ids for index, ids in spelling.items() if ids and max(ids) < num_tokens}  # that have rows


def spelled_sentencepiece(old, new, vocab_size):
    protos = [sentencepiece_model_pb2.ModelProto.FromString(Path(path).read_bytes()) for path in (old, new)]
    pieces = [[piece.piece for piece in proto.pieces] for proto in protos]
    refuse_other_ids(old, new, dict(enumerate(pieces[0][:vocab_size])), dict(enumerate(pieces[1])))
    bare = protos[0]  # it splits the text of a piece as inside a document
    bare.normalizer_spec.add_dummy_prefix = False
    bare.normalizer_spec.remove_extra_whitespaces = False
    model = SentencePieceProcessor(model_proto=bare.SerializeToString())
    new_pieces = pieces[1][len(pieces[0]) :]
    encoded = model.encode([piece.replace(SPACE, " ") for piece in new_pieces])
    return dict(enumerate(encoded, len(pieces[0])))


def spelled_tiktoken(old, new, vocab_size):
    ranks, _ = read_ranks(old)
    tokens = {rank: token for token, rank in read_ranks(new)[0].items()}
    refuse_other_ids(old, new, {rank: token for token, rank in ranks.items() if rank < vocab_size}, tokens)
    return {rank: joined(ranks, token) for rank, token in tokens.items() if token not in ranks}


def joined(ranks, token):
    """Return BPE's ids for the bytes of one word."""
    parts = [token[i : i + 1] for i in range(len(token))]
    for _ in steps(parts, ranks):
        pass
    return [ranks[part] for part in parts]


MADE = "give one that data_prep/tokenize.py extend, or add_tokens of transformers, has made from it"


def refuse_other_ids(old, new, before, now, remedy=MADE):
    for index, token in before.items():
        if now.get(index) != token:
            differ = f"id {index} is {now.get(index)!r} and in {old} it is {token!r}"
            raise ConfigError([f"--tokenizer {new}: {differ}; {remedy}"])


def pieces_by_id(file):
    """Return {id: piece} of a tokenizer.json without added tokens, whose names may change. Raises ConfigError."""
    import tokenizers

    try:
        vocabulary = tokenizers.Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=False)
    except Exception as error:  # it raises nothing more special
        raise ConfigError([f"{file}: cannot be read ({error}); fix it, or remove it"]) from error
    return {index: piece for piece, index in vocabulary.items()}


def added_tokens(directory):
    """Return {id: text} of the tokens that files of Hugging Face add to the pieces of a tokenizer. Raises ConfigError.

    Those of transformers 4 without a tokenizer.json are in added_tokens.json, or in tokenizer_config.json."""
    path = directory / TOKENIZER_FILES[1]
    try:
        found = {token["id"]: token["content"] for token in optional_json(path).get("added_tokens", [])}
        path = directory / TOKENIZER_FILES[2]
        for index, token in optional_json(path).get("added_tokens_decoder", {}).items():
            found.setdefault(int(index), token["content"])
        path = directory / "added_tokens.json"
        for text, index in optional_json(path).items():
            found.setdefault(int(index), text)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError([f"{path}: cannot be read ({error}); fix it, or delete it"]) from error
    return found


def refuse_other_pieces(directory, new, old, rows):
    """Raise ConfigError if ``new`` has other pieces at ids of the source's tokenizer in Hugging Face form that have one
    of the model's ``rows``.

    Names of added tokens may change. old: the source's tokenizer.model, with which ``spelled`` compares, or None.
    """
    remedy, before, own = MADE, added_tokens(directory), directory / TOKENIZER_FILES[1]
    file = model_file(new)
    if file.suffix == ".json":
        before, now = (pieces_by_id(own) if own.is_file() else {}) | before, pieces_by_id(file)
    else:
        first = size_of(old) if old and before else 0
        before = {index: text for index, text in before.items() if index >= first}
        remedy = "extend the tokenizer of that directory by add_tokens of transformers, and give the result"
        if is_tiktoken(file):
            now = {rank: token.decode(errors="replace") for token, rank in read_ranks(file)[0].items()}
        else:
            pieces = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes()).pieces
            now = {index: piece.piece for index, piece in enumerate(pieces)}
    shared = {index: before[index] for index in sorted(before.keys() & now.keys()) if index < rows}
    refuse_other_ids(directory, new, shared, now, remedy)


def find_tokenizers(arguments, rows, vocab_size):
    """Return (path of the model's tokenizer, path of the run data's tokenizer, {name: bytes} of files for the step).

    rows: those of the model's vocabulary. vocab_size: those that it will have.
    A model without tokenizer.model has no such path, and its tokenizer in Hugging Face form is copied unread. Raises
    ConfigError if that of the data, in this form too, has other ids.
    """
    places = [arguments.model / TOKENIZER_FILES[0], arguments.model / "original" / TOKENIZER_FILES[0]]
    old = arguments.old_tokenizer or next((path for path in places if path.is_file()), None)
    new = arguments.tokenizer or (None if arguments.extend_vocab else old)
    given = [flag(name) for name in ("tokenizer", "old_tokenizer") if getattr(arguments, name)]
    named = given[0] if given else "tokenizer of the model,"
    if new:
        contents = read_tokenizer(new, vocab_size, named)
        if arguments.tokenizer:
            refuse_other_pieces(arguments.model, new, old, rows)
        return old, new, contents
    kept = tokenizer_files(arguments.model) if not arguments.extend_vocab else []
    return old, new, {path.name: kept_bytes(path) for path in kept}


def token_ids(directory, values):
    """{"bos", "eos", "pad"} -> id of config.json's ``values`` or of generation_config.json, or None."""
    path = directory / "generation_config.json"
    try:
        more = optional_json(path)
        if not isinstance(more, dict):
            raise ValueError("it holds no settings")
    except ValueError as error:
        raise ConfigError([f"{path}: cannot be read ({error}); fix it, or delete it"]) from error
    keys = {name: f"{name}_token_id" for name in ("bos", "eos", "pad")}
    found = {name: more.get(key) if values.get(key) is None else values[key] for name, key in keys.items()}
    if isinstance(more.get("eos_token_id"), list):  # all ends of a text; config.json may name one of them
        found["eos"] = more["eos_token_id"]
    odd = {keys[name]: value for name, value in found.items() if not fits(value, int | None | tuple[int, ...])}
    if odd:
        given = f"{directory}: config.json or generation_config.json"
        raise ConfigError([f"{given} has {key} {value!r}: write a whole number, or null" for key, value in odd.items()])
    return found
