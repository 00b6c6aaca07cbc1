"""Training of a SentencePiece model: what it is like, and what it is trained on."""

import pytest
import sentencepiece

from data_prep.sentencepiece_training import sample_sentences
from data_prep.tokenize import main
from data_prep.units import plan_units
from tests.tokenizing import TEXTS, json_lines


def train(pattern, vocab_size, output, code=0):
    assert main(["train", "--input", str(pattern), "--vocab-size", str(vocab_size), "--output", str(output)]) == code
    return output


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model trained by the command itself."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "text.jsonl").write_bytes(json_lines(TEXTS * 3))
    return train(directory / "*.jsonl", 400, directory / "m.model")


def test_training_is_deterministic_and_makes_a_model_like_llamas(model, tmp_path):
    (tmp_path / "text.jsonl").write_bytes(json_lines(TEXTS * 3))
    assert train(tmp_path / "*.jsonl", 400, tmp_path / "m.model").read_bytes() == model.read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert processor.vocab_size() == 400
    assert (processor.unk_id(), processor.bos_id(), processor.eos_id(), processor.pad_id()) == (0, 1, 2, -1)
    assert processor.id_to_piece(3) == "<0x00>"
    pieces = [processor.id_to_piece(number).strip("▁") for number in range(3 + 256, 400)]
    assert {piece for piece in pieces if any(map(str.isdigit, piece))} == set("1234567890") & set("".join(TEXTS))
    for text in [*TEXTS, "never seen: ☃ \N{GREEK SMALL LETTER ALPHA}"]:
        assert processor.decode(processor.encode(text)) == text


def test_a_text_too_small_for_the_vocabulary_is_refused_with_the_largest_size_that_works(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(" ".join(TEXTS))
    train(tmp_path / "text.txt", 5000, tmp_path / "m.model", code=2)
    message = capsys.readouterr().err
    largest = message.split("at most ")[1].split(",")[0]
    assert message.count("\n") == 1
    assert not (tmp_path / "m.model").exists()
    train(tmp_path / "text.txt", largest, tmp_path / "m.model")


def test_a_small_vocabulary_is_not_spent_on_rare_characters(tmp_path):
    words = " ".join(first + last for first in ("ka", "lo", "mi", "nu", "re") for last in ("st", "ver", "ding", "mon"))
    text = f"common words {words} " * 300 + "".join(map(chr, range(0x4E00, 0x4E00 + 500)))
    (tmp_path / "text.txt").write_text(text)
    train(tmp_path / "text.txt", 330, tmp_path / "m.model")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    pieces = [processor.id_to_piece(number) for number in range(259, 330)]
    assert sum(len(piece) > 1 for piece in pieces) > len(pieces) / 2
    assert processor.decode(processor.encode(text)) == text


def test_the_training_sample_spreads_over_all_files_and_all_of_a_large_one(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_bytes(json_lines([f"{name}{number:05d}" for number in range(1000)]))
    units, _ = plan_units("--input ", "", [f"{tmp_path}/*"], text_key="text", unit_size=4096, identity=None)
    sample = [sentence.decode() for sentence in sample_sentences(units, "text", 3000)]
    assert 2400 < sum(map(len, sample)) <= 3000
    for name in "abc":
        numbers = [int(sentence[1:]) for sentence in sample if sentence[0] == name]
        assert len(numbers) > 100
        assert min(numbers) < 50
        assert max(numbers) > 800
