"""The tokens at the ends of documents are those of the model's pretraining, and a data directory keeps them."""

import hashlib
import json

import numpy as np
import pytest

from data_prep.encoding import Options, Tokenizer
from moh_lm.config import ConfigError
from moh_lm.data.hugging_face_model import DOCUMENT_END, HuggingFaceModel
from moh_lm.data.shards import ShardError, read_manifest
from tests.data_prep.hugging_face import add_tokens, change
from tests.data_prep.test_encoding import small_ranks
from tests.tokenizing import (
    TEXTS,
    hugging_face_tokenizer,
    json_lines,
    llama_3_vocabulary,
    shards,
    tokenize,
    train_model,
)

CHATML = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
HEADERS = "<|start_header_id|>{{ messages }}<|eot_id|><|eom_id|>"
MODELS = {  # as the files of that model are: added tokens, eos_token, template, ids of config.json and of generation
    "Qwen2.5": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|endoftext|>", CHATML, 300, 300),
    "Qwen2.5-Instruct": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>", CHATML, 302, [302, 300]),
    "Llama-3.1": (["<|end_of_text|>", "<|eot_id|>"], "<|end_of_text|>", "", 300, 300),
    "Llama-3.1-Instruct": (["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "<|eot_id|>", HEADERS, [300, 301, 302],
                           [300, 301, 302]),
    "SmolLM2-Instruct": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>", CHATML, 302, 302),
    "ChatML of Llama-2": (["<|im_start|>", "<|im_end|>"], "<|im_end|>", CHATML, 301, 301),
    "Mistral-Instruct": ([], "</s>", "[INST]{{ messages }}</s>", 2, 2),
    "without eos_token": (["<|endoftext|>"], None, CHATML, 300, None),
}  # fmt: skip
ENDS = ["<|endoftext|>"] * 2 + ["<|end_of_text|>"] * 2 + ["<|endoftext|>", "</s>", "</s>", "<|endoftext|>"]


def model_directory(directory, name):
    """A directory of a model of Hugging Face but for its weights."""
    tokens, eos, template, ids, more = MODELS[name]
    hugging_face_tokenizer(directory, "bytes")
    add_tokens(directory, *tokens, special=True)
    change(directory / "tokenizer_config.json", eos_token=eos, chat_template=template, bos_token="<s>")
    change(directory / "config.json", model_type="llama", eos_token_id=ids)
    change(directory / "generation_config.json", eos_token_id=more)
    return directory


@pytest.mark.parametrize(("name", "end"), [*zip(MODELS, ENDS, strict=True)])
def test_documents_end_as_the_model_was_pretrained(name, end, tmp_path):
    tokenizer = Tokenizer(str(model_directory(tmp_path / "hf", name)))
    assert tokenizer.model.id_to_piece(tokenizer.eos_id) == end
    assert tokenizer.ends().startswith(f"documents end with {end} (id {tokenizer.eos_id})")
    assert tokenizer.ends().endswith("no token begins them (--bos puts <s> (id 1) there, as transformers does)")
    chat = MODELS[name][1]
    assert (f", since {chat} only ends a turn" in tokenizer.ends()) == (chat not in (None, end))


def test_without_a_model_beside_it_the_eos_token_ends_documents(tmp_path):
    directory = model_directory(tmp_path / "hf", "Qwen2.5-Instruct")
    for name in ("config.json", "generation_config.json"):
        (directory / name).unlink()
    assert Tokenizer(str(directory)).eos_id == 302
    change(directory / "config.json", hidden_size=64)  # of a run, in a checkpoint
    assert Tokenizer(str(directory)).eos_id == 302


def test_a_data_directory_knows_the_end_of_its_documents(tmp_path):
    directory = model_directory(tmp_path / "hf", "Qwen2.5-Instruct")
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS))
    source = f"a={tmp_path}/a.jsonl"
    stdout, _ = tokenize(directory, tmp_path / "out", source)
    assert "documents end with <|endoftext|> (id 300), since <|im_end|> only ends a turn in" in stdout
    (shard,) = shards(tmp_path / "out", "a")
    assert shard.read(shard.num_tokens - 1, 1).tolist() == [300]
    config = tmp_path / "out/tokenizer_config.json"
    before = json.loads((directory / "tokenizer_config.json").read_text())
    assert json.loads(config.read_text()) == {**before, DOCUMENT_END: "<|endoftext|>"}
    assert read_manifest(tmp_path / "out")["tokenizer"]["eos_id"] == 300
    assert HuggingFaceModel(tmp_path / "out").eos_id() == 300
    for tokenizer in (directory, tmp_path / "out"):
        assert "1 of them already complete" in tokenize(tokenizer, tmp_path / "out", source)[0]
    change(config, **{DOCUMENT_END: "<|im_end|>"})
    with pytest.raises(ShardError, match="documents end with id 300, and not with '<|im_end|>', id 302; restore it"):
        read_manifest(tmp_path / "out")


