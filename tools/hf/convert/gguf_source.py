"""Converts a Llama in a GGUF file to Hugging Face form for the time of its import.

transformers' own reader gives the weights, the configuration and the tokenizer, in fp32. That reader draws missing
tensors at random and ignores what it does not know, such as biases or the scaling of the rotary embedding. Therefore
everything in the file is checked first, and whatever would be lost is refused by name.
"""

import json
from contextlib import contextmanager

import torch
from safetensors.torch import save_file

from data_prep.encoding import Tokenizer
from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import read_json
from tools.hf.convert.export_directory import workplace

SUFFIX = ".gguf"
OF_LAYER = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip
OF_MODEL = ("token_embd", "output_norm")  # and "output", unless the embeddings are tied
READ = (  # keys of an architecture that transformers reads, or that say nothing about the model
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base",
    "tensor_data_layout",
)  # fmt: skip
NEEDED = ("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon")
WIDTHS = ("attention.key_length", "attention.value_length")  # of a head; all of it is rotated
NEUTRAL = ("none", 0, 1.0)  # values of other keys, such as scales and windows
OTHERWISE = "import the model in Hugging Face form instead"
# Names of rules by which byte-level tokenizers split text, as llama.cpp knows them: transformers applies GPT-2's to
# all that it does not know.
LIKE_GPT2 = ("gpt-2", "jais", "mpt", "olmo", "phi-2")
DIGITS_FIRST = ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")  # then GPT-2's


@contextmanager
def hugging_face_form(model, output):
    """Provide ``model`` or, for a GGUF file, a temporary directory beside ``output`` with its config and tokenizer.

    ``add_weights`` completes it, once all flags have been checked. Raises ConfigError for a file that transformers
    cannot read, or would not read in full.
    """
    if model.suffix != SUFFIX:
        yield model
        return
    check(model)
    place = next(parent for parent in output.absolute().parents if parent.exists())
    with workplace(place, "import") as directory:
        write_config(model, directory)
        write_tokenizer(model, directory)
        yield directory


def check(path):
    """Raise ConfigError unless transformers can read everything in the GGUF file ``path``."""
    try:
        import accelerate  # noqa: F401 - transformers needs it for the weights
        import gguf
    except ImportError as error:
        needs = f"a GGUF file is read with the package {error.name}: pip install -e '.[real]'"
        raise ConfigError([f"--model {path}: {needs}"]) from error
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if "tokenizer." not in name}
    except (OSError, ValueError, LookupError) as error:
        reason = f"not a whole GGUF file ({error}); fetch it again"
        raise ConfigError([f"--model {path}: {reason}"]) from error
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise ConfigError([f"--model {path}: has the architecture {kind!r}; only 'llama' can be read from GGUF files"])
    if (parts := fields.get("split.count", 1)) > 1:
        raise ConfigError([f"--model {path}: is one of {parts} parts; join them first: llama-gguf-split --merge"])
    own = {name.partition(".")[2]: value for name, value in fields.items() if name.startswith("llama.")}
    width, heads = own.get("rope.dimension_count"), own.get("attention.head_count")
    problems = [
        f"llama.{name} {value!r} would be ignored by transformers; {OTHERWISE}"
        for name, value in own.items()
        if not (name in READ or neutral(name, value) or (name in WIDTHS and value == width))
    ]
    # Without them, transformers does not undo the order of queries and keys, and takes an epsilon of its own.
    absent = [name for name in NEEDED if name not in own]
    problems += [f"llama.{name} is missing, and transformers would guess it; {OTHERWISE}" for name in absent]
    queries = next((int(tensor.shape[-1]) for tensor in reader.tensors if tensor.name == "blk.0.attn_q.weight"), None)
    if width and heads and queries not in (None, heads * width):
        problems.append(f"llama.rope.dimension_count {width}: rotates a part of each head; {OTHERWISE}")
    names = {tensor.name for tensor in reader.tensors}
    layers = range(fields.get("llama.block_count", 0))
    known = {f"{name}.weight" for name in OF_MODEL} | {f"blk.{n}.{name}.weight" for n in layers for name in OF_LAYER}
    extra = names - known - {"output.weight"}
    problems += [f"{name} would be ignored by transformers; {OTHERWISE}" for name in sorted(extra)[:4]]
    problems += [f"{name} is missing; fetch the file again" for name in sorted(known - names)[:4]]
    of_type = {tensor.tensor_type: tensor.data for tensor in reader.tensors}
    for kind, data in of_type.items():
        try:
            gguf.dequantize(data[:1], kind)
        except NotImplementedError:
            problems.append(f"has weights of the type {kind.name}, which cannot be read; use a Q8_0 or F16 file")
    raise_any([f"--model {path}: {problem}" for problem in problems])


