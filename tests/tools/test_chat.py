"""A chat model from an export, by the code of docs/huggingface.md: its template, the loss on answers, and its text."""

import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.distributed import run_ranks
from tests.tokenizing import ROOT
from tests.tools.exporting import PAPER, write_checkpoint
from tools import export_hf
from tools.hf.convert import export_check

TALK = [{"role": "user", "content": "a head"}, {"role": "assistant", "content": "the model"}]
LONGER = [{"role": "system", "content": "text"}, *TALK, *TALK]


@pytest.fixture(scope="module")
def recipe():
    """The two blocks of code: the template, and the training."""
    page = (ROOT / "docs/huggingface.md").read_text(encoding="utf-8")
    section = page.split("### A chat model")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def directory(tokenizer, tmp_path_factory):
    """An export, unchecked."""
    made = tmp_path_factory.mktemp("chat")
    run_ranks(write_checkpoint, 1, made / "run", PAPER, tokenizer, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_check, "transformers", None)
        assert export_hf.main(["--checkpoint", str(made / "run"), "--output", str(made / "hf")]) == 0
    return made / "hf"


@pytest.fixture(autouse=True)
def unregistered(monkeypatch):
    """Other tests of this process register the class of exports, from directories that are gone."""
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "moh_llama", raising=False)


@pytest.fixture
def made(recipe, directory):
    """The names that the first block makes: the tokenizer with its template, and the model."""
    names = {"AutoTokenizer": AutoTokenizer, "AutoModelForCausalLM": AutoModelForCausalLM, "Dataset": Dataset}
    exec(recipe[0], names | {"export": str(directory)}, made := {})
    return SimpleNamespace(names=names | made, **made)


def answer(directory):
    """What the saved chat model says to the user of TALK."""
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    asked = tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**asked, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(made[0, asked["input_ids"].shape[1] :])


def test_markers_are_single_tokens_and_answers_are_marked(made):
    found = made.tokenizer.apply_chat_template(LONGER, return_dict=True, return_assistant_tokens_mask=True)
    ids, learnt = found["input_ids"], found["assistant_masks"]
    markers = dict(zip(made.tokenizer.convert_tokens_to_ids(made.markers), made.markers, strict=True))
    turns = [role for turn in LONGER for role in (f"<|{turn['role']}|>", "<|end|>")]
    assert [markers[token] for token in ids if token in markers] == turns
    answers = made.tokenizer.decode([token for token, mask in zip(ids, learnt, strict=True) if mask])
    assert [part.strip() for part in answers.split("<|end|>")] == ["the model", "the model", ""]
    assert min(markers) >= 290 and made.model.get_input_embeddings().num_embeddings == len(made.tokenizer)


def test_a_model_that_learns_the_answers_says_them(made, tmp_path):
    row = made.tokenizer.apply_chat_template(
        TALK, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
    )
    labels = row["input_ids"].masked_fill(torch.as_tensor(row["assistant_masks"]).reshape(1, -1) == 0, -100)
    optimizer = torch.optim.AdamW(made.model.parameters(), 1e-2)
    for _ in range(40):
        made.model(row["input_ids"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    made.model.save_pretrained(tmp_path / "chat")
    made.tokenizer.save_pretrained(tmp_path / "chat")
    assert answer(tmp_path / "chat") == "the model<|end|>"


@pytest.mark.parametrize("adapters", [True, False])
def test_trl_trains_it_as_the_page_says(recipe, made, tmp_path, adapters, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    usual = "learning_rate=1e-4"
    few = 'learning_rate=3e-2, max_steps=30, use_cpu=True, bf16=False, report_to="none", save_strategy="no"'
    code = recipe[1].replace(usual, few).replace("peft_config=lora", "peft_config=lora if adapters else None")
    assert code.count(few) == code.count("if adapters") == 1
    exec(code.replace("if lora else", "if adapters else"), made.names | {"adapters": adapters})
    assert answer(tmp_path / "chat") == "the model<|end|>"
