"""tools/import_hf.py: a Llama of transformers becomes step 0 of a run, with the same logits, or nothing at all."""

import base64
import errno
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from moh_lm.checkpoint.fragments import FragmentReader, full_parameters
from moh_lm.checkpoint.manifest import HashedFile, verify
from moh_lm.checkpoint.saver import find_step
from moh_lm.config import Config, DataConfig
from moh_lm.data.dataset import Dataset
from moh_lm.data.loader import Loader
from moh_lm.flags import parse_config
from moh_lm.kernels import attention
from moh_lm.model.transformer import CausalLM
from moh_lm.run.resume import contradictions
from tests.distributed import run_ranks
from tests.tokenizing import hugging_face_tokenizer
from tests.tools.modeling_cases import make_model
from tests.training.test_training import losses, rows, run
from tools import import_hf
from tools.hf import export_check, import_step, import_weights
from tools.hf.configuration_moh import MoHLlamaConfig
from tools.hf.modeling_moh import MoHLlamaForCausalLM
from tools.work.import_hf import token_ids

ROOT = Path(__file__).resolve().parents[2]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SHAPE = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64, "rope_parameters": LLAMA3,
}  # fmt: skip
BASE_ONLY = {"rope_type": "default", "rope_theta": 500.0}
MIXTURE = "--head-selection mixture --num-shared-heads 4 --num-active-routed-heads 2".split()


def make_llama(directory, seed=0, dtype=torch.float32, shard="5GB", kind=(LlamaForCausalLM, LlamaConfig), **changes):
    """A Llama, or another ``kind``, whose every weight shows in its logits, saved by transformers."""
    torch.manual_seed(seed)
    model = kind[0](kind[1](**{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1.25)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard)
    return kind[0].from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    return directory, make_llama(directory)


@pytest.fixture
def tool(monkeypatch, capsys):
    """A function that runs a program of tools/ in this process: name, arguments -> (exit code, stdout, stderr)."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    # So that weights are read in several blocks and written in several files.
    monkeypatch.setattr(import_weights, "BLOCK", 700)
    monkeypatch.setattr(import_step, "FILE_BYTES", 20_000)
    # Exports are checked with the trainer's model only: tests/tools/test_export.py has the other half.
    monkeypatch.setattr(export_check, "transformers", None)

    def call(name, *arguments):
        program = importlib.import_module(f"tools.{name}")
        return program.main(list(map(str, arguments))), *capsys.readouterr()

    return call


@pytest.fixture
def imported(tool, tmp_path):
    """A function: source directory, flags -> the run directory that the import makes."""

    def call(source, *flags, output="run"):
        code, _, errors = tool("import_hf", "--model", source, "--output", tmp_path / output, *flags)
        assert code == 0, errors
        return tmp_path / output

    return call


@pytest.fixture(autouse=True)
def unpadded(monkeypatch):
    """Narrow heads go through the same kernel as in transformers, so that only weights can make a difference."""
    monkeypatch.setattr(attention, "CPU_WIDTH", 0)


@torch.no_grad()
def trainer_logits(run_directory, tokens):
    """Logits [b, s, vocab] of the trainer's model with the weights of the newest step."""
    step = find_step(run_directory)
    model = CausalLM(Config.load(step / "config.json").model)
    parameters = dict(model.named_parameters())
    for name, values in full_parameters(step):
        parameters.pop(name).copy_(values)
    assert not parameters
    return torch.stack([model(row[None])[:, 0] for row in tokens])


@torch.no_grad()
def assert_same_logits(run_directory, model):
    tokens = torch.randint(model.config.vocab_size, (3, 50), generator=torch.Generator().manual_seed(1))
    expected = torch.stack([model(row[None]).logits[0] for row in tokens])
    found = trainer_logits(run_directory, tokens)[..., : model.config.vocab_size]
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


# --- The same model ---


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 8, "head_dim": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0}},
        {"num_key_value_heads": 1, "rms_norm_eps": 1e-2},
        {"dtype": torch.bfloat16, "shard": "30KB"},
        {"dtype": torch.float16},
    ],
    ids=["grouped-llama3", "plain", "tied-linear", "one-key", "bf16-shards", "fp16"],
)
def test_the_logits_are_those_of_transformers(imported, tmp_path, changes):
    model = make_llama(tmp_path / "hf", **changes)
    run_directory = imported(tmp_path / "hf")
    assert_same_logits(run_directory, model)
    assert len(list((run_directory / "checkpoints" / "step-0").glob("rank-*.safetensors"))) > 1


MISTRAL = dict(kind=(MistralForCausalLM, MistralConfig), rope_parameters=BASE_ONLY)


