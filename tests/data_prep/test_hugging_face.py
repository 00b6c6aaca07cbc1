"""Tokenizers of Hugging Face: the ids of transformers, by any engine, and control tokens that stay text."""

import hashlib
import io
import json
import shutil
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace

import numpy as np
import pytest

from data_prep.encoding import Tokenizer
from data_prep.output import check_model_file
from moh_lm.config import ConfigError, DataConfig
from moh_lm.data.dataset import Dataset
from moh_lm.data.hugging_face_model import HuggingFaceModel
from moh_lm.data.shards import ShardError
from tests.data_prep.hugging_face import add_tokens, change, tokenizers
from tests.data_prep.test_encoding import PARTS, nasty_texts
from tests.tokenizing import TEXTS, hugging_face_tokenizer, json_lines, shards, tokenize, train_model
from tools import inspect_data


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_ids_are_those_of_transformers(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    directory = hugging_face_tokenizer(tmp_path / "hf", kind)
    ours, theirs = Tokenizer(str(directory)), transformers.AutoTokenizer.from_pretrained(directory)
    for text in [*nasty_texts(), *PARTS, *TEXTS, ""]:
        expected = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.encode(text).tolist() == [*expected, 2]
        assert 2 not in expected and 1 not in expected


def test_a_data_directory_keeps_the_tokenizer_that_made_it(tmp_path):
    directory = hugging_face_tokenizer(tmp_path / "hf", "bytes")
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS))
    tokenize(directory, tmp_path / "out", f"a={tmp_path}/a.jsonl", no_shuffle=True)
    (shard,) = shards(tmp_path / "out", "a")
    recorded = shard.sidecar["tokenizer"]
    assert recorded["sha256"] == hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
    assert (recorded["vocab_size"], recorded["eos_id"]) == (300, 2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (directory / name).read_bytes()
    data = DataConfig(str(tmp_path / "out"), (), 0.0)
    dataset = Dataset.open(data, seq_length=16, seed=7, vocab_size=300)
    assert dataset.tokenizer_path == tmp_path / "out/tokenizer.json"
    with redirect_stdout(io.StringIO()) as stdout:
        assert inspect_data.main([str(tmp_path / "out"), "--json", "--document", *(f"a:{n}" for n in range(7))]) == 0
    assert [document["text"] for document in json.loads(stdout.getvalue())["documents"]] == TEXTS
    config = directory / "tokenizer_config.json"
    config.write_text(config.read_text().replace("</s>", "<s>"))
    _, stderr = tokenize(directory, tmp_path / "out", f"a={tmp_path}/a.jsonl", no_shuffle=True, code=2)
    assert "was made with another tokenizer" in stderr
    tokenize(tmp_path / "out", tmp_path / "again", f"a={tmp_path}/a.jsonl", no_shuffle=True)
    assert shards(tmp_path / "again", "a")[0].sidecar["bin"] == shard.sidecar["bin"]


def test_a_directory_stands_for_its_tokenizer_model(tmp_path):
    directory = hugging_face_tokenizer(tmp_path / "hf", "bytes")
    train_model(directory)
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS))
    cases = [
        (directory, {"tokenizer.model"}),
        (directory / "tokenizer.json", {"tokenizer.json", "tokenizer_config.json"}),
    ]
    for given, names in cases:
        tokenize(given, tmp_path / "out", f"a={tmp_path}/a.jsonl")
        assert {path.name for path in (tmp_path / "out").glob("tokenizer*")} == names
        shutil.rmtree(tmp_path / "out/a")


