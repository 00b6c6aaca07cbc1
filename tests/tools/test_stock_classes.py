"""Gated models in classes of transformers: export_hf --as, and import_hf of what it has written."""

import json
import os
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from moh_lm.checkpoint.fragments import full_parameters
from moh_lm.checkpoint.saver import find_step
from moh_lm.config import Config, HeadsConfig
from moh_lm.data.files import read_json
from tests.distributed import run_ranks
from tests.tools.exporting import PAPER, make_weights, write_checkpoint

pytest.importorskip("transformers", minversion="5.7")  # which has Laguna

GATED = replace(PAPER, heads=HeadsConfig(head_selection="gated"), qk_norm=True)
UNRESOLVED = HeadsConfig(head_selection="gated", routing="softplus")
SOFTPLUS = replace(GATED, heads=UNRESOLVED)
NARROW = HeadsConfig(head_selection="gated", routing="softplus", gate_width=5)
MODELS = {
    "as it is": ("qwen3_5", GATED),
    "tied, one key": ("qwen3_5", replace(GATED, tie_embeddings=True, num_key_value_heads=1)),
    "a part is turned": ("qwen3_5", replace(GATED, rotary_fraction=0.5)),
    "narrow gates": ("qwen3_5", replace(GATED, heads=replace(NARROW, routing="sigmoid"))),
    "gates of features": (
        "qwen3_5", replace(GATED, element_gates=True, heads=HeadsConfig(head_selection="all")),
    ),
    "laguna": ("laguna", SOFTPLUS),
    "laguna, tied, narrow gates, window": (
        "laguna", replace(SOFTPLUS, heads=NARROW, window=(6, 0), tie_embeddings=True, num_key_value_heads=1)
    ),
    "laguna, yarn, a part is turned": (
        "laguna", replace(SOFTPLUS, rotary_fraction=0.5, rope_type="yarn", rope_factor=4.0, rope_original_length=8)
    ),
    "laguna, other heads in a layer": (
        "laguna",
        replace(GATED, heads=UNRESOLVED, num_attention_heads=(4, 8), num_key_value_heads=(2, 4), window=(0, 5)),
    ),
}  # fmt: skip
CLASS = {"qwen3_5": "Qwen3_5ForCausalLM", "laguna": "LagunaForCausalLM"}
LOAD = """
import json, sys, torch, transformers
found = []
for directory, tokens in json.loads(sys.argv[1]):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.tensor(tokens)
    with torch.no_grad():
        found.append([type(model).__name__, model(tokens).logits.tolist()])
    found[-1].append(model.generate(tokens, max_new_tokens=8, do_sample=False).tolist())
    model.save_pretrained(directory + "-saved")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{kind: directory} of the exports that were made."""
    return {"in": tmp_path_factory.mktemp("stock")}


@pytest.fixture
def exported(made, export):
    """Makes the export of one of ``MODELS`` when it is first asked for, and returns its directory."""

    def of(kind):
        if kind not in made:
            stock, model = MODELS[kind]
            run, directory = made["in"] / f"run {len(made)}", made["in"] / f"hf{len(made)}"
            run_ranks(write_checkpoint, 1, run, model, None, False)
            code, printed, errors = export("--checkpoint", run, "--output", directory, "--as", stock)
            assert code == 0 and "trust_remote_code" not in printed, errors
            made[kind] = directory
        return made[kind]

    return of


