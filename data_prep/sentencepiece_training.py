"""Training of a SentencePiece model in the manner of LLaMA's: BPE, byte fallback, single digits, no normalisation.

The text is a sample of the documents: every unit of the inputs (see data_prep/units.py) gives its first documents, in
proportion to its size, so that the sample spreads over all files and over the length of large ones. The same inputs and
options give the same model, byte for byte.
"""

import io
import re
from collections import Counter
from collections.abc import Iterator

import sentencepiece

from data_prep.documents import documents
from data_prep.units import Unit
from moh_lm.config import ConfigError

LONGEST_SENTENCE = 4096  # bytes; SentencePiece would skip longer ones
BYTES_AND_CONTROLS = 256 + 3  # pieces that every model has


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