def test_another_end_in_the_model_beside_a_tokenizer_is_said(tmp_path):
    train_model(tmp_path)
    change(tmp_path / "config.json", eos_token_id=[32_000, 32_007])
    said = Tokenizer(str(tmp_path)).ends()
    assert "end with </s> (id 2), but the config.json beside the tokenizer says that texts end with id" in said
    assert "id 32000, 32007; no token begins them (--bos puts <s> (id 1) there)" in said
    change(tmp_path / "config.json", eos_token_id=[2, 32_007])
    assert "config.json" not in Tokenizer(str(tmp_path)).ends()
    for damage in ("[" * 100_000, "[]"):
        (tmp_path / "config.json").write_text(damage)
        with pytest.raises(ConfigError, match=r"config\.json: cannot be read .*; fix it, or copy the tok"):
            Tokenizer(str(tmp_path)).ends()


# --- Beginnings ---


def three_tokenizers(directory):
    """(path, id of BOS, id of EOS) of a tokenizer of each kind."""
    pytest.importorskip("tiktoken")
    for name in ("sp", "llama"):
        (directory / name).mkdir()
    yield train_model(directory / "sp"), 1, 2
    yield llama_3_vocabulary(directory / "llama/tokenizer.model", small_ranks()), 128_000, 128_001
    yield model_directory(directory / "hf", "Mistral-Instruct"), 1, 2


def test_with_bos_every_document_begins_with_it(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines([*TEXTS, "<s> as text"]))
    for number, (path, bos, eos) in enumerate(three_tokenizers(tmp_path)):
        output = tmp_path / f"out-{number}"
        stdout, _ = tokenize(path, output, f"a={tmp_path}/a.jsonl", bos=True, no_shuffle=True)
        assert f"(id {eos}) and begin with {Tokenizer(str(path)).model.id_to_piece(bos)} (id {bos})\n" in stdout
        (shard,) = shards(output, "a")
        plain = list(Tokenizer(str(path)).encode_all([*TEXTS, "<s> as text"]))
        expected = np.concatenate([part for ids in plain for part in ([bos], ids)])
        assert shard.read(0, shard.num_tokens).tolist() == expected.tolist()
        assert shard.num_documents == len(TEXTS) + 1 and expected.tolist().count(bos) == shard.num_documents
        assert shard.sidecar["tokenizer"]["bos_id"] == read_manifest(output)["tokenizer"]["bos_id"] == bos
        again, _ = tokenize(path, output, f"a={tmp_path}/a.jsonl", bos=True, no_shuffle=True)
        assert "1 of them already complete" in again
        _, stderr = tokenize(path, output, f"a={tmp_path}/a.jsonl", no_shuffle=True, code=2)
        assert f"with end-of-sequence id {eos} after each and {bos} before; --tokenizer has" in stderr


def test_without_bos_shards_have_the_names_that_they_had(tmp_path):
    """The name of a unit holds these facts: shards of earlier versions would be made again."""
    path = train_model(tmp_path)
    tokenizer = Tokenizer(str(path))
    assert tokenizer.identity == hashlib.sha256(path.read_bytes()).hexdigest()
    assert tokenizer.description.keys() == {"sha256", "vocab_size", "eos_id", "engine"}
    assert Options().facts() == {"text_key": "text", "shuffle": True}


def test_a_bos_that_the_tokenizer_lacks_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    directory = hugging_face_tokenizer(tmp_path / "hf", "bytes")
    _, stderr = tokenize(directory, tmp_path / "out", f"a={tmp_path}/a.txt", bos=True, code=2)
    assert "hf: has no beginning-of-sequence token; leave --bos out" in stderr
    change(directory / "tokenizer_config.json", bos_token="<s>")
    stdout, _ = tokenize(directory, tmp_path / "out", f"a={tmp_path}/a.txt", bos=True)
    assert "begin with <s> (id 1)" in stdout
