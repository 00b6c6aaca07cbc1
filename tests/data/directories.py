"""Shards and data directories for the tests: made of ids or of lengths, and opened as a run opens them."""

import numpy as np
import pytest

from moh_lm.config import ConfigError, DataConfig
from moh_lm.data.loader import Dataset, Loader
from moh_lm.data.reader import verify_shard
from moh_lm.data.shards import ShardError, ShardWriter, open_shard, write_manifest

VOCAB = 2**20
SEQ_LENGTH = 8
TOKENIZER = {"sha256": "a" * 64, "vocab_size": 65536, "eos_id": 2, "engine": "test"}


def write(prefix, documents, vocab_size=65536, tokenizer=TOKENIZER, inputs=()):
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with ShardWriter(prefix, vocab_size) as shard:
        for document in documents:
            shard.add(document)
        return shard.commit({"tokenizer": tokenizer, "inputs": list(inputs)})


def open_sound(prefix, **options):
    """``open_shard`` of a shard that is read in full."""
    shard = open_shard(prefix, **options)
    for problem in verify_shard(shard):
        raise ShardError(problem)
    return shard


def part(prefix, suffix):
    return prefix.with_name(prefix.name + suffix)


def counting(lengths, first):
    """Documents of ``lengths`` whose tokens count from ``first`` on."""
    ends = first + np.cumsum(lengths)
    return [np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True)]


def make_directory(path, sources, vocab_size=VOCAB, **facts):
    """A data directory: source -> shards -> lengths of documents. Every token of it is another number.

    facts: of the tokenizer.
    """
    token = 0
    for source, shards in sources.items():
        for number, lengths in enumerate(shards):
            tokenizer = {**TOKENIZER, **facts, "vocab_size": token + sum(lengths)}
            write(path / source / f"unit-{number}", counting(lengths, token), vocab_size, tokenizer)
            token += sum(lengths)
    write_manifest(path)
    return path


def open_dataset(data_dir, mix=(), fraction=0.1, seed=1, seq_length=SEQ_LENGTH, vocab_size=VOCAB):
    data = DataConfig(data_dir=str(data_dir), data_mix=tuple(mix), validation_fraction=fraction)
    return Dataset.open(data, seq_length=seq_length, seed=seed, vocab_size=vocab_size)


def loader(dataset, rank=0, size=1, global_batch_size=24, micro_batch_size=2, **options):
    return Loader(
        dataset,
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=rank,
        data_parallel_size=size,
        **options,
    )


def problems_of(*arguments, **options):
    with pytest.raises(ConfigError) as caught:
        open_dataset(*arguments, **options)
    return caught.value.problems
