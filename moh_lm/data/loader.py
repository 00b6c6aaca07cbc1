"""Turns samples into micro-batches: each rank's share of a step, read ahead of the training loop.

    tokens      w_0 w_1 ... w_{S-1}      of a window w_0 ... w_S, or of the pieces of a packed row
    labels      w_1 w_2 ... w_S          with resets or packed, -100 where the next token begins another document
    positions   0 1 2 0 1 ...            with resets only: from 0 at the first token of each document and of the window,
                                         and of each part of it in a warm-up of the length

With resets a document neither sees nor predicts another, so its last token has no label.
"""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from moh_lm.data.dataset import Dataset
from moh_lm.data.packing import Piece
from moh_lm.parallel.cross_entropy import IGNORED

AHEAD = 2  # steps that are read ahead


class MicroBatch(NamedTuple):
    tokens: torch.Tensor  # [b, s] int64
    labels: torch.Tensor  # [b, s] int64: the next token, or -100 where none is to be predicted
    sources: torch.Tensor  # [b] int64: index into Dataset.source_names
    positions: torch.Tensor | None = None  # [b, s] int64: of each token in its document or part, or None
    samples: torch.Tensor | None = None  # [b] int64: their numbers in the run; None for held-out sequences


class Loader:
    """The micro-batches of one data-parallel rank; ranks that differ only in other dimensions read the same.

    reset_at_documents: give positions, and no label to the last token of a document. length_at: maps consumed samples
    to the length of the parts of a window that do not see each other; None: windows stay whole. batch_at: maps them to
    the samples of the step; None: always ``global_batch_size``. pin_memory: for GPUs, where copies from unpinned memory
    wait for earlier kernels. A thread reads ahead; ``close`` ends it.
    """

    def __init__(
        self, dataset: Dataset, *, global_batch_size: int, micro_batch_size: int, data_parallel_rank: int,
        data_parallel_size: int, reset_at_documents: bool = False, length_at=None, batch_at=None,
        pin_memory: bool = False,
    ):  # fmt: skip
        self.dataset = dataset
        self.batch_at = batch_at or (lambda consumed_samples: global_batch_size)
        self.micro_batch_size = micro_batch_size
        self.rank = data_parallel_rank
        self.size = data_parallel_size
        self.reset_at_documents = reset_at_documents
        self.length_at = length_at
        self.pin_memory = pin_memory
        self.reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self.ahead = deque()  # (consumed_samples, future) of the steps that are being read, in order

    def train_step(self, consumed_samples: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of the step whose first sample is number ``consumed_samples``.

        Rank r of R takes samples consumed + r B/R + [0, B/R) of a global batch of B, in order. Only consecutive steps
        are read ahead. Raises ShardError if a file is damaged.
        """
        if self.ahead and self.ahead[0][0] != consumed_samples:
            self.forget()
        while len(self.ahead) <= AHEAD:
            newest = self.ahead[-1][0] if self.ahead else None
            first = consumed_samples if newest is None else newest + self.batch_at(newest)
            self.ahead.append((first, self.reader.submit(self.read_step, first)))
        return self.ahead.popleft()[1].result()

    def close(self):
        """End the reading thread. The loader can still read validation windows."""
        self.forget()
        self.reader.shutdown()

    def forget(self):
        while self.ahead:
            self.ahead.pop()[1].cancel()

    def read_step(self, consumed_samples):
        """Return the same as ``train_step``, and read nothing ahead."""
        share = self.batch_at(consumed_samples) // self.size  # of this rank
        first = consumed_samples + self.rank * share
        samples = np.arange(first, first + share)
        source, rows = self.dataset.rows(samples)  # a decay begins between two steps
        streams = [entry.training for entry in self.dataset.sources]
        part = self.length_at(consumed_samples) if self.length_at else None
        return self.micro_batches(streams, source, rows, samples, part)

    def validation(self, source_name: str, num_samples: int) -> list[MicroBatch]:
        """Return this rank's part of the first ``num_samples`` held-out windows of a source, or of all if there are
        fewer.

        Micro-batches are dealt to the ranks in turn; the last ones are filled up with sequences without labels.
        """
        index = self.dataset.source_names.index(source_name)
        position = self.dataset.sources[index].validation_positions(num_samples)
        mine = dealt(position, self.micro_batch_size, self.rank, self.size).reshape(-1)
        rows = [[Piece(first, self.dataset.mixture.seq_length)] if first >= 0 else [] for first in mine.tolist()]
        return self.micro_batches([entry.validation for entry in self.dataset.sources], np.full(len(mine), index), rows)

    def micro_batches(self, streams, source, rows, samples=None, part=None):
        """Cut ``rows`` of ``Piece``s of the streams ``source`` [n] into micro-batches; a row without pieces is filler.

        part: tokens of the parts of a row that do not see each other; None: it is whole.
        """
        length = self.dataset.mixture.seq_length
        tokens = np.zeros((len(rows), length), dtype=np.int64)
        labels = np.full_like(tokens, IGNORED)
        begins = np.zeros_like(tokens)  # the first token of each token's document
        for row, (s, pieces) in enumerate(zip(source.tolist(), rows, strict=True)):
            at = 0
            for piece in pieces:
                ids, here = streams[s].read(piece.first, piece.count + 1), slice(at, at + piece.count)
                tokens[row, here], labels[row, here] = ids[:-1], ids[1:]
                starts = [at, *(at + start for start in self.starts(streams[s], piece))]
                labels[row, [start - 1 for start in starts[1:]]] = IGNORED
                starts = [start for start in starts if start < length]
                begins[row, starts] = starts
                at += piece.count
        arrays = {"tokens": tokens, "labels": labels, "sources": source}
        if self.reset_at_documents:
            arrays["positions"] = np.arange(length) - np.maximum.accumulate(begins, axis=1)
        if part is not None and part < length:
            within = np.broadcast_to(np.arange(length) % part, tokens.shape).copy()
            arrays["positions"] = np.minimum(arrays.get("positions", within), within)
        if samples is not None:
            arrays["samples"] = samples
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.pin_memory:
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return [
            MicroBatch(**{name: tensor[start : start + self.micro_batch_size] for name, tensor in tensors.items()})
            for start in range(0, len(rows), self.micro_batch_size)
        ]

    def starts(self, stream, piece):
        """Return where documents begin after the first token of a piece, for packed rows and with resets."""
        if self.reset_at_documents and not piece.starts:
            return stream.document_starts(piece.first, piece.count + 1)
        return piece.starts


def dealt(numbers, micro_batch_size, rank, size):
    """Deal ``numbers``, int64 [n], to ``size`` ranks in turn, a micro-batch each, and return those of ``rank``, int64
    [micro-batches, b]: equally many for every rank, with -1 as filler at the end."""
    filler = np.full(-len(numbers) % (micro_batch_size * size), -1)
    return np.concatenate([numbers, filler]).reshape(-1, size, micro_batch_size)[:, rank]
