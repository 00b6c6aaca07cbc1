"""Which heads of an import are shared: the important ones come first."""

import json
import shutil

import pytest
import torch

from moh_lm.checkpoint.saver import find_step
from moh_lm.config import DataConfig
from moh_lm.data.dataset import Dataset
from moh_lm.data.hugging_face_model import HuggingFaceModel
from moh_lm.data.loader import Loader
from moh_lm.data.shards import ShardWriter, write_manifest
from tests.tokenizing import hugging_face_tokenizer
from tests.tools.exported_code.configuration_moh import MoHLlamaConfig
from tests.tools.exported_code.modeling_moh import MoHLlamaForCausalLM
from tests.tools.imports.llamas import BASE_ONLY, LLAMA3, MIXTURE, assert_same_logits, make_llama, rewrite, small_model
from tools.heads.importance import HELD_OUT, sample_shards


def importance_by_transformers(model, tokens):
    """|W_O_i H_i| in the mean over tokens, [layers, heads], from what transformers hands to o_proj."""
    seen = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(lambda module, inputs, _: seen.append((module.weight, inputs[0])))
    model(tokens)
    return torch.stack(
        [
            torch.stack(
                [
                    (context[..., i * 8 : (i + 1) * 8] @ weight[:, i * 8 : (i + 1) * 8].T).norm(dim=-1).mean()
                    for i in range(8)
                ]
            )
            for weight, context in seen
        ]
    )


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
def test_important_heads_come_first_in_the_same_model(imported, data_dir, tmp_path, key_value_heads, positions):
    ours = {"kind": (MoHLlamaForCausalLM, MoHLlamaConfig), "head_selection": "all"} | positions if positions else {}
    model = make_llama(tmp_path / "hf", num_key_value_heads=key_value_heads, **ours)
    flags = "--head-selection mixture --routing query_norm --num-shared-heads 4 --num-active-routed-heads 4".split()
    sample = ("--select-shared", "importance", "--sample-data", str(data_dir), "--sample-tokens", "256")
    run_directory = imported(tmp_path / "hf", *flags, *sample)
    assert_same_logits(run_directory, model)
    facts = json.loads((find_step(run_directory) / "state.json").read_text())["imported"]["head_importance"]
    data = DataConfig(data_dir=str(data_dir), validation_fraction=HELD_OUT)
    dataset = Dataset.open(data, seq_length=64, seed=1234, vocab_size=64)
    loader = Loader(dataset, global_batch_size=4, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=1)
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


def test_the_end_of_every_shard_is_no_sample(tmp_path):
    (tmp_path / "source").mkdir()
    for unit in range(2):
        with ShardWriter(tmp_path / "source" / f"unit-{unit}", 64) as shard:
            for word in [5] * 19 + [7]:  # the last document is a twentieth, and too short for a held-out sequence
                shard.add([word] * 20)
            shard.commit({"tokenizer": {"sha256": "none", "vocab_size": 64, "eos_id": 2}, "inputs": []})
    write_manifest(tmp_path)
    tokens = sample_shards(tmp_path, vocab_size=64, seq_length=64, num_tokens=800, seed=0)
    assert tokens.shape == (12, 64) and tokens.unique().tolist() == [5]


def importance_of(run_directory):
    """(what state.json says of the shared heads, of their importance)."""
    facts = json.loads((find_step(run_directory) / "state.json").read_text())["imported"]
    return facts["shared_heads"], facts.get("head_importance")


def test_a_sample_of_text_is_read_with_the_models_tokenizer(imported, tool, tmp_path):
    tokenizer = small_model(tmp_path / "old", ["a cat and a dog", "the cat sat"] * 20, 278)
    make_llama(tmp_path / "hf", vocab_size=278)
    shutil.copy(tokenizer, tmp_path / "hf" / "tokenizer.model")
    (tmp_path / "text").write_text("the cat sat and a dog " * 40)
    sample = ("--select-shared", "importance", "--sample-text", str(tmp_path / "text"), "--sample-tokens", "64")
    assert importance_of(imported(tmp_path / "hf", *MIXTURE, *sample))[1]["tokens"] == 64
    for more, named in (((), "all heads are on"), ((*MIXTURE, "--sample-data", "x"), "measure on with only one")):
        code, _, errors = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "no", *sample, *more)
        assert code == 2 and named in errors


def test_important_heads_are_shared_by_default_if_text_can_be_read(imported, tool, tmp_path):
    tokenizer = hugging_face_tokenizer(tmp_path / "tokenizer", "bytes")
    size = HuggingFaceModel(tokenizer).vocab_size()
    make_llama(tmp_path / "hf", vocab_size=size)
    shown = ("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "no", *MIXTURE, "--dry-run")
    assert "shared     the first heads: the model has no tokenizer; give shards with" in tool(*shown)[1]
    for file in tokenizer.iterdir():
        shutil.copy(file, tmp_path / "hf")
    output = tool(*shown)[1]
    assert "shared     the most important heads on 16,384 tokens of the documentation of Python" in output
    how, facts = importance_of(imported(tmp_path / "hf", *MIXTURE))
    assert how == "importance" and facts["orders"] != [list(range(8))] * 2
    left_out = [  # of four routed heads two are in use
        sum(values[head] for head in order[4:]) / 2 / sum(values)
        for values, order in zip(facts["importance"], facts["orders"], strict=True)
    ]
    assert facts["share_cut"] == pytest.approx(sum(left_out) / 2)
    assert f"cut        {facts['share_cut']:.1%} of it for a token" in output
    assert importance_of(imported(tmp_path / "hf", *MIXTURE, "--select-shared", "first", output="b"))[0] == "first"
    assert importance_of(imported(tmp_path / "hf", "--head-selection", "gated", output="c"))[0] == "first"


def test_a_model_that_is_trained_with_shared_heads_keeps_its_order(tool, imported, llama, data_dir, tmp_path):
    source = imported(llama[0], *MIXTURE)
    assert tool("export_hf", "--checkpoint", source, "--output", tmp_path / "mixture")[0] == 0
    rewrite(llama[0], tmp_path / "released", auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})
    static = ("--head-selection", "static", "--allow-routing-change")
    sample = ("--select-shared", "importance", "--sample-data", data_dir)
    for name, flags in (("mixture", ()), ("mixture", static), ("released", ("--released", "moh-llama3-8b"))):
        call = ("import_hf", "--model", tmp_path / name, "--output", tmp_path / "new", *sample, *flags)
        code, _, errors = tool(*call)
        assert code == 2 and "--select-shared importance: the source is trained with its shared heads" in errors
        assert not (tmp_path / "new").exists()
