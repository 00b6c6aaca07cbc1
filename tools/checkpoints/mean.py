"""Writes a checkpoint with the mean weights of several checkpoints. It has the files and the layout of the last
one."""

import torch
from safetensors import safe_open

from moh_lm.checkpoint.directory import point_latest
from moh_lm.checkpoint.fragments import AVERAGE, read_partition, safetensors_header
from moh_lm.checkpoint.manifest import HashedFile, write_manifest
from moh_lm.data.files import json_bytes, read_json
from moh_lm.parsing import parse_json
from tools.checkpoints.read import CHUNK, progress
from tools.checkpoints.write import HEADER_BYTES, refuse_without_room, whole_or_absent

DTYPES = {"F32": torch.float32, "I32": torch.int32}


def write_mean(steps, run):
    """Write the last of ``steps``, ``Step``s of one model, with the mean of their weights below the directory ``run``.

    Returns the new step directory. One piece of one parameter is in memory at a time. Raises ConfigError if the disk is
    too small, or OSError, and then leaves no file.
    """
    last = steps[-1]
    target = run / "checkpoints" / last.path.name
    size = sum(entry["bytes"] for entry in last.entries.values())
    refuse_without_room(target, size + HEADER_BYTES)
    entries = {}
    with whole_or_absent(target) as temporary:
        with progress("averaging", size) as bar:
            for name in last.entries:
                with HashedFile(temporary / name) as file:
                    for block in blocks_of(steps, name):
                        file.write(block)
                        bar.update(len(block))
                entries[name] = file.entry
        write_manifest(temporary, entries)
    point_latest(target)
    return target


def blocks_of(steps, name):
    """The bytes of a file of the new step."""
    path = steps[-1].path / name
    if name == "state.json":
        yield json_bytes({**read_json(path), "averaged": [step.state["step"] for step in steps]})
    elif name.startswith("rank-"):
        yield from rank_file(steps, path)
    else:
        yield path.read_bytes()


def rank_file(steps, path):
    """Return the unchanged header of a rank's file of the last step, and its tensors: mean weights, its own moments."""
    file = safe_open(path, "pt")
    slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
    described = {key: (DTYPES[found.get_dtype()], found.get_shape()) for key, found in slices.items()}
    yield safetensors_header(described, file.metadata())
    addresses = parse_json(file.metadata()["fragments"])
    for key, (dtype, (size,)) in described.items():
        kind, _, name = key.partition("/")
        for start in range(0, size, CHUNK):
            stop = min(start + CHUNK, size)
            if kind in ("master", AVERAGE):
                values = mean(steps, kind, name, addresses[name], start, stop - start)
            else:
                values = slices[key][start:stop]
            values = values if dtype.is_floating_point else values.round()
            yield values.to(dtype).view(torch.uint8).numpy()


def mean(steps, kind, name, address, start, length):
    """Return elements [start, start + length) of a fragment, summed over the steps and rounded once. fp64 [length]."""
    partition, first = read_partition(address["partition"]), address["start"] + start
    return sum(step.reader.read(kind, name, partition, first, length).double() for step in steps) / len(steps)
