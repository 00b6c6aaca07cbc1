"""Converts the Hugging Face tokenizer with which a model was trained to the files of its export, with equal ids.

As in tokenizer_json.py, nothing is added to a text, control tokens that are spelled out in it stay text, and EOS, which
ends documents of the data, is declared as BOS too. The padding token is the tokenizer's own, or the piece for unknown
text, or a special token whose name says that it has no other use; otherwise there is none.
"""

import re

from moh_lm.data.hugging_face_model import DOCUMENT_END, HuggingFaceModel, text_of
from tools.hf.convert.tokenizer_json import config_with, read_files, write_files


def write_tokenizer(step, directory, max_length, parses=False):
    """Write tokenizer.json and tokenizer_config.json; returns {"bos", "eos", "pad", "unk"} -> id or None.

    step: directory that holds the tokenizer. max_length: the model's context in tokens. parses: whether the export will
    find control tokens in a text; those that are not special then stay so and are shown. Raises ConfigError.
    """
    model = HuggingFaceModel(step)
    tokenizer, config = read_files(step)
    named = {name: config.get(f"{name}_token") for name in ("eos", "pad", "unk")}
    named["eos"] = config.get(DOCUMENT_END, named["eos"])
    tokens = {name: text for name, token in named.items() if (text := text_of(token))}
    tokens["bos"] = tokens["eos"]
    tokens = {name: token for name, token in tokens.items() if model.tokenizer.token_to_id(token) is not None}
    if tokens.get("pad") == tokens["eos"]:  # collators exclude padding from the loss, and EOS must stay in it
        del tokens["pad"]
    added = tokenizer.get("added_tokens", [])  # some are ordinary letters, not special
    others = [token["content"] for token in added if token.get("special") and token["content"] != tokens["eos"]]
    unused = [token for token in others if re.search("pad|unk|reserved|unused", token, re.IGNORECASE)]
    spare = [token for token in (tokens.get("unk"), *unused) if token not in (None, tokens["eos"])]
    if spare:
        tokens.setdefault("pad", spare[0])
    if not parses:
        special = model.control_tokens()
        tokenizer["added_tokens"] = [{**token, "special": token["content"] in special} for token in added]
    adds_nothing = {"truncation": None, "padding": None, "post_processor": None}
    write_files(directory, {**tokenizer, **adds_nothing},
                config_with({f"{name}_token": token for name, token in tokens.items()}, max_length))  # fmt: skip
    return {name: model.tokenizer.token_to_id(token) for name, token in tokens.items()}
