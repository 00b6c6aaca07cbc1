"""tools/export_hf.py: models of every kind and their tokenizers, in the form that transformers knows, or refused."""

import json
from dataclasses import replace

import pytest
import sentencepiece
import torch

from moh_lm.config import Config, HeadsConfig, ModelConfig
from moh_lm.data.tokenizer import read_model
from tests.distributed import run_ranks
from tests.tokenizing import hugging_face_tokenizer, llama_3_vocabulary, sentencepiece_model
from tests.tools.exporting import (
    HEADS,
    PAPER,
    TIED,
    load_with_transformers,
    make_weights,
    read_safetensors,
    write_checkpoint,
)
from tools.hf.convert import export_check
from tools.hf.convert.hugging_face_tokenizer import write_tokenizer
from tools.hf.convert.import_config import model_config

ROPES = {
    "linear": {"rope_type": "linear", "rope_factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_factor": 8.0,
        "rope_low_freq_factor": 1.0,
        "rope_high_freq_factor": 4.0,
        "rope_original_length": 16,
    },
    "yarn": {"rope_type": "yarn", "rope_factor": 4.0, "rope_original_length": 16},
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_scaled_rotary_embedding_is_written_for_every_version(kind, tmp_path, export, without_transformers):
    run_ranks(write_checkpoint, 1, tmp_path / "run", replace(PAPER, **ROPES[kind]), None, False)
    code, printed, _ = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    assert code == 0 and "checked: logits of the trainer's model" in printed
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    keys = {"rope_type": "rope_type", "rope_original_length": "original_max_position_embeddings"}
    scaling = {keys.get(field, field.removeprefix("rope_")): value for field, value in ROPES[kind].items()}
    assert config["rope_theta"] == 500.0
    assert config["rope_scaling"] == scaling
    assert config["rope_parameters"] == {**scaling, "rope_theta": 500.0}


OWN_KEYS = HeadsConfig(
    num_shared_heads=(2, 0), num_active_routed_heads=(2,), routing="released", routing_unit="key_value_group",
    routed_keys="selected", routed_positions="head",
)  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("kind, heads", [("moh_llama", OWN_KEYS), ("mistral", HeadsConfig(head_selection="all"))])
def test_an_export_sees_what_the_windows_of_the_model_show(kind, heads, tmp_path, export):
    pytest.importorskip("transformers")
    window = (6, 3) if kind == "moh_llama" else (6, 6)
    run_ranks(write_checkpoint, 1, tmp_path / "run", replace(PAPER, heads=heads, window=window), None, False)
    code, printed, errors = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    assert code == 0 and "checked: logits of transformers" in printed, errors
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["sliding_window"]) == (kind, 6)
    assert config.get("layer_types") == {"moh_llama": ["sliding_attention"] * 2}.get(kind)
    assert config.get("layer_windows") == {"moh_llama": [6, 3]}.get(kind)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "| sliding window | 6 tokens in " in card and ("ordinary `Mistral" in card) == (kind == "mistral")


@pytest.mark.parametrize(
    "heads, positions, said",
    [
        (
            HeadsConfig(head_selection="all"), dict(position=("cope", "rotary"), rotary_fraction=0.5),
            "CoPE up to 64 in 1 of 2 layers, rotary, 0.5 of the features in 1 of 2 layers",
        ),
        (HEADS, dict(position=("learned",), learned_positions=40), "a learned table in 2 of 2 layers"),
    ],
)  # fmt: skip
def test_positions_that_no_llama_has_are_exported_with_our_class(heads, positions, said, tmp_path, export):
    pytest.importorskip("transformers")
    model = replace(PAPER, heads=heads, **positions)
    run_ranks(write_checkpoint, 1, tmp_path / "run", model, None, False)
    code, printed, errors = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    assert code == 0 and "checked: logits of transformers" in printed, errors
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["MoHLlamaForCausalLM"] and model_config(config).position == model.position
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"| positions | {said}" in card and ("| rotary embedding |" in card) == ("rotary" in model.position)


