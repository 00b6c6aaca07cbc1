"""From a data directory to micro-batches: the sources of a run, their held-out parts, and each rank's share of a step.

Every shard is cut once. The heads of a source's shards, end to end, are its training stream; the tails are its
validation stream. Windows may cross from shard to shard inside their stream but never the cut, so validation shares no
token with training. The cut depends on the shard and the fraction only: it stays when other shards come or go.

    shard    |------------- head ------------|-- tail --|         tail = about validation_fraction, whole documents
    stream   head 1 | head 2 | ...     windows of S + 1 tokens at stride S, ordered by Mixture
             tail 1 | tail 2 | ...     windows of S + 1 tokens at stride S, ordered by a permutation of their own
"""

import difflib
import hashlib
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from moh_lm.checks import data_problems
from moh_lm.config import ConfigError, DataConfig
from moh_lm.data.mixture import Mixture, Permutation, integer_weights
from moh_lm.data.shards import Shard, ShardError, open_shard, read_manifest
from moh_lm.parallel.cross_entropy import IGNORED


class MicroBatch(NamedTuple):
    tokens: torch.Tensor  # [b, s] int64
    labels: torch.Tensor  # [b, s] int64: the next token, or -100 in a sequence that only fills the batch
    sources: torch.Tensor  # [b] int64: index into Dataset.source_names


class Stream:
    """Parts of shards end to end, addressed by token position. ``parts`` are (shard, first token, end)."""

    def __init__(self, parts: Iterable[tuple[Shard, int, int]]):
        self.parts = [(shard, first, end) for shard, first, end in parts if end > first]
        self.ends = np.cumsum([end - first for _, first, end in self.parts], dtype=np.int64)
        self.num_tokens = int(self.ends[-1]) if self.parts else 0

    def read(self, position: int, count: int) -> np.ndarray:
        """Token ids int64 [count] from ``position`` on. Raises ShardError if a file has become shorter."""
        pieces = []
        part = int(np.searchsorted(self.ends, position, side="right"))
        while count:
            shard, _, end = self.parts[part]
            left = int(self.ends[part]) - position
            pieces.append(shard.read(end - left, min(left, count)))
            position += len(pieces[-1])
            count -= len(pieces[-1])
            part += 1
        return np.concatenate(pieces).astype(np.int64)


def held_out_start(shard: Shard, fraction: float) -> int:
    """The token position that cuts ``shard``: the tail from there on is held out.

    The start of the document that the last ``fraction`` of the tokens begins in, or that very position if the whole
    document would more than double the tail. Found by binary search: the index is not read in full.
    """
    held_out = int(shard.num_tokens * fraction)
    position = shard.num_tokens - held_out
    if not held_out:
        return position
    _, pointers, bounds = shard.index()

    def document_start(document):
        return int(pointers[bounds[document]]) // shard.dtype.itemsize

    document = bisect_right(range(shard.num_documents), position, key=document_start) - 1
    start = document_start(document)
    return start if shard.num_tokens - start <= 2 * held_out else position


