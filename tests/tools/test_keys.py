"""The keys of config.json are said once (tools/hf/convert/keys.py); remote code that says them again agrees."""

import inspect
from dataclasses import fields, replace

import pytest

pytest.importorskip("transformers")

from moh_lm.config import SPREAD, TRAINING_ONLY, HeadsConfig, ModelConfig
from tests.tools.exported_code.configuration_moh import DEFAULTS, ROPE_KEYS, MoHLlamaConfig
from tools.hf.convert import keys
from tools.hf.convert.import_config import model_config

LLAMA3 = {
    "rope_type": "llama3", "rope_factor": 8.0, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0,
    "rope_original_length": 64,
}  # fmt: skip
HEADS = HeadsConfig(
    num_shared_heads=(2, 0), num_active_routed_heads=(2, 4), routing="released", routing_unit="key_value_group",
    routing_top_p=0.7, two_stage=False, load_balance_coefficient=0.05,
)  # fmt: skip
MODEL = ModelConfig(
    num_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=8, num_key_value_heads=4, head_dim=6,
    vocab_size=301, rope_theta=500.0, rms_norm_eps=1e-4, tie_embeddings=True, heads=HEADS,
)  # fmt: skip
MODELS = {
    "mixture": replace(MODEL, **LLAMA3),
    "static": replace(MODEL, heads=replace(HEADS, head_selection="static")),
    "static, own keys": replace(MODEL, heads=HeadsConfig("static", routed_keys="selected")),
    "static, top-p": replace(MODEL, heads=HeadsConfig("static", routing_top_p=0.6)),
    "static, bias": replace(MODEL, heads=HeadsConfig("static", routing="relu", load_balance_bias_rate=0.001)),
    "in groups": replace(
        MODEL, heads=HeadsConfig(num_shared_heads=(4, 0), num_active_routed_heads=(4,), routing_unit="head_in_group")
    ),
    "own positions": replace(MODEL, heads=replace(HEADS, routed_keys="selected", routed_positions="head")),
    "plain": replace(MODEL, heads=HeadsConfig()),
    "narrow": replace(MODEL, heads=HeadsConfig(head_selection="gated", routing="softplus", gate_width=3)),
    "norms": replace(MODEL, qk_norm=True, post_norm=True),
    "all, norms": replace(MODEL, qk_norm=True, heads=HeadsConfig(head_selection="all")),
    "all": replace(MODEL, rope_type="linear", rope_factor=2.0, heads=HeadsConfig(head_selection="all")),
    "all, yarn": replace(
        MODEL, rope_type="yarn", rope_factor=4.0, rope_original_length=16, heads=HeadsConfig(head_selection="all")
    ),
    "all, gates of features": replace(MODEL, element_gates=True, heads=HeadsConfig(head_selection="all")),
    "all, window": replace(MODEL, window=(7,), heads=HeadsConfig(head_selection="all")),
    "all, window, scaled": replace(MODEL, window=(7,), **LLAMA3, heads=HeadsConfig(head_selection="all")),
    "all, other width": replace(MODEL, hidden_size=20, base_width=20, heads=HeadsConfig(head_selection="all")),
    "all, window in one layer": replace(MODEL, window=(7, 0), heads=HeadsConfig(head_selection="all")),
    "window in one layer": replace(MODEL, window=(0, 7)),
    "two windows": replace(MODEL, window=(7, 3)),
    "positions": replace(MODEL, position=("none", "cope"), cope_max_position=9),
    "all, CoPE": replace(MODEL, position=("cope",), heads=HeadsConfig(head_selection="all")),
    "a table": replace(MODEL, position=("learned",), learned_positions=70),
    "all, a part turned": replace(MODEL, rotary_fraction=0.4, heads=HeadsConfig(head_selection="all")),
}
TYPES = {"all": "llama", "all, window": "mistral"}  # of the others: moh_llama


def test_every_field_of_a_model_has_its_key():
    model = {entry.name for entry in fields(ModelConfig)} - {"heads", "rope_type", "window", "base_width"}
    assert model == {entry.field for entry in (*keys.MODEL, *keys.OURS, *keys.ROPE, keys.PARTIAL)}
    heads = {entry.name for entry in fields(HeadsConfig)}
    assert heads - {entry.field for entry in keys.HEADS} <= {*TRAINING_ONLY, *SPREAD}


def test_the_remote_configuration_has_the_defaults_of_the_table():
    arguments = inspect.signature(MoHLlamaConfig.__init__).parameters
    defaults = DEFAULTS | {name: argument.default for name, argument in arguments.items()}
    written = {entry.key for entry in (*keys.MODEL, *keys.OURS, *keys.HEADS)} | {"rope_theta", "rope_scaling"}
    assert written | keys.FIXED.keys() <= {*defaults, "tie_word_embeddings"}
    assert {entry.field.removeprefix("rope_"): entry.key for entry in keys.ROPE} == ROPE_KEYS
    for entry in keys.HEADS:
        if entry.absent is not keys.REQUIRED:
            assert defaults[entry.key] == entry.absent
    assert {key: defaults[key] for key in keys.FIXED} == keys.FIXED


def test_keys_that_say_nothing_are_left_out():
    values = keys.written(MODELS["plain"])
    assert not {"routing_unit", "routing_top_p", "load_balance_coefficient"} & values.keys()
    assert values["routing"] == "sigmoid" and "two_stage" not in values and "two_stage" in keys.written(MODEL)
    assert not {entry.key for entry in keys.HEADS} & keys.written(MODELS["all"]).keys()


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_read_by_import_and_remote_code(name):
    model = MODELS[name]
    kind = TYPES.get(name, "moh_llama")
    assert keys.model_type(model) == kind
    heads, routed = model.heads, model.heads.head_selection != "all"
    if heads.head_selection == "static":  # what a router would have is not said
        heads = HeadsConfig("static", heads.num_shared_heads, heads.num_active_routed_heads)
    values = {"model_type": kind, "max_position_embeddings": 64, **keys.written(model)}
    read = model_config(values)
    assert replace(read, heads=model.heads) == model
    for entry in keys.HEADS if routed else ():
        assert getattr(read.heads, entry.field) == getattr(heads, entry.field)
    remote = MoHLlamaConfig(**{"head_selection": "all"} | values)
    for entry in keys.MODEL:
        assert getattr(remote, entry.key) == values[entry.key]
    for entry in keys.OURS:
        value = getattr(remote, entry.key)
        assert (tuple(value) if isinstance(value, list) else value) == getattr(model, entry.field)
    for entry in keys.HEADS if routed else ():
        value = getattr(remote, entry.key)
        assert (tuple(value) if isinstance(value, list) else value) == getattr(heads, entry.field)
    assert remote.rope_parameters == values["rope_parameters"]
    assert tuple(remote.layer_windows) == read.window == model.window


@pytest.mark.parametrize("absent", ["routing", "two_stage", "routing_unit", "routing_dtype", "load_balance_bias_rate"])
def test_an_absent_key_means_the_same_to_import_and_remote_code(absent):
    values = {"model_type": "moh_llama", "max_position_embeddings": 64, **keys.written(MODELS["plain"])}
    values = {key: value for key, value in values.items() if key != absent}
    assert getattr(model_config(values).heads, absent) == getattr(MoHLlamaConfig(**values), absent)