@pytest.mark.parametrize("window", [None, 7, 64])
def test_a_mistral_is_imported_with_its_window_and_exported_as_it_was(imported, tool, tmp_path, window):
    model = make_llama(tmp_path / "hf", sliding_window=window, **MISTRAL)
    run_directory = imported(tmp_path / "hf")
    assert_same_logits(run_directory, model)
    code, _, errors = tool("export_hf", "--checkpoint", run_directory, "--output", tmp_path / "out")
    assert code == 0, errors
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert after["model_type"] == ("mistral" if window else "llama") and after.get("sliding_window") == window
    with torch.no_grad():
        tokens = torch.arange(40)[None] % 64
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


def test_a_mixture_that_selects_every_head_has_the_logits_of_the_llama(imported, llama):
    """query_norm gives selected heads the gate 1, so with all of them on nothing is left out."""
    flags = "--head-selection mixture --routing query_norm --num-shared-heads 4 --num-active-routed-heads".split()
    assert_same_logits(imported(llama[0], *flags, "4"), llama[1])
    with pytest.raises(AssertionError):
        assert_same_logits(imported(llama[0], *flags, "1", output="fewer"), llama[1])


def test_a_gated_import_has_the_logits_of_the_llama(imported, llama):
    """Its gates begin with exactly 1."""
    assert_same_logits(imported(llama[0], "--head-selection", "gated"), llama[1])


def test_flags_of_heads_say_what_they_contradict(tool, llama, tmp_path):
    heads = {"head_selection": "mixture", "routing": "sigmoid", "two_stage": True}
    budgets = {"num_shared_heads": [8, 8], "num_active_routed_heads": [0, 0]}
    names = {"model_type": "moh_llama", "architectures": ["MoHLlamaForCausalLM"]}
    rewrite(llama[0], tmp_path / "gated", **names, **heads, **budgets)
    gated = ("--head-selection", "gated")
    for model, flags, said in [
        (tmp_path / "gated", gated, "router.w_shared is missing"),  # of the file: the flag is no contradiction
        (tmp_path / "gated", (*gated, "--num-shared-heads", "4"), "--num-shared-heads (4, 4): the source is trained"),
        (llama[0], (*gated, "--routing", "released"), "contradicts --routing released"),
        (llama[0], ("--num-shared-heads", "4"), "--num-shared-heads: a model with all heads has none; add"),
    ]:
        code, _, errors = tool("import_hf", "--model", model, "--output", tmp_path / "no", *flags)
        assert code == 2 and said in errors


def test_router_weights_are_those_of_a_fresh_run_with_the_same_seed(imported, llama):
    run_directory = imported(llama[0], *MIXTURE, "--routing", "released", "--seed", "5")
    config = Config.load(find_step(run_directory) / "config.json").model
    fresh = CausalLM(config)
    fresh.initialize(5)
    found, source = dict(full_parameters(find_step(run_directory))), load_file(llama[0] / "model.safetensors")
    routers = {name: value for name, value in fresh.named_parameters() if ".router." in name}
    assert len(routers) == 6
    assert all(torch.equal(found[name], value) for name, value in routers.items())
    assert all(torch.equal(found[name], value) for name, value in source.items())


def test_a_trained_mixture_without_its_routers_is_refused(tool, llama, tmp_path):
    heads = {"head_selection": "mixture", "routing": "paper", "two_stage": True}
    budgets = {"num_shared_heads": [4, 4], "num_active_routed_heads": [2, 2]}
    names = {"model_type": "moh_llama", "architectures": ["MoHLlamaForCausalLM"]}
    rewrite(llama[0], tmp_path / "hf", **names, **heads, **budgets)
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "no")
    assert code == 2 and "model.layers.1.self_attn.router.w_type is missing" in errors


def test_an_export_of_stage_1_is_imported_as_a_mixture(imported, tool, tmp_path):
    make_llama(tmp_path / "llama", rope_parameters=BASE_ONLY)
    dense = imported(tmp_path / "llama")
    code, _, errors = tool("export_hf", "--checkpoint", dense, "--output", tmp_path / "hf")
    assert code == 0, errors
    again = imported(tmp_path / "hf", *MIXTURE, "--routing", "query_norm", output="moh")
    model = Config.load(find_step(again) / "config.json").model
    assert (model.heads.num_shared_heads, model.heads.routing) == ((4, 4), "query_norm")
    code, _, errors = tool("export_hf", "--checkpoint", again, "--output", tmp_path / "exported")
    assert code == 0, errors
    third = imported(tmp_path / "exported", output="third")  # with the heads that it was trained with
    assert Config.load(find_step(third) / "config.json").model == model
    other = ("--num-shared-heads", "2")
    code, _, errors = tool("import_hf", "--model", tmp_path / "exported", "--output", tmp_path / "no", *other)
    assert code == 2 and "--num-shared-heads (2, 2): the source is trained with (4, 4)" in errors