class Source:
    """One source of a run: its shards, their streams, and the windows held out."""

    def __init__(self, name: str, shards: list[Shard], fraction: float, seq_length: int):
        self.name = name
        self.shards = shards
        self.seq_length = seq_length
        cuts = [held_out_start(shard, fraction) for shard in shards]
        self.training = Stream((shard, 0, cut) for shard, cut in zip(shards, cuts, strict=True))
        self.validation = Stream((shard, cut, shard.num_tokens) for shard, cut in zip(shards, cuts, strict=True))
        self.validation_windows = max(0, self.validation.num_tokens - 1) // seq_length

    def validation_positions(self, num_samples: int) -> np.ndarray:
        """First tokens of the first ``num_samples`` held-out windows, in an order that mixes the shards."""
        order = Permutation(self.validation_windows, f"validation/{self.name}")
        return order(np.arange(min(num_samples, self.validation_windows))) * self.seq_length

    def identity(self) -> str:
        """A hash of the contents of all shards, from their sidecars."""
        files = [shard.sidecar[file]["sha256"] for shard in self.shards for file in ("bin", "idx")]
        return hashlib.sha256("".join(files).encode()).hexdigest()

    def problems(self, fraction: float) -> list[str]:
        """Why a run with this source cannot start."""
        needed, training, held_out = self.seq_length + 1, self.training.num_tokens, self.validation.num_tokens
        if training < needed:
            return [
                f"source {self.name} has {training} training tokens, a sample of --seq-length {self.seq_length} takes "
                f"{needed}: prepare more text, leave the source out of --data-mix, or shorten --seq-length"
            ]
        if fraction and not self.validation_windows:
            return [
                f"--validation-fraction {fraction:g} holds out {held_out} of {training + held_out} tokens of source "
                f"{self.name}, a sample of --seq-length {self.seq_length} takes {needed}: raise it to about "
                f"{min(0.5, 1.1 * needed / (training + held_out)):.2g}, or set it to 0 for no validation"
            ]
        return []


