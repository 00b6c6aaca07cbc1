"""Gated models in classes of transformers: export_hf --as."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from moh_lm.config import HeadsConfig
from tests.distributed import run_ranks
from tests.tools.exporting import PAPER, make_weights, write_checkpoint

pytest.importorskip("transformers", minversion="5.0")

GATED = replace(PAPER, heads=HeadsConfig(head_selection="gated"), qk_norm=True)
MODELS = {
    "as it is": GATED,
    "tied, one key": replace(GATED, tie_embeddings=True, num_key_value_heads=1),
    "a part is turned": replace(GATED, rotary_fraction=0.5),
}
LOAD = """
import json, sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
tokens = torch.tensor(json.loads(sys.argv[2]))
with torch.no_grad():
    found = [type(model).__name__, model(tokens).logits.tolist()]
print(json.dumps([*found, model.generate(tokens, max_new_tokens=8, do_sample=False).tolist()]))
"""


@torch.no_grad()
@pytest.mark.parametrize("kind", MODELS)
def test_a_gated_model_needs_no_code_of_this_project(kind, tmp_path, export):
    model = MODELS[kind]
    run_ranks(write_checkpoint, 1, tmp_path / "run", model, None, False)
    flags = ("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf", "--as", "qwen3_5")
    code, printed, errors = export(*flags)
    assert code == 0 and "trust_remote_code" not in printed, errors
    assert not [*(tmp_path / "hf").glob("*.py")]
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "as `Qwen3_5ForCausalLM` of transformers computes them" in card and "remote_code" not in card
    tokens = torch.randint(model.vocab_size, (2, 17), generator=torch.Generator().manual_seed(1))
    command = [sys.executable, "-I", "-c", LOAD, tmp_path / "hf", json.dumps(tokens.tolist())]  # knows no checkout
    name, logits, text = json.loads(subprocess.run(command, capture_output=True, check=True, cwd=tmp_path).stdout)
    assert name == "Qwen3_5ForCausalLM"
    expected = make_weights(model)(tokens).transpose(0, 1)
    assert (torch.tensor(logits) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert text[0][:17] == tokens[0].tolist() and len(text[0]) == 25


def test_a_rounded_export_is_checked_too(tmp_path, export):
    run_ranks(write_checkpoint, 1, tmp_path / "run", GATED, None, False)
    flags = ("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf", "--as", "qwen3_5", "--dtype", "bfloat16")
    code, printed, errors = export(*flags)
    assert code == 0 and "checked: logits of transformers" in printed, errors


def test_what_the_class_cannot_compute_is_refused_by_flags(tmp_path, export):
    run_ranks(write_checkpoint, 1, tmp_path / "run", replace(PAPER, window=(6, 3)), None, False)
    code, _, errors = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf", "--as", "qwen3_5")
    assert code == 2 and errors.count("--as qwen3_5: cannot hold this model; ") == 4
    for flag in ("--head-selection", "--routing released", "without --qk-norm", "--window"):
        assert flag in errors
