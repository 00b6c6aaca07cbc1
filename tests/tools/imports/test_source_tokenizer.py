"""The tokenizer of an imported model in the export of a run that continued it: its settings, and none of its code."""

import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data_prep.encoding import Tokenizer
from moh_lm.checkpoint.saver import find_step
from moh_lm.config import Config
from moh_lm.data.hugging_face_model import ends_of_model
from tests.distributed import run_ranks
from tests.tokenizing import hugging_face_tokenizer, llama_3_vocabulary
from tests.tools.exporting import write_checkpoint
from tests.tools.imports.llamas import make_llama, small_model
from tools import generate
from tools.hf.convert import export_check, tiktoken_json
from tools.hf.convert.source_tokenizer import begin_id, restore, settings_of
from tools.hf.convert.tokenizer_json import read_model, write_tokenizer
from tools.hf.convert.trainer_model import ends_of_text

CHAT = "{% for message in messages %}<|turn|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
TALK = [{"role": "user", "content": "The quick fox"}, {"role": "assistant", "content": "jumps </s> over"}]
CODE = {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}


def chat_model(directory, **settings):
    """A Llama whose tokenizer ends turns by a token of its own; the files are those of transformers."""
    hugging_face_tokenizer(directory, "bytes", bos_token="<s>", chat_template=CHAT, **settings)
    pieces = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    pieces.add_special_tokens(["<|turn|>", "<|end|>"])
    pieces.add_tokens(["<|think|>"])
    pieces.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|end|>"}))
    end = pieces.token_to_id("<|end|>")
    make_llama(directory, vocab_size=end + 3, bos_token_id=1, eos_token_id=[end, 2])
    return end


def continued(imported, source, data, directory, bos_id=None):
    """A run of sequences of 32 that began with the import of ``source``; data: path of the tokenizer of its data, whose
    documents begin with ``bos_id``."""
    step = find_step(imported(source))
    facts = json.loads((step / "state.json").read_text())["imported"]
    model = Config.load(step / "config.json").model
    run_ranks(write_checkpoint, 1, directory, model, data, False, 32, facts, bos_id)
    return directory


def test_the_export_of_a_continued_model_has_its_settings(imported, tool, tmp_path, monkeypatch):
    end = chat_model(tmp_path / "hf", padding_side="right")
    (tmp_path / "data").mkdir()
    for name, content in Tokenizer(str(tmp_path / "hf")).contents().items():  # documents end with </s> there
        (tmp_path / "data" / name).write_bytes(content)
    run = continued(imported, tmp_path / "hf", tmp_path / "data" / "tokenizer.json", tmp_path / "continued")
    code, _, errors = tool("export_hf", "--checkpoint", run, "--output", tmp_path / "out")
    assert code == 0, errors
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 64 and config["bos_token_id"] == 1
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == [end, 2]
    before, after = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("hf", "out"))
    for name in ("bos_token", "eos_token", "padding_side", "chat_template"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.apply_chat_template(TALK)["input_ids"] == before.apply_chat_template(TALK)["input_ids"]
    assert after("The quick fox")["input_ids"] == before("The quick fox", add_special_tokens=False)["input_ids"]
    assert after.pad_token_id not in (None, end, 2)
    thought = after("<|think|> so")["input_ids"]  # parsed, and not left out as special tokens are
    assert thought[0] == end + 1 and after.decode(thought, skip_special_tokens=True) == "<|think|> so"
    monkeypatch.setattr(export_check, "transformers", transformers)
    export_check.check_tokenizer(tmp_path / "out", tmp_path / "data")


def test_a_continued_sentencepiece_model_has_its_bos_and_template(imported, tool, tmp_path):
    make_llama(tmp_path / "hf", vocab_size=278, bos_token_id=1, eos_token_id=2)
    data = small_model(tmp_path / "hf" / "tokenizer", ["a cat and a dog", "the cat sat"] * 20, 278)
    (tmp_path / "hf" / "chat_template.jinja").write_text(CHAT)
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))
    run = continued(imported, tmp_path / "hf", data, tmp_path / "continued", bos_id=1)
    code, _, errors = tool("export_hf", "--checkpoint", run, "--output", tmp_path / "out")
    assert code == 0, errors
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [config[key] for key in ("bos_token_id", "eos_token_id", "max_position_embeddings")] == [1, 2, 64]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.padding_side) == ("<s>", "</s>", "left")
    assert tokenizer.chat_template == CHAT
    assert tokenizer("the cat")["input_ids"] == [1, *Tokenizer(str(data)).model.encode("the cat")]


