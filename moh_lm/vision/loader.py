"""Turns images into micro-batches: what a run of an image model reads, and each rank's share of a step.

--workers processes read ahead of the training loop, one micro-batch each. Without them, steps are read on demand.
"""

import os
import signal
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import ShardError, read_json
from moh_lm.data.loader import dealt
from moh_lm.data.training_data import TrainingData
from moh_lm.supervise.processes import log_rank0
from moh_lm.supervise.stop import SIGNALS
from moh_lm.units import listing
from moh_lm.vision.images import Images, order
from moh_lm.vision.latents import FACTS, PARTIAL, DiTSamples, Latents
from moh_lm.vision.samples import Request, ViTSamples

AHEAD = 2  # steps that are read ahead
NAMED = 3  # class folders that a sentence may name
SAMPLES = {"vit": ViTSamples, "dit": DiTSamples}
IN_ORDER = 0  # the seed of the order of held-out images, which mixes their classes


def open_source(path):
    """Return the ``Images`` or ``Latents`` at a path. Raises ConfigError."""
    if os.path.exists(os.path.join(path, FACTS)):
        return Latents(path)
    if os.path.exists(os.path.join(path, PARTIAL)):
        raise ConfigError([f"{path}: tools/encode_latents.py has not finished; run the same command again"])
    return Images(path)


def open_images(config):
    """Return the ``ImageSet`` of a ``ViTTraining`` or ``DiTTraining``. Raises ConfigError with every problem."""
    sources, problems, data = [], [], config.data
    paths = {"--data-dir": data.data_dir, **({"--validation-dir": data.validation_dir} if data.validation_dir else {})}
    for flag, path in paths.items():
        try:
            source = open_source(path)
            sources.append(source)
            problems += [text if text.startswith("--") else f"{flag} {text}" for text in source.problems(config.model)]
        except ConfigError as error:
            problems += [f"{flag} {text}" for text in error.problems]
    if len(sources) == len(paths):
        problems += class_problems(config.model.num_classes, *sources)
        given = f"--validation-dir {data.validation_dir}"
        if len({*map(type, sources)}) > 1:
            problems.append(f"{given}: one of it and --data-dir holds images, the other latents; give both in one form")
        elif len({getattr(source, "vae", None) for source in sources}) > 1:
            problems.append(f"{given}: was encoded by another autoencoder than --data-dir; encode both with one")
    raise_any(problems)
    return ImageSet(config, *sources)


def class_problems(num_classes, training, held_out=None):
    """Yield sentences if there are too many or too few class folders, or if held-out images have other folders."""
    found, present = len(training.classes), set(training.classes)
    if found != num_classes:
        yield f"--num-classes {num_classes}: {training.path} has {found} class folders; set --num-classes {found}"
    if held_out is None:
        return
    where, classes = f"--validation-dir {held_out.path}", set(held_out.classes)
    if other := sorted(classes - present):
        yield f"{where} has {folders(other)}, which is not in --data-dir {training.path}; remove it, or add it there"
    if missing := sorted(present - classes):
        yield f"{where} has no {folders(missing)}, which is in --data-dir {training.path}; add it, or remove it there"
    if classes == present and held_out.classes != training.classes:
        yield f"{where} numbers its classes in another order than --data-dir {training.path}; encode both again"


def names_of_training(step):
    """Return the class names that the model in a step directory was trained on; None for an import."""
    segments = read_json(Path(step) / "state.json")["data"]["segments"]
    return segments[-1]["names"] if segments else None


def held_out_problems(step, model, images):
    """Yield sentences if ``images``, given by --images, differ from those with which the ``model`` of ``step`` was
    trained."""
    yield from images.problems(model)
    found, known = len(images.classes), model.num_classes
    if found != known:
        like = "give images like those of its training"
        yield f"--images {images.path}: has {found} classes, but the model has {known}; {like}"
    names = names_of_training(step) or images.classes
    if names != images.classes and len(names) == len(images.classes):
        was, now = next(pair for pair in zip(names, images.classes, strict=True) if pair[0] != pair[1])
        yield f"--images {images.path}: has {now} where the training data had {was}; give folders with the same names"


def facts_of(source):
    """Return what a checkpoint records about ``Images`` or ``Latents``."""
    return {"images": len(source.labels), "classes": len(source.classes), **source.identity()}


def difference(given, source, before):
    """Return a sentence if ``source``, the value of the flag ``given``, differs from what a checkpoint recorded. Only
    recorded facts are compared: older checkpoints record no content. Copies may have other times."""
    now = {**facts_of(source), "names": source.classes}
    if all(before[key] == now[key] for key in before.keys() & now.keys() - {"times"}):
        return []
    was, is_now = (f"{facts['images']} images of {facts['classes']} classes" for facts in (before, now))
    if was != is_now:
        return [f"{given} {source.path} had {was} and has {is_now}"]
    if before["sha256"] != now["sha256"]:
        return [f"{given} {source.path} has {is_now}, as before, but under other names"]
    return [f"{given} {source.path} has other {source.content} than before, under the same names"]


def folders(names):
    return f"class folder {listing(names, NAMED)}"


