"""Text and treebanks as a head report reads them: files, shards, words in tokens."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from moh_lm.config import ConfigError
from tests.tools.heads.models import SENTENCES, TREES, attended, domain


def test_the_words_of_a_treebank_are_found_in_the_tokens(tools, tokenizer, tmp_path):
    path = tmp_path / "trees.conllu"
    path.write_text(TREES)
    read = tools["syntax"].read_treebank
    first, second = read(path, tokenizer, 1000, 64)  # "del" is not "de" and "el"
    decode = tokenizer.model.decode
    assert [decode(each.tokens.tolist()) for each in (first, second)] == ["The dog's friend can't see.", "Dogs bark"]
    words = "The dog 's friend ca n't see .".split()
    expected = [("det dependent", 2, 1), ("nmod dependent", 4, 2), ("case governor", 3, 2), ("nsubj dependent", 7, 4),
                ("aux dependent", 7, 5), ("advmod dependent", 7, 6), ("punct governor", 8, 7)]  # fmt: skip
    assert [pair[:2] for pair in first.pairs] == [(name, later - earlier) for name, later, earlier in expected]
    for (_, _, asks, start, end), (_, later, earlier) in zip(first.pairs, expected, strict=True):
        before = decode(first.tokens[:asks].tolist())
        assert len(before) < len("".join(words[:later])) + 5
        assert words[later - 1][-1] in decode([int(first.tokens[asks])])
        assert words[earlier - 1] in decode(first.tokens[start:end].tolist())
    assert len(read(path, tokenizer, 3, 64)) == 1  # enough tokens
    for text, words in ((b"\xff", "cannot be read"), (b"no treebank", "has no sentence of up to 64 tokens")):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=words):
            read(path, tokenizer, 1000, 64)


def test_sentences_begin_like_documents(tools, tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "trees.conllu"
    path.write_text(TREES)
    plain = tools["syntax"].read_treebank(path, tokenizer, 1000, 64)
    monkeypatch.setattr(tokenizer, "bos_ids", np.array([1], np.int32))
    for with_bos, without in zip(tools["syntax"].read_treebank(path, tokenizer, 1000, 64), plain, strict=True):
        assert with_bos.tokens.tolist() == [1, *without.tokens.tolist()]
        assert with_bos.pairs == [(*pair[:2], *(place + 1 for place in pair[2:])) for pair in without.pairs]


def test_a_word_of_byte_tokens_has_all_of_them(tools, tokenizer):
    words = (1, "Dogs", 2), (2, "\u2740\u2741", 0), (3, "bark", 2)  # three bytes each flower
    lines = [f"{number}\t{word}\t_\t_\t_\t_\t{governor}\tx\t_\t_" for number, word, governor in words]
    tokens, pairs = tools["syntax"].read_sentence(lines, tokenizer)
    (_, _, end, *_), (_, _, _, first, stop) = pairs
    assert tokenizer.model.decode(tokens[:first].tolist()).strip() == "Dogs"
    assert tokenizer.model.decode(tokens[first:stop].tolist()).strip() == "\u2740\u2741" and end == stop - 1


def test_hits_of_a_relation_are_the_largest_weights_on_its_word(tools, model):
    draw = np.random.default_rng(0)
    sentences = []
    for _ in range(12):
        tokens, pairs = torch.from_numpy(draw.integers(0, 80, 24)), []
        for _ in range(8):
            first, asks = sorted(draw.choice(24, 2, replace=False).tolist())
            end = int(draw.integers(first, asks)) + 1
            pairs.append((draw.choice(["nsubj governor", "obj dependent"]), int(draw.integers(1, 4)), asks, first, end))
        sentences.append(tools["syntax"].Sentence(tokens, pairs))
    found = tools["syntax"].measure_syntax(model, sentences)
    maps = [attended(model, sentence.tokens) for sentence in sentences]
    for relation, figures in found.items():
        pairs = [(n, pair) for n, sentence in enumerate(sentences) for pair in sentence.pairs if pair[0] == relation]
        distances = [pair[1] for _, pair in pairs]
        assert figures["pairs"] == len(pairs)
        assert figures["baseline"] == max(distances.count(each) for each in (1, 2, 3)) / len(pairs)
        for layer, head in ((0, 0), (0, 6), (1, 1), (1, 7)):
            hits = [pair[3] <= int(maps[n][layer][0][head, pair[2]].argmax()) < pair[4]
                    for n, pair in pairs if maps[n][layer][1][pair[2], head]]  # fmt: skip
            share = figures["share"][layer, head]
            assert share == pytest.approx(np.mean(hits)) if len(hits) >= 20 else math.isnan(share)
            assert figures["follows"][layer, head] == (share >= figures["baseline"] + 0.1)
    assert sum(figures["pairs"] for figures in found.values()) == 96


def read(tools, tokenizer, *entries, seq_length=40, num_tokens=200, vocab_size=None):
    size = vocab_size or tokenizer.vocab_size
    return tools["text"].read_domains(entries, tokenizer, size, seq_length, num_tokens, "text")


def test_each_file_gives_as_many_tokens_from_its_beginning(tools, tokenizer, corpus):
    (found,) = read(tools, tokenizer, f"all={corpus}/*.jsonl")
    beginnings = [np.concatenate(list(tokenizer.encode_all(part)))[:100] for part in (SENTENCES[:20], SENTENCES[20:])]
    assert torch.cat(found.windows).tolist() == np.concatenate(beginnings).tolist()
    assert [len(window) for window in found.windows] == [40] * 5 and found.dropped == {"broken JSON": 1}


def test_of_shards_the_windows_are_evenly_spaced_over_the_tokens(tools, tokenizer, corpus):
    tokens = np.concatenate(list(tokenizer.encode_all(SENTENCES[:20])))
    first, second = read(tools, tokenizer, str(corpus / "data"), num_tokens=130)
    assert (first.name, second.name) == ("first", "second") and len(first.windows) == 3
    for place, window in zip((0, (len(tokens) - 40) // 2, len(tokens) - 40), first.windows, strict=True):
        assert window.tolist() == tokens[place : place + 40].tolist()
    (same,) = read(tools, tokenizer, f"name={corpus / 'data' / 'first'}", num_tokens=130)
    assert same.name == "name" and torch.equal(torch.stack(same.windows), torch.stack(first.windows))
    (joined,) = read(tools, tokenizer, f"both={corpus / 'data'}", num_tokens=10**6)
    assert sum(map(len, joined.windows)) > len(tokens)


def test_what_cannot_be_read_is_said(tools, tokenizer, corpus, data_dir):
    (corpus / "short.txt").write_text("few words")
    for entry, words in [
        ("data.jsonl", "is not a directory of shards; give one, or NAME=FILES"),
        (f"x={corpus}/*.none", "matches no file"),
        (f"\udcff={corpus}/a.jsonl", "its name is not UTF-8"),
        (f"x={corpus}/short.txt", "give at least 32"),
        (str(data_dir), "another tokenizer"),
    ]:
        with pytest.raises(ConfigError, match=words):
            read(tools, tokenizer, entry)
    with pytest.raises(ConfigError, match="the model's vocabulary is 300"):
        read(tools, tokenizer, f"x={corpus}/a.jsonl", vocab_size=300)


def test_test_texts_repeat_tokens_neither_frequent_nor_rare(tools):
    counts = torch.tensor([50, 40, 0, *range(39, 1, -1), 1])
    one = domain(tools, "one", [torch.repeat_interleave(torch.arange(len(counts)), counts)])
    ranks, found = tools["text"].frequency_ranks([one], len(counts))
    assert found.tolist() == counts.tolist() and ranks[[0, 1, 3, 2]].tolist() == [0, 1, 2, 41]
    sequences = tools["text"].repeated_sequences(ranks, found, start=1)
    assert sequences.shape == (10, 101) and (sequences[:, 0] == 1).all()
    for row in sequences[:, 1:].view(10, 4, 25).tolist():
        assert row[0] == row[1] == row[2] == row[3] and len(set(row[0])) == 25
        assert not {0, 1, 2, 3, 4, 5, 38, 39, 40, 41} & set(row[0])  # 40 present but for the start: 4 of either end


def test_the_pieces_of_an_excerpt_add_up_to_its_text(tools, tokenizer):
    text = "Ein großer Fuchs \N{GRINNING FACE} ist 文字, naïve & <b>"
    ids = tokenizer.model.encode(text)
    pieces = tools["page"].token_texts(ids, tokenizer.model.decode)
    assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.model.decode(ids)
    assert "\N{GRINNING FACE}" in pieces and "" in pieces  # of several tokens, the last one has it
