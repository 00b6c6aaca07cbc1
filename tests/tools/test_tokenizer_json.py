"""tools/hf/convert/tokenizer_json.py: the converted tokenizer gives SentencePiece's ids, whatever the text."""

import random
import unicodedata

import pytest

pytest.importorskip("transformers")

import sentencepiece
from transformers import PreTrainedTokenizerFast

from data_prep.encoding import Tokenizer
from moh_lm.data.sentencepiece_model import proto_of
from moh_lm.data.tiktoken_model import TiktokenModel
from moh_lm.data.tokenizer import model_file
from tests.tokenizing import hugging_face_tokenizer, llama_3_vocabulary, sentencepiece_model
from tools.hf.convert import tiktoken_json, tokenizer_json
from tools.hf.convert.export_check import check_tokenizer
from tools.hf.convert.tokenizer_json import begin_texts, read_model, special_ids, tokenizer_config, write_tokenizer
from tools.hf.convert.write_export import export_tokenizer

PROSE = [
    "The model reads what the tokenizer writes, and nothing else: 3.14159, 2.71828, 65536 and 1234567890.",
    "    def forward(self, hidden_states):\n\treturn self.o_proj(hidden_states)  # [batch, sequence, hidden]",
    "Fünf süße Äpfel, naïve cafés; Ελληνικά και русский язык; tiếng Việt được viết bằng chữ La-tinh.",
    "한국어는 음절로 쓴다. 日本語ではカタカナもｶﾞｷﾞも使う。العربية تكتب من اليمين، हिन्दी बाएँ से।",
    "<html><s>struck</s> &amp; <unk>known</unk></html>, <0xA> and \u2581 visible \u2581\u2581 spaces",
]
HOSTILE = [
    *("", " ", "   ", "\n", "\t", "\r\n", "\x00", "a\x00b", "a", " a", "a ", "  a   b  ", "\n a\n", "a\n\n\nb"),
    *("\u2581", "a\u2581", "\u2581\u2581a ", "a \u2581 b", "\u3000a", "a\u00a0b", "\u200b", "\ufeff", "\u2028"),
    *("<s>", "</s>", "a</s>b", "<unk>", "<pad>x", "<0x0A>", "<0x0A>b", "<0x", "⁇", " ⁇ "),
    *("\U0001f642", "\U0001f642\U0001f642a", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0010ffff", "\ue000"),
    *("e\u0301", "\u1e9b\u0323", "ﬁ ½ ① ﷺ", "Ａ\u3000Ｂ", "aaaaaaaaaaaaa", "abababababa", "\x01\x02\x7f\x80\xff"),
]
LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
}
SYMBOLS = ["<sep>", "<x|y>", "\u2581\u2581"]
SPACED = ["  ", "   ", " the", "a b", "<sep>"]  # of which SentencePiece finds the last
NORMAL = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "nmt_nfkc"}
UNSUPPORTED = {
    "its model type is word": ({"model_type": "word"}, "the tokenizers"),
    "treat_whitespace_as_suffix": ({**LLAMA, "treat_whitespace_as_suffix": True}, "a b"),
    r"its normalization changes the user-defined symbols '\\n'": ({**NORMAL, "user_defined_symbols": ["\n"]}, "a\nb"),
    "its normalization changes the user-defined symbols 'AB', '①'": (
        {**NORMAL, "normalization_rule_name": "nfkc_cf", "user_defined_symbols": ["AB", "ab", "①"]}, "a ab①"),
    "its normalization changes the user-defined symbols 'a▁'": (
        {**LLAMA, "remove_extra_whitespaces": True, "user_defined_symbols": ["a▁", "<a>"]}, "aab"),
    "its normalization changes the user-defined symbols '▁▁'": (
        {**NORMAL, "remove_extra_whitespaces": False, "user_defined_symbols": ["▁▁"]}, "b▁▁a"),
    "it may cut the user-defined symbols '▁▁'": (
        {**LLAMA, "model_type": "unigram", "user_defined_symbols": ["▁▁", "<a>"]}, "a▁▁▁b"),
}  # fmt: skip
MODELS = {
    "bpe with Llama's options": LLAMA,
    "bpe with default options": {"model_type": "bpe"},
    "bpe with identity normalization": {"model_type": "bpe", "normalization_rule_name": "identity"},
    "bpe without a dummy prefix": {**LLAMA, "add_dummy_prefix": False},
    "bpe with user-defined symbols": {**LLAMA, "user_defined_symbols": SYMBOLS, "pad_id": 3},
    "bpe with symbols of spaces": {**LLAMA, "user_defined_symbols": SPACED},
    "unigram with symbols of spaces": {**LLAMA, "model_type": "unigram", "user_defined_symbols": SPACED},
    "unigram with Llama's options": {**LLAMA, "model_type": "unigram"},
    "unigram with default options": {"model_type": "unigram"},
}


