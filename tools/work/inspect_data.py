"""The work of tools/inspect_data.py: what is in the shards, and how it is shown."""

import json
import sys
import textwrap
from bisect import bisect_right
from pathlib import Path

from data_prep.report import table
from moh_lm.config import Config, ConfigError, DataConfig
from moh_lm.data.dataset import Dataset
from moh_lm.data.files import ShardError
from moh_lm.data.shards import tokenizer_files
from moh_lm.data.tokenizer import read_model
from moh_lm.parsing import parse_json
from tools.shards.directory import open_directory, sum_of, summarize, verify

ANY_VOCABULARY = 2**31
FAILURES = ()
COUNTED = ("name", "shards", "documents", "tokens")  # columns of the table
LENGTHS = (1, 16, 64, 256, 1024, 4096, 16384, 65536)  # tokens; powers of two at which a column of the table begins


def run(arguments):
    try:
        report, problems = inspect(arguments, arguments.config)
    except ShardError as error:
        report, problems = {}, [str(error)]
    if arguments.json:
        print(json.dumps({**report, "problems": problems}, indent=1))
    else:
        print("".join(f"{line}\n" for line in describe(report)), end="")
    print("".join(f"inspect_data: {problem}\n" for problem in problems), file=sys.stderr, end="")
    return 1 if problems else 0


def inspect(arguments, config):
    """(what was asked for, by kind; sentences for what is damaged). Raises ConfigError and ShardError."""
    if arguments.sample is not None:
        decode = decoder(arguments)
        dataset = None if arguments.state else sampled_dataset(config, arguments.values)
        samples = [
            read_sample(dataset or dataset_of_state(arguments, number), number, decode) for number in arguments.sample
        ]
        return {"samples": samples}, []
    sources, problems = open_directory(arguments.directory)
    if arguments.document and problems:
        return {}, problems  # a number would be that of another document
    if arguments.document:
        decode = decoder(arguments)
        return {"documents": [read_document(sources, text, decode) for text in arguments.document]}, problems
    if arguments.verify:
        shards = [shard for shards in sources.values() for shard in shards]
        unknown = sum(shard.sidecar is None for shard in shards)
        return {"verified": len(shards), "without_checksums": unknown}, problems + verify(shards)
    rows, contradictions = summarize(sources)
    report = {"sources": rows}
    if config.run.train_iters is not None:
        report["plan"] = open_dataset(config).plan(config.run.train_iters * config.run.global_batch_size)
        report["plan_tokens"] = config.run.train_iters * config.run.tokens_per_iteration
    return report, problems + contradictions


def open_dataset(config):
    run = config.run
    sizes = dict(seq_length=run.seq_length, seed=run.seed, vocab_size=ANY_VOCABULARY)
    return Dataset.open(config.data, **sizes, decay_begins=config.decay_begins())


def sampled_dataset(config, given):
    """The data of the run; where it is too small for one, with as much changed of what is not ``given`` as it takes."""
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
            flags = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in change.items())
            print(f"inspect_data: too little data for a run with the defaults; these are samples with {flags}",
                  file=sys.stderr)  # fmt: skip
        return dataset
    raise refusals[0]


def decoder(arguments):
    """A function from token ids to text; without a tokenizer the ids themselves are written."""
    path = arguments.tokenizer or next(iter(tokenizer_files(arguments.directory)), None)
    if path is None:
        return lambda ids: " ".join(map(str, ids))
    model = read_model(path)
    return lambda ids: model.decode([token for token in ids if token < model.vocab_size()])


def read_sample(dataset, number, decode):
    """The window that sample ``number`` of a run is, in the pieces of documents that it is made of."""
    source, epoch, position = (int(column[0]) for column in dataset.mixture_of(number).locate([number]))
    stream = dataset.sources[source].training
    pieces = []
    for shard, first, end in stream.pieces(position, dataset.mixture.seq_length + 1):
        with shard.document_starts() as starts:
            bounds = [first, *starts.inside(first + 1, end), end]
            numbers = [starts.number(start) for start in bounds[:-1]]
        for document, start, stop in zip(numbers, bounds, bounds[1:], strict=False):
            pieces.append(piece(shard, document, start, stop, decode))
    name = dataset.source_names[source]
    return {"sample": number, "source": name, "epoch": epoch, "position": position, "pieces": pieces}


def piece(shard, document, start, stop, decode):
    """Tokens ``start`` to ``stop`` - 1 of a shard, which belong to its ``document``."""
    ids = shard.read(start, stop - start).tolist()
    return {"shard": Path(shard.prefix).name, "document": document, "first": start, "ids": ids, "text": decode(ids)}


