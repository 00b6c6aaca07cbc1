"""tools/import_hf.py: a Llama of transformers becomes step 0 of a run with the same logits, and comes out again."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from moh_lm.build import build_model
from moh_lm.checkpoint.fragments import full_parameters
from moh_lm.checkpoint.saver import find_step
from moh_lm.config import Config
from moh_lm.run.resume import model_changes
from tests.tools.imports.llamas import BASE_ONLY, LLAMA3, MIXTURE, SHAPE, assert_same_logits, make_llama, rewrite
from tests.tools.modeling_cases import make_model


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
def test_a_mistral_keeps_its_window_through_import_and_export(imported, tool, tmp_path, window):
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


@pytest.mark.parametrize("unit, fewer", [("head", "4 1"), ("head_in_group", "0 4")])
def test_a_mixture_of_every_head_has_the_logits_of_the_llama(imported, llama, unit, fewer):
    """query_norm gives selected heads the gate 1, so with all of them on nothing is left out."""
    flags = f"--head-selection mixture --routing query_norm --routing-unit {unit}".split()
    for budget, output in (("4 4", "all"), (fewer, "fewer")):
        shared, active = budget.split()
        budget = ("--num-shared-heads", shared, "--num-active-routed-heads", active)
        run_directory = imported(llama[0], *flags, *budget, output=output)
        if output == "all":
            assert_same_logits(run_directory, llama[1])
        else:
            with pytest.raises(AssertionError):
                assert_same_logits(run_directory, llama[1])


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


def test_router_weights_are_those_of_a_fresh_run(imported, llama):
    run_directory = imported(llama[0], *MIXTURE, "--routing", "released", "--seed", "5")
    config = Config.load(find_step(run_directory) / "config.json").model
    fresh = build_model(config)
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


def test_a_gated_export_is_imported_as_gated(imported, tmp_path):
    model = make_model(**GATED)
    model.save_pretrained(tmp_path / "hf")
    assert_same_logits(imported(tmp_path / "hf", "--head-selection", "gated"), model)


def test_heads_in_groups_do_not_become_the_first_heads(tool, tmp_path):
    """The shared head of the second group would be off."""
    in_groups = dict(num_key_value_heads=2, routing_unit="head_in_group", num_shared_heads=[2, 2])
    make_model(**in_groups, num_active_routed_heads=[2, 2]).save_pretrained(tmp_path / "hf")
    call = ("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "no", "--allow-routing-change")
    code, _, errors = tool(*call, "--head-selection", "static")
    assert code == 2 and "static keeps the first heads of all; choose all" in errors
    before = Config.from_dict(
        dict(num_layers=1, num_attention_heads=8, num_key_value_heads=2, routing_unit="head_in_group",
             allow_routing_change=True)
    )  # fmt: skip
    (problem,) = model_changes(before.to_dict(), Config.from_dict(before.to_dict() | {"head_selection": "static"}))
    assert problem.endswith("static keeps the first heads of all; choose all")


def test_gates_at_equal_scores_weigh_heads_of_several_widths(imported, tmp_path):
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
    assert code == 2 and "--select-shared importance: needs equally many heads in every layer, of one width" in errors


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


def test_a_shared_head_whose_gate_depends_on_the_token_needs_its_row(tool, llama, tmp_path):
    heads = {"head_selection": "mixture", "routing": "sigmoid"}
    budgets = {"num_shared_heads": [1, 1], "num_active_routed_heads": [2, 2]}
    names = {"model_type": "moh_llama", "architectures": ["MoHLlamaForCausalLM"]}
    rewrite(llama[0], tmp_path / "hf", **names, **heads, **budgets)
    weights = load_file(tmp_path / "hf/model.safetensors")
    width = next(value for name, value in weights.items() if name.endswith("q_proj.weight")).shape[1]
    routed = {f"model.layers.{layer}.self_attn.router.w_routed": torch.ones(7, width) for layer in range(2)}
    save_file(weights | routed, tmp_path / "hf/model.safetensors")
    code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "no")
    assert code == 2 and "model.layers.1.self_attn.router.w_shared is missing" in errors
