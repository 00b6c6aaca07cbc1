"""Training of a SentencePiece model: what it is like, and what it is trained on."""

import random
import re

import pytest
import sentencepiece

from data_prep.encoding import Tokenizer
from data_prep.sentencepiece_training import train as train_model
from data_prep.tokenize import main
from data_prep.training_sample import RESERVED, sample_sentences
from data_prep.units import plan_units
from moh_lm.config import ConfigError
from tests.tokenizing import TEXTS, json_lines


def train_by_command(pattern, vocab_size, output, code=0):
    assert main(["train", "--input", str(pattern), "--vocab-size", str(vocab_size), "--output", str(output)]) == code
    return output


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model trained by the command itself."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "text.jsonl").write_bytes(json_lines(TEXTS * 3))
    return train_by_command(directory / "*.jsonl", 400, directory / "m.model")


def test_training_is_deterministic_and_makes_a_model_like_llamas(model, tmp_path):
    (tmp_path / "text.jsonl").write_bytes(json_lines(TEXTS * 3))
    assert train_by_command(tmp_path / "*.jsonl", 400, tmp_path / "m.model").read_bytes() == model.read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert processor.vocab_size() == 400
    assert (processor.unk_id(), processor.bos_id(), processor.eos_id(), processor.pad_id()) == (0, 1, 2, -1)
    assert processor.id_to_piece(3) == "<0x00>"
    pieces = [processor.id_to_piece(number).strip("▁") for number in range(3 + 256, 400)]
    assert {piece for piece in pieces if any(map(str.isdigit, piece))} == set("1234567890") & set("".join(TEXTS))
    for text in [*TEXTS, "never seen: ☃ \N{GREEK SMALL LETTER ALPHA}"]:
        assert processor.decode(processor.encode(text)) == text


def test_the_segment_cache_can_encode_with_a_trained_model(model):
    assert Tokenizer(str(model)).cache is not None


def scattered(seed):
    """A text of Latin letters, spaces and some rarer characters."""
    draw = random.Random(seed)
    rare = draw.randrange(2, 800)
    return "\n".join(
        "".join(
            draw.choice([" ", chr(ord("a") + draw.randrange(26)), chr(0x4E00 + int(draw.paretovariate(0.7)) % rare)])
            for _ in range(draw.randrange(1, 60))
        )
        for _ in range(draw.randrange(1, 60))
    )


SIZES = [("TEXTS", 5000, "most"), ("TEXTS", 2**24, "most"), ("TEXTS", 1, "least"), ("TEXTS", 2, "least")]
SIZES += [("TEXTS", 258, "least"), (7, 700, "most"), (22, 2000, "most"), (2, 280, "least")]


