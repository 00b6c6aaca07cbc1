"""Checkpoints: complete or absent, verified before they are read, and free of the layout that wrote them.

A step directory holds config.json, state.json, the tokenizer, ``rank-N.safetensors`` of every rank, and manifest.json
with the size and SHA-256 of each of them. A rank's file holds the fragments that its optimizer owns: for a range of
each flattened parameter the fp32 master weight and both Adam moments, with their addresses in the file's metadata. A
reader puts the ranges together, so the number of ranks that read need not be the number that wrote. Nothing here is a
pickle.

A save fills ``step-N.tmp``, adds the manifest, renames the directory to ``step-N`` and replaces ``latest``. Every
file is flushed to the disk before the rename that makes it count, so a crash leaves the checkpoints before it as they
were.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from moh_lm.config import Config, ConfigError
from moh_lm.model.transformer import CausalLM
from moh_lm.parallel.layers import Partition

STEP_NAME = re.compile(r"step-(\d+)")


def save_checkpoint(directory, step, fragments, config, state, tokenizer):
    """Write ``directory``/step-N; every rank calls this together. Returns the directory.

    fragments: what this rank owns (``Engine.fragments``). state: JSON-able dict, the same on every rank.
    tokenizer: path of the SentencePiece model, or None.
    """
    final = Path(directory) / f"step-{step}"
    temporary = final.with_name(final.name + ".tmp")
    rank = dist.get_rank()
    if rank == 0:
        for leftover in final.parent.glob("step-*.tmp"):  # of a save that a crash cut short
            shutil.rmtree(leftover)
        temporary.mkdir(parents=True)
    dist.barrier()
    names = [f"rank-{rank}.safetensors"]
    write_fragments(temporary / names[0], fragments)
    if rank == 0:
        config.save(temporary / "config.json")
        write_json(temporary / "state.json", {"step": step, **state})
        names += ["config.json", "state.json"]
        if tokenizer is not None:
            shutil.copyfile(tokenizer, temporary / "tokenizer.model")
            names.append("tokenizer.model")
    for name in names:
        flush(temporary / name)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {name: describe(temporary / name) for name in names})
    if rank == 0:
        entries = {name: entry for part in parts for name, entry in part.items()}
        write_json(temporary / "manifest.json", entries)
        flush(temporary / "manifest.json")
        flush(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        flush(final.parent)
        pointer = final.with_name("latest.tmp")
        pointer.write_text(final.name + "\n", encoding="utf-8")
        flush(pointer)
        pointer.replace(final.with_name("latest"))
        flush(final.parent)
    dist.barrier()
    return final


def write_fragments(path, fragments):
    """``kind/name`` -> flat fp32 tensor; the metadata key ``fragments`` is JSON: name -> address."""
    tensors, addresses = {}, {}
    for fragment in fragments:
        if fragment.is_copy:
            continue
        partition = fragment.parameter.tensor_partition
        addresses[fragment.name] = {
            "start": fragment.start,
            "shape": fragment.shape,
            "whole_shape": fragment.parameter.whole_shape,
            "partition": None if partition is None else asdict(partition),
        }
        for kind, tensor in fragment.tensors.items():
            tensors[f"{kind}/{fragment.name}"] = tensor.detach().cpu().clone()
    save_tensors(tensors, path, {"fragments": json.dumps(addresses)})


def save_tensors(tensors, path, metadata):
    """A safetensors file with the permissions of any other; the library makes it readable by its owner only."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(mode)


def find_step(path):
    """The step directory that ``path`` names: itself, or of a run directory the one in ``latest``, else the newest.

    Its files are verified. Raises ConfigError if there is none, or naming the file that is damaged.
    """
    path = Path(path)
    steps = [path] if STEP_NAME.fullmatch(path.name) else list_steps(path / "checkpoints")
    if not steps or not steps[0].is_dir():
        raise ConfigError([f"{path}: no checkpoint here; give a run directory, or its checkpoints/step-N"])
    damaged = verify(steps[0])
    if damaged:
        raise ConfigError(damaged)
    return steps[0]