def random_texts(seed):
    draw = random.Random(seed)
    alphabets = ["ab ", "aab\u2581 ", " \n\t.", "<s/>unkpad0xA ", "日本 é½ﬁ", "".join(PROSE), "\U0001f642é\u200d "]
    for _ in range(400):
        alphabet = draw.choice(alphabets)
        yield "".join(draw.choice(alphabet) for _ in range(draw.randrange(1, 40)))


def train(path, **options):
    model = sentencepiece_model(path, PROSE * 5, 460, **{"byte_fallback": False, **options})
    return sentencepiece.SentencePieceProcessor(model_file=str(model))


def convert(model, directory):
    write_tokenizer(read_model(model), directory, max_length=512)
    return PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.fixture(params=MODELS)
def tokenizers(request, tmp_path):
    """(SentencePiece's, converted)"""
    original = train(tmp_path / "tokenizer.model", **MODELS[request.param])
    return original, convert(tmp_path / "tokenizer.model", tmp_path)


def test_ids_equal_those_of_sentencepiece(tokenizers):
    original, converted = tokenizers
    texts = [*PROSE, "\n".join(PROSE), *HOSTILE, *random_texts(0), "a <sep>b<x|y><x|y> c", "<sep> a", "   x"]
    texts += [unicodedata.normalize("NFD", text) for text in PROSE]
    texts = [text for text in texts if text not in SYMBOLS]  # the one text that cannot be converted
    different = [text for text in texts if converted(text)["input_ids"] != original.encode(text)]
    assert different == []


def test_decoded_text_equals_that_of_sentencepiece(tokenizers):
    original, converted = tokenizers
    for text in [*PROSE, *HOSTILE, *random_texts(1)]:
        ids = original.encode(text)
        # SentencePiece writes " \u2047 " for an unknown character, transformers "<unk>"; both lose a visible space.
        if original.unk_id() not in ids and "\u2581" not in text:
            assert converted.decode(ids) == original.decode(ids)


def test_special_tokens_have_the_ids_of_sentencepiece(tmp_path):
    original = train(tmp_path / "m.model", **LLAMA, pad_id=3, eos_piece="<end>")
    converted = convert(tmp_path / "m.model", tmp_path)
    assert converted.eos_token == converted.bos_token == "<end>"
    assert converted.eos_token_id == converted.bos_token_id == original.eos_id()
    assert converted.pad_token_id == original.pad_id() == 3
    assert converted.unk_token_id == original.unk_id()
    assert len(converted) == original.vocab_size() and converted.model_max_length == 512
    assert converted.decode([original.eos_id(), *original.encode("a")], skip_special_tokens=True) == "a"
    batch = converted(["a", "a b c d"], padding=True, padding_side="left")
    assert batch["input_ids"][0][0] == 3 and batch["attention_mask"][0][0] == 0


def test_a_tokenizer_without_eos_declares_none(tmp_path):
    train(tmp_path / "m.model", **LLAMA, eos_id=-1, bos_id=-1)
    proto = read_model(tmp_path / "m.model")
    assert special_ids(proto) == {"bos": None, "eos": None, "pad": 0, "unk": 0}
    config = tokenizer_config(proto, 512)
    assert not {"bos_token", "eos_token"} & set(config) and config["pad_token"] == config["unk_token"]


