"""Writes every file of an export: configuration, tokenizer, remote code, weights and model card."""

import shutil
from itertools import islice

import torch

from moh_lm.build import build_model
from moh_lm.checkpoint.fragments import full_parameters, write_safetensors
from moh_lm.data.files import read_json, write_json
from moh_lm.data.hugging_face_model import DOCUMENT_END
from moh_lm.data.shards import TOKENIZER_FILES, tokenizer_file, tokenizer_files
from moh_lm.data.tiktoken_model import is_tiktoken
from moh_lm.model.router import stored_dtype
from moh_lm.model.transformer import INIT_STD, saved_tensors
from tools.hf.convert import hugging_face_tokenizer, tiktoken_json
from tools.hf.convert.export_files import ExportError, plan_shards
from tools.hf.convert.keys import ARCHITECTURES, model_type, written
from tools.hf.convert.model_card import model_card
from tools.hf.convert.shipped_code import LANGUAGE, write_code
from tools.hf.convert.source_tokenizer import begin_id, cleaned, restore
from tools.hf.convert.tokenizer_json import CLASS, begin_texts, named_ids, read_model, write_tokenizer

AUTO_MAP = {
    "AutoConfig": "configuration_moh.MoHLlamaConfig",
    "AutoModel": "modeling_moh.MoHLlamaModel",
    "AutoModelForCausalLM": "modeling_moh.MoHLlamaForCausalLM",
    "AutoModelForSequenceClassification": "modeling_moh.MoHLlamaForSequenceClassification",
}


def write_export(step, config, dtype, arguments, directory, stock=None):
    """Write every file of the export; returns the number of parameters. stock: see stock_classes.py, or None."""
    state, special, begins = read_json(step / "state.json"), {}, None
    length = max(config.run.seq_length, state.get("imported", {}).get("max_position_embeddings", 0))
    if not arguments.no_tokenizer:
        special, begins = write_tokenizer_files(step, state, length, config.model.vocab_size, directory)
    write_json(directory / "config.json", hugging_face_config(config.model, length, dtype, special, stock))
    ids = {f"{name}_token_id": special.get(name) for name in ("bos", "eos", "pad")}
    if ids["pad_token_id"] is None:  # otherwise generate() uses EOS and prints a warning every time
        eos = ids["eos_token_id"]
        ids["pad_token_id"] = eos[0] if isinstance(eos, list) else eos
    write_json(directory / "generation_config.json", {key: value for key, value in ids.items() if value is not None})
    if is_ours(config.model) and not stock:
        write_code(LANGUAGE, directory)
    parameters = write_weights(step, config.model, dtype, arguments.max_shard_size, directory, stock)
    head = {key: getattr(arguments, key) for key in ("language", "license", "base_model")}
    card = model_card(step, config, state, dtype, parameters, begins, head, arguments.push_to_hub, stock)
    (directory / "README.md").write_text(card, encoding="utf-8")
    return parameters


def write_tokenizer_files(step, state, length, vocab_size, directory):
    """Write the tokenizer of ``step``. Returns the ids of its special tokens, and whether it puts BOS before a text, or
    None if that of an import is copied or there is none."""
    tokenizer, imported = tokenizer_of_data(step), state.get("imported", {})
    if not tokenizer:
        return copy_tokenizer(step, imported, directory), None
    source = imported.get("tokenizer", {})
    special = export_tokenizer(tokenizer, directory, length, parses="chat_template" in source)
    if source:
        special = restore(directory, source, imported["token_ids"], special, vocab_size)
    begin = begin_id(state, directory)
    if begin is None:
        return special, False
    begin_texts(directory, begin)
    return special | {"bos": begin}, True


def is_ours(model):
    return model_type(model) == "moh_llama"


def tokenizer_of_data(step):
    """Return the path of the tokenizer that made the data of ``step``; None if it has none, or only its source's."""
    path = tokenizer_file(step)
    of_source = path and path.name != TOKENIZER_FILES[0] and read_json(step / "state.json")["step"] == 0
    return None if of_source else path


