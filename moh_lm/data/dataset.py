"""The data of a run: the sources of a data directory, their mixture, and what the run has read before."""

import difflib
import gc
from contextlib import contextmanager
from itertools import takewhile
from os.path import basename

import numpy as np

from moh_lm.config import ConfigError, DataConfig, raise_any
from moh_lm.data.mixture import Mixture, data_problems, integer_weights
from moh_lm.data.packing import Packer, Piece
from moh_lm.data.segments import PACKING, changes, next_segments, tokens_read, windows_read
from moh_lm.data.shards import ShardError, open_source, read_manifest, tokenizer_file
from moh_lm.data.source import Source
from moh_lm.data.training_data import TrainingData


@contextmanager
def without_collection():
    """Pause the garbage collector: thousands of new shards make it look through all objects of torch in vain."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Dataset(TrainingData):
    """The sources of a run and their mixture, made by ``Dataset.open``. notes: remarks for the user.

    segments: what the run has read so far (segments.py). decay: the first sample and the mixture of the decay, or None.
    num_pieces: pieces of the tokenizer, None if unknown. bos_id: the token that begins every document, or None.
    """

    def __init__(
        self, sources, mixture, data: DataConfig, notes: list[str], segments: list[dict] | None = None, decay=None,
        bos_id: int | None = None, num_pieces: int | None = None,
    ):  # fmt: skip
        self.sources: list[Source] = sources
        self.mixture: Mixture = mixture
        self.source_names: list[str] = mixture.names
        self.data = data
        self.notes = notes
        self.bos_id, self.num_pieces = bos_id, num_pieces
        self.segments = segments or next_segments([], self.fingerprint(), 0)
        self.decay: tuple[int, Mixture] | None = None
        if decay:
            first, later = decay
            self.decay = first, later.after(first, self.consumed(self.segments, first))
        self.tokenizer_path = tokenizer_file(data.data_dir)
        self.packer = None
        if data.packing == "best_fit":
            self.packer = Packer(mixture, [source.training for source in self.sources])

    @classmethod
    @without_collection()
    def open(
        cls, data: DataConfig, *, seq_length: int, seed: int, vocab_size: int, decay_begins: int | None = None,
        validates: bool = True, compares_sizes: bool = True,
    ) -> "Dataset":  # fmt: skip
        """Open the sources of ``data.data_mix``, or of the whole directory. Raises ConfigError with every problem.
        decay_begins: the first sample of ``data.decay_mix``, or None. validates: refuse sources too small for that.
        compares_sizes: see ``open_source``."""
        problems = data_problems(data)
        raise_any(problems)
        try:
            manifest = read_manifest(data.data_dir)
        except ShardError as error:
            remedy = "" if "; " in str(error) else "; give a directory that data_prep/tokenize.py has finished"
            raise ConfigError([f"--data-dir {data.data_dir}: {error}{remedy}"]) from error
        present = manifest["sources"]
        mixed = [name for name, _ in data.data_mix] or list(present)
        decay = dict(data.decay_mix) if decay_begins is not None else {}
        names = [*mixed, *(name for name in decay if name not in mixed)]
        problems += unknown_sources("--data-mix", mixed, list(present))
        problems += unknown_sources("--decay-mix", [name for name in decay if name not in mixed], list(present))
        known = [name for name in names if name in present]
        sources, found = open_sources(data, known, manifest, seq_length, validates, compares_sizes)
        problems += found + vocabulary_problems(sources, vocab_size, manifest["tokenizer"])
        if not names:
            problems.append(f"--data-dir {data.data_dir}: holds no source; run data_prep/tokenize.py")
        num_tokens = {source.name: source.training.num_tokens for source in sources}
        weights = dict(data.data_mix) or {name: str(tokens) for name, tokens in num_tokens.items() if tokens}
        for mix in (weights, decay):
            try:
                integer_weights(mix)
            except ConfigError as error:
                problems += error.problems
        raise_any(problems)

        common = dict(seq_length=seq_length, seed=seed, names=sorted(names))
        mixture = Mixture(weights, num_tokens, **common)
        later = Mixture(decay, num_tokens, **common) if decay else None
        notes = notes_of(mixture, sorted(present.keys() - set(names)), sources, data.validation_fraction)
        stage = None
        if decay and later.weights.tolist() != mixture.weights.tolist():
            stage = decay_begins, later
            shares = ", ".join(f"{name} {share:.2%}" for name, share in later.shares().items() if share)
            notes.append(f"from sample {decay_begins:,} on: {shares} (--decay-mix)")
        sources.sort(key=lambda source: source.name)
        bos_id, num_pieces = map(manifest["tokenizer"].get, ("bos_id", "vocab_size"))
        return cls(sources, mixture, data, notes, decay=stage, bos_id=bos_id, num_pieces=num_pieces)

    @property
    def shares(self) -> dict[str, float]:
        """The share of each source in the mix; if the decay changes it, the smaller one."""
        first, second = self.mixture.shares(), (self.decay[1] if self.decay else self.mixture).shares()
        return {name: min(first[name], second[name]) for name in first}

    def mixture_of(self, sample: int) -> Mixture:
        """Return the mixture of sample number ``sample``; for -1, the mixture with which a run starts."""
        return self.decay[1] if self.decay and sample >= self.decay[0] else self.mixture

    def rows(self, samples) -> tuple[np.ndarray, list[list[Piece]]]:
        """Map sample numbers [n] of one mixture to their sources, int64 [n], and the pieces of the training stream that
        each consists of. Only packed rows know where documents begin."""
        source, epoch, position = self.mixture_of(int(samples[0])).locate(samples)
        places = zip(source.tolist(), epoch.tolist(), position.tolist(), strict=True)
        if self.packer:
            return source, [self.packer.row(*place) for place in places]
        return source, [[Piece(first, self.mixture.seq_length)] for _, _, first in places]

    def tokens_read(self, samples: int) -> int:
        """Return the tokens of the first ``samples`` samples, whose --seq-length may have changed."""
        return tokens_read(self.segments, samples, self.mixture.seq_length)

    def bytes_per_token(self) -> dict[str, float | None]:
        return {source.name: source.bytes_per_token for source in self.sources}

    def plan(self, num_samples: int) -> list[dict]:
        """Return what the first ``num_samples`` samples take from each source, and the size of each source.

        After a change of data, ``samples`` and ``epochs`` count only what is read from the source in its present form.
        """
        mixture = self.mixture
        counts = self.mixture_of(num_samples).counts(num_samples)
        rows = zip(self.sources, mixture.weights, mixture.windows, counts, strict=True)
        weights = dict(self.data.data_mix)
        return [
            {
                "name": source.name,
                "weight": weights.get(source.name, "0" if weights else str(source.training.num_tokens)),
                "share": float(integer / mixture.period),
                "tokens": source.training.num_tokens + source.validation.num_tokens,
                "documents": sum(shard.num_documents for shard in source.shards),
                "windows": int(windows),
                "samples": int(samples),
                "epochs": float(samples / windows),
                "validation_windows": source.validation_windows,
            }
            for source, integer, windows, samples in rows
        ]

    def fingerprint(self, mixture: Mixture | None = None) -> dict:
        """Return what determines the sequence of a mixture's samples: equal if and only if the sequences are."""
        mixture = mixture or self.mixture
        weights = {name: w for name, w in zip(mixture.names, mixture.weights.tolist(), strict=True) if w}
        return {
            "seed": mixture.seed,
            "seq_length": mixture.seq_length,
            "validation_fraction": self.data.validation_fraction,
            "weights": weights,
            "shards": {source.name: source.identity() for source in self.sources if source.name in weights},
            **({} if self.data.packing == PACKING else {"packing": self.data.packing}),
        }

    def consumed(self, segments: list[dict], samples: int) -> dict[str, int]:
        """Return the windows of every source, in the mix or not, among the first ``samples`` of a run."""
        shards = {**self.fingerprint(), "shards": {source.name: source.identity() for source in self.sources}}
        return {name: windows_read(segments, samples, name, shards) for name in self.source_names}

    def state(self, consumed_samples: int = 0) -> dict:
        """Return what a checkpoint keeps: the segments of the run, the shards by name and content, and ``bos_id`` if
        documents begin with it. JSON-able."""
        segments, newest = self.segments, self.mixture_of(consumed_samples - 1)
        if newest is not self.mixture:  # a decay, which begins a segment even where the one before was alike
            fingerprint, names = self.fingerprint(newest), newest.names
            consumed = {name: newest.consumed.tolist()[names.index(name)] for name in fingerprint["weights"]}
            segments = [segment for segment in segments if segment["first_sample"] < newest.first_sample]
            segments = [*segments, {"first_sample": newest.first_sample, **fingerprint, "consumed": consumed}]
        units = {
            source.name: {basename(shard.prefix): shard.content[:16] for shard in source.shards}
            for source in self.sources
        }
        begin = {} if self.bos_id is None else {"bos_id": self.bos_id}
        return {"segments": segments, "units": units, **begin}

    def changes(self, state: dict, consumed_samples: int = 0) -> list[str]:
        """Return a sentence for each difference between this dataset and that of a checkpoint with
        ``consumed_samples``."""
        newest, before = self.mixture_of(consumed_samples - 1), state["segments"][-1]
        if self.decay and newest is self.mixture:
            begins, later = self.decay
            if before["weights"] == self.fingerprint(later)["weights"]:
                began = f"began at sample {before['first_sample']} and would begin at {begins}"
                return [f"--decay-mix {began}: give the earlier budget and --decay-iters"]
        found = changes(before, state["units"], self.fingerprint(newest), self.state()["units"])
        stable = self.fingerprint()["weights"]
        decay = takewhile(lambda segment: segment["weights"] != stable, reversed(state["segments"]))
        began = [segment["first_sample"] for segment in decay] or [before["first_sample"]]  # and at allowed changes
        if not found and newest is not self.mixture and newest.first_sample not in began:
            at = f"began at sample {before['first_sample']} and begins at sample {newest.first_sample}"
            found.append(f"--decay-mix {at}")
        return found

    def continue_from(self, state: dict, consumed_samples: int) -> "Dataset":
        """Return this dataset for a run whose checkpoint has this ``state`` after ``consumed_samples`` samples.

        If nothing has changed, sample n stays the same. Otherwise a new segment starts: sources with the same shards
        continue where they were, and the others start from their first window.
        """
        newest = self.mixture_of(consumed_samples - 1)
        segments = next_segments(state["segments"], self.fingerprint(newest), consumed_samples)
        first = segments[-1]["first_sample"]
        mixture = newest.after(first, self.consumed(segments, first) | segments[-1]["consumed"])
        decay = self.decay if newest is self.mixture else None
        return Dataset(self.sources, mixture, self.data, self.notes, segments, decay, self.bos_id, self.num_pieces)