def list_steps(directory):
    """The complete step directories in the order in which a run would go on from them: the newest first.

    Where ``latest`` names a step, those after it are left out: so a run is sent back to an earlier step by hand.
    """
    numbers = {}
    for entry in Path(directory).iterdir() if Path(directory).is_dir() else ():
        match = STEP_NAME.fullmatch(entry.name)
        if match:
            numbers[int(match[1])] = entry
    steps = [numbers[number] for number in sorted(numbers, reverse=True)]
    pointer = Path(directory) / "latest"
    names = [step.name for step in steps]
    named = pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None
    return steps[names.index(named) :] if named in names else steps


def verify(step, rank=0, world_size=1):
    """Sentences for the files of ``step`` that differ from its manifest; each of ``world_size`` ranks reads a share."""
    try:
        manifest = read_json(step / "manifest.json")
    except (OSError, ValueError) as error:
        return [f"{step}/manifest.json: cannot be read ({error}); remove the step, and an earlier one is used"]
    found = []
    for name in sorted(manifest)[rank::world_size]:
        path = step / name
        if not path.is_file():
            found.append(f"{path}: is missing; remove the step, and an earlier one is used")
        elif describe(path) != manifest[name]:
            found.append(f"{path}: differs from manifest.json ({path.stat().st_size} bytes); remove the step")
    return found


def full_parameters(step):
    """(name, whole fp32 tensor) of every parameter of a step directory, in the order of the model."""
    reader = FragmentReader(step)
    with torch.device("meta"):
        model = CausalLM(Config.load(Path(step) / "config.json").model)
    for name, _ in model.named_parameters():
        yield name, reader.read("master", name)


class FragmentReader:
    """Whole tensors from the fragments of all ranks; each tensor is put together when it is asked for."""

    def __init__(self, step):
        self.files = []
        self.pieces = {}  # name -> [(address, file)]
        for path in sorted(Path(step).glob("rank-*.safetensors"), key=lambda path: int(path.stem.split("-")[1])):
            file = safe_open(path, "pt")
            for name, address in json.loads(file.metadata()["fragments"]).items():
                self.pieces.setdefault(name, []).append((address, file))

    def read(self, kind, name):
        """The whole parameter ``name``, or its moment; fp32. Raises ValueError if elements are missing."""
        pieces = self.pieces.get(name)
        if pieces is None:
            raise ValueError(f"{kind} of {name}: is in none of the files")
        whole = torch.empty(pieces[0][0]["whole_shape"])
        filled = 0
        for partition, shape, ranges in shards(pieces):
            local = torch.full((shape.numel(),), torch.nan)
            covered = 0
            for start, file in ranges:
                values = file.get_tensor(f"{kind}/{name}")
                local[start : start + values.numel()] = values
                covered += values.numel()
            if covered != local.numel():
                raise ValueError(f"{kind} of {name}: {covered} of {local.numel()} elements are in the files")
            if partition is None:
                return local.view(shape)
            partition.place(local.view(shape), whole)
            filled += sum(stop - start for start, stop in partition.ranges)
        if filled != partition.size:
            raise ValueError(f"{kind} of {name}: {filled} of {partition.size} slices are in the files")
        return whole


def shards(pieces):
    """Pieces of one parameter by tensor-parallel shard: (partition, local shape, (start, file) of each range)."""
    by_shard = {}
    for address, file in pieces:
        by_shard.setdefault(json.dumps(address["partition"]), []).append((address, file))
    for owned in by_shard.values():
        address = owned[0][0]
        yield read_partition(address), torch.Size(address["shape"]), [(a["start"], file) for a, file in owned]


def read_partition(address):
    values = address["partition"]
    if values is None:
        return None
    return Partition(**{**values, "ranges": tuple(map(tuple, values["ranges"]))})


@torch.no_grad()
def load_fragments(step, fragments):
    """Fill this rank's ``fragments`` in place from the files of ``step``, whatever layout wrote them."""
    reader = FragmentReader(step)
    for fragment in fragments:
        partition, start = fragment.parameter.tensor_partition, fragment.start
        for kind, tensor in fragment.tensors.items():
            whole = reader.read(kind, fragment.name)
            local = whole if partition is None else partition.take(whole)
            tensor.copy_(local.flatten()[start : start + tensor.numel()])


def describe(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def flush(path):
    """Force a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path, content):
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))
