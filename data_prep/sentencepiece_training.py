"""Trains a SentencePiece model with LLaMA's options: BPE, byte fallback, single digits, no normalisation.

    python data_prep/tokenize.py train --input GLOB [GLOB ...] --vocab-size 65536 --output M.model
    python data_prep/tokenize.py train --source NAME=GLOB ... --data-mix NAME=WEIGHT ... --output M.model

The text is a sample of the documents (data_prep/training_sample.py). The same inputs and options give the same model,
byte for byte.
"""

import io
import re
from collections import Counter

import sentencepiece

from data_prep.output import check_model_file
from data_prep.report import told
from data_prep.training_sample import LONGEST_SENTENCE, read_sample
from moh_lm.config import raise_any
from moh_lm.data.files import publish

BYTES_AND_CONTROLS = 256 + 3  # pieces in every model
SMALLEST = BYTES_AND_CONTROLS + 1  # the smallest size about which SentencePiece gives advice
# The sizes that it advises. The characters that must be pieces depend on the size, so the next one may fail as well.
LARGEST_SIZE, SMALLEST_SIZE = re.compile(r"size too high .*<= (\d+)"), re.compile(r"required_chars\. \d+ vs (\d+)")


def run(flags) -> int:
    """Run the command and return its exit code. Raises ConfigError."""
    output = flags.output
    check_model_file(output)
    sentences = read_sample(flags)
    print(f"training {flags.vocab_size:,} pieces on {sum(map(len, sentences)):,} bytes of text", flush=True)
    with told("training"):
        model = train(sentences, flags.vocab_size)
    publish(output, model)
    print(f"wrote {output}")
    return 0


def train(sentences: list[bytes], vocab_size: int) -> bytes:
    """The serialized model. Raises ConfigError with the nearest size that can be trained, which has been tried."""
    characters = Counter()
    for sentence in sentences:
        characters.update(sentence.decode())
    size, tried, model = max(vocab_size, SMALLEST), set(), None
    while model is None and size not in tried:
        tried.add(size)
        try:
            model = model_of(sentences, size, characters)
        except RuntimeError as error:
            refused = " ".join(str(error).split())
            advised = LARGEST_SIZE.search(refused) or SMALLEST_SIZE.search(refused)
            size = int(advised[1]) if advised else size
    problem = None
    if model is None:
        problem = f"SentencePiece cannot train on this text ({refused}); give more text, or other text"
    elif size < vocab_size:
        problem = f"the text is too small for so many pieces; give at most {size}, or more text"
    elif size > vocab_size:
        problem = f"the characters of the text do not fit into so few pieces; give at least {size}"
    raise_any([f"--vocab-size {vocab_size}: {problem}"] if problem else [])
    return model


def model_of(sentences: list[bytes], vocab_size: int, characters: Counter[str]) -> bytes:
    """The serialized model. Raises RuntimeError if text with these ``characters`` does not fit the size."""
    commonest = sum(count for _, count in characters.most_common(max(1, (vocab_size - BYTES_AND_CONTROLS) // 4)))
    model = io.BytesIO()
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
        # LLaMA's, or less, so that a small vocabulary is not spent on rare characters, which bytes can spell
        character_coverage=min(0.99995, max(0.98, commonest / characters.total())),
        max_sentence_length=LONGEST_SENTENCE,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        minloglevel=2,
    )
    return model.getvalue()