def open_sources(data, names, manifest, seq_length, validates, compares_sizes):
    """Return the ``Source``s of ``names`` that can be opened, and sentences for what is wrong with any of them.

    validates, compares_sizes: see ``Dataset.open``.
    """
    sources, problems = [], []
    for name in names:
        try:
            opened = open_source(data.data_dir, name, manifest, data.validation_fraction, compares_sizes=compares_sizes)
            units = manifest["sources"][name]["units"].values()
            sources.append(Source(name, opened, seq_length, bytes_per_token(units)))
            problems += sources[-1].problems(data.validation_fraction if validates else 0)
        except ShardError as error:
            problems.append(f"source {name}: {error}")
    return sources, problems


def notes_of(mixture, unused, sources, validation_fraction):
    """Return remarks for the user. unused: names of sources that the data directory has and the run does not read."""
    notes = [mixture.note] if mixture.note else []
    notes += [f"not in --data-mix: {', '.join(unused)}"] if unused else []
    notes += [
        f"source {source.name}: manifest.json does not list {len(source.unlisted)} of its shards, such as "
        f"{source.unlisted[0]}; they are not used until data_prep/tokenize.py has finished"
        for source in sources
        if source.unlisted
    ]
    return notes + [note for source in sources for note in source.notes(validation_fraction)]


