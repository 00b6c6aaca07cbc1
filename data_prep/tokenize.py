"""Turns text into token shards, and with ``train`` and ``extend`` into SentencePiece models. For users: docs/data.md.

    python data_prep/tokenize.py --tokenizer M.model --source NAME=GLOB [--source ...] --output DIR [--workers N]
    python data_prep/tokenize.py --tokenizer M.model --recognize DIRECTORY [--only NAME ...] --output DIR
    python data_prep/tokenize.py train --help

The inputs (inputs.py, recognised by corpora.py) are cut into units (units.py). Each becomes a shard (writing.py, from
documents.py and encoding.py) of the data directory DIR (output.py; its layout: moh_lm/data/shards.py) in one of several
processes (workers.py). A restart keeps complete shards. A shard that an earlier run made from the same input with
different content or options is replaced. Exit codes: 0 complete, 1 an input failed, 2 wrong usage.
"""

import os
import sys
from functools import partial

if __name__ == "__main__":  # the root of the checkout, not this folder, whose tokenize.py hides a standard module
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from moh_lm.cli.command import RESUMES, output_path, run_command
from moh_lm.cli.parser import Parser, nearest
from moh_lm.config import ConfigError
from moh_lm.flags import name_and_weight
from moh_lm.units import at_least, quantity, real

MOST_PIECES = 1 << 24  # with more, SentencePiece needs minutes to find that there are too few


def main(texts: list[str]) -> int:
    command = texts[0] if texts and texts[0] in COMMANDS else ""
    parse, work = COMMANDS.get(command, tokenize_flags), partial(run, command)
    words = {"remark": "; nothing was written", "interrupted": RESUMES}
    return run_command("tokenize.py", parse, work, texts[bool(command) :], **words)


def tokenize_flags(texts):
    parser = Parser(
        prog="python data_prep/tokenize.py",
        description="Encode text into token shards; docs/data.md explains how.",
        epilog="To train or extend a SentencePiece model: python data_prep/tokenize.py train --help, or extend --help",
    )
    if texts and not texts[0].startswith("-"):
        raise ConfigError([f"command {texts[0]} is unknown: {nearest(texts[0], COMMANDS)}"])
    add = parser.add_argument
    add(
        "--tokenizer", metavar="MODEL", required=True,
        help="SentencePiece model, LLaMA-3's tokenizer.model, tokenizer.json of Hugging Face, or a directory with one",
    )
    add(
        "--source", metavar="NAME=GLOB", action="append", default=[],
        help="a source and its files: JSON lines, parquet, Arrow or plain text, also compressed with gzip or "
        "zstandard, also at a URL such as s3://BUCKET/*.gz; '-' is standard input; may be repeated",
    )
    add(
        "--recognize", metavar="DIR", action="append", default=[],
        help="a directory with files of known corpora (docs/data.md), whose content names their sources; may be "
        "repeated",
    )
    add("--only", metavar="NAME", nargs="+", default=[], help="use only these sources that --recognize finds")
    add(
        "--output", metavar="DIR", type=output_path, required=True,
        help="data directory; sources that are already in it stay",
    )
    cores = len(os.sched_getaffinity(0))
    add("--workers", metavar="N", type=at_least(1), default=cores, help="number of processes (default: one per core)")
    add("--text-key", metavar="KEY", default="text", help="key or column that holds the text (default: text)")
    add("--bos", action="store_true", help="put the beginning-of-sequence token before each document")
    add(
        "--engine", choices=("own", "gigatoken"), default="own",
        help="gigatoken encodes with a Hugging Face tokenizer faster; a sample of its ids is compared (default: own)",
    )
    add("--no-shuffle", action="store_true", help="keep the documents in order instead of shuffling each shard")
    add(
        "--unit-size", metavar="BYTES", type=size, default="128M",
        help="bytes of input per shard, where an input can be divided (default: 128M)",
    )
    add(
        "--max-bad-fraction", metavar="F", type=fraction,
        help="largest fraction of bad records with which a shard is written (default: 0.01, or up to 1000 bad records "
        "if they are at most nine tenths)",
    )
    flags = parser.parse_args(texts)
    if not flags.source and not flags.recognize:
        parser.error("nothing to tokenize: give --source NAME=GLOB or --recognize DIR")
    if flags.only and not flags.recognize:
        parser.error("--only chooses among the sources that --recognize DIR finds: give --recognize too")
    return flags


def train_flags(texts):
    what = "Train a SentencePiece BPE model with byte fallback, like LLaMA's, on a sample of the documents."
    parser = Parser(prog="python data_prep/tokenize.py train", description=what)
    add_sample_flags(parser)
    parser.add_argument("--vocab-size", metavar="N", type=pieces, default="65536", help="pieces (default: 65536)")
    parser.add_argument("--output", metavar="MODEL", type=output_path, required=True, help="model file to write")
    return parser.parse_args(texts)


def extend_flags(texts):
    what = "Add tokens for another kind of text to a vocabulary. The existing ids stay as they are."
    parser = Parser(prog="python data_prep/tokenize.py extend", description=what)
    add = parser.add_argument
    add("--tokenizer", metavar="MODEL", required=True, help="SentencePiece BPE model, or LLaMA-3's tokenizer.model")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--vocab-size", metavar="N", type=pieces, help="total number of tokens after the extension")
    which.add_argument("--add-pieces", metavar="FILE", help="new pieces for a SentencePiece model, one per line")
    add("--output", metavar="MODEL", type=output_path, required=True, help="file to write")
    add(
        "--old-input", metavar="GLOB", nargs="+", default=[],
        help="files with text of the old kind, whose tokens should change little",
    )
    add_sample_flags(parser)
    return parser.parse_args(texts)


def add_sample_flags(parser: Parser):
    add = parser.add_argument
    add(
        "--input", metavar="GLOB", nargs="+", default=[],
        help="files of any kind that can be tokenized; sampled in proportion to their size",
    )
    add(
        "--source", metavar="NAME=GLOB", action="append", default=[],
        help="instead of --input: a source and its files; may be repeated",
    )
    add(
        "--data-mix", metavar="NAME=WEIGHT", nargs="+", default=[], type=name_and_weight,
        help="weight of each source in the sample (default: in proportion to their size)",
    )
    add("--text-key", metavar="KEY", default="text", help="key or column that holds the text (default: text)")
    add("--sample-bytes", metavar="BYTES", type=size, default="256M", help="most text to train on (default: 256M)")


def size(text: str) -> int:
    value = quantity(1024)(text)
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def pieces(text: str) -> int:
    value = size(text)
    if value > MOST_PIECES:
        raise ValueError(f"must be at most {MOST_PIECES}")
    return value


def fraction(text):
    value = real(text)
    if not 0 <= value <= 1:
        raise ValueError("must be between 0 and 1")
    return value


def run(command: str, flags) -> int:
    from data_prep import sentencepiece_extension, sentencepiece_training, tokenization

    works = {"train": sentencepiece_training, "extend": sentencepiece_extension}
    return works.get(command, tokenization).run(flags)


COMMANDS = {"train": train_flags, "extend": extend_flags}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
