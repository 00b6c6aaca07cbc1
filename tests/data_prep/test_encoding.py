"""Encoding: the ids of plain SentencePiece, and of tiktoken, for every model and every text."""

import random
from itertools import pairwise

import numpy as np
import pytest
from sentencepiece import sentencepiece_model_pb2

from data_prep import segment_cache
from data_prep.encoding import BATCH, CHECKED, Tokenizer
from moh_lm.config import ConfigError
from moh_lm.data.files import ShardError
from moh_lm.data.tiktoken_model import TiktokenModel, is_tiktoken
from tests.tokenizing import TEXTS, llama_3_vocabulary, sentencepiece_model, shards, tokenize

LLAMA = {
    "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "split_digits": True,
    "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True,
}  # fmt: skip
CACHED = {
    "LLaMA's options": {},
    "no dummy prefix": {"add_dummy_prefix": False},
    "joined digits": {"split_digits": False, "split_by_number": False},
    "joined scripts": {"split_by_unicode_script": False},
    "no pieces of spaces": {"allow_whitespace_only_pieces": False},
    "symbols": {"user_defined_symbols": ["<sep>", "▁▁▁", "\t\t", "umps▁o", "xé", "é文"], "control_symbols": ["<a>"]},
    "symbols with newlines": {"user_defined_symbols": ["\n", "\n\n", "\r\n", "x\n"]},
    "no byte fallback, but newlines": {"byte_fallback": False, "user_defined_symbols": ["\n"]},
}
WHOLE = {
    "unigram": {"model_type": "unigram"},
    "unigram without byte fallback": {"model_type": "unigram", "byte_fallback": False},
    "no byte fallback": {"byte_fallback": False},
    "NFKC": {"normalization_rule_name": "nmt_nfkc"},
    "extra spaces removed": {"remove_extra_whitespaces": True},
    "spaces as suffixes": {"treat_whitespace_as_suffix": True},
    "pieces of several words": {"split_by_whitespace": False},
    "a symbol with a plain space": {"user_defined_symbols": ["a b"]},
    "no character without a partner": {"user_defined_symbols": [chr(code) + "x" for code in range(1, 32)]},
    "SentencePiece's options": {"byte_fallback": False, "normalization_rule_name": "nmt_nfkc", "split_digits": False,
                                "remove_extra_whitespaces": True, "allow_whitespace_only_pieces": False},
}  # fmt: skip
PARTS = [
    *(" ", "  ", "\n", "\n\n", "\t", "\t\t", "\r\n", "▁", " ▁", "▁▁▁", "\0", "\x01", "\x07", "\x7f", "\xa0", "\u3000"),
    *("</s>", "<s>", "<unk>", "<0x0A>", "<sep>", "<a>", "a b", "umps over", "jumps▁over", "xé文", "aab", ".”", "»,"),
    *("0", "12", "1234567890", "é", "e\u0301", "\u0301", "ﬁ", "Ａ", "文", "文字", "я", "한", "\u093e", "\ufeff", "☃"),
    *("\N{GRINNING FACE}", "👨\u200d👩", "\ud7ff", "\ue000", "\uffff", "\U00010000", "\U000e0001", "\U0010ffff"),
    *(word for text in TEXTS for word in text.split(" ")),
]


def llama_like(path, **options):
    lines = [line for text in [*TEXTS, *PARTS] * 3 for line in text.replace("\0", "").split("\n") if line]
    return sentencepiece_model(path, lines, 600, character_coverage=0.98, **{**LLAMA, **options})


@pytest.fixture(params=[*CACHED, *WHOLE])
def tokenizer(request, tmp_path):
    tokenizer = Tokenizer(str(llama_like(tmp_path / "m.model", **{**CACHED, **WHOLE}[request.param])))
    assert (tokenizer.cache is not None) == (request.param in CACHED)
    return tokenizer


def nasty_texts(seed=0):
    draw = random.Random(seed)
    bounds = [0x00, 0x80, 0x800, 0xD800, 0xE000, 0x10000, 0x110000]
    planes = [range(*pair) for pair in pairwise(bounds) if pair != (0xD800, 0xE000)]
    for _ in range(200):
        yield "".join(draw.choices(PARTS, k=draw.randint(1, 60)))
        yield "".join(chr(draw.choice(draw.choice(planes))) for _ in range(draw.randint(1, 60)))
    yield from TEXTS
    yield from ("", " ", "\n", "▁", " " * 999, "▁ " * 99, "\n" * 99, " \n" * 99, "x" * 999, "0" * 999, "文" * 999)


