"""Settings of an imported model's tokenizer, which are restored in the export of a run that continued the model.

The tokenizer of the run's data gives the ids. Special tokens, chat template and padding side are those that users of
the source know; ``import_hf`` keeps them in ``imported`` of state.json. References to Python code are never kept.
"""

from pathlib import Path

from moh_lm.config import ConfigError
from moh_lm.data.files import json_bytes, read_json
from moh_lm.data.hugging_face_model import numbers_of, optional_json, template_file, text_of
from moh_lm.data.shards import TOKENIZER_FILES
from moh_lm.data.tiktoken_model import is_tiktoken, read_ranks
from moh_lm.data.tokenizer import read_model
from moh_lm.parsing import parse_json
from tools.hf.convert import tiktoken_json, tokenizer_json
from tools.hf.convert.tokenizer_json import CLASS, read_files, write_files

NAMES = ("bos", "eos", "pad", "unk")
LEFT = ("Llama", "CodeLlama", "Gemma", "Cohere")  # classes of transformers that pad on the left if no file says where
CODE = ("auto_map", "processor_class", "custom_pipelines")  # keys of files of Hugging Face that name Python code


def cleaned(content, more, less=()):
    """Return the bytes of a tokenizer_config.json with the settings ``more``, and without the keys ``less`` and custom
    code.

    A class of transformers then reads tokenizer.json. Bytes that need no change are returned unchanged.
    """
    settings = parse_json(content)
    wanted = {key: value for key, value in (without_code(settings) | more).items() if key not in less}
    if needs_code(settings):
        wanted["tokenizer_class"] = CLASS
    return content if wanted == settings else json_bytes(wanted)


def without_code(value):
    """Return a JSON value without the keys of ``CODE`` at any depth."""
    if isinstance(value, dict):
        return {key: without_code(item) for key, item in value.items() if key not in CODE}
    return [*map(without_code, value)] if isinstance(value, list) else value


def names_code(directory):
    """Return whether the tokenizer of a model needs its own Python code, according to its files."""
    return needs_code(optional_json(directory / "tokenizer_config.json"))


def needs_code(settings):
    """Return whether a tokenizer_config.json names code, or a class that the installed transformers lacks."""
    try:
        import transformers
    except ImportError:
        return CODE[0] in settings
    return CODE[0] in settings or not hasattr(transformers, str(settings.get("tokenizer_class", CLASS)))


