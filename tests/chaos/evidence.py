"""What a run directory holds, read without the code under test: hashes by hashlib, tensors by the safetensors library.

A checkpoint is whole if its manifest lists exactly the files that are there, every block has its hash, and every
element of every parameter is in exactly one of them, for the master weight and for both moments.
"""

import hashlib
import json
import logging
import math
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from safetensors.numpy import safe_open as open_safetensors
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it remarks on every run that was started again
KINDS = ("master", "exp_avg", "exp_avg_sq")


def steps_of(checkpoints):
    """{number: path} of the step directories in ``checkpoints``."""
    found = {}
    for path in Path(checkpoints).glob("step-*"):
        match = re.fullmatch(r"step-(\d+)", path.name)
        if match:
            found[int(match[1])] = path
    return found


def damage(step):
    """Sentences for what is wrong with a step directory."""
    try:
        manifest = json.loads((step / "manifest.json").read_text())
        files, size = manifest["files"], manifest["block_bytes"]
        present = {path.name for path in step.iterdir()} - {"manifest.json"}
        if present != set(files):
            return [f"{step}: holds {sorted(present)}, the manifest lists {sorted(files)}"]
        for name, entry in files.items():
            content = (step / name).read_bytes()
            hashes = [hashlib.sha256(content[at : at + size]).hexdigest() for at in range(0, len(content), size)]
            if entry != {"bytes": len(content), "sha256": hashes}:
                return [f"{step / name}: differs from the manifest"]
        gathered(step)
    except (OSError, ValueError, KeyError) as error:
        return [f"{step}: {type(error).__name__}: {error}"]
    return []


def gathered(step):
    """{(kind, name): whole fp32 array} of a step directory. Raises ValueError unless every element is there once."""
    shapes, shards = {}, {}
    for path in sorted(step.glob("rank-*.safetensors")):
        with open_safetensors(path, "np") as file:
            addresses = json.loads(file.metadata()["fragments"])
        tensors = load_file(path)
        for name, address in addresses.items():
            shapes[name] = tuple(address["whole_shape"])
            for kind in KINDS:
                key = (kind, name, json.dumps(address["partition"]))
                shards.setdefault(key, []).append((address["start"], tensors[f"{kind}/{name}"]))
    whole = {(kind, name): np.full(shape, np.nan, np.float32) for name, shape in shapes.items() for kind in KINDS}
    for (kind, name, partition), pieces in shards.items():
        partition = json.loads(partition)
        values = whole[kind, name]
        dim = partition["dim"] if partition else 0
        rows = np.concatenate([np.arange(*run) for run in partition["ranges"]]) if partition else np.arange(len(values))
        padding = partition["padding"] if partition else 0
        shape = [*values.shape[:dim], len(rows) + padding, *values.shape[dim + 1 :]]
        flat = np.full(math.prod(shape), np.nan, np.float32)
        for start, piece in pieces:
            if not np.isnan(flat[start : start + len(piece)]).all():
                raise ValueError(f"{step}: {kind} of {name} has elements twice")
            flat[start : start + len(piece)] = piece
        place = (slice(None),) * dim + (rows,)
        if not np.isnan(values[place]).all():
            raise ValueError(f"{step}: {kind} of {name} has elements twice")
        values[place] = flat.reshape(shape)[(slice(None),) * dim + (slice(0, len(rows)),)]
    for (kind, name), values in whole.items():
        if np.isnan(values).any():
            raise ValueError(f"{step}: {kind} of {name} lacks {np.isnan(values).sum()} of {values.size} elements")
    return whole


def state_hash(step):
    """One hash of everything that is trained: names, whole masters and moments, and the number of steps of AdamW."""
    digest = hashlib.sha256()
    for key, values in sorted(gathered(step).items()):
        digest.update(repr((key, values.shape)).encode() + values.tobytes())
    return digest.hexdigest()


def difference(one, other):
    """The largest difference of a master weight, and of a moment, between two step directories."""
    mine, theirs = gathered(one), gathered(other)
    if mine.keys() != theirs.keys():
        return math.inf, math.inf
    apart = {key: float(np.abs(values - theirs[key]).max()) for key, values in mine.items()}
    return tuple(max(v for (kind, _), v in apart.items() if (kind == "master") == wanted) for wanted in (True, False))


def rows(directory):
    """The rows of metrics.jsonl, without measurements of time and memory; a line cut short is None."""
    path, found = Path(directory) / "metrics.jsonl", []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            row = {key: value for key, value in row.items() if key not in ("tokens_per_second", "runtime")}
        except ValueError:
            row = None
        found.append(row)
    return found


def events(directory):
    """The rows of events.jsonl."""
    path = Path(directory) / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def scalars(directory):
    """{tag: [(step, value)]} of TensorBoard, without measurements of time."""
    board = EventAccumulator(str(Path(directory) / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not tag.startswith("runtime/")]
    return {tag: [(scalar.step, scalar.value) for scalar in board.Scalars(tag)] for tag in tags}


def leftovers(directory):
    """Whatever a complete run should not leave behind."""
    return [str(path) for path in Path(directory).rglob("*") if ".tmp" in path.name or path.name.startswith(".seen")]


def pointer_faults(directory):
    """Sentences if ``latest`` names a step that is not there; its files are judged with all others."""
    latest = Path(directory) / "checkpoints" / "latest"
    if not latest.exists():
        return []
    name = latest.read_text()
    if not re.fullmatch(r"step-\d+\n", name) or not (latest.parent / name.strip()).is_dir():
        return [f"{latest} names {name!r}, which is not there"]
    return []