def differing(tokenizer, texts):
    """The texts of which SentencePiece gives other ids."""
    plain = [[*tokenizer.model.encode(text), tokenizer.eos_id] for text in texts]
    encoded = list(tokenizer.encode_all(texts))
    assert len(encoded) == len(texts)
    return [text for text, ids, expected in zip(texts, encoded, plain, strict=True) if ids.tolist() != expected]


# --- SentencePiece ---


def test_ids_are_those_of_plain_sentencepiece(tokenizer):
    texts = list(nasty_texts())
    assert differing(tokenizer, texts) == []
    assert differing(tokenizer, texts) == []  # now that the segments are known
    long = "".join(texts) * 3
    assert len(long) > BATCH / 4
    assert differing(tokenizer, [long, long.replace("\n", ""), long.replace(" ", "")]) == []


@pytest.mark.parametrize("tokenizer", CACHED, indirect=True)
def test_ids_stay_the_same_while_segments_displace_each_other(tokenizer, monkeypatch):
    monkeypatch.setattr(segment_cache, "WINDOW", 64)
    monkeypatch.setattr(segment_cache, "SLOT_BITS", 4)
    monkeypatch.setattr(segment_cache, "STORED_TOKENS", 1 << 11)
    monkeypatch.setattr(segment_cache, "STORED_SEGMENTS", 32)
    tokenizer.cache.empty(1 << 11)
    texts = list(nasty_texts(seed=1))
    assert differing(tokenizer, [*texts, "".join(texts)]) == []
    assert len(tokenizer.cache.spans) < 32 + 64
    assert len(tokenizer.cache.table) == 16


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return llama_like(tmp_path_factory.mktemp("llama") / "m.model")


def test_ids_are_int32_and_end_with_the_only_eos(llama):
    tokenizer = Tokenizer(str(llama))
    for text in ["</s>", "a</s>b</s>", "", "<0xFF>"]:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist().index(tokenizer.eos_id) == len(ids) - 1
        assert tokenizer.model.decode(ids[:-1].tolist()) == text


def test_pieces_that_a_text_gets_by_spelling_them_are_named(llama, tmp_path):
    assert Tokenizer(str(llama)).spelled() == ""
    path = llama_like(tmp_path / "gemma.model", user_defined_symbols=["<start_of_turn>", "[X]", "word"])
    tokenizer = Tokenizer(str(path))
    assert tokenizer.encode("a <start_of_turn></s>").tolist().count(tokenizer.model.piece_to_id("<start_of_turn>")) == 1
    assert tokenizer.spelled() == "; a text that spells <start_of_turn>, [X] gets their ids"


def test_new_segments_for_ever_do_not_grow_the_cache(llama, monkeypatch):
    monkeypatch.setattr(segment_cache, "WINDOW", 1 << 12)
    monkeypatch.setattr(segment_cache, "STORED_SEGMENTS", 1 << 10)
    monkeypatch.setattr(segment_cache, "STORED_TOKENS", 1 << 18)
    tokenizer = Tokenizer(str(llama))
    draw = random.Random(0)
    for _ in range(20):
        tokenizer.encode(" ".join("".join(draw.choices("abcdefgh", k=12)) for _ in range(1_000)))
        assert len(tokenizer.cache.spans) <= (1 << 10) + (1 << 12) / 2
        assert len(tokenizer.cache.tokens) == 1 << 18


def test_a_cache_that_goes_wrong_is_found_by_the_running_check(llama):
    tokenizer = Tokenizer(str(llama))
    list(tokenizer.encode_all(["The quick brown fox"] * 5))
    tokenizer.cache.tokens[2:] += 1
    with pytest.raises(ShardError, match="encode a document differently.*quick"):
        list(tokenizer.encode_all(["The quick brown fox"] * CHECKED))


@pytest.mark.parametrize(
    "rule", ["unigram", "NFKC", "extra spaces removed", "spaces as suffixes", "a symbol with a plain space"]
)
def test_a_rule_that_looks_further_than_a_segment_is_known(rule, llama, tmp_path):
    model = llama_like(tmp_path / "m.model", **WHOLE[rule])
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.read_bytes())
    assert segment_cache.joined_bytes(proto) is None
    unused = sentencepiece_model_pb2.ModelProto.FromString(llama.read_bytes())
    unused.pieces[-1].type = unused.pieces[-1].UNUSED
    assert segment_cache.joined_bytes(unused) is None