def test_a_tokenizer_of_tiktoken_is_copied_and_converted(tmp_path, export):
    pytest.importorskip("tiktoken")
    pytest.importorskip("transformers")
    tokenizer = llama_3_vocabulary(tmp_path / "tokenizer.model", [bytes([byte]) for byte in range(256)])
    run_ranks(write_checkpoint, 1, tmp_path / "run", replace(PAPER, vocab_size=128_256), tokenizer, False)
    code, printed, _ = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    assert code == 0 and "checked: logits of transformers" in printed
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == tokenizer.read_bytes()
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hf" / name).read_text())["eos_token_id"] == 128_001  # the second special token


DENSE = replace(PAPER, heads=HeadsConfig(head_selection="all"))


@torch.no_grad()
def test_a_model_with_all_heads_is_an_ordinary_llama(tokenizer, tmp_path, export, programs):
    """It loads without remote code, its rotary scaling and tokenizer too."""
    pytest.importorskip("transformers")
    model_config = replace(DENSE, **ROPES["llama3"])
    run_ranks(write_checkpoint, 1, tmp_path / "run", model_config, tokenizer, False)
    flags = ["--license", "apache-2.0", "--base-model", "owner/name"]
    code, printed, _ = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf", *flags)
    assert code == 0 and "trust_remote_code" not in printed and "checked: logits of transformers" in printed
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert not {"auto_map", "head_selection", "num_shared_heads"} & config.keys()
    assert not list((tmp_path / "hf").glob("*.py"))
    prompt = "the head of a model\n"
    loaded = load_with_transformers(programs / "python", tmp_path / "hf", prompt, tmp_path, trusted=False)
    assert not any(loaded["report"].values())
    assert loaded["ids"] == sentencepiece.SentencePieceProcessor(model_file=str(tokenizer)).encode(prompt)
    logits = make_weights(model_config)(torch.tensor([loaded["ids"]]))[:, 0]
    torch.testing.assert_close(torch.tensor(loaded["logits"]), logits, rtol=0, atol=1e-5)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "\nlicense: apache-2.0\nbase_model: owner/name\n---\n" in card
    assert "ordinary `LlamaForCausalLM`" in card and "trust_remote_code" not in card and "mixture" not in card.lower()


@pytest.mark.parametrize("kind, words", [("mixture", "a router selects"), ("static", "there is no router")])
def test_the_card_says_what_the_model_is(kind, words, tmp_path, export, without_transformers):
    model_config = replace(PAPER, heads=replace(HEADS, head_selection=kind))
    run_ranks(write_checkpoint, 1, tmp_path / "run", model_config, None, False)
    code, printed, _ = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    assert code == 0 and "no tokenizer: the checkpoint has none" in printed
    card = (tmp_path / "hf" / "README.md").read_text()
    assert words in card and "license:" not in card and ("Routing is computed in fp32" in card) == (kind == "mixture")


def test_a_model_whose_tokenizer_cannot_be_converted_is_exported_without_it(tmp_path, export, without_transformers):
    options = {"model_type": "word", "byte_fallback": False}
    words = sentencepiece_model(tmp_path / "tokenizer.model", ["the head of a model"] * 9, 8, **options)
    for name, tokenizer in ("run", words), ("bare", None):
        run_ranks(write_checkpoint, 1, tmp_path / name, PAPER, tokenizer, False)
    flags = ["--checkpoint", tmp_path / "run", "--output", tmp_path / "hf"]
    code, _, said = export(*flags)
    assert code == 1 and "its model type is word" in said and "; --no-tokenizer exports the model without it" in said
    code, printed, _ = export(*flags, "--no-tokenizer")
    assert code == 0 and "no tokenizer: it was left out" in printed
    assert export("--checkpoint", tmp_path / "bare", "--output", tmp_path / "other")[0] == 0
    one, other = (sorted(path.iterdir()) for path in (tmp_path / "hf", tmp_path / "other"))
    assert [path.name for path in one] == [path.name for path in other]
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (tmp_path / "other/model.safetensors").read_bytes()


