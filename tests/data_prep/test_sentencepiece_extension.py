"""Larger vocabularies: what is new, and that the old tokens stay what they were."""

import base64
import random
from collections import Counter
from itertools import accumulate, pairwise

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from data_prep.bpe_continuation import LETTERS, joined_tokens
from data_prep.encoding import Tokenizer
from data_prep.sentencepiece_extension import bpe_model, run, words_of
from data_prep.tokenize import extend_flags
from moh_lm.config import ConfigError
from moh_lm.data.tiktoken_model import read_ranks
from tests.data_prep.test_encoding import nasty_texts, small_ranks
from tests.tokenizing import TEXTS, hugging_face_tokenizer, llama_3_vocabulary, sentencepiece_model, train_model

WORDS = ["。", "机器", "学习", "语言", "模型", "注意力", "，", "头", "混合", "训练", "数据", "文字", "龍馬", "※"]
LATIN = "zyxxyt"  # of single letters in the old vocabulary


def chinese(number, seed=0):
    """Lines of words that are more frequent the earlier they are in WORDS, some with the Latin word."""
    draw = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(len(WORDS))]
    return ["".join(draw.choices([*WORDS, f" {LATIN} "], [*weights, 0.2], k=20)) for _ in range(number)]


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return train_model(tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    directory = tmp_path_factory.mktemp("texts")
    (directory / "new.txt").write_text("\n".join(chinese(2000)))
    (directory / "old.txt").write_text("\n".join(TEXTS * 5 + [f"{LATIN} ※"] * 300).replace("\0", ""))
    return directory


def extend(old, output, *flags):
    assert run(extend_flags(["--tokenizer", str(old), "--output", str(output), *map(str, flags)])) == 0
    return output


@pytest.fixture(scope="module")
def new(old, texts, tmp_path_factory):
    output = tmp_path_factory.mktemp("new") / "m.model"
    return extend(old, output, "--vocab-size", 450, "--input", texts / "new.txt")


def processor(path):
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def pieces(path):
    model = processor(path)
    return [model.id_to_piece(index) for index in range(model.vocab_size())]


def ends(path, text):
    """Where the tokens of ``text`` end."""
    return {piece.end for piece in processor(path).encode(text, out_type="proto").pieces}


# --- SentencePiece models ---


def test_old_ids_stay_and_the_new_ones_fill_the_vocabulary(old, new):
    before, after = pieces(old), pieces(new)
    assert after[: len(before)] == before
    assert len(after) == len(set(after)) == 450
    assert processor(new).eos_id() == processor(old).eos_id()
    assert {"机器", "学习", "龍"} <= set(after)


def test_new_tokens_keep_their_order_after_very_low_scores(old, texts, tmp_path):
    proto = sentencepiece_model_pb2.ModelProto.FromString(old.read_bytes())
    proto.pieces.add(piece="▁▁", score=-1e9)
    (tmp_path / "old.model").write_bytes(proto.SerializeToString())
    model = extend(tmp_path / "old.model", tmp_path / "m.model", "--vocab-size", 450, "--input", texts / "new.txt")
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.read_bytes())
    scores = [piece.score for piece in proto.pieces[400:]]
    assert scores == sorted(set(scores), reverse=True) and scores[0] == -1e9


def test_the_same_text_gives_the_same_bytes(old, new, texts, tmp_path):
    again = extend(old, tmp_path / "m.model", "--vocab-size", 450, "--input", texts / "new.txt")
    assert again.read_bytes() == new.read_bytes()


def test_no_old_token_is_split_whatever_the_text(old, new):
    assert "th" in pieces(old) and LATIN in [piece.strip("▁") for piece in pieces(new)]
    for text in [*nasty_texts(), *chinese(50, seed=1), " ".join(chinese(3) + TEXTS), f"{LATIN}he {LATIN}urn"]:
        assert ends(new, text) <= ends(old, text)


def test_new_tokens_stay_within_words(old, new, tmp_path):
    for piece in pieces(new)[400:]:
        assert "▁" not in piece[1:]
        assert not set(piece) & set("。，※") or set(piece) <= set("▁。，※")

    proto = sentencepiece_model_pb2.ModelProto.FromString(old.read_bytes())
    proto.normalizer_spec.add_dummy_prefix = False  # so that no space begins a line
    proto.trainer_spec.split_digits = True
    (tmp_path / "old.model").write_bytes(proto.SerializeToString())
    (tmp_path / "lines.txt").write_text(f"{LATIN}\n112233\n{LATIN}\n" * 200)
    flags = ("--input", tmp_path / "lines.txt", "--vocab-size")
    assert pieces(extend(tmp_path / "old.model", tmp_path / "m.model", *flags, 405))[404] == LATIN
    with pytest.raises(ConfigError, match="give at most 405"):  # there is nothing else to join
        extend(tmp_path / "old.model", tmp_path / "m.model", *flags, 406)