@pytest.mark.parametrize(("text", "size", "word"), SIZES)
def test_a_size_that_does_not_fit_is_refused_with_the_nearest(text, size, word, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(" ".join(TEXTS) if text == "TEXTS" else scattered(text))
    train_by_command(tmp_path / "text.txt", size, tmp_path / "m.model", code=2)
    message = capsys.readouterr().err.splitlines()[-1]
    nearest = int(re.search(rf"give at {word} (\d+)", message)[1])
    assert "INTERNAL" not in message
    assert not (tmp_path / "m.model").exists()
    train_by_command(tmp_path / "text.txt", nearest + (1 if word == "most" else -1), tmp_path / "m.model", code=2)
    train_by_command(tmp_path / "text.txt", nearest, tmp_path / "m.model")


def test_a_size_of_billions_is_refused(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(" ".join(TEXTS))
    train_by_command(tmp_path / "text.txt", "2G", tmp_path / "m.model", code=2)
    assert "--vocab-size 2G: must be at most 16777216" in capsys.readouterr().err


def test_what_sentencepiece_cannot_train_on_is_one_line(monkeypatch):
    def fail(**options):
        raise RuntimeError("INTERNAL: src/trainer_interface.cc(467) [!sentences_.empty()] ")

    monkeypatch.setattr("sentencepiece.SentencePieceTrainer.train", fail)
    with pytest.raises(ConfigError, match=r"--vocab-size 300: SentencePiece cannot .*; give more text, or other text$"):
        train_model([b"text"], 300)


@pytest.mark.parametrize("mark", RESERVED)
def test_reserved_characters_cut_lines_and_are_counted(mark, tmp_path, capsys):
    """SentencePiece would skip whole lines with U+2585, and learn spaces where there is U+2581."""
    words = [f"{first} and {last} more" for first in ("ka", "lo", "mi") for last in ("stver", "ding", "mon")]
    (tmp_path / "cut.txt").write_text("\n".join(mark.join(words) for _ in range(50)))
    (tmp_path / "lines.txt").write_text("\n".join(words * 50))
    names = ("cut.txt", "lines.txt")
    cut, lines = (train_by_command(tmp_path / name, 290, tmp_path / f"{name}.model") for name in names)
    assert cut.read_bytes() == lines.read_bytes()
    said = capsys.readouterr().err
    assert f"lines of the sample were cut at 400 characters U+{ord(mark):04X}, wh" in said
    assert said.count("lines of the sample") == 1


def test_a_small_vocabulary_is_not_spent_on_rare_characters(tmp_path):
    words = " ".join(first + last for first in ("ka", "lo", "mi", "nu", "re") for last in ("st", "ver", "ding", "mon"))
    text = f"common words {words} " * 300 + "".join(map(chr, range(0x4E00, 0x4E00 + 500)))
    (tmp_path / "text.txt").write_text(text)
    train_by_command(tmp_path / "text.txt", 330, tmp_path / "m.model")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    pieces = [processor.id_to_piece(number) for number in range(259, 330)]
    assert sum(len(piece) > 1 for piece in pieces) > len(pieces) / 2
    assert processor.decode(processor.encode(text)) == text


# --- The sample ---


def test_the_training_sample_spreads_over_all_files(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_bytes(json_lines([f"{name}{number:05d}" for number in range(1000)]))
    units = plan_units("--input ", "", [f"{tmp_path}/*"], text_key="text", unit_size=4096)
    sample = [sentence.decode() for sentence in sample_sentences(units, "text", 3000)]
    assert 2400 < sum(map(len, sample)) <= 3000
    for name in "abc":
        numbers = [int(sentence[1:]) for sentence in sample if sentence[0] == name]
        assert len(numbers) > 100
        assert min(numbers) < 50
        assert max(numbers) > 800


def test_a_file_that_the_sample_does_not_need_is_not_opened(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_bytes(json_lines([name * 6] * 20))
    units = plan_units("--input ", "", [f"{tmp_path}/*"], text_key="text", unit_size=4096)
    (tmp_path / "b.jsonl").unlink()
    (tmp_path / "c.jsonl").unlink()
    assert list(sample_sentences(units, "text", 3)) == [b"aaaaaa"]


def test_the_sample_says_which_records_it_leaves_out(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["good"]) + b'\n{"text": 5}\n')
    (tmp_path / "b.jsonl").write_bytes(json_lines(["fine"]) + b'{"text": 6}\n{broken\n')
    units = plan_units("--input ", "", [f"{tmp_path}/*"], text_key="text", unit_size=4096)
    assert sorted(sample_sentences(units, "text", 3000)) == [b"fine", b"good"]
    said = capsys.readouterr().err
    assert f"left out of the sample: 2 text is not a string, the first in {tmp_path}/a.jsonl\n" in said
    assert f"1 broken JSON, the first in {tmp_path}/b.jsonl\n" in said and "blank" not in said


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """A function: flags -> the lines that the command trains on, of sources a, b, c with 9, 99 and 999 lines."""
    for name, number in {"a": 9, "b": 99, "c": 999}.items():
        (tmp_path / f"{name}.jsonl").write_bytes(json_lines([f"{name}{line:06}" for line in range(number)]))
    lines = []
    monkeypatch.setattr("data_prep.sentencepiece_training.train", lambda sample, size: lines.extend(sample) or b"")

    def draw(*flags, code=0):
        lines.clear()
        flags = [flag.replace("DIR", str(tmp_path)) for flag in flags]
        assert main(["train", *flags, "--output", str(tmp_path / "m.model")]) == code
        return [line.decode() for line in lines]

    return draw


SOURCES = ["--source", "a=DIR/a.*", "--source", "b=DIR/b.*", "--source", "c=DIR/c.*"]


@pytest.mark.parametrize("sample_bytes", ["800", "1M"])
def test_the_bar_of_the_sample_ends_when_all_text_is_read(drawn, sample_bytes, capsys):
    drawn(*SOURCES, "--sample-bytes", sample_bytes)
    shown = capsys.readouterr().err.strip().split("\r")
    assert "sampling:   0%" in shown[0] and "sampling: 100%" in shown[-1]
    assert float(re.search(r"/([\d.]+)k?", shown[0])[1]) < 801


@pytest.mark.parametrize("mix", [(1, 1, 1), (61.28, 12.48, 26.24), (0.5, 99, 0.5)])
@pytest.mark.parametrize("sample_bytes", ["800", "1M"])  # less than there is, and more
def test_sources_have_their_shares_of_the_mix_in_the_sample(drawn, mix, sample_bytes):
    mix = dict(zip("abc", mix, strict=True))
    weights = [f"{name}={weight}" for name, weight in mix.items()]
    sample = drawn(*SOURCES, "--data-mix", *weights, "--sample-bytes", sample_bytes)
    assert 20 < len(sample) <= (103 if sample_bytes == "800" else 1107)
    for name, weight in mix.items():
        lines = [line for line in sample if line[0] == name]
        assert abs(len(lines) - len(sample) * weight / sum(mix.values())) <= 2  # half a line for each source, rounded
        copies = [lines.count(line) for line in set(lines)]
        assert max(copies) - min(copies) <= 1


def test_without_a_mix_sources_are_one_text(drawn):
    assert drawn(*SOURCES) == drawn("--input", "DIR/*.jsonl")
    assert len(drawn(*SOURCES)) == 9 + 99 + 999


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "give either --input"),
        ([*SOURCES, "--input", "DIR/a.*"], "give either --input"),
        (["--input", "DIR/a.*", "--data-mix", "a=1"], "give either --input"),
        (["--source", "DIR/a.jsonl"], "write NAME=GLOB"),
        ([*SOURCES, "--data-mix", "a=1", "b=2"], "the sources are a, b, c"),
        ([*SOURCES, "--data-mix", "a=1", "b=2", "c=3", "d=4"], "the sources are a, b, c"),
        ([*SOURCES, "--data-mix", "a=1", "b=2", "c=0"], "weight above 0"),
        ([*SOURCES, "--data-mix", "a=1", "b=2", "c"], "write NAME=WEIGHT"),
        (["--source", "a=DIR/z.*", "--data-mix", "a=1"], "--source a=", ),
        (["--input", "DIR/a.*", "--text-key", "content"], "holds no text; is --text-key content right?"),
    ],
)  # fmt: skip
def test_mistakes_in_the_sources_are_one_clear_line(drawn, flags, words, capsys):
    drawn(*flags, code=2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tokenize.py: ")]
    assert words in line
