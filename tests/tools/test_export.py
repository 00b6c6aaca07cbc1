"""tools/export_hf.py: from a checkpoint to a directory that transformers loads, or to nothing at all.

One model in every form that its files can have; other models and tokenizers are in test_export_models.py.
"""

import ast
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
import yaml

from moh_lm.checkpoint.saver import find_step
from moh_lm.config import Config, HeadsConfig, ModelConfig
from moh_lm.data.files import read_json
from moh_lm.model import gates, rotary
from tests.distributed import run_ranks
from tests.tools.exporting import (
    PAPER,
    TIED,
    load_with_transformers,
    make_weights,
    read_safetensors,
    write_checkpoint,
)
from tools import export_hf as command
from tools.hf.convert import export_check, model_card, shipped_code, write_export

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module")
def run(tokenizer, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    run_ranks(write_checkpoint, 1, directory, PAPER, tokenizer, False)
    return directory


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_files_hold_every_parameter_bit_for_bit(run, tmp_path, export, without_transformers):
    code, printed, _ = export("--checkpoint", run, "--output", tmp_path / "hf", "--max-shard-size", "20KB")
    assert code == 0
    expected = {name: p.detach() for name, p in make_weights(PAPER).named_parameters()}
    written = read_safetensors(tmp_path / "hf")
    assert list(expected)[0] == "model.embed_tokens.weight" and set(written) == set(expected)
    for name, tensor in expected.items():
        assert written[name] == ("F32", tuple(tensor.shape), tensor.numpy().tobytes())
    assert f"{sum(p.numel() for p in expected.values()):,} parameters" in printed

    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in expected.values())
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    for name, file in index["weight_map"].items():
        header = (tmp_path / "hf" / file).read_bytes()
        assert f'"{name}"'.encode() in header
    largest = max(4 * p.numel() for p in expected.values())
    assert all((tmp_path / "hf" / file).stat().st_size < max(20_000, largest) + 2_000 for file in files)


def test_a_size_beyond_what_a_float_holds_is_a_size():
    assert command.shard_size("9" * 400 + "GB") > 10**400
    assert command.shard_size("1.5KiB") == 1536