def settings_of(directory, model, ids):
    """The settings of the tokenizer of a model in Hugging Face form, JSON-able; {} if it has none.

    model: path of its tokenizer.model, or None. ids: {"bos", "eos", "pad"} -> id of its configuration. Raises
    ConfigError.
    """
    try:
        names = ("tokenizer", "tokenizer_config", "special_tokens_map")
        pieces, config, named = (optional_json(directory / f"{name}.json") for name in names)
        tokens = {name: text_of((named | config).get(f"{name}_token")) for name in NAMES}
        entries = [(token["id"], token) for token in pieces.get("added_tokens", [])]
        entries += config.get("added_tokens_decoder", {}).items()
        added = {token["content"]: (int(index), bool(token.get("special"))) for index, token in entries}
        others = {*tokens.values(), *map(text_of, (named | config).get("additional_special_tokens") or [])}
        for text, index in optional_json(directory / "added_tokens.json").items():  # of transformers 4
            added.setdefault(text, (int(index), text in others))
        side = config.get("padding_side") or (pieces.get("padding") or {}).get("direction", "").lower()
        usual = "left" if config.get("tokenizer_class", "").startswith(LEFT) else "right"
        chat = template_file(directory)
        chat = config.get("chat_template") if chat is None else chat
        if model is not None:
            tokens = ends_of(model, ids) | {name: text for name, text in tokens.items() if text}
        begins = begins_with(pieces, config, tokens.get("bos"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        remedy = "fix the files of its tokenizer, or remove them"
        raise ConfigError([f"{directory}: has a tokenizer that cannot be read ({error}); {remedy}"]) from error
    if model is None and not pieces and not config:
        return {}
    if config and not pieces and "add_bos_token" not in config and tokens.get("bos"):
        unsaid = f"note: {directory} does not say whether texts begin with {tokens['bos']}"
        print(f"{unsaid}, as in transformers 4, or not; write add_bos_token into tokenizer_config.json", flush=True)
    special, others = ({text: index for text, (index, of) in added.items() if of == kind} for kind in (True, False))
    found = {"tokens": {name: text for name, text in tokens.items() if text}, "special": special, "begins": begins}
    if chat:  # markers of its template; other texts are encoded as in training
        found["added"] = {text: index for text, index in others.items() if text in str(chat)}
    return found | {"padding_side": side or usual, **({"chat_template": chat} if chat else {})}


def ends_of(model, ids):
    """Return {"bos", "eos"} -> text of the special tokens of a tokenizer.model with the ids of the configuration."""
    try:
        tokenizer = read_model(model)
    except ConfigError:  # the package is absent
        return {}
    numbers = {"bos": tokenizer.bos_id(), "eos": tokenizer.eos_id()}
    return {name: tokenizer.id_to_piece(index) for name, index in numbers.items() if index in listed(ids.get(name))}


def begins_with(pieces, config, bos):
    """Return the text of the token that transformers puts before a text, or None.

    pieces, config: content of tokenizer.json, which decides if there is one, and of tokenizer_config.json. bos: the
    text of BOS, or None.
    """
    if not pieces:
        return bos if config.get("add_bos_token") else None
    processor = pieces.get("post_processor") or {}
    steps = processor.get("processors", [processor])
    firsts = [step["single"][0] for step in steps if step.get("type") == "TemplateProcessing"]
    return next((first["SpecialToken"]["id"] for first in firsts if "SpecialToken" in first), None)


def begin_id(state, directory):
    """Return the id before every text of an export: that before documents of the data, or None.

    state: content of state.json. directory: the export, whose tokenizer is complete. An import that was not trained
    begins texts as its source does, with a token that the tokenizer may lack.
    """
    begins = state.get("imported", {}).get("tokenizer", {}).get("begins")
    if state["step"] == 0 and begins:
        return numbers_of(read_json(Path(directory, "tokenizer.json"))).get(begins)
    return state["data"].get("bos_id")


def restore(directory, source, ids, special, vocab_size):
    """Give the tokenizer in ``directory`` the settings of the ``source``. Returns {"bos", "eos", "pad", "unk"} -> ids.

    ids: those in the source's configuration. special: the tokenizer's own ids. Missing tokens are added if their ids
    are free, and among the ``vocab_size`` rows of the model. A text ends with the tokens of the source, or with the
    one that ends documents of the data.
    """
    tokenizer, config = read_files(directory)
    add_tokens(tokenizer, missing_tokens(source, tokenizer, vocab_size))
    known = numbers_of(tokenizer)
    tokens = {name: text for name, text in source["tokens"].items() if text in known}
    if tokens.get("pad") == tokens.get("eos", config.get("eos_token")):  # collators exclude padding from the loss
        tokens.pop("pad", None)
    config |= {f"{name}_token": text for name, text in tokens.items()} | {"padding_side": source["padding_side"]}
    if "chat_template" in source:  # the template spells the special tokens
        config |= {"chat_template": source["chat_template"], "split_special_tokens": False}
    write_files(directory, tokenizer, config)
    found = special | {name: known[text] for name, text in tokens.items()}
    ends = ends_of_export(source, ids, special["eos"], known)
    return found | {"eos": ends if len(ends) > 1 else ends[0] if ends else None}


def ends_of_export(source, ids, own, known):
    """Return the ids that end a text of an export, the first one the id of its EOS.

    ids: see ``restore``. own: id of the tokenizer that ends documents, or None. known: {text: id} of the tokenizer with
    the tokens that the export adds. The ids of the source count if its EOS has one of them there; otherwise they are
    other pieces.
    """
    end = known.get(source.get("tokens", {}).get("eos"))
    of_source = listed(ids.get("eos"))
    return list(dict.fromkeys([*listed(end), *(of_source if end in of_source else []), *listed(own)]))


def missing_tokens(source, tokenizer, vocab_size):
    """Return {text: (id, whether it is special)} of the source's tokens that an export adds to the content of a
    tokenizer.json: those whose ids are free there, and among the ``vocab_size`` rows of the model.

    The vocabulary of a unigram model is a list in the order of ids, to which nothing is added.
    """
    known, found = numbers_of(tokenizer), {}
    taken = {*known.values()}
    if not isinstance(tokenizer["model"]["vocab"], dict):
        return found
    for name, is_special in (("special", True), ("added", False)):
        for text, index in source.get(name, {}).items():
            if index < vocab_size and index not in taken and text not in known:
                found[text] = index, is_special
                taken.add(index)
    return found


def add_tokens(tokenizer, tokens):
    """Add ``tokens``, as ``missing_tokens`` returns them, to the content of a tokenizer.json."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for text, (index, is_special) in tokens.items():
        tokenizer["model"]["vocab"][text] = index
        tokenizer["added_tokens"].append({"id": index, "content": text, **flags, "special": is_special})
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])


def outline(path):
    """Return the vocabulary of the tokenizer at ``path`` in the form of the tokenizer.json that an export makes of it;
    an empty one if none can be made."""
    if path.name != TOKENIZER_FILES[0]:
        return read_json(path)
    if is_tiktoken(path):
        return {"model": {"vocab": tiktoken_json.vocabulary(*read_ranks(path))}}
    try:
        proto = tokenizer_json.read_model(path)
    except ValueError:
        return {"model": {"vocab": []}}
    is_list = proto.trainer_spec.model_type == tokenizer_json.UNIGRAM
    pieces = [(piece.piece, index) for index, piece in enumerate(proto.pieces)]
    return {"model": {"vocab": pieces if is_list else dict(pieces)}}


def listed(ids):
    """Return a list of ids, given one, several or None."""
    return ids if isinstance(ids, list) else [] if ids is None else [ids]
