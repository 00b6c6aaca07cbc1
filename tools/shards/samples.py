"""Samples of a run and documents of a source, with their pieces of text."""

import sys
from itertools import pairwise
from pathlib import Path

from moh_lm.config import Config, ConfigError, DataConfig, flag
from moh_lm.data.dataset import Dataset
from moh_lm.data.segments import PACKING
from moh_lm.data.shards import tokenizer_file
from moh_lm.data.tokenizer import read_model
from moh_lm.parsing import parse_json

ANY_VOCABULARY = 2**31


def open_dataset(config):
    run = config.run
    sizes = dict(seq_length=run.seq_length, seed=run.seed, vocab_size=ANY_VOCABULARY)
    return Dataset.open(config.data, **sizes, decay_begins=config.decay_begins())


def sampled_dataset(config, given):
    """The data of the run. If they are too small for a run, settings that are not ``given`` are changed until they
    suffice."""
    changes = [{}]
    if "validation_fraction" not in given:
        changes.append({"validation_fraction": 0.0})
    if "seq_length" not in given:
        shorter = (config.run.seq_length >> halvings for halvings in range(1, config.run.seq_length.bit_length()))
        changes += [{**changes[-1], "seq_length": seq_length} for seq_length in shorter]
    refusals = []
    for change in changes:
        try:
            dataset = open_dataset(Config.from_dict({**config.to_dict(), **change}))
        except ConfigError as error:
            refusals.append(error)
            continue
        if change:
            flags = " ".join(f"{flag(name)} {value:g}" for name, value in change.items())
            print(f"inspect_data: too little data for a run with the defaults; these are samples with {flags}",
                  file=sys.stderr)  # fmt: skip
        return dataset
    raise refusals[0]


def decoder(arguments):
    """A function from token ids to text; without a tokenizer the ids themselves are written."""
    path = arguments.tokenizer or tokenizer_file(arguments.directory)
    if path is None:
        return lambda ids: " ".join(map(str, ids))
    model = read_model(path)
    return lambda ids: model.decode([token for token in ids if token < model.vocab_size()])


def read_sample(dataset, number, decode):
    """Return the window or packed row of a run's sample ``number``, as pieces of documents."""
    source, epoch, position = (int(column[0]) for column in dataset.mixture_of(number).locate([number]))
    stream = dataset.sources[source].training
    _, (row,) = dataset.rows([number])
    last_label = 0 if dataset.packer else 1
    pieces = []
    for part in row:
        for shard, first, end in stream.pieces(part.first, part.count + last_label):
            pieces += pieces_of(shard, first, end, decode)
    name, position = dataset.source_names[source], row[0].first if dataset.packer else position
    return {"sample": number, "source": name, "epoch": epoch, "position": position, "pieces": pieces}


def pieces_of(shard, first, end, decode):
    """Tokens ``first`` to ``end`` - 1 of a shard, document by document."""
    with shard.document_starts() as starts:
        bounds = [first, *starts.inside(first + 1, end), end]
        numbers = [starts.number(start) for start in bounds[:-1]]
    places = zip(numbers, pairwise(bounds), strict=True)
    return [piece(shard, document, start, stop, decode) for document, (start, stop) in places]


def piece(shard, document, start, stop, decode):
    """Tokens ``start`` to ``stop`` - 1 of a shard, which belong to its ``document``."""
    ids = shard.read(start, stop - start).tolist()
    return {"shard": Path(shard.prefix).name, "document": document, "first": start, "ids": ids, "text": decode(ids)}


def dataset_of_state(arguments, number):
    """The data of the segment that contains sample ``number``, from the state of a checkpoint."""
    try:
        state = parse_json(Path(arguments.state).read_text(encoding="utf-8"))
        consumed = state["consumed_samples"]
        read = [segment for segment in state["data"]["segments"] if segment["first_sample"] <= number]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"--state {arguments.state}: is not the state.json of a checkpoint ({error})"]) from error
    if not read:
        remedy = "belongs to an import that has read no data; give the state of a later step"
        raise ConfigError([f"--state {arguments.state}: {remedy}"])
    if number >= consumed:
        print(f"inspect_data: this checkpoint has read {consumed} samples and not yet sample {number}; the run will "
              "read another one there if its data change, such as at its --decay-mix", file=sys.stderr)  # fmt: skip
    segment = read[-1]
    data = DataConfig(
        data_dir=arguments.directory,
        data_mix=tuple((name, str(weight)) for name, weight in segment["weights"].items()),
        validation_fraction=segment["validation_fraction"],
        packing=segment.get("packing", PACKING),
    )
    dataset = Dataset.open(data, seq_length=segment["seq_length"], seed=segment["seed"], vocab_size=ANY_VOCABULARY)
    now = dataset.fingerprint()["shards"]
    changed = [name for name, identity in segment["shards"].items() if now[name] != identity]
    if changed:
        raise ConfigError([
            f"--sample {number}: was read when source {', '.join(changed)} had other shards than {arguments.directory} "
            "has now; give the earlier directory"
        ])
    dataset.mixture = dataset.mixture.after(segment["first_sample"], segment["consumed"])
    return dataset


def read_document(sources, text, decode):
    """Return the document named by ``text``, SOURCE:N."""
    name, separator, number = text.rpartition(":")
    if not separator or not number.isdecimal() or name not in sources:
        first, names = next(iter(sources), "NAME"), ", ".join(sources) or "none"
        raise ConfigError([f"--document {text}: write SOURCE:N, such as {first}:0; sources: {names}"])
    number, before = int(number), 0
    for shard in sources[name]:
        if number < before + shard.num_documents:
            with shard.document_starts() as starts:
                local = number - before
                start = starts[local]
                stop = starts[local + 1] if local + 1 < len(starts) else shard.num_tokens
            return {"source": name, "number": number, **piece(shard, local, start, stop, decode)}
        before += shard.num_documents
    raise ConfigError([f"--document {text}: source {name} has {before:,} documents; choose one from 0 to {before - 1}"])