def test_old_text_stays_as_it_was_and_new_text_is_shorter(old, new):
    for text in [text for text in TEXTS if "文" not in text]:
        assert processor(new).encode(text) == processor(old).encode(text)
    unseen = "\n".join(chinese(100, seed=2))
    assert len(processor(new).encode(unseen)) < 0.4 * len(processor(old).encode(unseen))
    assert processor(new).decode(processor(new).encode(unseen)) == unseen


def test_what_is_as_frequent_in_old_text_is_not_joined(old, new, texts, tmp_path, capsys):
    flags = ("--vocab-size", 445, "--input", texts / "new.txt", "--old-input", texts / "old.txt")
    careful = extend(old, tmp_path / "m.model", *flags)
    assert "※" in pieces(new) and any("zy" in piece for piece in pieces(new)[400:])
    assert "※" not in pieces(careful) and not any("zy" in piece for piece in pieces(careful)[400:])

    said, _, _, on_new, on_old = capsys.readouterr().out.replace(",", "").splitlines()
    trained, measured = int(said.split()[-2]), int(on_new.split()[1])
    assert trained + measured == len("".join(chinese(2000)).encode())  # what is measured was not trained on
    name, num_bytes, before, after, changed = on_old.split()
    assert (name, changed) == ("old", "0.00%") and int(num_bytes) > int(before) == int(after) > 0


def test_the_segment_cache_can_encode_with_an_extended_model(new):
    tokenizer = Tokenizer(str(new))
    assert tokenizer.cache is not None
    for text, ids in zip(chinese(50), tokenizer.encode_all(chinese(50)), strict=True):
        assert ids[:-1].tolist() == tokenizer.model.encode(text)


def test_hugging_face_agrees_on_an_extended_model(new, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from tools.hf.convert.tokenizer_json import read_model, write_tokenizer

    write_tokenizer(read_model(new), tmp_path, max_length=512)
    converted = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*chinese(50), *TEXTS[:3], " ".join(chinese(2) + TEXTS[:3])]:
        assert converted.encode(text).ids == processor(new).encode(text)


def test_listed_pieces_become_tokens_and_split_no_other_text(old, tmp_path):
    listed = ["▁mitochondrion", "量子计算机", "▁New▁York", "lazy"]
    (tmp_path / "pieces.txt").write_text("▁mitochondrion\t-5\n量子计算机\r\n\n New York\nlazy\n")
    model = extend(old, tmp_path / "m.model", "--add-pieces", tmp_path / "pieces.txt")
    for piece in listed:
        assert processor(model).encode("in" + piece.replace("▁", " "), out_type=str)[-1] == piece
    added = pieces(model)[400:]
    assert all(any(piece.startswith(part) or part in piece for piece in listed) for part in added)
    for text in [*nasty_texts(), *TEXTS]:
        assert ends(model, text) <= ends(old, text)


def test_a_listed_piece_is_added_without_normalisation(tmp_path):
    sentencepiece_model(tmp_path / "old.model", TEXTS * 5, 450)
    (tmp_path / "pieces.txt").write_text("▁catdog\nℌead\n", encoding="utf-8-sig")  # with a byte order mark
    model = extend(tmp_path / "old.model", tmp_path / "m.model", "--add-pieces", tmp_path / "pieces.txt")
    assert {"▁catdog", "ℌead"} <= set(pieces(model)) and "\ufeff" not in "".join(pieces(model))
    assert processor(model).encode("a catdog", out_type=str)[-1] == "▁catdog"


def test_mistakes_are_refused_with_the_remedy(old, texts, tmp_path):
    unigram = {"model_type": "unigram", "byte_fallback": False}
    sentencepiece_model(tmp_path / "unigram.model", TEXTS * 5, 200, **unigram)
    flags = ["--input", texts / "new.txt", "--output", tmp_path / "m.model"]
    for mistake, words in [
        (["--tokenizer", old, "--vocab-size", 400], "already has 400"),
        (["--tokenizer", old, "--vocab-size", 100_000], "the text is too small for it; give at most"),
        (["--tokenizer", tmp_path / "unigram.model", "--vocab-size", 500], "only BPE models can be extended"),
        (["--tokenizer", old], "one of the arguments --vocab-size --add-pieces is required"),
        (["--tokenizer", old, "--add-pieces", tmp_path / "none.txt"], "none.txt"),
    ]:
        with pytest.raises(ConfigError, match=words):
            run(extend_flags([str(flag) for flag in mistake + flags]))
    assert not (tmp_path / "m.model").exists()