@pytest.fixture
def loaded(made, exported, programs):
    """What a Python that knows no checkout finds in each export: its tokens, the class, logits and a text."""
    if "found" not in made:
        generator = torch.Generator().manual_seed(1)
        tokens = {kind: torch.randint(MODELS[kind][1].vocab_size, (2, 17), generator=generator) for kind in MODELS}
        wanted = [(str(exported(kind)), tokens[kind].tolist()) for kind in MODELS]
        command = [programs / "python", "-c", LOAD, json.dumps(wanted)]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        printed = subprocess.run(command, capture_output=True, check=True, cwd=made["in"], env=environment).stdout
        found = json.loads(printed.splitlines()[-1])
        made["found"] = {kind: (tokens[kind], *row) for kind, row in zip(MODELS, found, strict=True)}
    return made["found"]


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_a_gated_model_needs_no_code_of_this_project(kind, exported, loaded):
    (stock, model), directory = MODELS[kind], exported(kind)
    assert not [*directory.glob("*.py")]
    card = (directory / "README.md").read_text()
    assert f"as `{CLASS[stock]}` of transformers computes them" in card and "remote_code" not in card
    tokens, name, logits, text = loaded[kind]
    assert name == CLASS[stock]
    expected = make_weights(model)(tokens).transpose(0, 1)
    assert (torch.tensor(logits) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert text[0][:17] == tokens[0].tolist() and len(text[0]) == 25


@pytest.mark.parametrize("kind", ["as it is", "laguna"])
def test_a_rounded_export_is_checked_too(kind, tmp_path, export):
    stock, model = MODELS[kind]
    run_ranks(write_checkpoint, 1, tmp_path / "run", model, None, False)
    flags = ("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf", "--as", stock, "--dtype", "bfloat16")
    code, printed, errors = export(*flags)
    assert code == 0 and "checked: logits of transformers" in printed, errors


REFUSED = {
    "a mixture": (
        "qwen3_5", replace(PAPER, window=(6, 3)),
        ("--head-selection", "--routing released", "without --qk-norm", "--window"),
    ),
    "laguna, gates and windows": (
        "laguna", replace(GATED, window=(6, 3), post_norm=True),
        ("--routing sigmoid: its gates are softplus", "--post-norm", "--window: its windows are of one width"),
    ),
    "laguna, keys": (
        "laguna", replace(GATED, heads=UNRESOLVED, num_attention_heads=(4, 6), num_key_value_heads=(2, 3)),
        ("--num-key-value-heads: all layers need 6",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_class_cannot_compute_is_refused_by_flags(kind, tmp_path, export):
    stock, model, sentences = REFUSED[kind]
    run_ranks(write_checkpoint, 1, tmp_path / "run", model, None, False)
    code, _, errors = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf", "--as", stock)
    assert code == 2 and errors.count(f"--as {stock}: cannot hold this model; ") == len(sentences), errors
    assert all(sentence in errors for sentence in sentences), errors


# --- The way back ---


@pytest.mark.parametrize("by", ["", "-saved"])
@pytest.mark.parametrize("kind", [kind for kind in MODELS if "other heads" not in kind])
def test_what_was_written_or_saved_by_transformers_is_imported_again(kind, by, tmp_path, exported, loaded, tool):
    model = MODELS[kind][1]
    code, _, errors = tool("import_hf", "--model", f"{exported(kind)}{by}", "--output", tmp_path / "again")
    assert code == 0, errors
    step = find_step(tmp_path / "again")
    wanted, read = replace(model, heads=replace(model.heads, gate_width=0)), Config.load(step / "config.json").model
    assert read == wanted
    before, after = dict(make_weights(model).named_parameters()), dict(full_parameters(step))
    assert before.keys() == after.keys()
    for name, value in before.items():
        found = after[name][:, : value.shape[1]] if "router" in name else after[name]
        torch.testing.assert_close(found, value.detach(), rtol=1e-6, atol=1e-6)  # a norm is kept as its distance from 1
        assert not after[name][..., value.shape[-1] :].any()


def test_gates_of_an_imported_class_cannot_become_others(tmp_path, exported, tool):
    directory = shutil.copytree(exported("laguna"), tmp_path / "hf")
    command = ("import_hf", "--model", directory)
    code, _, errors = tool(*command, "--output", tmp_path / "no", "--routing", "sigmoid")
    assert code == 2 and "--routing sigmoid: the source is trained with softplus; leave the flag out" in errors
    code, _, errors = tool(*command, "--output", tmp_path / "same", "--head-selection", "gated")
    assert code == 0, errors
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"g_proj", b"h_proj"))
    code, _, errors = tool(*command, "--output", tmp_path / "odd")
    assert code == 2 and "self_attn.g_proj.weight has shape []" in errors


FOREIGN = {
    "a layer of linear attention": ("as it is", {"layer_types": ["linear_attention", "full_attention"]}, "layer_types"),
    "a layer without a type": ("as it is", {"layer_types": None}, "a key is missing"),
    "a gate in attention": ("as it is", {"attn_output_gate": False}, "attn_output_gate False: has no counterpart"),
    "other positions": ("as it is", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [4]}}, "rope_parameters"),
    "dropout": ("as it is", {"attention_dropout": 0.1}, "attention_dropout 0.1: has no counterpart here"),
    "experts in a class without": ("as it is", {"num_experts": 4}, "num_experts 4: has no counterpart here"),
    "biases": ("as it is", {"attention_bias": True}, "attention_bias True: can only be False"),
    "logits of routers": ("laguna", {"output_router_logits": True}, "output_router_logits True: has no counterpart"),
    "experts": ("laguna", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types ['dense', 'sparse']"),
    "gates of features": ("laguna", {"gating": "per-element"}, "gating 'per-element': can only be 'per-head'"),
    "other heads": ("laguna", {"num_attention_heads_per_layer": [4, 2]}, "num_attention_heads_per_layer [4, 2]"),
    "another class": ("laguna", {"architectures": ["LagunaForTokens"]}, "architectures ['LagunaForTokens']"),
    "a window of no number": ("laguna", {"sliding_window": "wide"}, "sliding_window 'wide': must be a whole number"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_no_export_has_written_is_refused_by_name(kind, tmp_path, exported, tool):
    of, changes, said = FOREIGN[kind]
    directory = shutil.copytree(exported(of), tmp_path / "hf")
    values = read_json(directory / "config.json") | changes
    (directory / "config.json").write_text(json.dumps(values))
    code, _, errors = tool("import_hf", "--model", directory, "--output", tmp_path / "no")
    assert code == 2 and said in errors
