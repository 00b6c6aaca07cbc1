"""config.json of a Llama or Mistral, in every spelling of transformers 4 and 5, as a ``ModelConfig``.

It reads ``LlamaForCausalLM`` (model_type llama), ``MistralForCausalLM`` (mistral), which is a Llama with a sliding
window, and the exports of this project (moh_llama). The rotary embedding is described by ``rope_parameters``
(transformers 5), or by ``rope_theta`` and ``rope_scaling`` with ``rope_type`` or ``type`` (transformers 4). A file may
have both, and they must agree. Constants that the file does not give are not assumed, since training with a wrong one
shows no error. Settings that would change the model's function are refused by name: biases, other activations, windows
of a Llama, other scalings of the rotary embedding, quantized weights, remote code.
"""

import shlex
from dataclasses import fields

from moh_lm.checks.model import model_problems
from moh_lm.config import Config, ConfigError, HeadsConfig, ModelConfig, raise_any
from moh_lm.config.fields import as_tuples, fits, in_words
from moh_lm.config.model import OF_LAYERS
from moh_lm.parsing import read_json
from moh_lm.vision.config import kind_of_run
from tools.hf.convert import keys

ASSUMED = {"sliding_window": 4096, "num_key_value_heads": 8}  # by transformers if a mistral's file has none
USUAL = {**keys.FIXED, "partial_rotary_factor": 1.0}  # or absent
FOREIGN = (  # keys of relatives of Llama, or of variants of its code
    "quantization_config", "num_experts", "num_local_experts", "clip_qkv", "qk_layernorm",
    "use_qk_norm", "logit_scale", "logits_scaling", "residual_multiplier", "embedding_multiplier",
    "attention_multiplier", "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip
FIELDS = {entry.name: entry.type for section in (ModelConfig, HeadsConfig) for entry in fields(section)}
FIELDS |= dict.fromkeys(OF_LAYERS, int)  # one number in the file
TYPES = {entry.key: FIELDS[entry.field] for entry in keys.MODEL}  # types of values other than null
TYPES |= {"max_position_embeddings": int, "sliding_window": int, "layer_types": tuple[str, ...]}
OUR_TYPES = {entry.key: FIELDS[entry.field] for entry in (*keys.OURS, *keys.HEADS)}  # types of values including null
OUR_TYPES |= {"layer_heads": tuple[int, ...], "layer_windows": tuple[int, ...]}


def read_config(directory):
    """The content of ``directory``/config.json, with values of the types that are read. Raises ConfigError."""
    path = directory / "config.json"
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path}: cannot be read ({error}); give a model in Hugging Face form"]) from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type", ""), str):
        raise ConfigError([f"{path}: no configuration; give a model in Hugging Face form"])
    raise_any([f"{path}: {problem}; fix it" for problem in type_problems(values)])
    return values


def type_problems(values):
    """Sentences for values whose type differs from that of the field into which they are read."""
    kind = values.get("model_type")
    if kind not in keys.ARCHITECTURES:
        return []
    types = {key: wanted for key, wanted in TYPES.items() if values.get(key) is not None}
    types |= OUR_TYPES if kind == "moh_llama" else {}
    found = [
        f"{key} {values[key]!r}: must be {in_words(wanted, values[key])}"
        for key, wanted in types.items()
        if key in values and not fits(values[key], wanted)
    ]
    longest = values.get("max_position_embeddings", 1)
    if longest is None or (fits(longest, int) and longest < 1):
        found.append(f"max_position_embeddings {longest}: must be the longest sequence, 1 or above")
    return found


def refuse_run(flag, directory):
    """Raise ConfigError if ``directory`` is a run or a step of a run instead of a model in Hugging Face form."""
    if (directory / "checkpoints").is_dir() or (directory / "manifest.json").is_file():
        if (kind := kind_of_run(directory)) is not Config:
            raise ConfigError([f"{flag} {directory}: is a run of {kind.program}; docs/vision.md has its commands"])
        export = f"python tools/export_hf.py --checkpoint {shlex.quote(str(directory))} --output DIR"
        raise ConfigError([f"{flag} {directory}: is a run, not an export; export it first: {export}"])


def model_config(values, heads=None, code_is_known=False):
    """Return the ModelConfig described by config.json's ``values``. heads: a HeadsConfig instead of the file's.

    A Llama has none; it uses all heads if ``heads`` is None. code_is_known: ``heads`` describes what the model's own
    code computes, which is never run. Raises ConfigError with everything that cannot be read.
    """
    problems = foreign(values, code_is_known)
    needed = [entry.key for entry in keys.MODEL if entry.absent is keys.REQUIRED]
    problems += [f"{key} is missing" for key in needed if values.get(key) is None]
    problems += [
        f"{key} is missing: transformers assumes {value} for a mistral; write it into the file"
        for key, value in ASSUMED.items()
        if values.get("model_type") == "mistral" and key not in values
    ]
    rope = {}
    try:
        rope = rope_fields(values)
    except ConfigError as error:
        problems += error.problems
    except (TypeError, AttributeError) as error:
        problems.append(f"rope_parameters or rope_scaling: invalid ({error})")
    raise_any([f"config.json: {problem}" for problem in problems])
    try:
        model = ModelConfig(
            **{entry.field: as_tuples(values.get(entry.key, entry.absent)) for entry in (*keys.MODEL, *keys.OURS)}
            | keys.read_head_counts(values),
            heads=heads or own_heads(values),
            window=keys.read_window(values),
            **rope,
        )
        problems = model_problems(model)
    except (TypeError, LookupError, AttributeError, ValueError) as error:
        raise ConfigError([f"config.json: a key is missing or invalid ({error}); fix it"]) from error
    raise_any(problems)
    return model


