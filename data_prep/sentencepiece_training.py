"""Training of a SentencePiece model in the manner of LLaMA's: BPE, byte fallback, single digits, no normalisation.

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
from data_prep.training_sample import LONGEST_SENTENCE, read_sample
from moh_lm.config import ConfigError
from moh_lm.data.files import publish

BYTES_AND_CONTROLS = 256 + 3  # pieces that every model has


def run(flags) -> int:
    """The command; its exit code. Raises ConfigError."""
    output = flags.output
    check_model_file(output)
    sentences = read_sample(flags)
    print(f"training {flags.vocab_size:,} pieces on {sum(map(len, sentences)):,} bytes of text", flush=True)
    publish(output, train(sentences, flags.vocab_size))
    print(f"wrote {output}")
    return 0


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
