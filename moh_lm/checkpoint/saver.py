"""Checkpoints are complete or absent, verified before they are read, and independent of the layout that wrote them.

docs/checkpoints.md lists their files.

A save takes a snapshot of the optimizer's state, writes it to ``step-N.tmp`` (in the background if asked to), adds the
manifest, renames the directory to ``step-N``, and replaces ``latest``. Every file is flushed to the disk before the
rename, so a crash at any moment leaves earlier checkpoints intact.

Steps to keep are those that this start has written or verified, and earlier ones whose files have the right sizes.
Removal begins with a rename, so half a step never looks like a step.
"""

import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from moh_lm.checkpoint.directory import (
    STEP_NAME,
    discard,
    list_steps,
    no_checkpoint,
    outdated,
    point_latest,
    refuse_dangling,
    remove_entry,
    remove_leftovers,
    set_aside,
    step_number,
)
from moh_lm.checkpoint.fragments import metadata_of
from moh_lm.checkpoint.manifest import is_whole, verify, write_manifest
from moh_lm.checkpoint.space import needed_bytes
from moh_lm.checkpoint.writing import Writing, describe_failure, free_bytes, rank_0_files
from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import flush
from moh_lm.parallel.consensus import from_all_ranks, on_rank_zero, problems_of_all_ranks, wait_for_all
from moh_lm.units import binary_size


class CheckpointError(Exception):
    """A checkpoint could not be written; every rank raises it. ``problems`` holds one sentence each."""

    def __init__(self, problems):
        super().__init__("\n".join(problems))
        self.problems = problems


class NonFiniteState(CheckpointError):
    """The state to be saved holds NaN or infinity."""


class Saver:
    """Writes the checkpoints of a run below ``directory``. Every rank calls its methods together.

    keep_last: number of newest intact steps to keep; 0 keeps all. keep_every: steps divisible by it are kept forever;
    0: none. background: write while training continues. verified: steps known to be intact. on_saved: called on rank 0
    with the step, its directory and {"bytes", "seconds", "stall_seconds"}. on_failed: called with the step and problems
    of a save after which the run continues. progress: called while files are written.
    """

    def __init__(
        self, directory, *, keep_last=0, keep_every=0, background=False, verified=(), on_saved=lambda *_: None,
        on_failed=lambda *_: None, progress=lambda *_: None,
    ):  # fmt: skip
        self.directory = Path(directory)
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.background = background
        self.verified, self.counted = set(verified), False
        self.on_saved, self.on_failed = on_saved, on_failed
        self.failed = False  # whether the files of the last step could not be written
        self.progress = progress
        self.buffers = {}
        self.pending = None
        self.removal = None

    def save(self, step, fragments, config, state, tokenizer):
        """Start writing step-N. Waits for the previous save, and for this one too unless it runs in the background.

        fragments: what this rank owns (``Engine.fragments``). state: JSON-able, the same on every rank. tokenizer: path
        of the tokenizer's file with the pieces, or None. Raises CheckpointError and then leaves earlier steps as they
        are.
        """
        self.collect()
        self.step, self.started = step, time.perf_counter()
        fragments = [fragment for fragment in fragments if not fragment.is_copy]
        self.refuse(NonFiniteState, not_finite(step, fragments))
        temporary, need = self.directory / f"step-{step}.tmp", needed_bytes(fragments, tokenizer)
        problems = problems_of_all_ranks(self.make_room(temporary, need) if dist.get_rank() == 0 else [])
        tensors = {f"{kind}/{f.name}": tensor.detach() for f in fragments for kind, tensor in f.tensors.items()}
        self.pending = Writing(
            temporary,
            self.progress,
            problems,
            self.snapshot(tensors) if self.background and not problems else tensors,
            metadata_of(fragments),
            rank_0_files(step, config, state, tokenizer) if dist.get_rank() == 0 else {},
            need,
        )
        self.stall = time.perf_counter() - self.started
        if not self.background:
            self.finish()

    def snapshot(self, tensors):
        """Copy ``tensors`` to CPU memory that later saves reuse."""
        for key, tensor in tensors.items():
            if key not in self.buffers:
                self.buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.buffers[key].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return self.buffers

    def writing(self):
        """Return whether this rank is still writing."""
        return self.pending is not None and self.pending.is_alive()

    def collect(self):
        """``finish``, but let the run continue after a failure, unless the save before has failed too."""
        try:
            self.finish()
        except CheckpointError as error:
            if self.failed:
                raise
            self.failed = True
            self.on_failed(self.step, error.problems)

    def finish(self):
        """Wait for the files of all ranks and publish the step. Returns its directory, or None if there is none."""
        if self.pending is None:
            return None
        written, self.pending = self.pending, None
        wait_for_all(written, self.progress)
        entries = {name: entry for part in from_all_ranks(written.entries) for name, entry in part.items()}
        problems = problems_of_all_ranks(written.problems)
        final = written.directory.with_suffix("")
        if dist.get_rank() == 0:
            absent = {f"rank-{rank}.safetensors" for rank in range(dist.get_world_size())} - entries.keys()
            problems += [f"{written.directory / name}: was not written" for name in sorted(absent) if not problems]
            problems = problems or self.commit(written.directory, final, entries)
            if problems:
                remove_entry(written.directory)
        self.refuse(CheckpointError, problems)
        self.failed = False
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - self.started
            facts = {
                "bytes": sum(entry["bytes"] for entry in entries.values()),
                "seconds": round(seconds, 3),
                "stall_seconds": round(self.stall if self.background else seconds, 3),
            }
            self.on_saved(step_number(final), final, facts)
        return final

    def commit(self, temporary, final, entries):
        """Write the manifest, rename, update ``latest`` and remove old steps. Returns problems. Rank 0 only."""
        try:
            write_manifest(temporary, entries)
            if os.path.lexists(final):  # written by another program
                set_aside(final)
            temporary.rename(final)
        except OSError as error:
            return [describe_failure(error, temporary, sum(entry["bytes"] for entry in entries.values()))]
        self.verified.add(step_number(final))
        if is_done(flush, final.parent):  # else a crash may undo the renaming, so older steps stay
            is_done(point_latest, final)  # if not, the next start repairs it
            self.remove()
        return []

    def remove(self):
        """Remove the old steps in the background."""
        try:
            steps = list_steps(self.directory)
        except OSError as error:
            print(f"{self.directory}: cannot be listed ({error.strerror}); old steps stay", file=sys.stderr, flush=True)
            return
        if self.keep_last and not self.counted:  # what earlier starts have saved
            for step in steps:
                self.verified.update([step_number(step)] if step_number(step) and is_whole(step) else [])
                self.progress()
            self.counted = True
        numbers, doomed = [step_number(step) for step in steps], []
        for number in outdated(numbers, self.verified, self.keep_last, self.keep_every):
            try:
                doomed.append(discard(self.directory / f"step-{number}"))
            except OSError as error:
                print(f"{error.filename}: cannot be removed ({error.strerror})", file=sys.stderr, flush=True)
        self.removal = threading.Thread(target=lambda: [remove_entry(path) for path in doomed])
        self.removal.start()

    def make_room(self, temporary, need):
        """Remove leftovers and create the directory; returns problems if ``need`` bytes do not fit. Rank 0 only."""
        if self.removal is not None:
            self.removal.join()
        try:
            remove_leftovers(self.directory)
            free = free_bytes(self.directory)
            if free < need:
                return [
                    f"{temporary}: no space left on device: the checkpoint takes {binary_size(need)} and "
                    f"{binary_size(free)} are free; remove old steps, and give --keep-last to keep fewer from then on"
                ]
            if os.path.lexists(temporary):  # another user's, or one with open files on NFS
                set_aside(temporary)
            temporary.mkdir()  # without parents: a run directory that was moved is not made again elsewhere
        except OSError as error:
            return [describe_failure(error, temporary, need)]
        return []

    def refuse(self, error, problems):
        """Raise ``error`` on every rank if any rank has problems; it also names the step to resume from."""
        problems = problems_of_all_ranks(problems)
        if problems:
            newest = self.newest()
            raise error([f"{problem}; {newest}" for problem in problems])

    def newest(self):
        """Return a phrase that names the step to resume from."""
        try:
            steps = on_rank_zero(lambda: [str(step) for step in list_steps(self.directory)])
        except ConfigError as error:
            return f"the checkpoints cannot be listed: {error.problems[0]}"
        return f"the last checkpoint is {steps[0]}" if steps else "there is no checkpoint"

    def close(self):
        """Wait until all writing and removing have finished."""
        self.finish()
        if self.removal is not None:
            self.removal.join()