def test_equal_models_give_equal_bytes(tmp_path):
    train(tmp_path / "m.model", **LLAMA)
    for name in "ab":
        (tmp_path / name).mkdir()
        write_tokenizer(read_model(tmp_path / "m.model"), tmp_path / name, max_length=512)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_a_model_that_would_get_other_ids_is_refused(reason, tmp_path):
    options, text = UNSUPPORTED[reason]
    original = train(tmp_path / "m.model", **options)
    with pytest.raises(ValueError, match=f"{reason}.*; tools/generate.py and --eval-tasks use the run"):
        read_model(tmp_path / "m.model")
    write_tokenizer(proto_of(original), tmp_path, 512)
    try:
        ids = PreTrainedTokenizerFast.from_pretrained(tmp_path)(text)["input_ids"]
    except BaseException as error:  # the package panics over a symbol of which normalization leaves nothing
        assert "Panic" in type(error).__name__
    else:
        assert ids != original.encode(text)


def test_an_export_is_checked_with_its_user_defined_symbols(tmp_path, monkeypatch):
    train(tmp_path / "tokenizer.model", **LLAMA, user_defined_symbols=["    "])
    convert(tmp_path / "tokenizer.model", tmp_path)
    check_tokenizer(tmp_path, tmp_path / "tokenizer.model")
    monkeypatch.setattr(tokenizer_json, "is_symbol", lambda piece: piece.type == tokenizer_json.USER_DEFINED)
    convert(tmp_path / "tokenizer.model", tmp_path)
    with pytest.raises(SystemExit, match="tokenizer.json gives 'a      b    c'"):
        check_tokenizer(tmp_path, tmp_path / "tokenizer.model")


def test_a_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "m.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="m.model"):
        read_model(tmp_path / "m.model")


def test_ids_and_text_of_llama_3_are_those_of_tiktoken(tmp_path, monkeypatch):
    pytest.importorskip("tiktoken")
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [b"aa", b"aaa", b"ab", b"ba", b"aba", b"bab", b" a", b"th", b"the", b"  ", b"\n\n"]
    later = ["文".encode()[:2], "文".encode(), b" aab", b"abab"]  # of an extension: after the special tokens
    path = llama_3_vocabulary(tmp_path / "llama.model", tokens, later)
    special = tiktoken_json.write_tokenizer(path, tmp_path, 512)
    original, converted = TiktokenModel(path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert converted.eos_token_id == original.eos_id() == special["eos"] == 128_001
    chooser, parts = random.Random(5), [*"ab \n\t\r\0.'s12345文é\u0301\u2028\U0001f642", "the", "<|end_of_text|>"]
    for _ in range(3000):
        text = "".join(chooser.choice(parts) for _ in range(chooser.randrange(1, 30)))
        ids = converted(text)["input_ids"]
        assert ids == original.encode(text).tolist(), text
        assert converted.decode(ids) == text


def tokenizer_of(kind, directory):
    """The path of a small tokenizer of a ``kind``, in a new directory."""
    directory.mkdir()
    if kind == "tiktoken":
        pytest.importorskip("tiktoken")
        return llama_3_vocabulary(directory / "tokenizer.model", [bytes([byte]) for byte in range(256)])
    if kind == "hugging face":
        return hugging_face_tokenizer(directory, "bytes", bos_token="<s>")
    train(directory / "tokenizer.model", **LLAMA)
    return directory / "tokenizer.model"


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken", "hugging face"])
def test_texts_begin_with_the_bos_of_the_data(kind, tmp_path):
    data = Tokenizer(str(tokenizer_of(kind, tmp_path / "data")), bos=True)
    path, bos = model_file(tmp_path / "data"), data.model.bos_id()
    (tmp_path / "out").mkdir()
    export_tokenizer(path, tmp_path / "out", 64, parses=False)
    with pytest.raises(SystemExit, match="tokenizer.json gives"):
        check_tokenizer(tmp_path / "out", path, bos)
    begin_texts(tmp_path / "out", bos)
    check_tokenizer(tmp_path / "out", path, bos)
    converted = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    assert (converted.bos_token, converted.bos_token_id) == (data.model.id_to_piece(bos), bos)
    one, two = (data.encode(text)[:-1].tolist() for text in ("a text", f"of {converted.bos_token}"))
    assert converted("a text")["input_ids"] == one and one.count(bos) == 1
    assert converted("a text", f"of {converted.bos_token}")["input_ids"] == one + two
    assert converted.decode(two, skip_special_tokens=True).strip() == f"of {converted.bos_token}"