def copy_tokenizer(step, imported, directory):
    """Copy the source's tokenizer that an import kept in this step or in step 0; returns its special ids."""
    special, place = imported.get("token_ids", {}), step
    if not tokenizer_files(step):
        place = step.with_name("step-0")
    chat = {key: value for key, value in imported.get("tokenizer", {}).items() if key == "chat_template"}
    for path in tokenizer_files(place):
        content = path.read_bytes()
        content = cleaned(content, chat, [DOCUMENT_END]) if path.name == "tokenizer_config.json" else content
        (directory / path.name).write_bytes(content)
    named = named_ids(place) if (place / "tokenizer_config.json").is_file() else {}
    return named | {name: index for name, index in special.items() if index is not None}


def export_tokenizer(model, directory, max_length, parses):
    """Convert the tokenizer ``model``, and copy a tokenizer.model; returns the ids of its special tokens. parses: see
    hugging_face_tokenizer.py."""
    if model.name != TOKENIZER_FILES[0]:
        return hugging_face_tokenizer.write_tokenizer(model.parent, directory, max_length, parses)
    shutil.copyfile(model, directory / model.name)
    if is_tiktoken(model):
        return tiktoken_json.write_tokenizer(model, directory, max_length)
    try:
        proto = read_model(model)
    except ValueError as error:
        raise ExportError(f"{error}; --no-tokenizer exports the model without it") from error
    return write_tokenizer(proto, directory, max_length)


def hugging_face_config(model, length, dtype, special, stock=None):
    """Content of config.json. length: length of the longest sequence. special: ids of the special tokens, see
    ``special_ids``. stock: see ``write_export``."""
    kind = model_type(model)
    described = {"architectures": [ARCHITECTURES[kind]], "model_type": kind}
    described |= ({"auto_map": AUTO_MAP} if is_ours(model) else {}) | written(model)
    if stock:
        described = {"architectures": [stock.architecture], "model_type": stock.model_type, **stock.config()}
    return {
        **described,
        "max_position_embeddings": length,
        "initializer_range": INIT_STD,
        "use_cache": True,
        **{f"{name}_token_id": special.get(name) for name in ("bos", "eos", "pad")},
        **({"tokenizer_class": CLASS} if special else {}),  # transformers 4.46 chooses the tokenizer by it
        "torch_dtype": str(dtype).removeprefix("torch."),  # understood by every version
    }


def write_weights(step, model_config, dtype, max_shard_size, directory, stock=None):
    """Write the parameters of ``step`` as safetensors, and an index if there are several; returns their number."""
    with torch.device("meta"):
        tensors = saved_tensors(build_model(model_config))
        shapes = {name: tensor.shape for name, tensor in (stock.converted(tensors) if stock else tensors)}
    sizes = {name: shape.numel() * stored_dtype(name, dtype).itemsize for name, shape in shapes.items()}
    shards = plan_shards(sizes, max_shard_size)
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
        index = {name: file for names, file in zip(shards, files, strict=True) for name in names}
        write_json(
            directory / "model.safetensors.index.json",
            {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(index.items()))},
        )
    parameters = stock.converted(full_parameters(step)) if stock else full_parameters(step)
    for names, file in zip(shards, files, strict=True):
        try:
            found = islice(parameters, len(names))
            tensors = {name: rounded(name, tensor, stored_dtype(name, dtype)) for name, tensor in found}
        except ValueError as error:
            raise ExportError(f"checkpoint: a parameter cannot be read ({error})") from error
        write_safetensors(directory / file, tensors, {"format": "pt"})
        del tensors  # before the next shard is read
    return sum(shape.numel() for name, shape in shapes.items() if stored_dtype(name, dtype) is dtype)


def rounded(name, tensor, dtype):
    values = tensor.to(dtype)
    if not values.isfinite().all():
        raise ExportError(f"{name}: reaches {tensor.abs().max():.3g}, which {dtype} cannot hold; give another --dtype")
    return values
