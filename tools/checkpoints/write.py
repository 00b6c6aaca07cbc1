"""Writes copies of a checkpoint, and its parameters as one file. The result exists in full or not at all."""

import contextlib
import math
import shutil
import tempfile
from pathlib import Path

import torch

from moh_lm.checkpoint.directory import STEP_NAME, list_steps, point_latest
from moh_lm.checkpoint.fragments import AVERAGE, MOMENTS, safetensors_header
from moh_lm.checkpoint.manifest import BLOCK_BYTES, HashedFile, difference, read_entries
from moh_lm.checkpoint.writing import free_bytes
from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import flush, read_json
from moh_lm.model.router import stored_dtype
from moh_lm.supervise.run_directory import lock_run_directory
from tools.checkpoints.read import Step, find_damage, locate, misnamed, progress

HEADER_BYTES = 1 << 20  # generous space for everything besides the tensors


def copy(path, destination):
    """Copy the step ``path`` below ``destination``, a run directory or any other; returns the new step directory.

    Raises ConfigError if the source is damaged, or the destination has no room or has that step already; OSError.
    """
    source = locate(path)[0]
    try:
        entries = read_entries(source)
    except ValueError as error:
        raise ConfigError([f"{error}; restore it, or give another checkpoint"]) from error
    named = source if STEP_NAME.fullmatch(source.name) else source.resolve()
    name = named.name
    if not STEP_NAME.fullmatch(name):
        raise ConfigError([f"{source}: is set aside or half removed; rename it step-N if it is sound"])
    problems = []
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # the comparison with the manifest says so
        problems = misnamed(named, read_json(source / "state.json"))
    raise_any([f"{problem}; rename {name}, or give that step" for problem in problems])
    if STEP_NAME.fullmatch(destination.name):
        raise ConfigError([f"{destination}: give the directory in which to put {name}"])
    run = destination.parent if destination.name == "checkpoints" else destination
    is_run = (run / "checkpoints").is_dir() or (run / "config.json").is_file()
    directory = run / "checkpoints" if is_run else destination
    target = directory / name
    if target.exists():
        raise ConfigError([f"{target}: already exists; move it away, or give another directory"])
    refuse_without_room(target, sum(entry["bytes"] for entry in entries.values()) + HEADER_BYTES)
    made = not directory.exists()
    # A run that saves in the meantime would mistake the unfinished copy for a leftover.
    with lock_run_directory(run) if is_run else contextlib.nullcontext():
        try:
            copy_files(source, entries, target)
        except BaseException:
            if made:
                with contextlib.suppress(OSError):
                    directory.rmdir()
            raise
        if is_run and list_steps(directory)[0] == target:
            point_latest(target)
    return target


@contextlib.contextmanager
def whole_or_absent(target):
    """Context with a new directory, which becomes ``target`` at the end and is removed after an error. Its name differs
    from that of a save, so that a run never mistakes the remains of a killed copy for an interrupted save.
    """
    temporary = target.with_name(f"copy-{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        flush(temporary)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    flush(target.parent)


def copy_files(source, entries, target):
    """Copy the files, and hash what is read and what was written."""
    with whole_or_absent(target) as temporary:
        with progress(f"copying {source}", sum(entry["bytes"] for entry in entries.values())) as bar:
            for name in [*entries, "manifest.json"]:
                with open(source / name, "rb") as original, HashedFile(temporary / name) as file:
                    while block := original.read(BLOCK_BYTES):
                        file.write(block)
                        bar.update(len(block))
                if name in entries and file.entry != entries[name]:
                    problems = difference(source / name, entries[name]) or [f"{source / name}: changed while read"]
                    raise ConfigError([f"{problem}; restore it, or give another checkpoint" for problem in problems])
        damaged = find_damage(temporary)
        raise_any([f"{problem}: reading it back gave other bytes than were written" for problem in damaged])


def consolidate(path, output, moments, dtype):
    """Write weights in ``dtype``, counts whole, the ``moments`` in fp32, as one safetensors file; returns its bytes.

    If there is a moving average of the weights it is written, as in an evaluation and an export. One piece of one
    parameter is in memory at a time. Raises ConfigError or OSError, and then leaves no file.
    """
    if output.suffix != ".safetensors":
        raise ConfigError([f"{output}: give a name that ends in .safetensors"])
    if output.exists():
        raise ConfigError([f"{output}: already exists; move it away, or give another name"])
    step = Step(locate(path)[0])
    kinds = {name: AVERAGE if name in step.reader.averaged else "master" for name in step.shapes}
    tensors = [(name, kinds[name], name, stored_dtype(name, dtype)) for name in step.shapes]  # (key, kind, name, dtype)
    for kind in MOMENTS if moments else ():
        tensors += [(f"{kind}/{name}", kind, name, torch.float32) for name in step.shapes]
    tensors.sort(key=lambda tensor: -tensor[-1].itemsize)  # aligns all tensors
    described = {key: (written, list(step.shapes[name])) for key, _, name, written in tensors}
    header = safetensors_header(described, {"format": "pt", "step": str(step.state["step"])})
    size = len(header) + sum(math.prod(shape) * written.itemsize for written, shape in described.values())
    refuse_without_room(output, size)
    with tempfile.TemporaryDirectory(prefix=f"{output.name}.tmp-", dir=output.parent) as scratch:
        temporary = Path(scratch) / output.name
        with HashedFile(temporary) as file, progress(f"writing {output}", size) as bar:
            file.write(header)
            for _, kind, name, written in tensors:
                for values in step.read(kind, name):
                    file.write(values.to(written).view(torch.uint8).numpy())
                    bar.update(values.numel() * written.itemsize)
        temporary.rename(output)
    flush(output.parent)
    return size


def refuse_without_room(path, need):
    free = free_bytes(path.parent)
    if free < need:
        raise ConfigError([f"{path}: no space left on device: {need:,} bytes are needed and {free:,} are free"])
