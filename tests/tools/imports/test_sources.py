"""What tools/import_hf.py reads and what it refuses: spellings, settings, damaged files."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moh_lm.checkpoint.saver import find_step
from moh_lm.config import Config
from tests.tools.imports.llamas import LLAMA3, assert_same_logits, make_llama, rewrite

PLAIN = {"rope_type": "default", "rope_theta": 300.0}


@pytest.mark.parametrize(
    "spelling, expected",
    [
        ({"rope_parameters": {"rope_theta": 300.0, "rope_type": "default"}}, PLAIN),
        ({"rope_theta": 300.0}, PLAIN),
        ({"rope_theta": 300, "rope_scaling": None}, PLAIN),
        ({"rope_theta": 300.0, "rope_parameters": {"rope_type": "default"}}, PLAIN),
        ({"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear"}),
        ({"rope_theta": 500.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}, LLAMA3),
        ({"rope_theta": 500.0, "rope_parameters": LLAMA3}, LLAMA3),
    ],
)
def test_every_spelling_of_the_rotary_embedding_is_read(imported, llama, tmp_path, spelling, expected):
    rewrite(llama[0], tmp_path / "hf", {"rope_parameters": None}, **spelling)
    model = Config.load(find_step(imported(tmp_path / "hf")) / "config.json").model
    assert model.rope_type == expected["rope_type"]
    assert model.rope_theta == expected.get("rope_theta", 300.0)
    assert model.rope_original_length == expected.get("original_max_position_embeddings")


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2': only llama, mistral, moh_llama"),
        ({"model_type": "mistral", "architectures": None}, "sliding_window is missing: transformers assumes 4096"),
        ({"model_type": "mistral", "sliding_window": 1}, "architectures ['LlamaForCausalLM']: must be ['MistralFor"),
        ({"model_type": "mistral", "architectures": None, "sliding_window": 1}, "--window 1: must be 0, for the whole"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures ['LlamaForSequenceClassification']"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "say what it computes, by --released moh-llama3-8b"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {**LLAMA3, "factor": None}}, "rope_type 'llama3' without factor"),
        ({"rope_parameters": {**LLAMA3, "attention_factor": 2.0}}, "attention_factor 2.0"),
        ({"rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 of rope_type"),
        ({"layer_positions": ["none", "rotary"]}, "layer_positions ['none', 'rotary']: has no counterpart here"),
        ({"rope_parameters": None}, 'write "rope_theta": 10000.0 into the file'),
        ({"rope_theta": 7.0}, "contradict each other"),
        ({"num_key_value_heads": 3}, "--num-key-value-heads 3: must divide"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "48"}, "hidden_size '48': must be a whole number"),
        ({"vocab_size": 2**70}, f"vocab_size {2**70}: must be below 2^63"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings '64': must be a whole number"),
        ({"max_position_embeddings": None}, "max_position_embeddings None: must be the longest sequence, 1 or above"),
        ({"max_position_embeddings": -5}, "max_position_embeddings -5: must be the longest sequence, 1 or above"),
        ({"layer_types": -1}, "layer_types -1: must be a list of texts"),
        ({"model_type": "moh_llama", "num_shared_heads": 4}, "num_shared_heads 4: must be a list of whole numbers"),
        ({"model_type": "moh_llama", "two_stage": "no"}, "two_stage 'no': must be true or false"),
        ({"vocab_size": 65}, "model.embed_tokens.weight has shape [64, 48], but config.json says [65, 48]"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight has no counterpart here"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
    ids=str,
)
def test_what_is_no_plain_llama_is_refused_by_name(tool, llama, tmp_path, changes, named):
    rewrite(llama[0], tmp_path / "hf", **changes)
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "run")
    assert code == 2 and named in errors
    assert not (tmp_path / "run").exists()


def test_biases_infinities_pickles_and_absent_shards_are_refused(tool, llama, tmp_path):
    def refused(directory, named):
        code, _, errors = tool("import_hf", "--model", directory, "--output", tmp_path / "run")
        assert code == 2 and named in errors
        assert not (tmp_path / "run" / "checkpoints" / "step-0").exists()
        assert not (tmp_path / "run" / "checkpoints" / "copy-step-0.tmp").exists()

    for name in ("bias", "infinite", "pickle"):
        shutil.copytree(llama[0], tmp_path / name)
    tensors = load_file(llama[0] / "model.safetensors")
    with_bias = {**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}
    save_file(with_bias, tmp_path / "bias" / "model.safetensors")
    refused(tmp_path / "bias", "model.layers.0.self_attn.q_proj.bias has no counterpart")
    tensors["model.norm.weight"][7] = torch.inf
    save_file(tensors, tmp_path / "infinite" / "model.safetensors")
    refused(tmp_path / "infinite", "model.norm.weight is not finite")
    (tmp_path / "pickle" / "model.safetensors").rename(tmp_path / "pickle" / "pytorch_model.bin")
    refused(tmp_path / "pickle", "safe_serialization=True")
    make_llama(tmp_path / "shards", shard="30KB")
    next((tmp_path / "shards").glob("model-00002*")).unlink()
    refused(tmp_path / "shards", "is absent, but model.safetensors.index.json names it; fetch what is missing")


@pytest.mark.parametrize(
    "name, text, named",
    [
        ("generation_config.json", "[1]", "cannot be read (it holds no settings)"),
        ("generation_config.json", '{"pad_token_id": "x"}', "pad_token_id 'x': write a whole number, or null"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 1}}', "not an index (weight_map must give the name"),
    ],
)
def test_files_that_hold_something_else_are_refused(tool, tmp_path, name, text, named):
    make_llama(tmp_path / "hf", shard="30KB")
    (tmp_path / "hf" / name).write_text(text)
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "run")
    assert code == 2 and named in errors


def test_copies_that_another_model_has_left_are_refused(tool, llama, tmp_path):
    def refused(named):
        code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "run")
        assert code == 2 and named in errors, errors

    make_llama(tmp_path / "hf", seed=1, shard="30KB")
    shutil.copy(llama[0] / "model.safetensors", tmp_path / "hf")
    refused("has model.safetensors beside model.safetensors.index.json, so one of them is stale; remove that one")
    (tmp_path / "hf" / "model.safetensors").unlink()
    index = tmp_path / "hf" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    first, last = min(listed.values()), tmp_path / "hf" / max(listed.values())
    stale = next(name for name, file in listed.items() if file == first)
    save_file(load_file(last) | {stale: load_file(llama[0] / "model.safetensors")[stale]}, last)
    refused(f"{last.name}: has {stale}, which another file has too")


@pytest.mark.parametrize("elsewhere", ["../llama.safetensors", "{}/llama.safetensors", "", "part/llama.safetensors"])
def test_an_index_names_no_file_of_another_directory(tool, llama, tmp_path, elsewhere):
    make_llama(tmp_path / "hf", shard="30KB")
    shutil.copy(llama[0] / "model.safetensors", tmp_path / "llama.safetensors")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(listed, elsewhere.format(tmp_path))}))
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "run")
    assert code == 2 and "not an index (weight_map must give the name of a file beside it" in errors


@pytest.mark.parametrize("named", [{}, [], None, "model.safetensors", [["model.norm.weight", "model.safetensors"]]])
def test_an_index_without_names_hides_no_stale_file(tool, llama, tmp_path, named):
    shutil.copytree(llama[0], tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "run")
    assert code == 2 and "not an index (weight_map must give the name of a file beside it for each tensor" in errors


def test_files_that_an_index_does_not_name_are_passed_over(imported, llama, tmp_path):
    model = make_llama(tmp_path / "hf", seed=1, shard="30KB")
    shutil.copy(llama[0] / "model.safetensors", tmp_path / "hf" / "consolidated.safetensors")
    assert_same_logits(imported(tmp_path / "hf"), model)


def test_redundant_tensors_are_passed_over(imported, tmp_path):
    model = make_llama(tmp_path / "hf", tie_word_embeddings=True)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    assert_same_logits(imported(tmp_path / "hf"), model)


def test_the_directory_in_which_the_command_runs_has_a_name(imported, llama, monkeypatch):
    monkeypatch.chdir(llama[0])
    facts = json.loads((find_step(imported(".")) / "state.json").read_text())["imported"]
    assert facts["source"] == str(llama[0].resolve())