@pytest.mark.parametrize("routing, gates", [("paper", (1 / 4, 1 / 12)), ("released", (1.0, 1.0))])
def test_a_mixture_becomes_a_model_of_all_or_of_its_first_heads(imported, tool, llama, tmp_path, routing, gates):
    mixture = [*MIXTURE, "--num-shared-heads", "2", "--routing", routing]
    code, _, errors = tool("export_hf", "--checkpoint", imported(llama[0], *mixture), "--output", tmp_path / "hf")
    assert code == 0, errors
    refused = ("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "no", "--head-selection", "all")
    code, _, errors = tool(*refused)
    assert code == 2 and "leave the flag out, or give --allow-routing-change" in errors
    before, e = load_file(llama[0] / "model.safetensors"), SHAPE["head_dim"]
    scale = torch.tensor([gates[0]] * 2 * e + [gates[1]] * 6 * e)
    for selection in ("all", "static"):
        found = imported(tmp_path / "hf", "--head-selection", selection, "--allow-routing-change", output=selection)
        heads = Config.load(find_step(found) / "config.json").model.heads
        assert (heads.head_selection, heads.num_shared_heads) == (selection, (2, 2))
        after = dict(full_parameters(find_step(found)))
        assert after.keys() == before.keys()
        for name, value in before.items():
            expected = value * scale if name.endswith("o_proj.weight") else value
            torch.testing.assert_close(after[name], expected, rtol=1e-6, atol=0)


GATED = dict(routing="sigmoid", layer_heads=[2, 4], num_shared_heads=[2, 4], num_active_routed_heads=[0, 0])


def test_a_gated_export_with_other_numbers_of_heads_is_imported_as_gated(imported, tmp_path):
    model = make_model(**GATED)
    model.save_pretrained(tmp_path / "hf")
    assert_same_logits(imported(tmp_path / "hf", "--head-selection", "gated"), model)


def test_gates_at_equal_scores_weigh_the_columns_of_heads_of_several_widths(imported, tmp_path):
    widths = [6, 6, 4, 2]
    make_model(head_dims=widths).save_pretrained(tmp_path / "hf")
    found = imported(tmp_path / "hf", "--head-selection", "all", "--allow-routing-change")
    before, after = load_file(tmp_path / "hf" / "model.safetensors"), dict(full_parameters(find_step(found)))
    gates = {0: [1 / 2] + [1 / 6] * 3, 1: [1 / 4] * 2 + [1 / 4] * 2}  # Eq. 5 and 6 with one and with two shared heads
    for layer, of_heads in gates.items():
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        columns = torch.tensor([gate for gate, width in zip(of_heads, widths, strict=True) for _ in range(width)])
        torch.testing.assert_close(after[name], before[name] * columns, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "changes", [{"attention": "latent", "kv_lora_rank": 8, "qk_rope_head_dim": 2}, {"head_dims": [6, 6, 4, 2]},
                {"layer_heads": [4, 2]}]
)  # fmt: skip
def test_heads_that_importance_does_not_know_are_refused(tool, tmp_path, changes):
    make_model(head_selection="all", **changes).save_pretrained(tmp_path / "hf")
    flags = ("--head-selection", "mixture", "--select-shared", "importance", "--sample-text", tmp_path / "no")
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "run", *flags)
    assert code == 2 and "--select-shared importance: needs as many heads in every layer, of one width" in errors