def neutral(name, value):
    """Whether a value of a key that transformers ignores changes nothing in a Llama."""
    if isinstance(value, bool):
        return value == (name == "attention.causal")
    return value in NEUTRAL


def write_config(path, directory):
    """Write config.json of the GGUF file ``path``; no weights are read."""
    from transformers import LlamaConfig

    config = LlamaConfig.from_pretrained(path.parent, gguf_file=path.name)
    values = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")


def add_weights(model, directory):
    """Write model.safetensors of the GGUF file ``model``, 4 bytes for each parameter; other models have their own."""
    if model.suffix != SUFFIX:
        return
    from transformers import LlamaForCausalLM, logging, modeling_gguf_pytorch_utils

    logging.disable_progress_bar()
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors  # its progress bar cannot be turned off
    llama = LlamaForCausalLM.from_pretrained(model.parent, gguf_file=model.name, dtype=torch.float32)
    weights = llama.state_dict()
    if llama.config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    save_file({name: weight.contiguous() for name, weight in weights.items()}, directory / "model.safetensors")


def write_tokenizer(path, directory):
    """Write the tokenizer of the GGUF file ``path`` beside its model, and print what transformers cannot read.

    Its configuration has the chat template, and names the end of a document if a chat's turn ends otherwise.
    """
    import transformers

    try:
        rule = splitting_rule(path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        check_ends(path, tokenizer)
        tokenizer.save_pretrained(directory, save_jinja_files=False)
        (directory / "tokenizer.model").unlink(missing_ok=True)  # transformers 4 copies the GGUF file
        correct_tokenizer(directory, digits_first=rule in DIGITS_FIRST)
        for name, content in Tokenizer(str(directory)).contents().items():
            (directory / name).write_bytes(content)
    except Exception as error:  # converters of transformers raise anything
        remedy = "give the tokenizer of the data by --tokenizer"
        print(f"no tokenizer can be read from {path} ({type(error).__name__}: {error}); {remedy}", flush=True)


def check_ends(path, tokenizer):
    """Raise ValueError if a tokenizer that transformers has read begins or ends texts otherwise than its file says, or
    puts a space before them that the file does not want."""
    import gguf

    names = ("model", "bos_token_id", "eos_token_id", "add_space_prefix")
    fields = gguf.GGUFReader(path).fields
    kind, *ends, prefix = (field and field.contents() for field in (fields.get(f"tokenizer.ggml.{n}") for n in names))
    for end, expected in zip(("bos", "eos"), ends, strict=True):
        found = getattr(tokenizer, f"{end}_token_id")
        if None not in (expected, found) and found != expected:
            raise ValueError(f"the file's {end} is {expected}, and transformers reads {found}; update transformers")
    if kind == "llama" and prefix is False:
        raise ValueError("tokenizer.ggml.add_space_prefix false: would be ignored by transformers")


def splitting_rule(path):
    """Return the name of the rule by which a byte-level tokenizer splits text, or None for another tokenizer. Raises
    ValueError for a rule that transformers would replace by GPT-2's."""
    import gguf

    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as of_transformers
    except ImportError:  # other versions know none, or do not say which
        of_transformers = {}
    fields = gguf.GGUFReader(path).fields
    kind, rule = (fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind is None or kind.contents() != "gpt2":
        return None
    name = rule and rule.contents()
    if name not in {*LIKE_GPT2, *DIGITS_FIRST, *of_transformers}:
        raise ValueError(f"tokenizer.ggml.pre {name!r}: is no rule for splitting text that is known here")
    return name


def correct_tokenizer(directory, digits_first):
    """Drop special tokens that are not in the file but that converters of transformers add after all pieces.

    digits_first: whether each digit is split off before the rule of transformers applies."""
    path = directory / "tokenizer.json"
    values = read_json(path)
    size = read_json(directory / "config.json")["vocab_size"]
    values["added_tokens"] = [token for token in values["added_tokens"] if token["id"] < size]
    if digits_first:
        rules = [{"type": "Digits", "individual_digits": True}, values["pre_tokenizer"]]
        values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": rules}
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