def test_a_hugging_face_tokenizer_is_exported_with_its_ids(tmp_path, export):
    transformers, tokenizers = (pytest.importorskip(name) for name in ("transformers", "tokenizers"))
    tokenizer = hugging_face_tokenizer(tmp_path / "hf-tokenizer", "bytes", pad_token="<unk>")
    pieces = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    pieces.add_tokens(["<|User|>"])  # found in texts, were it not for its form
    pieces.save(str(tokenizer / "tokenizer.json"))
    run_ranks(write_checkpoint, 1, tmp_path / "run", PAPER, tokenizer / "tokenizer.json", False)
    code, printed, errors = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    assert code == 0 and "checked: logits of transformers" in printed, errors
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [2, 2, 0]
    converted = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "The quick </s> brown fox <|User|> jumps over 12 lazy dogs"
    assert converted(text)["input_ids"] == read_model(tokenizer).encode(text).tolist()


def test_a_letter_that_was_added_to_a_tokenizer_is_no_padding(tmp_path):
    """Padding becomes a special token, which is not found in a text."""
    directory = hugging_face_tokenizer(tmp_path, "bytes", unk_token=None)
    content = json.loads((directory / "tokenizer.json").read_text())
    letter = {**content["added_tokens"][0], "id": len(content["model"]["vocab"]), "content": "\u00f5", "special": False}
    content["added_tokens"] = [letter, *content["added_tokens"]]
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "out").mkdir()
    assert write_tokenizer(directory, tmp_path / "out", 64)["pad"] == 0  # <unk>, a special token
    chat = json.dumps(content).replace("<unk>", "<|im_start|>")
    (directory / "tokenizer.json").write_text(chat)
    assert "pad" not in write_tokenizer(directory, tmp_path / "out", 64)  # a marker that texts have
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "unk_token": settings["eos_token"]}))
    (directory / "tokenizer.json").write_text(json.dumps(content))
    assert write_tokenizer(directory, tmp_path / "out", 64)["pad"] == 0  # and not EOS, which GPT-2 has for unknown text


def test_a_tied_head_is_stored_once_and_passes_in_bfloat16(tmp_path, export):
    pytest.importorskip("transformers")
    model = replace(TIED, qk_norm=True, post_norm=True, base_width=6)
    run_ranks(write_checkpoint, 1, tmp_path / "run", model, None, False)
    code, printed, _ = export("--checkpoint", tmp_path / "run", "--output", tmp_path / "hf", "--dtype", "bfloat16")
    assert code == 0 and "checked: logits of transformers" in printed
    assert "lm_head.weight" not in read_safetensors(tmp_path / "hf")


@pytest.mark.parametrize("selection, differing, calls", [
    ("mixture", 1, 2), ("mixture", 3, 3), ("gated", 1, 1),
])  # fmt: skip
def test_a_mixture_differs_only_if_it_does_for_each_draw_of_tokens(selection, differing, calls, monkeypatch):
    """Scores of one draw may be as close as rounding."""
    seeds = []

    def compare(*given):
        seeds.append(given[-1])
        if len(seeds) <= differing:
            raise export_check.LogitsDiffer("other logits")
        return ["checked"]

    monkeypatch.setattr(export_check, "compare_models", compare)
    heads = HeadsConfig(head_selection=selection)
    config = Config(model=ModelConfig(heads=heads))
    if calls > differing:
        assert export_check.check_export("step", config, "directory", None) == ["checked"]
    else:
        with pytest.raises(export_check.LogitsDiffer):
            export_check.check_export("step", config, "directory", None)
    assert seeds == list(range(calls))


def test_a_module_keeps_the_tensors_of_its_file_while_it_computes_in_fp32():
    module = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    before = [parameter.data_ptr() for parameter in module.parameters()]
    module.register_forward_pre_hook(export_check.widen)
    module.register_forward_hook(export_check.narrow)
    x = torch.randn(4, 3)
    weight, bias = (parameter.detach().float() for parameter in module.parameters())
    assert torch.equal(module(x), torch.nn.functional.linear(x, weight, bias))
    assert [parameter.data_ptr() for parameter in module.parameters()] == before