@torch.no_grad()
def released_attention(q_proj, k_proj, v_proj, o_proj, x, dtype, wide):
    """Attention of MoH-LLaMA3 by its formula, in ``wide``, of one sequence x [s, d]: ([s, d], selection [s, h/2]).

    Half of the heads are shared; of the others those are added whose query has one of the largest norms, over the
    deviation of the norms, after a softmax: all in ``dtype``. Gates are 1. The rotary embedding has tests of its own.
    """
    heads, e = SHAPE["num_attention_heads"], SHAPE["head_dim"]
    query = (x @ q_proj.T).unflatten(1, (heads, e))
    norms = torch.stack([query[:, i].to(dtype).norm(dim=1) for i in range(heads // 2, heads)], dim=1)
    ranked = (norms / norms.std(dim=1, keepdim=True)).softmax(1).topk(heads // 4, dim=1).indices
    selection = torch.zeros(len(x), heads // 2, dtype=wide)
    for token, chosen in enumerate(ranked.tolist()):
        selection[token, chosen] = 1
    gates = torch.cat((torch.ones_like(selection), selection), 1)
    key, value = ((x @ weight.T).unflatten(1, (-1, e)).repeat_interleave(2, 1) for weight in (k_proj, v_proj))
    output = torch.zeros(len(x), heads, e, dtype=wide)
    for token in range(len(x)):
        for head in range(heads):
            scores = (key[: token + 1, head].to(wide) @ query[token, head].to(wide)) / e**0.5
            output[token, head] = gates[token, head] * (scores.softmax(0) @ value[: token + 1, head].to(wide))
    return output.flatten(1) @ o_proj.T.to(wide), selection


AUTO_MAP = {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@torch.no_grad()
def test_the_released_moh_llama3_is_read_and_computes_its_formula_without_its_code(imported, tool, tmp_path, dtype):
    dtype = getattr(torch, dtype)
    make_llama(tmp_path / "llama", seed=3, rope_parameters=BASE_ONLY)
    rewrite(tmp_path / "llama", tmp_path / "hf", auto_map=AUTO_MAP)
    (tmp_path / "hf" / "modeling_llama.py").write_text("raise RuntimeError('this code was run')\n")
    more = () if dtype == torch.bfloat16 else ("--routing-dtype", "fp32")
    run_directory = imported(tmp_path / "hf", "--released", "moh-llama3-8b", *more)
    model = CausalLM(Config.load(find_step(run_directory) / "config.json").model)
    assert model.model.layers[0].self_attn.router.layer[1:4] == (4, 4, 2)
    for name, values in full_parameters(find_step(run_directory)):
        model.get_parameter(name).copy_(values)
    layer = model.to(dtype).model.layers[1].self_attn
    layer.positions = SimpleNamespace(table=lambda *_: None, turn=lambda x, table: x)
    x = torch.randn(60, SHAPE["hidden_size"], dtype=dtype, generator=torch.Generator().manual_seed(1))
    weights = [getattr(layer, f"{name}_proj").weight for name in "qkvo"]
    expected, selection = released_attention(*weights, x, dtype, torch.float64)
    found, routed = layer(x[:, None])
    assert torch.equal(routed.selection[:, 0].double(), selection)
    limit = 1e-12 if dtype == torch.float64 else 2e-2
    assert (found[:, 0].double() - expected).norm() < limit * expected.norm()


def test_routers_have_their_released_names_and_one_shared_head_needs_no_weights(imported, llama, tmp_path):
    tensors = load_file(llama[0] / "model.safetensors")
    drawn = {}
    for name, experts in (("wg", 7), ("wg_0", 2)):
        for layer in range(2):
            drawn[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.randn(experts, SHAPE["hidden_size"])
    rewrite(llama[0], tmp_path / "hf", auto_map=AUTO_MAP)
    save_file(tensors | drawn, tmp_path / "hf" / "model.safetensors")
    flags = "--head-selection mixture --routing released --num-shared-heads 1 --num-active-routed-heads 3"
    found = dict(full_parameters(find_step(imported(tmp_path / "hf", *flags.split()))))
    for layer in range(2):
        here, there = (f"model.layers.{layer}.self_attn.{name}" for name in ("router.", ""))
        assert torch.equal(found[f"{here}w_routed"], drawn[f"{there}wg.weight"])
        assert torch.equal(found[f"{here}w_type"], drawn[f"{there}wg_0.weight"])
        assert not found[f"{here}w_shared"].any()


# --- Out again ---


@pytest.mark.parametrize("dtype, rope", [("float32", LLAMA3), ("bfloat16", BASE_ONLY)])
def test_an_import_is_exported_byte_for_byte(imported, tool, tmp_path, dtype, rope):
    tied = dtype == "bfloat16"
    make_llama(tmp_path / "hf", dtype=getattr(torch, dtype), tie_word_embeddings=tied, rope_parameters=rope)
    run_directory = imported(tmp_path / "hf")
    code, _, errors = tool("export_hf", "--checkpoint", run_directory, "--output", tmp_path / "out", "--dtype", dtype)
    assert code == 0, errors
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype and torch.equal(value, after[name]), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 64
    assert config["rope_parameters"] == rope


# --- What is read ---

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


def rewrite(source, target, absent=(), **changes):
    """A copy of a model with another config.json; keys in ``absent``, or changed to None, are left out."""
    shutil.copytree(source, target)
    values = json.loads((target / "config.json").read_text())
    values = {key: value for key, value in values.items() if key not in absent} | changes
    (target / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2': only llama, mistral, moh_llama"),
        ({"model_type": "mistral", "architectures": None}, "sliding_window is missing: transformers takes 4096"),
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
        ({"vocab_size": 65}, "model.embed_tokens.weight has shape [64, 48], config.json says [65, 48]"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight has no counterpart here"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
    ],
    ids=str,
)
def test_what_is_no_plain_llama_is_refused_by_name_and_nothing_is_written(tool, llama, tmp_path, changes, named):
    rewrite(llama[0], tmp_path / "hf", **changes)
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "run")
    assert code == 2 and named in errors
    assert not (tmp_path / "run").exists()


def test_biases_infinities_pickles_and_absent_shards_are_refused(tool, llama, tmp_path):
    def refused(directory, named):
        code, _, errors = tool("import_hf", "--model", directory, "--output", tmp_path / "run")
        assert code == 2 and named in errors
        assert not (tmp_path / "run" / "checkpoints" / "step-0").exists()
        assert not (tmp_path / "run" / "checkpoints" / "step-0.tmp").exists()

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
    refused(tmp_path / "shards", "model-00002-of-")


def test_a_table_of_early_transformers_and_a_copy_of_a_tied_head_are_passed_over(imported, tmp_path):
    model = make_llama(tmp_path / "hf", tie_word_embeddings=True)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path)
    assert_same_logits(imported(tmp_path / "hf"), model)


# --- A larger vocabulary ---


def test_new_rows_are_near_the_mean_of_the_old_ones_which_stay(imported, llama):
    one, same, other = (
        dict(full_parameters(find_step(imported(llama[0], "--extend-vocab", "3000", "--seed", seed, output=name))))
        for name, seed in (("one", "1"), ("same", "1"), ("other", "2"))
    )
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = llama[1].state_dict()[name]
        new = one[name][64:]
        assert new.shape == (2936, 48) and torch.equal(one[name][:64], old)
        torch.testing.assert_close(new.mean(0), old.mean(0), atol=1e-3, rtol=0)
        torch.testing.assert_close(new.std(0), old.std(0) * 0.01, rtol=0.1, atol=0)
        assert torch.equal(same[name], one[name]) and not torch.equal(other[name][64:], new)
    assert torch.equal(one["model.norm.weight"], llama[1].state_dict()["model.norm.weight"])


def small_model(path, lines, vocab_size):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(path), vocab_size=vocab_size, model_type="bpe",
        byte_fallback=True, remove_extra_whitespaces=False, minloglevel=2,  # as LLaMA's
    )  # fmt: skip
    return Path(f"{path}.model")


def test_a_new_piece_begins_as_the_mean_of_the_old_ones_that_spell_it(imported, tool, tmp_path):
    old = small_model(tmp_path / "old", ["a cat and a dog", "the cat sat"] * 20, 278)
    (tmp_path / "pieces").write_text("\u2581catdog\nsatcat\n")
    new = tmp_path / "new.model"
    extend = ["data_prep/tokenize.py", "extend", "--tokenizer", old, "--add-pieces", tmp_path / "pieces"]
    subprocess.run([sys.executable, *extend, "--output", new], cwd=ROOT, check=True, capture_output=True)
    before, after = (sentencepiece.SentencePieceProcessor(model_file=str(path)) for path in (old, new))
    model = make_llama(tmp_path / "hf", vocab_size=278)
    shutil.copy(old, tmp_path / "hf" / "tokenizer.model")
    run_directory = imported(tmp_path / "hf", "--extend-vocab", "320", "--tokenizer", new)
    step = find_step(run_directory)
    assert (step / "tokenizer.model").read_bytes() == new.read_bytes()
    found = dict(full_parameters(step))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows_before = model.state_dict()[name]
        noise = 0.06 * rows_before.std(0)  # six deviations
        for piece, spelled in (("\u2581catdog", before.encode("catdog")), ("satcat", before.encode("xsatcat")[2:])):
            expected = rows_before[spelled].mean(0) if "embed" in name else rows_before.mean(0)
            assert ((found[name][after.piece_to_id(piece)] - expected).abs() < noise).all(), piece
        assert ((found[name][-1] - rows_before.mean(0)).abs() < noise).all()  # of no piece
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "small", "--tokenizer", new)
    assert code == 2 and f"give --extend-vocab {after.vocab_size()}" in errors
    other = small_model(tmp_path / "other", ["quite another text of words"] * 20, 280)
    arguments = ("--output", tmp_path / "other", "--extend-vocab", "320", "--tokenizer", other)
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", *arguments)
    assert code == 2 and "id " in errors and "data_prep/tokenize.py extend" in errors


def test_a_vocabulary_of_llama3_is_copied_and_its_new_tokens_are_spelled_with_the_old(imported, tmp_path):
    """Ranks in tiktoken's format: 256 bytes, a pair, room for the 256 special tokens, and two words of it."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab"]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    first = len(tokens) + 256
    more = [base64.b64encode(token) + b" %d\n" % (first + number) for number, token in enumerate((b"abc", b"zabab"))]
    old, new = tmp_path / "old.model", tmp_path / "new.model"
    old.write_bytes(b"".join(lines))
    new.write_bytes(b"".join([*lines, *more]))
    model = make_llama(tmp_path / "hf", vocab_size=first)
    flags = ("--extend-vocab", first + 2, "--tokenizer", new, "--old-tokenizer", old)
    step = find_step(imported(tmp_path / "hf", *flags))
    assert (step / "tokenizer.model").read_bytes() == new.read_bytes()
    name = "model.embed_tokens.weight"
    old_rows, found = model.state_dict()[name], dict(full_parameters(step))[name]
    for number, spelled in enumerate(([256, 99], [122, 256, 256])):
        distance = (found[first + number] - old_rows[spelled].mean(0)).abs()
        assert (distance < 0.06 * old_rows.std(0)).all()


# --- Which heads are shared ---


@torch.no_grad()
def importance_by_transformers(model, tokens):
    """|W_O_i H_i| in the mean over tokens, [layers, heads], from what transformers hands to o_proj."""
    seen = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, inputs, _: seen.append((module.weight, inputs[0])))
    model(tokens)
    return torch.stack([
        torch.stack([
            (context[..., i * 8 : (i + 1) * 8] @ weight[:, i * 8 : (i + 1) * 8].T).norm(dim=-1).mean() for i in range(8)
        ])
        for weight, context in seen
    ])


PARTIAL = {"rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5}}


@pytest.mark.parametrize(
    "key_value_heads, positions",
    [
        (8, None),
        (4, None),
        (2, None),
        (2, {"layer_positions": ["cope", "rotary"], "cope_max_position": 7, **PARTIAL}),
        (4, {"layer_positions": ["learned"] * 2, "learned_positions": 64, "rope_parameters": BASE_ONLY}),
    ],
)
def test_important_heads_come_first_and_the_model_computes_the_same(
    imported, data_dir, tmp_path, key_value_heads, positions
):
    ours = {"kind": (MoHLlamaForCausalLM, MoHLlamaConfig), "head_selection": "all"} | positions if positions else {}
    model = make_llama(tmp_path / "hf", num_key_value_heads=key_value_heads, **ours)
    flags = "--head-selection mixture --routing query_norm --num-shared-heads 4 --num-active-routed-heads 4".split()
    sample = ("--select-shared", "importance", "--sample-data", str(data_dir), "--sample-tokens", "256")
    run_directory = imported(tmp_path / "hf", *flags, *sample)
    assert_same_logits(run_directory, model)
    facts = json.loads((find_step(run_directory) / "state.json").read_text())["imported"]["head_importance"]
    data = DataConfig(data_dir=str(data_dir), validation_fraction=0)
    dataset = Dataset.open(data, seq_length=64, seed=1234, vocab_size=64)
    loader = Loader(
        dataset, global_batch_size=4, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=1
    )
    (batch,) = loader.train_step(0)
    loader.close()
    expected = importance_by_transformers(model, batch.tokens)
    torch.testing.assert_close(torch.tensor(facts["importance"]), expected, rtol=1e-4, atol=0)
    size = 8 // key_value_heads
    for order, importance in zip(facts["orders"], expected, strict=True):
        assert sorted(order) == list(range(8)) and order != list(range(8))
        groups = [order[start : start + size] for start in range(0, 8, size)]
        assert all(len({head // size for head in group}) == 1 for group in groups)  # no group is torn apart
        means = [importance[group].mean() for group in groups]
        assert means == sorted(means, reverse=True)
        assert all(list(importance[group]) == sorted(importance[group], reverse=True) for group in groups)


def test_without_a_tokenizer_model_the_tokenizer_of_the_source_is_exported(imported, tool, tmp_path):
    """The ids are those of config.json, else of generation_config.json, else of the tokens that the files name."""
    make_llama(tmp_path / "hf", bos_token_id=None, eos_token_id=[2, 3], pad_token_id=None)
    (tmp_path / "hf" / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    files = {
        "tokenizer.json": b'{"added_tokens": [{"id": 5, "content": "<pad>"}, {"id": 9, "content": "<s>"}]}',
        "tokenizer_config.json": b'{"pad_token": {"content": "<pad>"}, "bos_token": "<s>"}',
    }
    for name, content in files.items():
        (tmp_path / "hf" / name).write_bytes(content)
    run_directory = imported(tmp_path / "hf", *MIXTURE)
    step = find_step(run_directory)
    assert all((step / name).read_bytes() == content for name, content in files.items())
    code, printed, errors = tool("export_hf", "--checkpoint", run_directory, "--output", tmp_path / "out")
    assert code == 0, errors
    assert all((tmp_path / "out" / name).read_bytes() == content for name, content in files.items())
    for name in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / "out" / name).read_text())
        assert [values[f"{key}_token_id"] for key in ("bos", "eos", "pad")] == [1, [2, 3], 5]
    assert "adds neither" not in (tmp_path / "out" / "README.md").read_text() and "no tokenizer:" not in printed


def test_every_token_that_ends_a_text_is_kept_where_config_json_names_one(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": [8, 9]}')
    values = {"bos_token_id": 7, "eos_token_id": 9, "pad_token_id": None}
    assert token_ids(tmp_path, values) == {"bos": 7, "eos": [8, 9], "pad": None}


def test_a_tokenizer_of_hugging_face_can_be_that_of_the_data_but_spells_no_new_tokens(imported, tool, tmp_path):
    tokenizer = hugging_face_tokenizer(tmp_path / "tokenizer", "bytes")
    make_llama(tmp_path / "hf", vocab_size=300)
    step = find_step(imported(tmp_path / "hf", "--tokenizer", tokenizer))
    assert {path.name for path in step.glob("tokenizer*")} == {"tokenizer.json", "tokenizer_config.json"}
    assert all((step / path.name).read_bytes() == path.read_bytes() for path in tokenizer.iterdir())
    old = small_model(tmp_path / "old", ["a cat and a dog", "the cat sat"] * 20, 278)
    extend = ("--extend-vocab", 320, "--tokenizer", tokenizer, "--old-tokenizer", old)
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "no", *extend)
    assert code == 2 and "tokens of Hugging Face are not compared" in errors


def test_a_sample_of_text_is_measured_with_the_tokenizer_of_the_model(imported, tool, tmp_path):
    tokenizer = small_model(tmp_path / "old", ["a cat and a dog", "the cat sat"] * 20, 278)
    make_llama(tmp_path / "hf", vocab_size=278)
    shutil.copy(tokenizer, tmp_path / "hf" / "tokenizer.model")
    (tmp_path / "text").write_text("the cat sat and a dog " * 40)
    sample = ("--select-shared", "importance", "--sample-text", str(tmp_path / "text"), "--sample-tokens", "64")
    facts = json.loads((find_step(imported(tmp_path / "hf", *MIXTURE, *sample)) / "state.json").read_text())
    assert facts["imported"]["head_importance"]["tokens"] == 64
    for more, named in (((), "all heads are on"), ((*MIXTURE, "--sample-data", "x"), "by one of --sample-data and")):
        code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "no", *sample, *more)
        assert code == 2 and named in errors


# --- A run from there ---

RUN = """
    --seq-length 16 --batch-tokens 128 --micro-batch-size 2 --train-iters 6 --warmup-iters 2 --precision fp32
    --learning-rate 1e-2 --min-learning-rate 1e-3 --validation-fraction 0.1 --log-interval 2 --save-interval 3
    --eval-interval 4 --eval-samples 5 --keep-last 1 --run-report false
"""


def flags(data_dir, directory, *more):
    return [*RUN.split(), "--data-dir", str(data_dir), "--checkpoint-dir", str(directory), *more]


@pytest.fixture(scope="module")
def straight(llama, data_dir, tmp_path_factory):
    """A run from an import, never stopped; the model is nowhere in its flags."""
    directory = tmp_path_factory.mktemp("straight")
    assert import_hf.main(["--model", str(llama[0]), "--output", str(directory), *MIXTURE]) == 0
    shutil.copytree(directory, directory.with_name("pristine"))
    run_ranks(run, 1, flags(data_dir, directory))
    return directory


@pytest.fixture
def pristine(straight, tmp_path):
    """A copy of the run directory before its first step."""
    return shutil.copytree(straight.with_name("pristine"), tmp_path / "run")


def test_a_run_begins_with_the_import_at_its_first_iteration(straight):
    logged = rows(straight)
    assert [row["step"] for row in logged if "evaluation" in row] == [0, 4, 6]
    assert [row["step"] for row in logged if "loss" in row] == [2, 4, 6]
    assert logged[1]["learning_rate"] == pytest.approx(1e-7 + (1e-2 - 1e-7) / 2)  # of the second iteration
    assert logged[1]["consumed_samples"] == 16
    before = {row["step"]: row["evaluation_mean"] for row in logged if "evaluation" in row}
    assert before[6] < before[0] - 0.5
    step = straight / "checkpoints" / "step-6"
    assert json.loads((step / "state.json").read_text())["imported"]["shared_heads"] == "first"
    reader = FragmentReader(step)
    assert reader.read("exp_avg_sq", "model.layers.1.mlp.up_proj.weight").abs().max() > 0


def test_step_0_stays_and_was_not_changed(straight):
    assert {path.name for path in (straight / "checkpoints").iterdir()} == {"step-0", "step-6", "latest"}
    assert verify(straight / "checkpoints" / "step-0") == []
    names = [path.name for path in (straight / "checkpoints" / "step-0").iterdir()]
    for name in names:
        theirs = straight.with_name("pristine") / "checkpoints" / "step-0" / name
        assert (straight / "checkpoints" / "step-0" / name).read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("stop_after", [None, 3])
def test_a_run_that_is_stopped_ends_as_if_it_had_not_been(pristine, straight, data_dir, stop_after):
    """Also before its first checkpoint: then it begins with step 0 once more."""
    if stop_after is None:
        run_ranks(run_and_die, 1, flags(data_dir, pristine))
        assert [row["step"] for row in rows(pristine)] == [0, 2]
    else:
        run_ranks(run, 1, flags(data_dir, pristine), stop_after)
    run_ranks(run, 1, flags(data_dir, pristine))
    assert rows(pristine) == rows(straight)
    states = [dict(full_parameters(find_step(directory))) for directory in (pristine, straight)]
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def run_and_die(arguments):
    from moh_lm.checkpoint.saver import Saver

    def die(*_):
        raise KeyboardInterrupt

    Saver.save = die
    run(arguments)


@pytest.mark.parametrize("layout", [("--tensor-parallel-size", "2"), ("--zero-stage", "3")])
def test_any_layout_begins_with_it(pristine, straight, data_dir, layout):
    run_ranks(run, 2, flags(data_dir, pristine, *layout))
    assert losses(pristine) == pytest.approx(losses(straight), rel=1e-5)
    first, expected = rows(pristine)[0], rows(straight)[0]
    assert first["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-6)


def test_flags_that_contradict_the_import_are_named(pristine, data_dir):
    config, _ = parse_config(flags(data_dir, pristine))
    assert contradictions(config) == [] and config.model.rope_type == "llama3"
    config, _ = parse_config(flags(data_dir, pristine, "--intermediate-size", "64"))
    (sentence,) = contradictions(config)
    assert "intermediate_size was 40 and is 64; leave the flag out" in sentence
    with pytest.raises(AssertionError, match="intermediate_size was 40 and is 64"):
        run_ranks(run, 1, flags(data_dir, pristine, "--intermediate-size", "64"))


@pytest.mark.parametrize("left", [(), ("checkpoints",)])
def test_a_run_whose_import_is_lost_or_was_cut_short_is_not_started_with_random_weights(pristine, data_dir, left):
    model = "--num-layers 2 --hidden-size 48 --intermediate-size 40 --num-attention-heads 8 --vocab-size 64".split()
    if left:
        (pristine / "checkpoints" / "step-0").rename(pristine / "checkpoints" / "step-0.tmp")
        (pristine / "checkpoints" / "latest").unlink()
    else:
        shutil.rmtree(pristine / "checkpoints")
    with pytest.raises(AssertionError, match="the model that was to be imported from .* is not there"):
        run_ranks(run, 1, flags(data_dir, pristine, *model))


# --- Nothing half-written ---


def test_a_write_that_fails_leaves_no_step_and_the_import_can_be_repeated(tool, imported, llama, tmp_path, monkeypatch):
    left, write_all = 30_000, HashedFile.write_all

    def failing(file, view):
        nonlocal left
        left -= len(view)
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(file.path))
        write_all(file, view)

    with monkeypatch.context() as patch:
        patch.setattr(HashedFile, "write_all", failing)
        code, _, errors = tool("import_hf", "--model", llama[0], "--output", tmp_path / "run")
    assert code == 2 and "no space left on device" in errors
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert_same_logits(imported(llama[0]), llama[1])
    code, _, errors = tool("import_hf", "--model", llama[0], "--output", tmp_path / "run")
    assert code == 2 and "has checkpoints/" in errors


def test_damaged_shards_of_a_sample_are_named(tool, llama, data_dir, tmp_path):
    shutil.copytree(data_dir, tmp_path / "data")
    for path in (tmp_path / "data").rglob("*.bin"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    sample = ("--select-shared", "importance", "--sample-data", tmp_path / "data")
    code, _, errors = tool("import_hf", "--model", llama[0], "--output", tmp_path / "run", *MIXTURE, *sample)
    assert code == 2 and "block 0, from byte 0 on, is damaged" in errors and errors.endswith("; nothing is left\n")
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_the_plan_and_writes_nothing(tool, llama, tmp_path):
    code, output, _ = tool("import_hf", "--model", llama[0], "--output", tmp_path / "run", "--dry-run", *MIXTURE)
    assert code == 0 and not (tmp_path / "run").exists()
    elements = sum(parameter.numel() for parameter in llama[1].parameters()) + 2 * (8 + 2) * 48
    assert f"size       {4 * elements:,} bytes" in output
    shown = [line.split() for line in output.splitlines()]
    assert "model.layers.0.self_attn.router.w_type 2 x 48 drawn".split() in shown


def test_the_tools_read_an_import_like_any_step(tool, imported, llama):
    run_directory = imported(llama[0])
    assert tool("checkpoint", "verify", run_directory)[0] == 0
    code, output, _ = tool("checkpoint", "show", run_directory)
    assert code == 0 and f"imported from     {llama[0]}" in output
    reader = FragmentReader(find_step(run_directory))
    assert not reader.read("exp_avg", "model.norm.weight").any()
    np.testing.assert_array_equal(reader.read("exp_avg", "model.norm.weight", None, 3, 5), np.zeros(5))


