"""The mapping between the keys of config.json and the fields of ModelConfig and HeadsConfig, in both directions.

tools/export_hf.py writes a model by ``written``; import_config.py reads by the same tables. The remote code in
configuration_moh.py has to be self-contained and repeats its keys; tests/tools/test_keys.py keeps them equal.

A model with all heads is a Llama, or with one window in all layers a Mistral; any other is computed by remote code.
"""

from typing import NamedTuple

from moh_lm.config import BUDGETS, TWO_STAGE, HeadsConfig, ModelConfig
from moh_lm.config.model import OF_LAYERS
from moh_lm.model.rotary import NEEDS

REQUIRED = object()
ARCHITECTURES = {  # model_type -> class
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "moh_llama": "MoHLlamaForCausalLM",
}
SLIDING, FULL = "sliding_attention", "full_attention"  # values in layer_types


class Key(NamedTuple):
    """key: its name in config.json. field: its name in the dataclass. absent: what a file without the key means."""

    key: str
    field: str
    absent: object = REQUIRED


MODEL = (
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "hidden_size"),
    Key("intermediate_size", "intermediate_size"),
    Key("num_hidden_layers", "num_layers"),
    Key("num_attention_heads", "num_attention_heads"),
    Key("num_key_value_heads", "num_key_value_heads", None),
    Key("head_dim", "head_dim", None),
    Key("rms_norm_eps", "rms_norm_eps", 1e-6),  # LlamaConfig's own default
    Key("tie_word_embeddings", "tie_embeddings", False),
)
OURS = (  # only for moh_llama, and only if not the default
    Key("head_dims", "head_dims", ()),
    Key("attention", "attention", "heads"),
    Key("kv_lora_rank", "kv_lora_rank", None),
    Key("q_lora_rank", "q_lora_rank", None),
    Key("qk_rope_head_dim", "qk_rope_head_dim", None),
    Key("qk_norm", "qk_norm", False),
    Key("element_gates", "element_gates", False),
    Key("post_norm", "post_norm", False),
    Key("layer_positions", "position", ()),
    Key("cope_max_position", "cope_max_position", 64),
    Key("learned_positions", "learned_positions", None),
)
HEADS = (  # only for moh_llama; values equal to those of an absent key are left out
    Key("head_selection", "head_selection"),
    Key("routing", "routing"),
    Key("two_stage", "two_stage"),
    Key("num_shared_heads", "num_shared_heads"),
    Key("num_active_routed_heads", "num_active_routed_heads"),
    Key("gate_width", "gate_width", 0),
    Key("routing_unit", "routing_unit", "head"),
    Key("routed_keys", "routed_keys", "all"),
    Key("routed_positions", "routed_positions", "text"),
    Key("routing_dtype", "routing_dtype", "fp32"),
    Key("routing_top_p", "routing_top_p", None),
    Key("load_balance_bias_rate", "load_balance_bias_rate", 0.0),
    Key("load_balance_coefficient", "load_balance_coefficient", 0.01),  # the trainer's; fine-tuning adds none
)
ROPE = (  # inside rope_parameters (transformers 5), or rope_theta and rope_scaling (transformers 4)
    Key("rope_theta", "rope_theta"),
    Key("factor", "rope_factor"),
    Key("low_freq_factor", "rope_low_freq_factor"),
    Key("high_freq_factor", "rope_high_freq_factor"),
    Key("original_max_position_embeddings", "rope_original_length"),
)
PARTIAL = Key("partial_rotary_factor", "rotary_fraction", 1.0)  # there too, only for moh_llama
ROPE_TYPES = {  # rope_type -> the keys that it needs
    kind: ("rope_theta", *(entry.key for entry in ROPE if entry.field.removeprefix("rope_") in needed))
    for kind, needed in NEEDS.items()
}
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}  # values of all models here


def model_type(model):
    """The model_type of a ModelConfig's export."""
    widths = {*model.window}
    several = len(widths) > 1 or len(model.head_counts) > 1
    if model.heads.head_selection != "all" or several or ours(model) or model.rotary_fraction != PARTIAL.absent:
        return "moh_llama"
    if any(widths):  # transformers 4.46 scales no rotary embedding of a Mistral
        return "mistral" if model.rope_type == "default" else "moh_llama"
    if model.rope_type == "yarn":  # transformers 4.46 ignores its original length
        return "moh_llama"
    return "llama" if model.hidden_size % model.num_attention_heads == 0 else "moh_llama"  # transformers 5 requires it


def ours(model):
    """The keys for features that a Llama does not have."""
    plain = ModelConfig(num_layers=model.num_layers)
    changed = [entry for entry in OURS if getattr(model, entry.field) != getattr(plain, entry.field)]
    return {entry.key: getattr(model, entry.field) for entry in changed}


def written(model):
    """The keys of a ModelConfig, with those of its heads if it is a moh_llama."""
    keys = {entry.key: getattr(model, entry.field) for entry in MODEL} | FIXED | written_rope(model)
    if len(model.head_counts) > 1:  # transformers knows one number
        keys |= {key: max(keys[key]) for key in OF_LAYERS} | {"layer_heads": list(model.head_counts)}
    if any(model.window):
        keys |= written_window(model)
    if model_type(model) != "moh_llama":
        return keys
    keys |= ours(model)
    if model.heads.head_selection == "all":
        return keys | {"head_selection": "all"}
    of_model = model.heads
    if of_model.head_selection == "static":  # its flags may be those of a mixture, but it has no router
        of_model = HeadsConfig(**{key: getattr(of_model, key) for key in ("head_selection", *BUDGETS)})
    heads = {entry: getattr(of_model, entry.field) for entry in HEADS}
    if of_model.routing not in TWO_STAGE:
        heads = {entry: value for entry, value in heads.items() if entry.key != "two_stage"}
    return keys | {entry.key: value for entry, value in heads.items() if value != entry.absent}


def read_head_counts(values):
    """Return the fields for heads of each layer, {} if MODEL has them; keys are shared as in the largest layer."""
    if "layer_heads" not in values:
        return {}
    most, keys = values["num_attention_heads"], values.get("num_key_value_heads") or values["num_attention_heads"]
    heads = tuple(values["layer_heads"])
    return dict(zip(OF_LAYERS, (heads, tuple(number * keys // most for number in heads)), strict=True))


def written_window(model):
    """Return the keys for windows. transformers has one window for all layers that have any; layer_windows is ours."""
    if model_type(model) == "mistral":
        return {"sliding_window": model.window[0]}
    layers = {"layer_types": [SLIDING if width else FULL for width in model.window]}
    several = {"layer_windows": list(model.window)} if len({*model.window} - {0}) > 1 else {}
    return {"sliding_window": max(model.window), **layers, **several}


def read_window(values):
    """Return the windows of config.json's ``values``, one number or one per layer; 0: the whole sequence."""
    width = values.get("sliding_window") or 0
    if "layer_windows" in values:
        return tuple(values["layer_windows"])
    return tuple(width * (kind == SLIDING) for kind in values.get("layer_types") or [SLIDING])


def written_rope(model):
    """Return the rotary settings in the keys of transformers 4 and in the key of transformers 5."""
    needed = [entry for entry in ROPE if entry.key in ROPE_TYPES[model.rope_type]]
    rope = {"rope_type": model.rope_type, **{entry.key: getattr(model, entry.field) for entry in needed}}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    if model.rotary_fraction != PARTIAL.absent:
        rope[PARTIAL.key] = model.rotary_fraction
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_type == "default" else scaling,
        "rope_parameters": rope,
    }