class ImageSet(TrainingData):
    """The images of a run. training, held_out: ``Images`` or ``Latents``; held_out may be None."""

    def __init__(self, config, training, held_out=None):
        self.config, self.training, self.held_out = config, training, held_out
        self.num_images = len(training.labels)
        self.num_validation = len(held_out.labels) if held_out else 0
        self.notes = [note for source in (training, held_out) for note in getattr(source, "notes", [])]
        self.samples = SAMPLES[config.kind](config)
        self.source_names = self.samples.source_names

    def state(self, consumed=0):
        """Return what a checkpoint stores to identify the training and held-out images."""
        held_out = {"held_out": facts_of(self.held_out)} if self.held_out else {}
        return {"segments": [{**facts_of(self.training), "names": self.training.classes, **held_out}], "units": {}}

    def changes(self, saved, consumed=0):
        """Return sentences if the images differ from a checkpoint's; a run may start or stop holding some out."""
        before = saved["segments"][-1]
        found = difference("--data-dir", self.training, before)
        if self.held_out and "held_out" in before:
            found += difference("--validation-dir", self.held_out, before["held_out"])
        return found

    def continue_from(self, saved, consumed):
        before = saved["segments"][-1]
        for source, facts in ((self.training, before), (self.held_out, before.get("held_out", {}))):
            changed = "times" in facts and source and facts["times"] != source.identity().get("times")
            if changed and not difference("", source, facts):
                alike = "their sizes, and the content of a sample, are as before"
                log_rank0(f"note: {source.path}: images were modified or copied since the checkpoint; {alike}")
        return self

    def tokens_read(self, samples):
        return samples * self.config.seq_length

    def training_request(self, numbers):
        """Return the ``Request`` for samples int64 [b] of the run."""
        epochs, places = np.divmod(numbers, self.num_images)
        seed = self.config.run.seed
        indices = [
            order(seed, epoch, self.num_images)[place // self.samples.repeats]
            for epoch, place in zip(epochs.tolist(), places.tolist(), strict=True)
        ]
        places = [self.training.place(index) for index in indices]
        return Request(numbers, places, self.training.labels[indices], True)

    def held_out_request(self, indices):
        """Return the ``Request`` for held-out images int64 [b]; -1 is filler."""
        labels = np.where(indices < 0, -1, self.held_out.labels[indices])
        indices = np.maximum(indices, 0)
        return Request(indices, [self.held_out.place(index) for index in indices], labels, False)


class ImageLoader:
    """The micro-batches of data-parallel rank ``rank`` of ``size``. pin_memory: for a GPU."""

    def __init__(self, dataset, rank, size, pin_memory):
        self.dataset, self.rank, self.size, self.pin_memory = dataset, rank, size, pin_memory
        self.workers, run = dataset.config.data.workers, dataset.config.run
        self.global_batch_size, self.micro_batch_size = run.batch_size, run.micro_batch_size
        self.samples_per_step = self.global_batch_size // size
        self.following = self.batches = None  # the step that is read next, and the iterator that reads it
        self.held_out = {}  # number of images -> DataLoader

    def train_step(self, consumed):
        """Return this rank's micro-batches of the step that starts at sample ``consumed``: for rank r of R samples
        consumed + r B/R + [0, B/R), in order. Consecutive steps are read ahead. Raises ShardError for an unreadable
        image."""
        if consumed != self.following:
            self.forget()
            self.batches = batches_of(self.reader(self.requests_from(consumed)))
        self.following = consumed + self.global_batch_size
        return [next(self.batches) for _ in range(self.samples_per_step // self.micro_batch_size)]

    def requests_from(self, consumed):
        for first in count(consumed + self.rank * self.samples_per_step, self.global_batch_size):
            for start in range(first, first + self.samples_per_step, self.micro_batch_size):
                yield self.dataset.training_request(np.arange(start, start + self.micro_batch_size))

    def validation(self, num):
        """Yield this rank's micro-batches of the first ``num`` held-out images (0: all). Micro-batches are dealt to the
        ranks in turn, and filler completes the last ones."""
        if not self.dataset.num_validation:
            return iter(())
        if num not in self.held_out:
            indices = order(IN_ORDER, 0, self.dataset.num_validation)[: num or None]
            mine = dealt(indices, self.micro_batch_size, self.rank, self.size)
            requests = list(map(self.dataset.held_out_request, mine))
            self.held_out[num] = self.reader(requests, persistent_workers=self.workers > 0)
        return batches_of(self.held_out[num])

    def reader(self, requests, **options):
        """Return torch's loader of the micro-batches of requests. Workers take seconds to start."""
        if self.workers:
            ahead = -(-AHEAD * self.samples_per_step // (self.micro_batch_size * self.workers))
            options |= dict(multiprocessing_context="spawn", prefetch_factor=ahead, worker_init_fn=ignore_stops)
        return DataLoader(
            self.dataset.samples, batch_size=None, sampler=requests, num_workers=self.workers,
            pin_memory=self.pin_memory, generator=torch.Generator(), **options,
        )  # fmt: skip

    def close(self):
        """End the workers."""
        self.forget()
        self.held_out.clear()

    def forget(self):
        if self.batches:
            self.batches.close()
        self.following = self.batches = None


def batches_of(reader):
    """Yield the ``ImageBatch``es of a DataLoader. Raises the ShardError of one that could not be read."""
    for batch in reader:
        if isinstance(batch, ShardError):
            raise batch
        yield batch._replace(inputs=tuple(batch.inputs))  # torch turns the tuple into a list


def ignore_stops(worker):
    """Ignore the signals that stop a run, since they may reach workers too: the run ends them later."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
