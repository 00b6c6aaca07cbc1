"""The text on which a vocabulary is trained: a sample of all files, with sources weighted as in the mix.

Every unit of a source (data_prep/units.py) gives its first documents, in proportion to its size, so that the sample
spreads over all files and over the length of large ones. If a source has less text than its share of the sample, the
sample is as large as the text that was found and keeps the shares: lines of that source are repeated, and lines of
others are left out, evenly. The same inputs and options give the same sample.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator

from tqdm import tqdm

from data_prep.documents import HARMLESS, Piece, documents
from data_prep.inputs import source_patterns
from data_prep.report import progress_bar
from data_prep.units import Unit, plan_units
from moh_lm.config import ConfigError, DataConfig, raise_any
from moh_lm.data.mixture import data_problems

SAMPLED_UNIT = 16 << 20  # bytes of a unit; the sample takes its share from the beginning
LONGEST_SENTENCE = 4096  # bytes; SentencePiece would skip longer ones
RESERVED = {  # characters reserved by SentencePiece, and why lines are cut there
    "\0": "which SentencePiece cannot read",
    "\u2581": "which SentencePiece would turn into a space",
    "\u2585": "whose lines SentencePiece would skip",
}


def read_sample(flags: argparse.Namespace) -> list[bytes]:
    """The lines of the sample that the flags describe. Raises ConfigError, and InputError for an unreadable file."""
    sources = sampled_sources(flags)
    total = sum(weight for weight, _ in sources.values())
    drawn, problems, planned, expected = {}, [], {}, 0.0
    for name, (weight, globs) in sources.items():
        option = "--input " if flags.input else f"--source {name or 'NAME'}="
        units = plan_units(option, name, globs, text_key=flags.text_key, unit_size=SAMPLED_UNIT)
        planned[name] = option, units
        expected += min(text_bytes(units), flags.sample_bytes * weight / total)
    with progress_bar("sampling", round(expected)) as bar:
        for name, (weight, globs) in sources.items():
            option, units = planned[name]
            drawn[name] = []
            for sentence in sample_sentences(units, flags.text_key, flags.sample_bytes * weight / total):
                drawn[name].append(sentence)
                bar.update(len(sentence) + 1)
            if not drawn[name]:
                problems.append(f"{option}{' '.join(globs)}: holds no text; is --text-key {flags.text_key} right?")
        bar.total = bar.n  # less than expected if much of the input is not text
    raise_any(problems)
    return by_weight(drawn, {name: weight / total for name, (weight, _) in sources.items()})


def text_bytes(units: list[Unit]) -> float:
    """Return about the most bytes of text that ``units`` hold; infinity if some are compressed."""
    pieces = [piece for unit in units for piece in unit.pieces]
    packed = any(piece.container in ("gzip", "zstd") for piece in pieces)
    return math.inf if packed else sum(piece.num_bytes for piece in pieces)


def sampled_sources(flags) -> dict[str, tuple[float, list[str]]]:
    """Return {name: weight and patterns of a source}; without a mix, one without a name. Raises ConfigError."""
    if bool(flags.input) == bool(flags.source) or (flags.input and flags.data_mix):
        raise ConfigError(["give either --input GLOB ... or --source NAME=GLOB ...; --data-mix goes with the latter"])
    if flags.input:
        return {"": (1.0, flags.input)}
    patterns = source_patterns(flags.source)
    if not flags.data_mix:
        return {"": (1.0, sum(patterns.values(), []))}
    problems = data_problems(DataConfig(data_dir=".", data_mix=tuple(flags.data_mix)))
    weights = dict(flags.data_mix)
    if weights.keys() != patterns.keys():
        given, mixed = (", ".join(sorted(names)) for names in (patterns, weights))
        problems.append(f"--data-mix {mixed}: the sources are {given}; give a weight to each of them and to no other")
    raise_any(problems)
    return {name: (float(weights[name]), globs) for name, globs in patterns.items()}


def sample_sentences(units: list[Unit], text_key: str, sample_bytes: float) -> Iterator[bytes]:
    """Yield lines of the first documents of each unit, ``sample_bytes`` or a line more in all. Raises InputError.

    At the end it prints which bad records it left out, and where lines were cut.
    """
    total, left, bad, cuts = sum(unit.num_bytes for unit in units), 0.0, {}, Counter()
    for unit in units:
        left += sample_bytes * unit.num_bytes / max(1, total)  # on top of what earlier units left or took too much
        if left <= 0:
            continue
        texts = (text for piece in unit.pieces for text in good_texts(piece, text_key, bad))
        for sentence in (sentence for text in texts for sentence in sentences(text, cuts)):
            if left <= 0:
                break
            yield sentence
            left -= len(sentence) + 1  # with its newline
    for reason, files in bad.items():
        words = f"left out of the sample: {files.total():,} {reason}, the first in {next(iter(files))}"
        tqdm.write(words, file=sys.stderr)
    for character, count in cuts.items():
        words = f"lines of the sample were cut at {count:,} characters U+{ord(character):04X}, {RESERVED[character]}"
        tqdm.write(words, file=sys.stderr)


def good_texts(piece: Piece, text_key: str, bad: dict[str, Counter]) -> Iterator[str]:
    """Yield the texts of ``piece``, and count other records in ``bad``, {reason: {file: records}}."""
    for document in documents(piece, text_key):
        if document.text:
            yield document.text
        elif document.dropped not in HARMLESS:
            bad.setdefault(document.dropped, Counter())[piece.origin] += 1


def sentences(text: str, cuts: Counter[str]) -> Iterator[bytes]:
    """Yield the lines of a text on which SentencePiece can train, cut at RESERVED characters, which are counted.

    Long lines are cut at spaces.
    """
    for character in RESERVED:
        if character in text:
            cuts[character] += text.count(character)
            text = text.replace(character, "\n")
    for line in text.split("\n"):
        line, start = line.encode(), 0
        while len(line) - start > LONGEST_SENTENCE:
            cut = line.rfind(b" ", start + 1, start + LONGEST_SENTENCE)
            if cut < 0:
                cut = start + LONGEST_SENTENCE
                while line[cut] & 0xC0 == 0x80:  # inside a UTF-8 character
                    cut -= 1
            yield line[start:cut]
            start = cut
        if start < len(line):
            yield line[start:]


def by_weight(drawn: dict[str, list[bytes]], shares: dict[str, float]) -> list[bytes]:
    """Return as many bytes as were drawn. Each source gets its share: its lines are repeated or left out evenly."""
    sizes = {name: sum(len(line) + 1 for line in lines) for name, lines in drawn.items()}
    sample = []
    for name, lines in drawn.items():
        copies = sum(sizes.values()) * shares[name] / sizes[name]
        if name:
            print(f"{name}: {shares[name]:.2%} of the sample ({copies:.2f} times {sizes[name]:,} bytes of text)")
        for number, line in enumerate(lines):
            sample += [line] * (int((number + 1) * copies + 0.5) - int(number * copies + 0.5))
    return sample
