"""The text on which a head report measures: the requested number of tokens from each domain, in windows.

A domain is NAME=FILES, text in any form that data_prep/tokenize.py reads, or NAME=DIR, token shards: a data directory,
the directory of one of its sources, or shards of other tools, also the PREFIX of one pair. DIR alone, a data directory,
makes every source a domain.

Windows of shards are spaced evenly over all tokens, held-out parts included. Each file gives the same number of tokens
from its beginning, or all its tokens if there are fewer. Windows join documents as training without
--reset-at-documents does; each document ends with the end-of-sequence token.
"""

import os
import re
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from data_prep.containers import InputError
from data_prep.documents import documents, inspect_file
from data_prep.inputs import matching_files
from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import beside
from moh_lm.data.source import Stream
from tools.shards.directory import open_directory

SHORTEST = 32  # fewest tokens of a domain
LONGEST_TOKEN = 32  # characters of a long document that are encoded for each requested token


class Domain(NamedTuple):
    """windows: int64 [s] each, of one length. dropped: documents that could not be read, by reason."""

    name: str
    windows: list
    dropped: Counter


def read_domains(entries, tokenizer, vocab_size, seq_length, num_tokens, text_key):
    """The ``Domain``s of the --data ``entries``, about ``num_tokens`` tokens of each. Raises ConfigError, ShardError.

    tokenizer: ``data_prep.encoding.Tokenizer`` of the model.
    """
    found = {}
    for entry in entries:
        name, separator, place = entry.partition("=")
        if not separator:
            name, place = "", entry
        shards = os.path.isdir(place) or os.path.exists(beside(place, ".idx"))
        if shards:
            windows = read_shards(entry, name, place, tokenizer, seq_length, num_tokens)
            domains = [Domain(name, windows, Counter()) for name, windows in windows.items()]
        elif not separator or not name:
            raise ConfigError([f"--data {entry}: is not a directory of shards; give one, or NAME=FILES or NAME=DIR"])
        else:
            domains = [read_text(name, place, tokenizer, seq_length, num_tokens, text_key)]
        for domain in domains:
            if re.search("[\ud800-\udfff]", domain.name):
                raise ConfigError([f"--data {entry}: its name is not UTF-8; give NAME=FILES with one in UTF-8"])
            if domain.name in found:
                raise ConfigError([f"--data {entry}: {domain.name} is given twice; give each domain its own name"])
            found[domain.name] = domain
    largest = {name: max(int(window.max()) for window in domain.windows) for name, domain in found.items()}
    problems = [
        f"--data {name}: has the token {token}, but the model's vocabulary is {vocab_size}; give data of its tokenizer"
        for name, token in largest.items()
        if token >= vocab_size
    ]
    raise_any(problems)
    return list(found.values())


def read_shards(entry, name, place, tokenizer, seq_length, num_tokens):
    """{domain: windows} for every source, or for all sources together under ``name``."""
    sources, problems = open_directory(place)
    raise_any(problems)
    shards = [shard for shards in sources.values() for shard in shards]
    made_with = {shard.sidecar["tokenizer"]["sha256"] for shard in shards if shard.sidecar}
    if made_with - {tokenizer.description["sha256"]}:
        advice = "give its text instead, or the run that was exported"
        raise ConfigError([f"--data {entry}: was made with another tokenizer file than the model's; {advice}"])
    domains = {name: shards} if name else sources
    return {name: shard_windows(name, shards, seq_length, num_tokens) for name, shards in domains.items()}


def shard_windows(name, shards, seq_length, num_tokens):
    stream = Stream((shard, 0, shard.num_tokens) for shard in shards)
    length = min(seq_length, stream.num_tokens)
    check_length(name, length)
    count = max(1, min(num_tokens, stream.num_tokens) // length)
    positions = np.linspace(0, stream.num_tokens - length, count).astype(np.int64)
    return [torch.from_numpy(stream.read(int(position), length)) for position in positions]


def read_text(name, pattern, tokenizer, seq_length, num_tokens, text_key):
    files, parts, left, dropped = matching_files(f"--data {name}=", [pattern]), [], num_tokens, Counter()
    for number, file in enumerate(files):
        share = -(-left // (len(files) - number))
        try:
            parts.append(first_tokens(readable(file, text_key, dropped), tokenizer, share))
        except InputError as error:
            raise ConfigError([f"--data {name}: {error}"]) from error
        left -= len(parts[-1])
    return Domain(name, windows_of(name, np.concatenate(parts), seq_length), dropped)


def windows_of(name, tokens, seq_length):
    """Windows, int64 [s] each, of the ``tokens`` of a domain, int64 [n], from their beginning on."""
    length = min(seq_length, len(tokens))
    check_length(name, length)
    count = len(tokens) // length
    return list(torch.from_numpy(tokens[: count * length]).view(count, length))


def readable(file, text_key, dropped):
    """Yield the texts of a file (path, name), and count the other documents in ``dropped``."""
    for document in documents(inspect_file(*file), text_key):
        if document.text is None:
            dropped[document.dropped] += 1
        else:
            yield document.text


def first_tokens(texts, tokenizer, wanted):
    """Return the first ``wanted`` tokens of texts, or all of them, int64 [tokens]. Reads no more texts than needed."""
    found, size = [np.zeros(0, np.int64)], 0
    for text in texts:
        found.append(tokenizer.encode(text[: LONGEST_TOKEN * wanted]).astype(np.int64))
        size += len(found[-1])
        if size >= wanted:
            break
    return np.concatenate(found)[:wanted]


def check_length(name, length):
    if length < SHORTEST:
        raise ConfigError([f"--data {name}: has {length} tokens; give at least {SHORTEST}"])


def frequency_ranks(domains, vocab_size):
    """Return (rank of each token by its count in the windows, 0 for the most frequent; the counts), both int64 [vocab].

    Among equally frequent tokens, a higher id counts as rarer, because vocabularies list frequent pieces first.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for domain in domains:
        for window in domain.windows:
            counts += torch.bincount(window, minlength=vocab_size)
    order = counts.sort(descending=True, stable=True).indices
    return torch.empty_like(order).scatter(0, order, torch.arange(vocab_size)), counts


def repeated_sequences(ranks, counts, start, examples=10, length=25, repeats=4):
    """Return Olsson et al.'s test text: repeated random tokens after a start token, int64 [examples, tokens].

    The tokens of an example are distinct, drawn from those in the text except the most and the least frequent tenth.
    start: the token after which documents begin.
    """
    present = ranks.argsort()[: int((counts > 0).sum())]
    present = present[present != start]
    tenth = len(present) // 10
    drawn = present[tenth : len(present) - tenth]
    generator = torch.Generator().manual_seed(0)
    rows = [drawn[torch.randperm(len(drawn), generator=generator)[:length]].repeat(repeats) for _ in range(examples)]
    return torch.cat((torch.full((examples, 1), start), torch.stack(rows)), dim=1)