def test_a_vocabulary_is_not_written_over_the_one_it_extends(old, texts):
    before = old.read_bytes()
    for given in (old, old.parent):  # a directory stands for the model in it
        with pytest.raises(ConfigError, match="is the --tokenizer, which its shards need; give another file"):
            extend(given, old, "--vocab-size", 420, "--input", texts / "new.txt")
    assert old.read_bytes() == before


def test_a_tokenizer_of_hugging_face_is_refused_with_the_remedy(texts, tmp_path):
    old = hugging_face_tokenizer(tmp_path / "tokenizer", "bytes")
    with pytest.raises(ConfigError, match="add the tokens with transformers") as raised:
        extend(old, tmp_path / "new.model", "--vocab-size", 450, "--input", texts / "new.txt")
    assert "\n" not in str(raised.value) and not (tmp_path / "new.model").exists()


# --- BPE ---


def test_tokens_are_joined_in_the_order_of_plain_bpe():
    draw = random.Random(0)
    weights = [1 / (rank + 1) for rank in range(20)]
    found = Counter(tuple(draw.choices(range(20), weights, k=draw.randint(1, 8))) for _ in range(20_000))
    spelled = Counter({"".join(chr(LETTERS[index]) for index in word): count for word, count in found.items()})
    expected, words = [], [[[(index,) for index in word], count] for word, count in found.items()]
    for _ in range(15):
        pairs = Counter()
        for word, count in words:
            for left, right in pairwise(word):
                pairs[left + right] += count
        (best, most), (_, second) = pairs.most_common(2)
        assert most > second  # no ties
        expected.append(list(best))
        for entry in words:
            entry[0] = joined(entry[0], best)
    assert joined_tokens(spelled, 15) == expected


def test_words_do_not_depend_on_batches_even_of_blank_lines(old, texts, monkeypatch):
    proto, lines = bpe_model(str(old)), ["", " ", *chinese(5), "", *TEXTS[:5], " "]
    together = words_of(proto, lines)
    monkeypatch.setattr("data_prep.sentencepiece_extension.BATCH", 1)
    apart = words_of(proto, lines)
    together[""] = apart[""] = 0  # what follows the last word of a batch
    assert apart == together


def joined(word, token):
    """``word`` with neighbours that are ``token`` together joined, from left to right."""
    result = []
    for part in word:
        if result and result[-1] + part == token:
            result[-1] = token
        else:
            result.append(part)
    return result


# --- LLaMA-3's format ---


def test_tokens_of_a_tiktoken_file_are_added_after_special_ones(texts, tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    old, size = llama_3_vocabulary(tmp_path / "old", small_ranks()), 128_256 + 40
    new = extend(old, tmp_path / "new", "--vocab-size", size, "--input", texts / "new.txt")
    assert new.read_bytes().startswith(old.read_bytes())
    ranks, special = read_ranks(new)
    assert special == 128_000
    added = [base64.b64decode(line.split()[0]) for line in new.read_bytes().splitlines()[special:]]
    assert [ranks[token] for token in added] == list(range(special + 256, size))
    assert {"机器".encode(), "学习".encode()} <= set(added)

    before, after = Tokenizer(str(old)), Tokenizer(str(new))
    assert (after.vocab_size, after.eos_id) == (size, before.eos_id)
    plain = tiktoken.Encoding("new", pat_str=after.model.encoding._pat_str, mergeable_ranks=ranks, special_tokens={})
    for text in [*nasty_texts(), *chinese(50, seed=1)]:
        ids = [tokenizer.encode(text)[:-1].tolist() for tokenizer in (before, after)]
        assert ids[1] == plain.encode_ordinary(text)
        spans = [set(accumulate(len(plain.decode_single_token_bytes(index)) for index in part)) for part in ids]
        assert spans[1] <= spans[0]
    unseen = "\n".join(chinese(100, seed=2))
    assert len(after.encode(unseen)) < 0.5 * len(before.encode(unseen))
    english = "the quick brown fox's 12345 '' jumps\n\n  over?!"
    assert after.encode(english).tolist() == before.encode(english).tolist()