def is_done(work, path):
    """Return whether ``work(path)`` succeeds after a checkpoint is complete; if not, print why."""
    try:
        work(path)
    except OSError as error:
        problem = f"{error.filename or path}: {error.strerror}"
        print(f"{problem}; the checkpoint itself is complete", file=sys.stderr, flush=True)
        return False
    return True


def not_finite(step, fragments):
    """Return a sentence if a tensor of the ``fragments`` holds NaN or infinity."""
    tensors = {f"{kind} of {f.name}": tensor for f in fragments for kind, tensor in f.tensors.items()}
    finite = are_finite(list(tensors.values())).tolist() if tensors else []
    bad = [name for name, is_finite in zip(tensors, finite, strict=True) if not is_finite]
    if not bad:
        return []
    return [f"step {step} is not saved: {bad[0]} is not finite on rank {dist.get_rank()} ({len(bad)} such tensors)"]


def are_finite(tensors):
    """Return whether each of ``tensors`` is finite, bool [tensors], on the device of the first one. Other tensors may
    be elsewhere: frozen or offloaded ones are in CPU memory."""
    bounds = [torch.stack(tensor.detach().aminmax()) for tensor in tensors]  # NaN propagates
    return torch.stack([pair.to(bounds[0].device) for pair in bounds]).isfinite().all(1)


def find_step(path):
    """Return the step directory at ``path``, or the newest step of the run directory ``path``, after verifying its
    files. Raises ConfigError if there is none, or if a file is damaged or cannot be read."""
    path = Path(path)
    try:
        is_run = (path / "checkpoints").is_dir()  # even if it is called step-5
        if is_run:
            refuse_dangling(path / "checkpoints")
        steps = list_steps(path / "checkpoints") if is_run or not STEP_NAME.fullmatch(path.name) else [path]
        if not steps or not steps[0].is_dir():
            raise no_checkpoint(path)
        damaged = verify(steps[0])
    except OSError as error:
        raise ConfigError([f"{error.filename}: cannot be read ({error.strerror}); make it readable"]) from error
    raise_any([f"{problem}; restore it, or give an earlier checkpoint" for problem in damaged])
    return steps[0]
