"""What the tests of the tool share: checkpoints read by hand, and files changed under a manifest that agrees."""

import errno
import json

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from moh_lm.checkpoint.manifest import HashedFile, describe, write_manifest

KINDS = ("master", "exp_avg", "exp_avg_sq")
NAME = "model.layers.1.mlp.up_proj.weight"


def shown(checkpoint, *arguments):
    """The JSON that a command prints."""
    return json.loads(checkpoint(*arguments, "--json")[1])


def step_of(run, number):
    return run / "checkpoints" / f"step-{number}"


def gather(step):
    """{(kind, name): whole array}, put together by hand."""
    shards, whole = {}, {}
    for path in sorted(step.glob("rank-*.safetensors")):
        tensors = load_file(path)
        for name, address in json.loads(safe_open(path, "np").metadata()["fragments"]).items():
            shape, cut = address["whole_shape"], address["partition"]
            if cut:
                local = [*shape]
                local[cut["dim"]] = sum(b - a for a, b in cut["ranges"]) + cut["padding"]
            for kind in KINDS:
                key = kind, name, json.dumps(cut), tuple(local if cut else shape), tuple(shape)
                flat = shards.setdefault(key, np.full(int(np.prod(key[3])), np.nan, np.float32))
                flat[address["start"] : address["start"] + address["length"]] = tensors[f"{kind}/{name}"]
    for (kind, name, cut, local, shape), flat in shards.items():
        array = whole.setdefault((kind, name), np.full(shape, np.nan, np.float32))
        cut, part, position = json.loads(cut), flat.reshape(local), 0
        if not cut:
            array[...] = part
            continue
        for first, last in cut["ranges"]:
            rows = part.take(range(position, position + last - first), cut["dim"])
            array[(slice(None),) * cut["dim"] + (slice(first, last),)] = rows
            position += last - first
    return whole


def forge(step, name, change):
    """Let ``change(tensors, fragments)`` edit the file ``name`` of ``step``, with a manifest that agrees."""
    path = step / name
    tensors, fragments = load_file(path), json.loads(safe_open(path, "np").metadata()["fragments"])
    change(tensors, fragments)
    save_file(tensors, path, {"fragments": json.dumps(fragments)})
    agree(step)


def agree(step):
    """Write a manifest of the files as they are."""
    write_manifest(step, {path.name: describe(path) for path in step.iterdir() if path.name != "manifest.json"})


def flip(path, position=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 4
    path.write_bytes(content)


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


class FullDisk(HashedFile):
    """Has room for the first bytes of the second rank's file, or of the one file."""

    def write(self, data):
        if self.path.name not in ("rank-1.safetensors", "one.safetensors"):
            return super().write(data)
        super().write(data[:1000])
        raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