class Dataset:
    """The sources of a run and their mixture; ``Dataset.open`` makes it. ``notes`` are remarks for the user."""

    def __init__(self, sources: list[Source], mixture: Mixture, data: DataConfig, notes: list[str]):
        self.sources = sources
        self.mixture = mixture
        self.data = data
        self.notes = notes
        path = Path(data.data_dir) / "tokenizer.model"
        self.tokenizer_path = path if path.exists() else None

    @classmethod
    def open(cls, data: DataConfig, *, seq_length: int, seed: int, vocab_size: int) -> "Dataset":
        """Open the sources of ``data.data_mix``, or all of the directory. Raises ConfigError with all that is wrong."""
        problems = data_problems(data)
        if problems:
            raise ConfigError(problems)
        try:
            manifest = read_manifest(data.data_dir)
        except ShardError as error:
            remedy = "give a directory that data_prep/tokenize.py has finished"
            raise ConfigError([f"--data-dir {data.data_dir}: {error}; {remedy}"]) from error
        present = manifest["sources"]
        names = [name for name, _ in data.data_mix] or list(present)
        sources = []
        for name in names:
            if name not in present:
                problems.append(unknown_source(name, list(present)))
                continue
            try:
                shards = [open_shard(Path(data.data_dir, name, unit)) for unit in present[name]["units"]]
                sources.append(Source(name, shards, data.validation_fraction, seq_length))
                problems += sources[-1].problems(data.validation_fraction)
            except ShardError as error:
                problems.append(f"source {name}: {error}")
        problems += vocabulary_problems(sources, vocab_size, manifest["tokenizer"])
        if not names:
            problems.append(f"--data-dir {data.data_dir}: holds no source; run data_prep/tokenize.py")
        num_tokens = {source.name: source.training.num_tokens for source in sources}
        weights = dict(data.data_mix) or {name: str(tokens) for name, tokens in num_tokens.items() if tokens}
        try:
            integer_weights(weights)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)

        mixture = Mixture(weights, num_tokens, seq_length=seq_length, seed=seed)
        unused = sorted(present.keys() - set(names))
        notes = [mixture.note] if mixture.note else []
        if unused:
            notes.append(f"not in --data-mix: {', '.join(unused)}")
        return cls(sorted(sources, key=lambda source: source.name), mixture, data, notes)

    @property
    def source_names(self) -> list[str]:
        return self.mixture.names

    def plan(self, num_samples: int) -> list[dict]:
        """What the first ``num_samples`` samples take from each source, with the source's own size."""
        mixture = self.mixture
        rows = zip(self.sources, mixture.weights, mixture.windows, mixture.counts(num_samples), strict=True)
        weights = dict(self.data.data_mix)
        return [
            {
                "name": source.name,
                "weight": weights.get(source.name, str(source.training.num_tokens)),
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

    def fingerprint(self) -> dict:
        """What determines the sequence of samples: equal if and only if the sequences are."""
        return {
            "seed": self.mixture.seed,
            "seq_length": self.mixture.seq_length,
            "validation_fraction": self.data.validation_fraction,
            "weights": dict(zip(self.source_names, self.mixture.weights.tolist(), strict=True)),
            "shards": {source.name: source.identity() for source in self.sources},
        }


def unknown_source(name, present):
    near = difflib.get_close_matches(name, present, n=1)
    remedy = f"did you mean {near[0]}?" if near else "choose among these"
    return f"--data-mix {name}: the data directory has no such source but {', '.join(present) or 'none'}; {remedy}"


def vocabulary_problems(sources, vocab_size, tokenizer):
    """A model needs an embedding for every id of its data, and for every piece of the tokenizer it is used with."""
    largest = {source.name: max(shard.sidecar["largest_id"] for shard in source.shards) for source in sources}
    needed = max([tokenizer.get("vocab_size", 0), *(largest_id + 1 for largest_id in largest.values())])
    if vocab_size >= needed:
        return []
    ids = ", ".join(f"{largest_id} in source {name}" for name, largest_id in largest.items())
    return [
        f"--vocab-size {vocab_size} is smaller than the vocabulary of the data: {tokenizer.get('vocab_size')} pieces, "
        f"largest id {ids}; set --vocab-size {needed} or more"
    ]


class Loader:
    """The micro-batches of one data-parallel rank; ranks of the same rank in other dimensions read the same."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ):
        if global_batch_size % (micro_batch_size * data_parallel_size):
            raise ConfigError([
                f"global batch of {global_batch_size} sequences: must be a multiple of "
                f"micro_batch_size({micro_batch_size}) * data_parallel_size({data_parallel_size})"
            ])
        self.dataset = dataset
        self.samples_per_step = global_batch_size // data_parallel_size  # of this rank
        self.micro_batch_size = micro_batch_size
        self.rank = data_parallel_rank
        self.size = data_parallel_size

    def train_step(self, consumed_samples: int) -> list[MicroBatch]:
        """This rank's micro-batches of the step whose first sample is number ``consumed_samples``.

        Rank r of R takes samples consumed + r B/R + [0, B/R) of a global batch of B, in order.
        """
        first = consumed_samples + self.rank * self.samples_per_step
        source, _, position = self.dataset.mixture.locate(np.arange(first, first + self.samples_per_step))
        return self.micro_batches([entry.training for entry in self.dataset.sources], source, position)

    def validation(self, source_name: str, num_samples: int) -> list[MicroBatch]:
        """This rank's part of the first ``num_samples`` held-out windows of a source, or of all if there are fewer.

        Micro-batches are dealt to the ranks in turn; sequences without labels make up what is missing in the last ones.
        """
        index = self.dataset.source_names.index(source_name)
        position = self.dataset.sources[index].validation_positions(num_samples)
        filler = -len(position) % (self.micro_batch_size * self.size)
        position = np.concatenate([position, np.full(filler, -1)])
        mine = position.reshape(-1, self.size, self.micro_batch_size)[:, self.rank].reshape(-1)  # [n, R, b] -> [n b]
        return self.micro_batches([entry.validation for entry in self.dataset.sources], np.full(len(mine), index), mine)

    def micro_batches(self, streams, source, position):
        """Windows at ``position`` [n] of the streams ``source`` [n], cut into micro-batches; position -1 is filler."""
        length = self.dataset.mixture.seq_length
        windows = np.zeros((len(position), length + 1), dtype=np.int64)
        for row, (s, first) in enumerate(zip(source.tolist(), position.tolist(), strict=True)):
            if first >= 0:
                windows[row] = streams[s].read(first, length + 1)
        labels = np.where(position[:, None] >= 0, windows[:, 1:], IGNORED)
        whole = MicroBatch(*map(torch.from_numpy, (windows[:, :-1].copy(), labels, source)))
        starts = range(0, len(position), self.micro_batch_size)
        return [MicroBatch(*(tensor[start : start + self.micro_batch_size] for tensor in whole)) for start in starts]
