"""``tools/generate.py``: text from a run or an export, and what cannot be generated."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from data_prep.encoding import Tokenizer
from moh_lm.build import build_model
from moh_lm.checkpoint.manifest import describe, read_entries, write_manifest
from moh_lm.checkpoint.saver import find_step
from moh_lm.config import HeadsConfig, ModelConfig
from tests.distributed import run_ranks
from tests.inference.models import SIZES
from tests.tokenizing import hugging_face_tokenizer, train_model
from tests.tools.exporting import PAPER, write_checkpoint
from tools import generate as generate_tool
from tools.hf.convert.keys import written

ROOT = Path(__file__).resolve().parents[2]



@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("generate")
    tokenizer = train_model(directory)
    config = ModelConfig(**{**vars(PAPER), "vocab_size": 400})
    run_ranks(write_checkpoint, 1, directory / "run", config, tokenizer, False)
    return directory / "run"


def write_zeros(directory):
    """Give ``directory`` the configuration and weights of an export; returns the weights."""
    config = ModelConfig(**{**SIZES, "vocab_size": 400}, heads=HeadsConfig(head_selection="all"))
    values = {"model_type": "llama", **written(config), "max_position_embeddings": 32}
    (directory / "config.json").write_text(json.dumps(values))
    weights = {name: torch.zeros_like(tensor) for name, tensor in build_model(config).state_dict().items()}
    save_file(weights, directory / "model.safetensors")
    return weights


def command(programs, *flags, text=None):
    line = [str(programs / "python"), str(ROOT / "tools/generate.py"), *map(str, flags)]
    result = subprocess.run(line, cwd=ROOT, input=text, capture_output=True, text=True, timeout=900)
    return result.returncode, result.stdout, result.stderr


def test_the_text_in_pieces_is_the_text_at_once(run, programs):
    flags = ("--model", run, "--max-new-tokens", 9, "--temperature", 1, "--seed", 3, "--attention-backend", "dense")
    code, out, err = command(programs, *flags, "--prompt", "the quick", "--json")
    assert code == 0 and "tokens/s" in err
    row = json.loads(out)
    assert row["prompt"] == "the quick" and 0 < len(row["tokens"]) <= 9
    code, streamed, _ = command(programs, *flags, text="the quick")
    assert (code, streamed) == (0, f"the quick{row['text']}\n")


def test_prompts_begin_with_the_bos_of_the_data(run, tmp_path, without_transformers, monkeypatch, tool):
    asked = []
    monkeypatch.setattr(generate_tool, "write", lambda *given: asked.append(given[3]))
    shutil.copytree(run, tmp_path / "begun")
    path = find_step(tmp_path / "begun") / "state.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "data": {**facts["data"], "bos_id": 1}}))
    write_manifest(path.parent, read_entries(path.parent) | {path.name: describe(path)})
    for source, output in ((run, tmp_path / "plain-export"), (tmp_path / "begun", tmp_path / "begun-export")):
        code, _, errors = tool("export_hf", "--checkpoint", source, "--output", output)
        assert code == 0, errors
        for model in (source, output):
            assert tool("generate", "--model", model, "--prompt", "the quick", "--max-new-tokens", 2)[0] == 0
    ids = Tokenizer(str(tmp_path / "begun-export")).model.encode("the quick")
    assert asked == [[ids], [ids], [[1, *ids]], [[1, *ids]]]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "begun-export" / name).read_text())["bos_token_id"] == 1
    assert "The tokenizer adds only BOS" in (tmp_path / "begun-export" / "README.md").read_text()


def test_a_prompt_begins_as_the_tokenizer_of_an_export_does(tmp_path, monkeypatch, tool):
    hugging_face_tokenizer(tmp_path, "bytes", bos_token="<s>")  # its tokenizer.json adds BOS, and no other file says so
    write_zeros(tmp_path)
    monkeypatch.setattr(generate_tool, "write", lambda *given: asked.extend(given[3]))
    asked, flags = [], ("generate", "--model", tmp_path, "--prompt", "a", "--max-new-tokens", 2)
    assert tool(*flags)[0] == 0
    assert asked == [[1, *Tokenizer(str(tmp_path)).model.encode("a")]]
    (tmp_path / "tokenizer_config.json").write_text("[")
    code, _, errors = tool(*flags)
    assert code == 2 and "tokenizer_config.json cannot be read" in errors


def test_a_text_ends_with_each_token_that_ends_one_in_the_export(tmp_path, without_transformers, tool, capsys):
    train_model(tmp_path)
    write_zeros(tmp_path)  # all logits are zero, so the most likely token is the first
    flags = ("generate", "--model", tmp_path, "--prompt", "a", "--max-new-tokens", 3, "--json")
    made = []
    for ends in (None, 5, [7, 0]):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        code, out, errors = tool(*flags)
        assert code == 0, errors
        made.append(json.loads(out)["tokens"])
    assert made == [[0, 0, 0], [0, 0, 0], []]


def test_what_cannot_be_generated_is_said(run, tmp_path, monkeypatch, capsys):
    triton = ("--model", run, "--prompt", "a", "--device", "cpu", "--attention-backend", "triton")
    loops = ("--model", run, "--prompt", "a", "--device", "cuda", "--attention-backend", "loops")
    for flags, words in [
        (("--model", run, "--prompt", "a", "--max-new-tokens", 500), "500 new ones are too many; the model was"),
        (("--model", run, "--prompt", ""), "contains no tokens"),
        (loops, "--attention-backend loops: needs a CPU, and --device is cuda; choose auto"),
        (("--model", run, "--prompt", "a", "--cuda-graph"), "--cuda-graph: needs a CUDA GPU, and --device is cpu"),
        (triton, "--attention-backend triton: needs a CUDA GPU, and --device is cpu; choose auto"),
    ]:
        assert generate_tool.main([str(flag) for flag in flags]) == 2
        out, err = capsys.readouterr()
        assert out == "" and words in err, err


def test_loops_are_refused_where_a_gpu_is_taken_by_default(run, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert generate_tool.main(["--model", str(run), "--prompt", "a", "--attention-backend", "loops"]) == 2
    assert "loops: needs a CPU, and --device is cuda; choose auto, or --device cpu" in capsys.readouterr().err


def test_a_package_that_the_tokenizer_needs_is_named(tmp_path, monkeypatch, capsys):
    write_zeros(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert generate_tool.main(["--model", str(tmp_path), "--prompt", "a"]) == 2
    assert "has no tokenizer that can be read: needs the package tokenizers; pip install" in capsys.readouterr().err


def test_an_export_with_a_damaged_or_odd_file_is_named(tmp_path, capsys):
    train_model(tmp_path)
    weights = write_zeros(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"none")
    flags = ["--model", str(tmp_path), "--prompt", "a"]
    assert generate_tool.main(flags) == 2
    assert "model.safetensors: not a safetensors file" in capsys.readouterr().err
    for odd in ({"adapter.weight": torch.zeros(3)}, {"model.norm.weight": torch.zeros(1)}):
        save_file(weights | odd, tmp_path / "model.safetensors")
        assert generate_tool.main(flags) == 2
        ((name, tensor),) = odd.items()
        words = f"its config.json describes no {name} {list(tensor.shape)}; import it by tools/import_hf.py\n"
        assert capsys.readouterr().err.endswith(words)
    for value in (float("nan"), float("inf")):
        odd = {"model.norm.weight": torch.full((SIZES["hidden_size"],), value)}
        save_file(weights | odd, tmp_path / "model.safetensors")
        assert generate_tool.main(flags) == 2
        assert "model.norm.weight has values that are not finite; give another step" in capsys.readouterr().err


@pytest.mark.parametrize(
    "stdin, flags, words",
    [
        (io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8"), [], "standard input: is not UTF-8 text"),
        (io.TextIOWrapper(io.BytesIO(b"\xff"), "utf-8", "surrogateescape"), [], "standard input: is not UTF-8 text"),
        (None, ["--prompt", os.fsdecode(b"a \xff")], "--prompt: is not UTF-8 text"),
    ],
    ids=["strict", "surrogates", "flag"],
)
def test_a_prompt_that_is_no_text_is_said(stdin, flags, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", stdin)
    assert generate_tool.main(["--model", "any", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"generate: {words}")