def test_bfloat16_weights_are_rounded_to_nearest_even(run, tmp_path, export, without_transformers):
    assert export("--checkpoint", run, "--output", tmp_path / "hf", "--dtype", "bfloat16")[0] == 0
    written = read_safetensors(tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    for name, parameter in make_weights(PAPER).named_parameters():
        bits = parameter.detach().numpy().view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
        assert written[name] == ("BF16", tuple(parameter.shape), rounded.tobytes())


def test_the_configuration_has_llamas_keys_and_the_head_budgets(run, tmp_path, export, without_transformers):
    export("--checkpoint", run, "--output", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    expected = {
        "model_type": "moh_llama",
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_theta": 500.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
        "head_selection": "mixture",
        "routing": "released",
        "two_stage": True,
        "num_shared_heads": [2, 0],
        "num_active_routed_heads": [1, 3],
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    assert {key: config[key] for key in expected} == expected
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())["padding_side"] == "left"


def test_a_budget_that_tokens_keep_on_average_only_is_said_so():
    for routing, more, words in (("relu", {}, "about 2 of 6"), ("paper", {"routing_top_p": 0.5}, "at most 2 of 6")):
        heads = HeadsConfig(routing=routing, num_shared_heads=(2,), num_active_routed_heads=(2,), **more)
        model = ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=8, heads=heads)
        text = model_card.load_facts(model, {"step": 1, "router_shares": [[0.5] * 6]})
        assert f"| 0 | 2 | {words} | 50.0% |" in text, text


def test_the_card_of_a_mean_names_its_steps(run):
    step = find_step(run)
    config, state = Config.load(step / "config.json"), read_json(step / "state.json")
    for averaged, said in (({}, False), ({"averaged": [800, 1000]}, True)):
        facts = model_card.training_facts(config, state | averaged)
        assert (facts.get("mean") == "of the weights after steps 800, 1,000") == said


def test_a_card_calls_a_model_a_toy_below_a_billion_tokens(run):
    """Of a model that began with another one, the tokens are not known."""
    step = find_step(run)
    config, state = Config.load(step / "config.json"), read_json(step / "state.json")
    enough = math.ceil(10**9 / 32)
    imported = {"source": "a", "config_sha256": "b", "vocabulary": "", "shared_heads": ""}
    for more, said in (
        ({"consumed_samples": enough - 1}, True),
        ({"consumed_samples": enough}, False),
        ({"imported": imported}, False),
    ):
        card = model_card.model_card(step, config, state | more, torch.float32, 1, True, {"language": "no"}, "a/b")
        assert ("toy" in card) == said and 'source = "a/b"' in card and "\n# b\n" in card
        assert yaml.safe_load(card.split("---")[1])["language"] == "no"


@pytest.mark.parametrize("routing, said", [("paper", True), ("sigmoid", False)])
def test_the_card_says_that_a_second_stage_is_missing(routing, said):
    model = ModelConfig(num_layers=1, heads=HeadsConfig(routing=routing, two_stage=False))
    text = model_card.model_facts(model, torch.float32, 1, 32)
    assert f"| routing | {routing}" in text and ("without a1 and a2" in text) == said


def test_the_log_is_found_from_among_the_checkpoints(tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "step-9").mkdir(parents=True)
    row = {"step": 9, "loss": 3.25, "source_loss": {"a": 3.25}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path / "checkpoints")
    assert "3.25" in model_card.loss_facts(Path("step-9"), 9)
    (tmp_path / "elsewhere" / "links").mkdir(parents=True)
    (tmp_path / "elsewhere" / "links" / "best").symlink_to(tmp_path / "checkpoints" / "step-9")
    assert "3.25" in model_card.loss_facts(tmp_path / "elsewhere" / "links" / "best", 9)
    (tmp_path / "another" / "disk" / "step-9").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-10").symlink_to(tmp_path / "another" / "disk" / "step-9")
    assert "3.25" in model_card.loss_facts(tmp_path / "checkpoints" / "step-10", 9)


def test_the_model_card_has_the_facts_of_the_run(run, tokenizer, tmp_path, export, without_transformers):
    shutil.copytree(run, tmp_path / "moh-7")
    rows = [
        {"step": 0, "evaluation": {"books": 9.0, "code": 9.0}, "evaluation_mean": 9.0},
        {"step": 5, "loss": 4.1234, "source_loss": {"all": 5.0, "books": 4.0, "code": 4.25}},
        {"step": 6, "evaluation": {"all": 4.5, "books": 3.5, "code": 3.25}, "evaluation_mean": 3.375},
        {"step": 8, "loss": 1.0, "source_loss": {"books": 1.0}},
    ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "moh-7" / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 7, "lo']))
    started = {"event": "started", "ranks": 2, "device": "NVIDIA H200", "versions": {"torch": "2.11.0"}}
    events = [
        {"step": 0, **started, "ranks": 8},
        {"step": 4, **started, "commit": "0123456789abcdef"},
        {"step": 5, **started, "device": 1},  # which only damage or another program writes
        {"step": 7, **started, "ranks": 4},  # after this checkpoint
    ]
    (tmp_path / "moh-7" / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    flags = ("--checkpoint", tmp_path / "moh-7", "--output", tmp_path / "hf", "--language", "en")
    assert export(*flags)[0] == 0
    card = (tmp_path / "hf" / "README.md").read_text()
    assert str(tmp_path) not in card
    for line in (
        "\nlanguage: en\n",
        "\n# A language model with Mixture-of-Head attention\n",
        "It has read 2K tokens, so it is a toy",  # 70 * 32
        'source = "."  # OWNER/NAME on the hub, or the directory',
        "| device | NVIDIA H200 |",
        "| software | torch 2.11.0, commit 012345678 |",
        "| source | share of the mix | tokens seen |",
        f"| books | 25.00% | {(21 + 7) * 32:,} |",
        f"| code | 50.00% | {(21 + 14) * 32:,} |",
        f"| web | 25.00% | {7 * 32:,} |",
        "| mean loss per token | training, up to step 5 | held out, after step 6 |",
        "| books | 4.000 | 3.500 |",
        "| all | 5.000 | 4.500 |",
        "| all sources | 4.123 | 3.375 |",
        "| 0 | 2 | 1 of 2 | 50.0% | 40.0% | 60.0% |",
        "| 1 | 0 | 3 of 4 | 75.0% | 60.0% | 90.0% |",
        "| steps | 7 of 7, 1 of them skipped |",
        "| learning rate | 0.0003 to 3e-05, cosine; 2,000 steps of warm-up from 1e-07 |",
    ):
        assert line in card, card


def test_every_layout_gives_the_same_bytes(run, tokenizer, tmp_path, export, without_transformers):
    started = {"event": "started", "step": 0, "device": "AMD EPYC", "versions": {"torch": "2.13.0"}}
    shutil.copytree(run, tmp_path / "first")
    (tmp_path / "first/events.jsonl").write_text(json.dumps({**started, "ranks": 1}) + "\n")
    export("--checkpoint", tmp_path / "first", "--output", tmp_path / "one")
    for name, tensor_parallel in (("data parallel", False), ("tensor parallel", True)):
        run_ranks(write_checkpoint, 2, tmp_path / name / "run", PAPER, tokenizer, tensor_parallel)
        (tmp_path / name / "run/events.jsonl").write_text(json.dumps({**started, "ranks": 2}) + "\n")
        assert export("--checkpoint", tmp_path / name / "run", "--output", tmp_path / name / "hf")[0] == 0
        assert contents(tmp_path / name / "hf") == contents(tmp_path / "one")


@torch.no_grad()
def test_transformers_computes_the_logits_and_text_of_the_trainer(run, tokenizer, tmp_path, programs):
    pytest.importorskip("transformers")
    (tmp_path / "elsewhere" / "links").mkdir(parents=True)
    finished = subprocess.run(  # as typed, from another directory
        [str(programs / "python"), str(TOOLS / "export_hf.py"), "--checkpoint", str(run), "--output", "hf"],
        env={**os.environ, "PYTHONPATH": str(TOOLS.parent)},
        cwd=tmp_path / "elsewhere",
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert "checked: logits of transformers" in finished.stdout
    prompt = "the head of</s> a model\n"
    loaded = load_with_transformers(programs / "python", tmp_path / "elsewhere" / "hf", prompt, tmp_path)
    assert not any(loaded["report"].values())
    original = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    assert loaded["ids"] == original.encode(prompt)

    model, ids = make_weights(PAPER), loaded["ids"]
    logits = model(torch.tensor([ids]))[:, 0]
    torch.testing.assert_close(torch.tensor(loaded["logits"]), logits, rtol=0, atol=1e-5)
    for _ in range(12):
        ids = [*ids, model(torch.tensor([ids]))[-1, 0].argmax().item()]
    assert loaded["generated"] == ids


def test_fp16_rounds_exactly_and_refuses_overflow(run, tmp_path, export, monkeypatch):
    pytest.importorskip("transformers")
    code, printed, _ = export("--checkpoint", run, "--output", tmp_path / "hf", "--dtype", "float16")
    assert code == 0 and "checked: logits of transformers" in printed
    weights = read_safetensors(tmp_path / "hf")
    for name, parameter in make_weights(PAPER).named_parameters():
        dtype, _, data = weights[name]
        assert dtype == "F16" and data == parameter.detach().half().numpy().tobytes()

    def scaled(step, read=write_export.full_parameters):
        return ((name, 1e6 * tensor) for name, tensor in read(step))

    monkeypatch.setattr(write_export, "full_parameters", scaled)
    code, _, errors = export("--checkpoint", run, "--output", tmp_path / "large", "--dtype", "float16")
    assert code == 1 and "which torch.float16 cannot hold" in errors and not (tmp_path / "large").exists()


def test_an_earlier_export_is_replaced_only_if_asked_for(run, tmp_path, export, without_transformers):
    output = tmp_path / "hf"
    dense = replace(TIED, heads=HeadsConfig(head_selection="all"))
    run_ranks(write_checkpoint, 1, tmp_path / "dense", dense, None, False)
    assert export("--checkpoint", tmp_path / "dense", "--output", output)[0] == 0
    before = contents(output)
    assert json.loads(before["config.json"])["model_type"] == "llama"

    code, _, errors = export("--checkpoint", run, "--output", output)
    assert (code, errors.count("\n")) == (2, 1) and "add --overwrite" in errors
    assert contents(output) == before
    assert export("--checkpoint", run, "--output", output, "--overwrite")[0] == 0
    assert "tokenizer.json" not in before and "tokenizer.json" in contents(output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "hf"]
    (output / "model.safetensors").write_bytes(b"fine-tuned")
    code, _, errors = export("--checkpoint", run, "--output", output, "--overwrite")
    assert code == 2 and "has model.safetensors, which no export wrote" in errors
    assert (output / "model.safetensors").read_bytes() == b"fine-tuned"


def test_an_export_that_computes_something_else_is_not_published(run, tmp_path, export, monkeypatch):
    pytest.importorskip("transformers")
    code, turn = Path(rotary.__file__).read_text(), "torch.cat((-second, first)"
    assert turn in code
    (tmp_path / "rotary.py").write_text(code.replace(turn, "torch.cat((second, -first)"))  # they turn the other way
    monkeypatch.setitem(shipped_code.FORMULAS, "moh_rotary.py", tmp_path / "rotary.py")
    code, _, errors = export("--checkpoint", run, "--output", tmp_path / "hf")
    assert (code, errors.count("\n")) == (1, 1)
    assert "transformers" in errors and "differs from the checkpoint by" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["rotary.py"]


def test_the_formulas_of_an_export_are_files_of_the_trainer(run, tmp_path, export, without_transformers):
    export("--checkpoint", run, "--output", tmp_path / "hf")
    for name, trained in (("moh_gates.py", gates), ("moh_rotary.py", rotary)):
        code = (tmp_path / "hf" / name).read_bytes()
        assert code == Path(trained.__file__).read_bytes()
        statements = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import | ast.ImportFrom)]
        modules = {part.name for node in statements if isinstance(node, ast.Import) for part in node.names}
        modules |= {"." * node.level + (node.module or "") for node in statements if isinstance(node, ast.ImportFrom)}
        assert {module.split(".")[0] for module in modules} <= {"torch", *sys.stdlib_module_names}


@pytest.mark.parametrize(
    "names, entries",
    [
        (shipped_code.LANGUAGE, ("configuration_moh", "modeling_moh")),
        (shipped_code.VIT, ("modeling_moh_vit",)),
        (shipped_code.DIT, ("modeling_moh_dit",)),
    ],
)
def test_a_loaded_file_of_an_export_names_all_that_it_needs(names, entries, tmp_path):
    """transformers 4 and diffusers copy the files that a file imports, but not those that these import."""
    shipped_code.write_code(names, tmp_path)

    def imported(name):
        return set(re.findall(r"^from \.(\w+) import", (tmp_path / f"{name}.py").read_text(), re.MULTILINE))

    copied = set()
    for entry in entries:
        copied |= {entry} | imported(entry)
        assert copied >= {needed for name in copied for needed in imported(name)}
    assert {f"{name}.py" for name in copied} == {*names}


def test_a_check_that_is_killed_is_said_so(run, tmp_path, export, monkeypatch):
    program = "import os, sys; print('Loading weights', file=sys.stderr); os.kill(os.getpid(), 9)"
    (tmp_path / "killed.py").write_text(program)
    monkeypatch.setattr(export_check, "__file__", str(tmp_path / "killed.py"))
    monkeypatch.setattr(export_check, "transformers", True)
    code, _, errors = export("--checkpoint", run, "--output", tmp_path / "hf")
    assert code == 1 and "the check with transformers was ended by signal 9 (Killed)" in errors
    assert not (tmp_path / "hf").exists()


def test_without_transformers_the_export_says_what_was_not_checked(run, tmp_path, export, without_transformers):
    code, printed, _ = export("--checkpoint", run, "--output", tmp_path / "hf")
    assert code == 0 and "not checked with transformers" in printed and "pip install transformers" in printed


def test_wrong_arguments_are_one_line_each_and_write_nothing(run, tmp_path, export):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text('{"model_type": "llama"}')  # of someone else
    (tmp_path / "file").write_text("keep")
    cases = [
        (["--checkpoint", tmp_path, "--output", tmp_path / "mine"], ["is not empty and", "no checkpoint here"]),
        (["--checkpoint", run, "--output", tmp_path / "mine", "--overwrite"], ["is not empty and not an export"]),
        (["--checkpoint", run, "--output", tmp_path / "file"], ["is not a readable directory"]),
        (["--checkpoint", run, "--output", tmp_path / "file" / "hf"], ["cannot be written"]),
    ]
    for arguments, messages in cases:
        code, printed, errors = export(*arguments)
        assert (code, printed, errors.count("\n")) == (2, "", len(messages)), errors
        assert all(message in errors for message in messages), errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]


def test_a_damaged_checkpoint_is_not_exported(run, tmp_path, export):
    shutil.copytree(run, tmp_path / "run")
    path = next((tmp_path / "run").rglob("rank-0.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, _, errors = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    assert (code, errors.count("\n")) == (2, 1) and "rank-0.safetensors" in errors
    assert not (tmp_path / "hf").exists()