@pytest.fixture
def checked(monkeypatch):
    """Exports are compared with transformers as always, but in this process."""

    def logits(directory, tokens, tokenizer, begin):
        if tokenizer:
            export_check.check_tokenizer(directory, tokenizer, *begin)
        return export_check.compute_logits(directory, tokens)

    monkeypatch.setattr(export_check, "transformers", transformers)
    monkeypatch.setattr(export_check, "hugging_face_logits", logits)


@pytest.mark.parametrize("begins", [True, False])
def test_an_import_before_training_begins_texts_as_its_source(begins, imported, tool, checked, tmp_path, monkeypatch):
    """The last files but one are those of Llama 2: both tokenizer.model and tokenizer.json."""
    asked = []
    monkeypatch.setattr(generate, "write", lambda *given: asked.extend(given[3]))
    make_llama(tmp_path / "hf", vocab_size=278, bos_token_id=1, eos_token_id=2)
    small_model(tmp_path / "hf" / "tokenizer", ["a cat and a dog", "the cat sat"] * 20, 278)
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": begins}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))
    for made in ("without tokenizer.json", "with both", "without tokenizer.model"):
        source = AutoTokenizer.from_pretrained(tmp_path / "hf")
        run, output = imported(tmp_path / "hf", output=made), tmp_path / f"{made}, exported"
        code, printed, errors = tool("export_hf", "--checkpoint", run, "--output", output)
        assert code == 0 and "checked: logits of transformers" in printed, errors
        ids = AutoTokenizer.from_pretrained(output)("the cat")["input_ids"]
        assert ids == source("the cat")["input_ids"] and (ids[0] == 1) == begins
        assert json.loads((output / "config.json").read_text())["bos_token_id"] == 1
        if made == "without tokenizer.json":
            assert ("The tokenizer adds only BOS" in (output / "README.md").read_text()) == begins
            source.save_pretrained(tmp_path / "hf")
        else:
            (tmp_path / "hf" / "tokenizer.model").unlink(missing_ok=True)
        for model in (run, output):
            assert tool("generate", "--model", model, "--prompt", "the cat", "--max-new-tokens", 2)[0] == 0
        assert asked[-2:] == [ids, ids]


def test_markers_that_a_tokenizer_model_lacks_come_from_the_source(tmp_path):
    path = llama_3_vocabulary(tmp_path / "tokenizer.model", [bytes([byte]) for byte in range(256)])
    added = {"128000": "<|begin_of_text|>", "128001": "<|end_of_text|>", "128009": "<|eot_id|>", "128010": "<|turn|>"}
    decoder = {index: {"content": text, "special": True} for index, text in added.items()}
    settings = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "chat_template": CHAT}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "added_tokens_decoder": decoder}))
    begin = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|begin_of_text|>"}}, {"Sequence": {}}]}
    steps = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, begin]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"post_processor": steps}))
    ids = {"bos": 128_000, "eos": [128_001, 128_009], "pad": None}
    (tmp_path / "out").mkdir()
    special = tiktoken_json.write_tokenizer(path, tmp_path / "out", 64)
    source = settings_of(tmp_path, None, ids)
    found = restore(tmp_path / "out", source, ids, special, 128_256)
    assert begin_id({"step": 0, "imported": {"tokenizer": source}}, tmp_path / "out") == 128_000
    assert (found["bos"], found["eos"], found["pad"]) == (128_000, [128_009, 128_001], 128_004)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])["input_ids"]
    assert ids == [128_010, ord("a"), ord("b"), 128_009]