def dataset_of_state(arguments, number):
    """The data of the segment that ``number`` is in, as the state of a checkpoint describes it."""
    try:
        state = parse_json(Path(arguments.state).read_text(encoding="utf-8"))
        consumed = state["consumed_samples"]
        read = [segment for segment in state["data"]["segments"] if segment["first_sample"] <= number]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"--state {arguments.state}: not the state.json of a checkpoint ({error})"]) from error
    if not read:
        raise ConfigError([f"--state {arguments.state}: of an import that has read no data; give that of a later step"])
    if number >= consumed:
        print(f"inspect_data: sample {number} is not read yet at this checkpoint of {consumed} samples; the run reads "
              "another there if it goes on with other data, such as at its --decay-mix", file=sys.stderr)  # fmt: skip
    segment = read[-1]
    data = DataConfig(
        data_dir=arguments.directory,
        data_mix=tuple((name, str(weight)) for name, weight in segment["weights"].items()),
        validation_fraction=segment["validation_fraction"],
    )
    dataset = Dataset.open(data, seq_length=segment["seq_length"], seed=segment["seed"], vocab_size=ANY_VOCABULARY)
    now = dataset.fingerprint()["shards"]
    changed = [name for name, identity in segment["shards"].items() if now[name] != identity]
    if changed:
        raise ConfigError([
            f"--sample {number}: was read when source {', '.join(changed)} had other shards than {arguments.directory} "
            "has now; give the directory as it was"
        ])
    dataset.mixture = dataset.mixture.after(segment["first_sample"], segment["consumed"])
    return dataset


def read_document(sources, text, decode):
    """The document that ``text``, SOURCE:N, names."""
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


def describe(report):
    """Lines of at most 100 columns if the names of sources have at most 24."""
    if "sources" in report:
        yield from describe_sources(report["sources"])
    if "plan" in report:
        yield from describe_plan(report["plan"], report["plan_tokens"])
    if "verified" in report:
        unknown = report["without_checksums"]
        yield f"{report['verified']:,} shards read in full" + (f", {unknown:,} have no checksums" if unknown else "")
    for sample in report.get("samples", ()):
        place = f"epoch {sample['epoch']}, from token {sample['position']:,} of its training tokens on"
        yield f"sample {sample['sample']:,}: source {sample['source']}, {place}"
        for part in sample["pieces"]:
            yield from describe_piece(part)
    for document in report.get("documents", ()):
        yield f"document {document['number']:,} of source {document['source']}"
        yield from describe_piece(document)


def describe_piece(part):
    last = part["first"] + len(part["ids"]) - 1
    yield f"--- {part['shard']}, document {part['document']:,}, tokens {part['first']:,} to {last:,}"
    for line in part["text"].split("\n"):
        shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line.expandtabs())
        yield from textwrap.wrap(shown, 100, drop_whitespace=False) or [""]


def describe_sources(rows):
    shown = [*rows, sum_of("all", rows)] if len(rows) > 1 else rows
    lines, lengths = [], []
    for row in shown:
        rate = "-" if row["text_bytes"] is None or not row["tokens"] else f"{row['text_bytes'] / row['tokens']:.2f}"
        dropped = sum(row["dropped"].values())
        lines.append([*(row[key] for key in COUNTED), rate, dropped, ", ".join(row["dtypes"])])
        counts = [0] * len(LENGTHS)
        for shortest, count in row["lengths"].items():
            counts[max(0, bisect_right(LENGTHS, shortest) - 1)] += count
        documents = max(1, row["documents"])
        shares = [f"{count / documents:.1%}" for count in counts]
        lengths.append([row["name"], *shares, f"{row['tokens'] / documents:,.0f}", row["longest"]])
    yield from table(["source", *COUNTED[1:], "bytes/token", "dropped", "dtype"], lines, left=(0, 6))
    for row in rows:
        for reason, count in row["dropped"].items():
            yield f"dropped of {row['name']}: {count:,} {reason}"
    yield from ("", "documents by length in tokens")
    starts = [f"{start // 1024}K-" if start >= 1024 else f"{start}-" for start in LENGTHS]
    yield from table(["source", *starts, "mean", "longest"], lengths)


def describe_plan(rows, tokens):
    yield from ("", f"plan of {tokens:,} tokens")
    lines = [
        [row["name"], f"{row['share']:.2%}", row["samples"], row["windows"], f"{row['epochs']:.3f}",
         row["validation_windows"]]
        for row in rows
    ]  # fmt: skip
    yield from table(["source", "share", "samples", "windows", "epochs", "held-out windows"], lines)