def bytes_per_token(units):
    """Return a source's bytes of text per token, from the manifest; None unless all shards record it."""
    sizes = [(entry.get("text_bytes"), entry["tokens"]) for entry in units]
    if any(text_bytes is None for text_bytes, _ in sizes) or not sum(tokens for _, tokens in sizes):
        return None
    return sum(text_bytes for text_bytes, _ in sizes) / sum(tokens for _, tokens in sizes)


def unknown_sources(given, names, present):
    """Return a sentence with the existing sources if some ``names`` are not sources."""
    unknown = [name for name in names if name not in present]
    near = [close for name in unknown for close in difflib.get_close_matches(name, present, n=1)]
    remedy = f"did you mean {', '.join(dict.fromkeys(near))}?" if near else "choose among these"
    there = f"the data directory has {', '.join(present) or 'no source'}"
    return [f"{given}: no source is named {', '.join(unknown)}; {there}: {remedy}"] if unknown else []


def vocabulary_problems(sources, vocab_size, tokenizer):
    """Check that the model has an embedding for every id of its data and for every piece of its tokenizer."""
    largest = {source.name: max(shard.largest_id for shard in source.shards) for source in sources}
    needed = max([tokenizer.get("vocab_size", 0), *(largest_id + 1 for largest_id in largest.values())])
    if vocab_size >= needed:
        return []
    ids = ", ".join(f"{largest_id} in source {name}" for name, largest_id in largest.items())
    return [
        f"--vocab-size {vocab_size} is smaller than the vocabulary of the data: {tokenizer.get('vocab_size')} pieces, "
        f"largest id {ids}; set --vocab-size {needed} or more"
    ]
