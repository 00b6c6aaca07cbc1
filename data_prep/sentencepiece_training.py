"""Training of a SentencePiece model in the manner of LLaMA's: BPE, byte fallback, single digits, no normalisation.

    python data_prep/tokenize.py train --input GLOB [GLOB ...] --vocab-size 65536 --output M.model

The text is a sample of the documents: every unit of the inputs (see data_prep/units.py) gives its first documents, in
proportion to its size, so that the sample spreads over all files and over the length of large ones. The same inputs and
options give the same model, byte for byte.
"""

import argparse
import io
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

from data_prep.documents import InputError, documents
from data_prep.output import writable_directory
from data_prep.units import Unit, plan_units
from moh_lm.config import ConfigError
from moh_lm.data.shards import publish
from moh_lm.flags import Parser, quantity

TRAINING_UNIT = 16 << 20  # bytes of input from whose beginning the sample takes its share
LONGEST_SENTENCE = 4096  # bytes; SentencePiece would skip longer ones
BYTES_AND_CONTROLS = 256 + 3  # pieces that every model has


def main(arguments: list[str]) -> int:
    """The command, from the arguments after ``train``; the exit code. Raises ConfigError."""
    flags = read_flags(arguments)
    output = Path(flags.output)
    if output.is_dir():
        raise ConfigError([f"--output {output}: is a directory; give a file name such as {output / 'tokenizer.model'}"])
    writable_directory(output.parent)
    units, unreadable = plan_units(
        "--input ", "", flags.input, text_key=flags.text_key, unit_size=TRAINING_UNIT, identity=None
    )
    try:
        if unreadable:
            raise InputError(unreadable[0])
        sentences = list(sample_sentences(units, flags.text_key, flags.sample_bytes))
    except InputError as error:
        print(f"tokenize.py: {error}", file=sys.stderr)
        return 1
    if not sentences:
        raise ConfigError([f"--input {' '.join(flags.input)}: holds no text; is --text-key {flags.text_key} right?"])
    print(f"training {flags.vocab_size:,} pieces on {sum(map(len, sentences)):,} bytes of text", flush=True)
    publish(output, train(sentences, flags.vocab_size))
    print(f"wrote {output}")
    return 0


def read_flags(arguments):
    parser = Parser(
        prog="python data_prep/tokenize.py train",
        description="Train a SentencePiece BPE model with byte fallback, as LLaMA's, on a sample of the documents.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--input", metavar="GLOB", required=True, nargs="+", help="files, of any kind that can be tokenized")
    add("--output", metavar="MODEL", required=True, help="the model file to write")
    add("--vocab-size", metavar="N", type=size, default="65536", help="pieces (default: 65536)")
    add("--text-key", metavar="KEY", default="text", help="key or column that holds the text (default: text)")
    add("--sample-bytes", metavar="BYTES", type=size, default="256M", help="text to train on, at most (default: 256M)")
    return parser.parse_args(arguments)


def size(text):
    try:
        value = quantity(1024)(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value


def sample_sentences(units: list[Unit], text_key: str, sample_bytes: int) -> Iterator[bytes]:
    """Lines of the first documents of each unit, about ``sample_bytes`` in all. Raises InputError."""
    total = sum(unit.num_bytes for unit in units)
    for unit in units:
        left = sample_bytes * unit.num_bytes / max(1, total)
        texts = (document.text for piece in unit.pieces for document in documents(piece, text_key) if document.text)
        for sentence in (sentence for text in texts for sentence in sentences(text)):
            left -= len(sentence) + 1  # and its newline
            if left < 0:
                break
            yield sentence


def sentences(text: str) -> Iterator[bytes]:
    """The lines of a text that SentencePiece can train on, long ones cut at spaces."""
    for line in text.split("\n"):
        line = line.replace("\0", "").encode()
        while len(line) > LONGEST_SENTENCE:
            cut = line.rfind(b" ", 1, LONGEST_SENTENCE)
            if cut < 0:
                cut = LONGEST_SENTENCE
                while line[cut] & 0xC0 == 0x80:  # inside a UTF-8 character
                    cut -= 1
            yield line[:cut]
            line = line[cut:]
        if line:
            yield line


def train(sentences: list[bytes], vocab_size: int) -> bytes:
    """The serialized model. Raises ConfigError if the text has too few pieces, or too many characters, for the size."""
    characters = Counter()
    for sentence in sentences:
        characters.update(sentence.decode())
    commonest = sum(count for _, count in characters.most_common(max(1, (vocab_size - BYTES_AND_CONTROLS) // 4)))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            # LLaMA's, or less, lest a small vocabulary is spent on rare characters, which bytes can spell
            character_coverage=min(0.99995, max(0.98, commonest / characters.total())),
            max_sentence_length=LONGEST_SENTENCE,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        message = str(error)
        if largest := re.search(r"size too high .*<= (\d+)", message):
            message = f"the text is too small for it; give at most {largest[1]}, or more text"
        elif smallest := re.search(r"required_chars\. \d+ vs (\d+)", message):
            message = f"the characters of the text do not fit into it; give at least {smallest[1]}"
        raise ConfigError([f"--vocab-size {vocab_size}: {message}"]) from error
    return model.getvalue()