def own_heads(values):
    """The HeadsConfig of the file: that of an export, or all heads."""
    if values["model_type"] != "moh_llama":
        return HeadsConfig(head_selection="all")
    given = {"routing": "paper"}  # the default of configuration_moh.py
    given |= {entry.field: values[entry.key] for entry in keys.HEADS if entry.key in values}
    if values.get("head_selection") == "all":  # every head counts as shared there
        given = {"head_selection": "all"}
    choices = {entry.name: entry.metadata["choices"] for entry in fields(HeadsConfig) if "choices" in entry.metadata}
    raise_any([
        f"config.json: {key} {given[key]!r}: choose one of {', '.join(choices[key])}"
        for key in sorted(choices.keys() & given.keys())
        if given[key] not in choices[key]
    ])
    return HeadsConfig(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})


def foreign(values, code_is_known=False):
    """Sentences for settings that the models of ``ARCHITECTURES`` do not have."""
    kind = values.get("model_type")
    if kind not in keys.ARCHITECTURES:
        return [f"model_type {kind!r}: only {', '.join(keys.ARCHITECTURES)} can be read"]
    found = []
    architectures = values.get("architectures") or [keys.ARCHITECTURES[kind]]
    if architectures != [keys.ARCHITECTURES[kind]]:
        found.append(f"architectures {architectures}: must be [{keys.ARCHITECTURES[kind]!r}]")
    if kind != "moh_llama" and values.get("auto_map") and not code_is_known:
        found.append(
            "auto_map: the model has code of its own, which is not run; say what it computes, by --released "
            "moh-llama3-8b, or by --head-selection and its other flags"
        )
    found += [
        f"{key} {values[key]!r}: can only be {usual!r}"
        for key, usual in USUAL.items()
        if values.get(key) not in (None, usual)
    ]
    names = FOREIGN if kind == "moh_llama" else (*FOREIGN, *(entry.key for entry in keys.OURS))
    found += [f"{key} {values[key]!r}: has no counterpart here" for key in names if values.get(key)]
    if kind == "llama" and values.get("sliding_window"):
        found.append(f"sliding_window {values['sliding_window']!r}: LlamaForCausalLM has none, but a mistral has")
    allowed = {"llama": {keys.FULL}, "mistral": {keys.SLIDING}}.get(kind, {keys.FULL, keys.SLIDING})
    types = set(values.get("layer_types") or []) - allowed
    found += [f"layer_types {name!r}: only {', '.join(sorted(allowed))} can be read" for name in sorted(types)]
    return found


def rope_fields(values):
    """The fields ``rope_*`` of ModelConfig from config.json's ``values``. Raises ConfigError.

    transformers 5 writes ``rope_parameters`` only, transformers 4 ``rope_theta`` and ``rope_scaling``.
    """
    new, old = (normal_rope(values.get(key) or {}) for key in ("rope_parameters", "rope_scaling"))
    if values.get("rope_theta") is not None:
        old = {"rope_theta": values["rope_theta"], **old}
    rope = {**old, **new}
    if not rope:
        raise ConfigError([
            "neither rope_parameters nor rope_theta: without them transformers assumes a base of 10000; "
            'write "rope_theta": 10000.0 into the file if that is right'
        ])
    if rope != {**new, **old}:
        raise ConfigError([f"rope_parameters {new} and rope_theta, rope_scaling {old} contradict each other"])
    is_ours = values.get("model_type") == "moh_llama"
    turned = rope.pop(keys.PARTIAL.key, keys.PARTIAL.absent) if is_ours else keys.PARTIAL.absent
    kind = rope.pop("rope_type", "default")
    if kind not in keys.ROPE_TYPES:
        raise ConfigError([f"rope_type {kind!r}: only {', '.join(keys.ROPE_TYPES)} can be read"])
    missing = [key for key in keys.ROPE_TYPES[kind] if not isinstance(rope.get(key), int | float)]
    fields = {entry.key: entry.field for entry in keys.ROPE}
    extra = sorted(rope.keys() - fields.keys())
    if missing or extra:
        raise ConfigError([
            *(f"rope_type {kind!r} without {key}: transformers assumes one; write it into the file" for key in missing),
            *(f"{key} {rope[key]!r} of rope_type {kind!r}: has no counterpart here" for key in extra),
        ])
    numbers = {fields[key]: rope[key] for key in keys.ROPE_TYPES[kind]}
    whole = "rope_original_length"
    numbers = {key: int(n) if key == whole else float(n) for key, n in numbers.items()}
    return {"rope_type": kind, keys.PARTIAL.field: turned, **numbers}


def normal_rope(rope):
    """Return a rope dictionary without entries that have no effect (None, a rotary embedding of all features), and with
    ``type`` renamed to rope_type."""
    kept = {key: value for key, value in rope.items() if value is not None}
    if kept.get("partial_rotary_factor") == 1:
        del kept["partial_rotary_factor"]
    if "type" in kept:
        kept = {"rope_type": kept.pop("type"), **kept}
    return kept