def test_a_model_that_the_cache_gets_wrong_is_encoded_plainly(llama, monkeypatch):
    monkeypatch.setattr(segment_cache, "joined_bytes", lambda proto: np.zeros((256, 256), dtype=bool))
    assert Tokenizer(str(llama)).cache is None


# --- tiktoken ---


def small_ranks():
    """Bytes, then a token for each pair of bytes of some words, then for longer beginnings of the words."""
    ranks = {bytes([byte]): rank for rank, byte in enumerate(random.Random(0).sample(range(256), 256))}
    words = [word.encode() for word in [" the", " quick", "fox", "文字", "  ", "\n\n", "''", "'s", "123", " été", "?!"]]
    for length in range(2, 8):
        for word in words:
            for start in range(len(word) - length + 1):
                ranks.setdefault(word[start : start + length], len(ranks))
    return ranks


def test_ids_of_llama_3s_format_are_those_of_tiktoken(tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken.load import load_tiktoken_bpe

    path = llama_3_vocabulary(tmp_path / "tokenizer.model", small_ranks())
    reserved = ["<|begin_of_text|>", "<|end_of_text|>", *(f"<|reserved_special_token_{n}|>" for n in range(254))]
    reference = tiktoken.Encoding(  # as in LLaMA-3's own code
        name="llama3",
        pat_str=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        mergeable_ranks=load_tiktoken_bpe(str(path)),
        special_tokens={token: 128_000 + number for number, token in enumerate(reserved)},
    )
    tokenizer = Tokenizer(str(path))
    assert tokenizer.vocab_size == reference.n_vocab == 128_256
    assert tokenizer.eos_id == reference.encode_single_token("<|end_of_text|>")
    texts = [*nasty_texts(), "<|end_of_text|> It's 12345 THE'S quick  fox\r\n\r\n  été?!\n"]
    for text, ids in zip(texts, tokenizer.encode_all(texts), strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == [*reference.encode(text, disallowed_special=()), tokenizer.eos_id]
    spaces = tokenizer.encode("a" + " " * 1_000_000 + "b")  # too much for tiktoken in one piece
    assert reference.decode(spaces[:-1].tolist()) == "a" + " " * 1_000_000 + "b"


def test_tokens_added_to_llama_3_come_after_special_tokens(tmp_path):
    pytest.importorskip("tiktoken")
    path = llama_3_vocabulary(tmp_path / "m", small_ranks(), [b"fox?!", b" fox"])
    tokenizer = Tokenizer(str(path))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (128_258, 128_001)
    assert tokenizer.encode("fox fox").tolist() == [small_ranks()[b"fox"], 128_257, 128_001]


def test_the_command_writes_shards_with_llama_3s_vocabulary(tmp_path):
    pytest.importorskip("tiktoken")
    path = llama_3_vocabulary(tmp_path / "tokenizer.model", small_ranks())
    (tmp_path / "in.txt").write_text("the quick fox")
    tokenize(path, tmp_path / "out", f"a={tmp_path}/in.txt")
    (shard,) = shards(tmp_path / "out", "a")
    assert shard.read(0, shard.num_tokens).tolist() == Tokenizer(str(path)).encode("the quick fox").tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: [*lines, b"no token"], "line 0 is not a token in base64"),
        (lambda lines: lines[:100] + lines[101:], "not every byte is a token"),
        (lambda lines: [*lines, lines[-1]], "lines hold only"),
        (lambda lines: [*lines, b"aGVsbG8= 128100"], "the 256 special tokens of LLaMA-3 find no free ranks"),
        (lambda lines: lines[:-1], "127,999 tokens precede the special ones, but in LLaMA-3 there are 128,000"),
    ],
)
def test_a_vocabulary_that_is_damaged_or_not_llama_3s_is_refused(change, words, tmp_path):
    pytest.importorskip("tiktoken")
    lines = llama_3_vocabulary(tmp_path / "m", small_ranks()).read_bytes().splitlines()
    (tmp_path / "m").write_bytes(b"\n".join(change(lines)))
    assert is_tiktoken(tmp_path / "m")
    with pytest.raises(ConfigError, match=words.replace("line 0", f"line {len(lines) + 1}")):
        TiktokenModel(tmp_path / "m")