def test_files_of_another_tokenizer_are_not_replaced(tmp_path, capsys):
    directory, model = hugging_face_tokenizer(tmp_path / "hf", "bytes"), train_model(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS))
    before = {path: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(AssertionError, match="hf: has tokenizer.json of another tokenizer"):
        tokenize(model, directory, f"a={tmp_path}/a.jsonl")
    (directory / "manifest.json").write_text('{"name": "an application"}')  # so it is no data directory
    before[directory / "manifest.json"] = (directory / "manifest.json").read_bytes()
    with pytest.raises(AssertionError, match="hf: has a manifest.json of something else"):
        tokenize(model, directory, f"a={tmp_path}/a.jsonl")
    (directory / ".lock").unlink()
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    tokenize(model, tmp_path / "out", f"a={tmp_path}/a.jsonl")
    with pytest.raises(ConfigError, match="out/tokenizer.model: is the tokenizer of the shards in its directory"):
        check_model_file(tmp_path / "out/tokenizer.model")


def test_what_is_no_usable_tokenizer_is_refused(tmp_path, monkeypatch):
    config = hugging_face_tokenizer(tmp_path / "hf", "bytes") / "tokenizer_config.json"
    model = tmp_path / "hf/tokenizer.json"
    unigram = (hugging_face_tokenizer(tmp_path / "unigram", "unigram") / "tokenizer.json").read_text()
    mistakes = [
        (config, "{}", "no end-of-sequence"),
        (config, '{"eos_token": "<other>"}', "no end-of-sequence"),
        (config, "{", "not a tokenizer of Hugging Face"),
        (model, "{}", "not a tokenizer of Hugging Face"),
        (model, unigram, "would end there"),
    ]
    for path, text, words in mistakes:
        before = path.read_text()
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            Tokenizer(str(tmp_path / "hf"))
        path.write_text(before)
    (tmp_path / "hf/other.json").write_text(unigram)
    with pytest.raises(ConfigError, match="other.json: the files of a tokenizer of Hugging Face are named tokenizer"):
        Tokenizer(str(tmp_path / "hf/other.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="pip install tokenizers"):
        Tokenizer(str(tmp_path / "hf"))
    config.unlink()
    with pytest.raises(ConfigError, match="no such file as .*tokenizer_config.json"):
        Tokenizer(str(tmp_path / "hf"))


@pytest.mark.parametrize(("kind", "unknown"), [("bytes", None), ("words", "<unk>"), ("words", None)])
def test_a_vocabulary_that_drops_characters_says_so(kind, unknown, tmp_path):
    path = hugging_face_tokenizer(tmp_path / "hf", kind) / "tokenizer.json"
    change(path, model=json.loads(path.read_text())["model"] | {"unk_token": unknown})
    tokenizer = Tokenizer(str(tmp_path / "hf"))
    drops = np.array_equal(tokenizer.encode("a ☃☃ b"), tokenizer.encode("a ☃ b"))
    assert drops == (kind == "words" and unknown is None)
    assert tokenizer.spelled() == "; characters that the vocabulary lacks are dropped" * drops


# --- Control tokens, and tokens that differ each time ---

NAMED = {
    "eos_token": {"eos_token": "[X]"},
    "bos_token, an object": {"bos_token": {"content": "[X]", "special": False}},
    "additional tokens": {"additional_special_tokens": ["[Y]", "[X]"]},
    "extra tokens": {"extra_special_tokens": {"image": "[X]"}},
    "decoder": {"added_tokens_decoder": {"300": {"content": "[X]", "special": True}}},
    "map": {},
    "template": {"chat_template": "{{ '[X]' + messages[0].content }}"},
    "template file": {},
}


@pytest.mark.parametrize("place", NAMED)
def test_a_control_token_that_is_not_called_special_stays_text(place, tmp_path):
    directory = hugging_face_tokenizer(tmp_path / "hf", "bytes")
    add_tokens(directory, "[X]", "[Y]", "  ")
    text = "a [X]b  c[X]"
    assert Tokenizer(str(directory)).encode(text).tolist().count(300) == 2  # nothing says that it is for control
    change(directory / "tokenizer_config.json", **NAMED[place])
    if place == "map":
        change(directory / "special_tokens_map.json", pad_token="[X]")
    elif place == "template file":
        (directory / "chat_template.jinja").write_text("[X]{{ messages }}")
    model = Tokenizer(str(directory)).model
    ids = model.encode(text).tolist()
    assert 300 not in ids and 302 in ids  # spaces are text
    assert model.decode(ids) == text


def test_a_data_directory_knows_the_control_tokens_of_a_template(tmp_path):
    directory, copy = hugging_face_tokenizer(tmp_path / "hf", "bytes"), tmp_path / "copy"
    add_tokens(directory, "[X]", "[Y]")
    change(directory / "tokenizer_config.json", additional_special_tokens=["[Y]"])
    (directory / "chat_template.jinja").write_text("[X]{{ messages }}")
    copy.mkdir()
    for name, content in Tokenizer(str(directory)).contents().items():
        (copy / name).write_bytes(content)
    first, second = Tokenizer(str(directory)), Tokenizer(str(copy))
    assert first.encode("a [X][Y] b").tolist() == second.encode("a [X][Y] b").tolist()
    assert first.identity == second.identity and first.contents() == second.contents()


def test_other_control_tokens_make_another_tokenizer(tmp_path):
    directory, texts = hugging_face_tokenizer(tmp_path / "hf", "bytes"), tmp_path / "a.jsonl"
    add_tokens(directory, "[X]")
    texts.write_bytes(json_lines(["a [X]"]))
    tokenize(directory, tmp_path / "out", f"a={texts}")
    change(directory / "tokenizer_config.json", chat_template="[X]")
    _, stderr = tokenize(directory, tmp_path / "out", f"a={texts}", code=2)
    assert "end-of-sequence id 2 and 1 more control tokens ([X]); choose another directory" in stderr
    tokenize(directory, tmp_path / "new", f"a={texts}")
    assert "1 of them already complete" in tokenize(tmp_path / "new", tmp_path / "new", f"a={texts}")[0]


@pytest.mark.parametrize("token", ["<|user|>", "<｜User｜>", "<s>", "[MASK]", "<bos>"])
def test_what_looks_like_a_control_token_stays_text(token, tmp_path):
    directory = hugging_face_tokenizer(tmp_path / "hf", "bytes")
    add_tokens(directory, token, "<h1>", "<think>")
    content = json.loads((directory / "tokenizer.json").read_text())
    added = [{**entry, "special": False} for entry in content["added_tokens"]]
    change(directory / "tokenizer.json", added_tokens=added, post_processor=None)
    model = Tokenizer(str(directory)).model
    ids = model.encode(f"a {token} b <h1>").tolist()
    assert model.number(token) not in ids and model.number("<h1>") in ids
    assert model.decode(ids) == f"a {token} b <h1>"


def test_named_tokens_are_told_as_transformers_tells_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    directory = hugging_face_tokenizer(tmp_path / "hf", "bytes")
    add_tokens(directory, "[X]", "<h1>")
    change(directory / "tokenizer_config.json", bos_token="[X]", additional_special_tokens=["<s>"])
    ours, theirs = Tokenizer(str(directory)), transformers.AutoTokenizer.from_pretrained(directory)
    for text in ("a [X] b<s><h1></s>", "[X][X]"):
        expected = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.encode(text).tolist() == [*expected, 2]


def test_bpe_dropout_is_refused_for_data_and_else_switched_off(tmp_path):
    directory = hugging_face_tokenizer(tmp_path / "hf", "bytes")
    text, path = "The quick brown fox jumps over the lazy dog. " * 9, directory / "tokenizer.json"
    expected = Tokenizer(str(directory)).encode(text)
    model = json.loads(path.read_text())["model"]
    change(path, model={**model, "dropout": 0.5}, truncation=None, padding=None)
    drawn = tokenizers.Tokenizer.from_file(str(path))
    assert len({tuple(drawn.encode(text).ids) for _ in range(9)}) > 1
    with pytest.raises(ConfigError, match='with BPE dropout 0.5; write "dropout": null in tokenizer.json'):
        Tokenizer(str(directory))
    assert HuggingFaceModel(directory).encode(text).tolist() == expected[:-1].tolist()
    for harmless in (None, 0.0):
        change(path, model={**model, "dropout": harmless})
        assert Tokenizer(str(directory)).encode(text).tolist() == expected.tolist()


# --- Engines ---


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_batches_have_the_ids_of_single_texts(tmp_path, kind):
    tokenizer = Tokenizer(str(hugging_face_tokenizer(tmp_path / "hf", kind)))
    assert tokenizer.cache is not None
    texts = [*TEXTS, *(text * 3 for text in TEXTS), "", " "]
    for text, ids in zip(texts, tokenizer.encode_all(texts), strict=True):
        assert ids.tolist() == [*tokenizer.model.encode(text).tolist(), tokenizer.eos_id] and ids.dtype == np.int32


class Gigatoken:
    """In place of the package: the same ids, unless ``wrong``."""

    wrong = False

    def from_json(self, facts):
        special = [token["content"] for token in json.loads(facts)["added_tokens"]]
        assert special == [] and json.loads(facts)["post_processor"] is None
        model = tokenizers.Tokenizer.from_str(facts)
        return SimpleNamespace(encode=lambda text: np.array(model.encode(text).ids[Gigatoken.wrong :], np.uint32))


def test_another_engine_has_the_same_ids_or_is_refused(tmp_path, monkeypatch):
    directory = str(hugging_face_tokenizer(tmp_path / "hf", "bytes"))
    monkeypatch.setitem(sys.modules, "gigatoken", SimpleNamespace(Tokenizer=Gigatoken()))
    own, other = Tokenizer(directory), Tokenizer(directory, engine="gigatoken")
    for ids, expected in zip(other.encode_all(TEXTS), own.encode_all(TEXTS), strict=True):
        assert ids.tolist() == expected.tolist()
    monkeypatch.setattr(Gigatoken, "wrong", True)
    with pytest.raises(ShardError, match="gigatoken and tokenizers .* encode a document differently"):
        list(Tokenizer(directory, engine="gigatoken").encode_all(TEXTS))


def test_an_engine_that_cannot_encode_is_refused(tmp_path, monkeypatch, model):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(ConfigError, match="--engine gigatoken: cannot encode .*; pip install gigatoken, or leave"):
        Tokenizer(str(hugging_face_tokenizer(tmp_path / "hf", "bytes")), engine="gigatoken")
    monkeypatch.setitem(sys.modules, "gigatoken", SimpleNamespace())
    with pytest.raises(ConfigError, match="it is for tokenizer.json of Hugging Face"):
        Tokenizer(str(model), engine="gigatoken")
