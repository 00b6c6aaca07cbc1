"""Text in, token shards out; and, as ``tokenize.py train``, text in, SentencePiece model out.

    python data_prep/tokenize.py --tokenizer M.model --source NAME=GLOB [--source ...] --output DIR [--workers N]
    python data_prep/tokenize.py train --input GLOB [GLOB ...] --vocab-size 65536 --output M.model

The inputs (documents.py) are cut into units (units.py). Each becomes a shard (encoding.py) of the data directory DIR
(output.py; its layout: moh_lm/data/shards.py) in one of several processes (workers.py). A restart keeps the shards that
are complete; a shard that an earlier run made of the same input with other content or options is replaced.
Exit codes: 0 complete, 1 an input failed, 2 wrong usage.
"""

import os
import sys

if __name__ == "__main__":
    # Python put this file's directory first, where this very file hides the standard module `tokenize`.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

import argparse
import re
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from data_prep import sentencepiece_training
from data_prep.encoding import Options, Tokenizer
from data_prep.output import finished_sidecar, only_run, replaced_shards, sweep, writable_directory
from data_prep.units import plan_units
from data_prep.workers import run_units
from moh_lm.config import ConfigError
from moh_lm.data.shards import ShardError, publish, write_manifest
from moh_lm.flags import Parser, quantity

SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def main(arguments: list[str]) -> int:
    try:
        if arguments[:1] == ["train"]:
            return sentencepiece_training.main(arguments[1:])
        return tokenize_command(arguments)
    except ConfigError as error:
        for problem in error.problems:
            print(f"tokenize.py: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ntokenize.py: stopped; the same command goes on from here", file=sys.stderr)
        return 130


def tokenize_command(arguments: list[str]) -> int:
    flags = tokenize_flags(arguments)
    patterns = source_patterns(flags.source)
    tokenizer = Tokenizer(flags.tokenizer)
    options = Options(text_key=flags.text_key, shuffle=not flags.no_shuffle)
    units, failures = plan(patterns, options, flags.unit_size, tokenizer)
    output = writable_directory(flags.output)
    with only_run(output):
        replaced = replaced_shards(output, units, tokenizer)
        sweep(output, patterns)
        publish(output / "tokenizer.model", Path(flags.tokenizer).read_bytes())
        finished = {unit: sidecar for unit in units if (sidecar := finished_sidecar(output, unit))}
        for source in patterns:
            complete = [unit in finished for unit in units if unit.source == source]
            print(f"{source}: {len(complete)} shards, {sum(complete)} of them complete already", flush=True)

        missing = [unit for unit in units if unit not in finished]
        with progress_bar(missing) as bar:
            tokens = 0
            for unit, event, value in run_units(missing, flags.workers, flags.tokenizer, options, str(output)):
                if event == "progress":
                    tokens += value[1]
                    bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)
                    bar.update(value[0])
                elif event == "done":
                    finished[unit] = value
                else:
                    failures[unit.source].append(f"{unit.source}/{unit.name}: {value}")

        for source in patterns:
            if not failures[source] and not any(finished[unit]["documents"] for unit in units if unit.source == source):
                failures[source].append(f"{source}: holds no document; is --text-key right?")
        replaced = [path for path in replaced if not failures[path.parent.name]]
        for path in replaced:
            path.unlink()  # the sidecar; what is without one, the sweep removes
        try:
            write_manifest(output)
        except ShardError as error:
            failures["manifest"] = [str(error)]
        sweep(output, patterns)
    if replaced:
        print(f"replaced {len(replaced)} shards that an earlier run made of the same inputs")
    print_summary(patterns, finished)
    for sentence in sum(failures.values(), []):
        print(f"tokenize.py: failed: {sentence}", file=sys.stderr)
    return 1 if any(failures.values()) else 0


def tokenize_flags(arguments):
    parser = Parser(
        prog="python data_prep/tokenize.py",
        description="Encode text with a SentencePiece model into token shards.",
        epilog="To train a SentencePiece model: python data_prep/tokenize.py train --help",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--tokenizer", metavar="MODEL", required=True, help="SentencePiece model")
    add(
        "--source", metavar="NAME=GLOB", required=True, action="append",
        help="a source and its files: JSON lines, parquet or plain text, also in gzip or zstandard; may be repeated",
    )
    add("--output", metavar="DIR", required=True, help="data directory; sources that it has already stay")
    cores = len(os.sched_getaffinity(0))
    add("--workers", metavar="N", type=positive, default=cores, help="processes (default: one per core)")
    add("--text-key", metavar="KEY", default="text", help="key or column that holds the text (default: text)")
    add("--no-shuffle", action="store_true", help="keep the documents in order instead of shuffling each shard")
    add(
        "--unit-size", metavar="BYTES", type=size, default="128M",
        help="bytes of input per shard, where an input can be divided (default: 128M)",
    )
    return parser.parse_args(arguments)


def size(text):
    try:
        return positive(quantity(1024)(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: must be at least 1")
    return value


def source_patterns(sources: list[str]) -> dict[str, list[str]]:
    """Source name -> its patterns, from NAME=GLOB. Raises ConfigError."""
    patterns, problems = {}, []
    for source in sources:
        name, separator, pattern = source.partition("=")
        if not separator or not pattern:
            problems.append(f"--source {source}: write NAME=GLOB, such as --source 'wikipedia=text/wiki/*.jsonl.gz'")
        elif not SOURCE_NAME.fullmatch(name):
            problems.append(f"--source {source}: begin the name with a letter or digit, then also '.', '_' or '-'")
        else:
            patterns.setdefault(name, []).append(pattern)
    if problems:
        raise ConfigError(problems)
    return patterns


def plan(patterns, options, unit_size, tokenizer):
    """The units of all sources, and source -> sentences for its unreadable inputs. Raises ConfigError."""
    units, failures, problems = [], {}, []
    identity = {"tokenizer": tokenizer.description["sha256"], **vars(options)}
    for source, globs in patterns.items():
        try:
            planned, failures[source] = plan_units(
                f"--source {source}=", source, globs, text_key=options.text_key, unit_size=unit_size, identity=identity
            )
            units += planned
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return units, failures


def progress_bar(units):
    return tqdm(
        desc="tokenizing",
        total=sum(unit.num_bytes for unit in units),
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 30,
        disable=not units,
    )


def print_summary(sources, finished):
    print(f"{'source':24} {'files':>8} {'documents':>12} {'tokens':>16} {'bytes/token':>12}  dropped")
    for source in sources:
        sidecars = [sidecar for unit, sidecar in finished.items() if unit.source == source]
        files = len({made_of["path"] for sidecar in sidecars for made_of in sidecar["inputs"]})
        documents, tokens, text_bytes = (sum(s[key] for s in sidecars) for key in ("documents", "tokens", "text_bytes"))
        dropped = sum((Counter(sidecar["dropped"]) for sidecar in sidecars), Counter())
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items())) or "none"
        print(f"{source:24} {files:8,} {documents:12,} {tokens:16,} {text_bytes / max(1, tokens):12.2f}  {reasons}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
