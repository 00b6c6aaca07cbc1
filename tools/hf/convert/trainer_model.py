"""The trainer's own model and its tokenizer, from a run, a step of it or an export."""

import importlib.util
import math
import os

import torch

from data_prep.encoding import Tokenizer
from moh_lm.build import build_model
from moh_lm.checkpoint.fragments import full_parameters, step_config
from moh_lm.checkpoint.saver import find_step
from moh_lm.cli.devices import usable_device
from moh_lm.config import ConfigError, raise_any
from moh_lm.cost.attention import cache_width
from moh_lm.data.hugging_face_model import ends_of_model, numbers_of, optional_json
from moh_lm.data.shards import TOKENIZER_FILES, tokenizer_file
from moh_lm.data.tokenizer import read_model
from moh_lm.kernels.measured import TRITON_HEAD_DIMS
from moh_lm.model.transformer import saved_tensors
from tools.hf.convert.export_files import weight_files
from tools.hf.convert.import_config import model_config, read_config
from tools.hf.convert.source_tokenizer import ends_of_export, listed, missing_tokens, outline


def described(directory, values):
    """Return the ModelConfig of an export's config.json. Raises ConfigError, also for one in another class's form."""
    try:
        return model_config(values)
    except ConfigError as error:
        remedy = "what is not such an export can be read after tools/import_hf.py"
        raise ConfigError([f"--model {directory}: {problem}; {remedy}" for problem in error.problems]) from error


def load(arguments, attention_backend="auto"):
    """Return (model on its device, its longest sequence, its ``Tokenizer``, ids that end a text). Raises ConfigError.

    The tokenizer begins documents with BOS if the data of a step do, or if the tokenizer of an export, or of the source
    of an import that was not trained, begins texts with it.
    """
    directory = arguments.model
    if not os.path.isdir(directory):
        remedy = "give a run, a step or an export, or import a model of the hub with tools/import_hf.py first"
        raise ConfigError([f"--model {directory}: no such directory; {remedy}"])
    values = read_config(directory) if os.path.exists(directory / "config.json") else {}
    is_step = "model_type" not in values
    if not is_step:
        config, limit = described(directory, values), values.get("max_position_embeddings")
        if not isinstance(limit, int):
            raise ConfigError([f"--model {directory}: config.json has no max_position_embeddings; add it"])
        parameters = ((name, file.get_tensor(name)) for name, file in weight_files(directory).items())
    else:
        directory = find_step(directory)
        run = step_config(directory)
        config, limit, parameters = run.model, run.run.seq_length, full_parameters(directory)
    device = arguments.device or usable_device(None)
    if attention_backend == "loops" and device != "cpu":
        remedy = "choose auto, or --device cpu"
        raise ConfigError([f"--attention-backend loops: needs a CPU, and --device is {device}; {remedy}"])
    usable_device(device)
    if attention_backend == "triton":
        check_triton(device, config)
    bos = recorded_bos(directory, is_step)
    try:
        if bos is None:
            bos = getattr(read_model(directory), "begins", False)
        tokenizer = Tokenizer(str(directory), bos)
    except ConfigError as error:
        reason, advice = error.problems[0].removeprefix(f"--tokenizer {directory}: "), "or copy that of its data there"
        raise ConfigError([f"--model {directory}: has no tokenizer that can be read: {reason}, {advice}"]) from error
    with torch.device("meta"):
        core = "groups" if config.chooses_in_groups else "dense"
        model = build_model(config, backends=core).to(getattr(torch, arguments.dtype))
    model.to_empty(device=device)
    wanted = dict(saved_tensors(model))
    with torch.no_grad():
        for name, tensor in parameters:
            if name not in wanted or wanted[name].shape != tensor.shape:
                odd = f"its config.json describes no {name} {list(tensor.shape)}"
                raise ConfigError([f"--model {directory}: {odd}; import it by tools/import_hf.py"])
            if not tensor.isfinite().all():
                raise ConfigError([f"--model {directory}: {name} has values that are not finite; give another step"])
            wanted.pop(name).copy_(tensor)
    if wanted:
        raise ConfigError([f"--model {directory}: has no {', '.join(wanted)}; export it again"])
    return model.eval(), limit, tokenizer, ends_of_text(directory, is_step, tokenizer.model, config.vocab_size)


def ends_of_text(directory, is_step, tokenizer, vocab_size=math.inf):
    """Return the ids that end a text of an export, or of a step of ``vocab_size`` rows as its export has them. Raises
    ConfigError."""
    if not is_step:
        return {tokenizer.eos_id(), *ends_of_model(directory)}
    state = optional_json(directory / "state.json")
    imported = state.get("imported", {})
    source, ids = imported.get("tokenizer"), imported.get("token_ids", {})
    if state.get("step") == 0 and not (directory / TOKENIZER_FILES[0]).is_file():  # its tokenizer is the source's own
        return {tokenizer.eos_id(), *listed(ids.get("eos"))}
    if not source:
        return {tokenizer.eos_id()}
    content = outline(tokenizer_file(directory))
    new = {text: index for text, (index, _) in missing_tokens(source, content, vocab_size).items()}
    return {*ends_of_export(source, ids, tokenizer.eos_id(), numbers_of(content) | new)}


def recorded_bos(directory, is_step):
    """Return whether BOS begins documents of a step, or texts of an export or of an import's source; None if no file
    but tokenizer.json says it."""
    path = directory / ("state.json" if is_step else "tokenizer_config.json")
    try:
        facts = optional_json(path)
        if not is_step:
            return facts.get("add_bos_token")
        if facts["step"] == 0 and "imported" in facts:
            begins = facts["imported"].get("tokenizer", {}).get("begins")
            return begins is not None if (directory / TOKENIZER_FILES[0]).is_file() else None
        return "bos_id" in facts["data"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError([f"--model {directory}: {path.name} cannot be read ({error}); restore it"]) from error


def check_triton(device, config):
    problems = []
    head_dim = cache_width(config) if config.attention == "latent" else config.head_dim
    if any(map(config.own_keys, range(config.num_layers))):
        problems.append("cannot leave out keys, which the heads of this model do; choose auto or dense")
    if torch.device(device).type != "cuda":
        problems.append(f"needs a CUDA GPU, and --device is {device}; choose auto")
    if importlib.util.find_spec("triton") is None:
        problems.append("the package triton is not installed; pip install triton, or choose auto")
    if head_dim not in TRITON_HEAD_DIMS:
        allowed = ", ".join(map(str, TRITON_HEAD_DIMS))
        problems.append(f"has no kernels for head dimension {head_dim}, only for {allowed}; choose auto")
    raise_any([f"--attention-backend triton: {problem}" for problem in problems])