def test_markers_of_a_template_have_the_ids_and_rows_of_the_source(imported, tool, tmp_path):
    """A tokenizer.json adds a special marker, another that is not special, and padding beyond the model's rows."""
    make_llama(tmp_path / "hf", vocab_size=281)
    old = small_model(tmp_path / "old", ["a cat and a dog", "the cat sat"] * 20, 278)
    write_tokenizer(read_model(old), tmp_path / "hf", 64)
    source = PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf", split_special_tokens=False)
    source.add_special_tokens({"additional_special_tokens": ["<|start|>"]})
    source.add_tokens([tokenizers.AddedToken("<call>", normalized=False, special=False)])
    source.add_tokens([tokenizers.AddedToken("catdog", normalized=False, special=False)])  # no marker, but a word
    source.chat_template = "{% for turn in messages %}<|start|>{{ turn.content }}<call>{% endfor %}"
    source.add_special_tokens({"pad_token": "[PAD]"})
    source.save_pretrained(tmp_path / "hf")
    Path(old).rename(tmp_path / "hf/tokenizer.model")
    code, _, errors = tool("export_hf", "--checkpoint", imported(tmp_path / "hf"), "--output", tmp_path / "out")
    assert code == 0, errors
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    talk = [{"role": "user", "content": "the cat"}]
    assert exported.apply_chat_template(talk)["input_ids"] == source.apply_chat_template(talk)["input_ids"]
    *trained, _ = Tokenizer(str(tmp_path / "out")).encode_batch(["a catdog"])[0].tolist()
    assert exported("a catdog")["input_ids"] == trained
    assert max(exported(["a cat", "the cat sat and a dog"], padding=True)["input_ids"][0]) < 281
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert source.pad_token_id == 281 and config["pad_token_id"] == exported.pad_token_id < 281


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "code",
    [
        CODE,
        {"tokenizer_class": "OwnTokenizer", "processor_class": "own.OwnTokenizer"},
        {"custom_pipelines": {"a": {"impl": "own.A"}}, "of": [{"auto_map": {"AutoConfig": "own.B"}}]},
    ],
)
def test_code_that_a_tokenizer_names_is_in_no_export(imported, tool, tmp_path, trained, code):
    """The tokenizer itself works: its pieces are in tokenizer.json."""
    chat_model(tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | code))
    (tmp_path / "hf" / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass OwnTokenizer: pass\n")
    data = tmp_path / "hf" / "tokenizer.json" if trained else None
    run = continued(imported, tmp_path / "hf", data, tmp_path / "continued") if trained else imported(tmp_path / "hf")
    code, _, errors = tool("export_hf", "--checkpoint", run, "--output", tmp_path / "out")
    assert code == 0, errors
    places = [tmp_path / "out", tmp_path / "run" / "checkpoints" / "step-0"]
    for text in (file.read_text() for place in places for file in Path(place).rglob("*.json")):
        assert "auto_map" not in text and "own." not in text and "OwnTokenizer" not in text
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    pieces = tokenizers.Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    pieces.no_padding()
    pieces.no_truncation()
    expected = pieces.encode("The quick fox", add_special_tokens=False).ids
    assert tokenizer("The quick fox", add_special_tokens=False)["input_ids"] == expected
    assert tokenizer.chat_template == CHAT and not (tmp_path / "ran").exists()


def test_the_tokenizer_of_an_import_encodes_as_that_of_its_source(imported, tmp_path):
    """The end of documents and a control token show in files that a step does not hold."""
    source = tmp_path / "hf"
    chat_model(source)
    path = source / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("chat_template")
    settings["chat_template"] = "{{ old }}"  # transformers prefers the file
    (source / "chat_template.jinja").write_text("{% for turn in messages %}<call>{{ turn.content }}<|end|>{% endfor %}")
    path.write_text(json.dumps(settings))
    pieces = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    pieces.add_tokens(["<call>"])
    pieces.save(str(source / "tokenizer.json"))
    make_llama(source, vocab_size=pieces.get_vocab_size(), bos_token_id=1, eos_token_id=[turn_end(pieces), 2])
    step = find_step(imported(source))
    one, other = (Tokenizer(str(place)) for place in (source, step))
    assert one.ends() == other.ends() and "only ends a turn" in one.ends()
    ids = [tokenizer.encode_batch(["a <call> b"])[0].tolist() for tokenizer in (one, other)]
    assert ids[0] == ids[1] and pieces.token_to_id("<call>") not in ids[0]
    assert one.identity == other.identity
    assert ends_of_text(step, True, other.model) == {*ends_of_model(source)} == {turn_end(pieces), 2}
    trained = json.loads((step / "state.json").read_text()) | {"step": 3}
    for text, special, ends in (
        ("<|end|>", {}, {turn_end(pieces), 2}),
        ("<|other|>", {}, {2}),  # ids of the source mean other pieces here
        ("<|other|>", {"<|other|>": 5}, {2}),  # as the id of this one does
        ("<|other|>", {"<|other|>": 999}, {2, 999}),  # which the export adds
    ):
        trained["imported"]["tokenizer"] |= {"tokens": {"eos": text}, "special": special}
        (step / "state.json").write_text(json.dumps(trained))
        assert ends_of_text(step, True, other.model) == ends, text
    trained["imported"] |= {"tokenizer": {"tokens": {}}, "token_ids": {"eos": 999}}  # an id without a token
    (step / "state.json").write_text(json.dumps(trained))
    assert ends_of_text(step, True, other.model) == {2}


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("kind, ends", [("bpe", {2, 278}), ("unigram", {2})])  # no export adds a token to the latter
def test_a_text_of_a_run_ends_where_one_of_its_export_does(kind, ends, is_special, imported, tool, tmp_path):
    """The tokenizer of the data lacks the token that ends a turn of the source."""
    source = tmp_path / "hf"
    make_llama(source, vocab_size=281, bos_token_id=1, eos_token_id=[278, 2])
    data = small_model(tmp_path / "tokenizer", ["a cat and a dog", "the cat sat"] * 20, 278, model_type=kind)
    write_tokenizer(read_model(data), source, 64)
    pieces, settings = (json.loads((source / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json"))
    pieces["added_tokens"].append({**pieces["added_tokens"][0], "id": 278, "content": "<|end|>", "special": is_special})
    (source / "tokenizer.json").write_text(json.dumps(pieces))
    settings |= {"eos_token": "<|end|>", "chat_template": "{{ messages[0].content }}<|end|>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    run = continued(imported, source, data, tmp_path / "continued")
    code, _, errors = tool("export_hf", "--checkpoint", run, "--output", tmp_path / "out")
    assert code == 0, errors
    of_run = ends_of_text(find_step(run), True, Tokenizer(str(data)).model, 281)
    assert of_run == {*ends_of_model(tmp_path / "out")} == ends


def turn_end(pieces):
    return pieces.token_to_id("<|end|>")


def test_an_import_says_that_nothing_tells_whether_texts_begin_with_bos(tool, tmp_path):
    make_llama(tmp_path / "hf", vocab_size=278, bos_token_id=1, eos_token_id=2)
    small_model(tmp_path / "hf" / "tokenizer", ["a cat and a dog", "the cat sat"] * 20, 278)
    for settings in ({}, {"add_bos_token": False}):
        (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **settings}))
        _, text, _ = tool("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "run", "--dry-run")
        assert ("does not say whether texts begin with <s>" in text) == (not settings)


def test_an_import_says_that_it_leaves_code_out(tool, tmp_path):
    chat_model(tmp_path / "hf")
    given = ("import_hf", "--model", tmp_path / "hf", "--output", tmp_path / "run", "--dry-run")
    assert "names Python code" not in tool(*given)[1]
    path = tmp_path / "hf" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | CODE))
    assert "note: tokenizer_config.json names Python code, which is left out" in tool(*given)[1]
    path.write_text("{")
    code, _, errors = tool(*given)
    assert code == 2 and "tokenizer_config.json: cannot be read" in errors and "fix it, or remove it" in errors
