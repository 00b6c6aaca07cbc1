"""The file that each rank adds to a checkpoint, and how to read parameters, or parts of them, from all of these files.

``rank-N.safetensors`` holds what one rank's optimizer owned: for a range of each flattened local parameter the fp32
master weight and both moments, under ``KIND/NAME``. Image models may also have a moving average of the weights. The
counts of a router's bias are int32. The metadata key ``fragments`` is JSON, NAME -> address:

    whole_shape    of the parameter
    partition      which slices of it the writer's tensor-parallel shard was (``Partition``), or null
    start, length  of the range in that shard, flattened

The metadata key ``zero``, a JSON list, names what is left out because it is zero: kinds (an imported model has no
moments yet), or ``KIND/NAME`` (Muon has no second moment, a frozen weight has no moments).

A reader may have any other layout: it asks for a range of its own shard, whichever files hold it.
"""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from moh_lm.build import build_model
from moh_lm.checkpoint.manifest import NO_SUCH_FILE, HashedFile, read_entries
from moh_lm.config import Config
from moh_lm.model.transformer import saved_tensors
from moh_lm.parallel.layers import Partition
from moh_lm.parsing import parse_json, read_json

MOMENTS = ("exp_avg", "exp_avg_sq")
AVERAGE = "ema"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32"}


class Fragment(NamedTuple):
    """A range of one parameter that this rank's optimizer owns.

    start: first element of the range in the local ``parameter``, flattened. tensors: "master", "exp_avg" and
    "exp_avg_sq", flat fp32, all of one length, the optimizer's own; Muon has no "exp_avg_sq", and a frozen weight has
    only the master. "ema": the moving average of the master, where there is one. is_copy: another rank holds the same
    values and writes them.
    """

    name: str
    parameter: torch.nn.Parameter
    start: int
    is_copy: bool
    tensors: dict[str, torch.Tensor]


def metadata_of(fragments):
    """Return the metadata of a file with these ``Fragment``s."""
    absent = [f"{kind}/{fragment.name}" for fragment in fragments for kind in MOMENTS if kind not in fragment.tensors]
    addresses = json.dumps({fragment.name: address_of(fragment) for fragment in fragments})
    return {"fragments": addresses, **({"zero": json.dumps(absent)} if absent else {})}


def address_of(fragment):
    partition = fragment.parameter.tensor_partition
    return {
        "whole_shape": fragment.parameter.whole_shape,
        "partition": None if partition is None else asdict(partition),
        "start": fragment.start,
        "length": fragment.tensors["master"].numel(),
    }


def write_safetensors(path, tensors, metadata, progress=lambda: None):
    """Write and hash ``tensors``, of ``DTYPES``, in the safetensors format. Returns the entry for the manifest.

    Format: u64 length of the header, JSON header, the tensors end to end. ``progress`` is called after each block.
    """
    described = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()}
    with HashedFile(path, progress) as file:
        file.write(safetensors_header(described, metadata))
        for tensor in tensors.values():
            file.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return file.entry


def safetensors_header(described, metadata):
    """Return the bytes before the tensors. described: {name: (dtype, shape)} in the order of the tensors."""
    header, offset = {"__metadata__": metadata}, 0
    for name, (dtype, shape) in described.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return len(text).to_bytes(8, "little") + text


class Piece(NamedTuple):
    """One range of one shard, in one file."""

    file: safe_open
    start: int
    length: int


class FragmentReader:
    """Reads parameters from the rank files of a step directory.

    Raises ValueError with the path if a file is not a rank file, and OSError if it cannot be read.
    """

    def __init__(self, step):
        self.shapes = {}  # name -> shape of the whole parameter
        self.shards = {}  # name -> {Partition or None: [Piece]}
        self.zero = set()  # kinds, or kinds of a parameter, that the files leave out
        self.averaged = set()  # names of parameters whose moving average is there
        names = [name for name in read_entries(Path(step)) if name.startswith("rank-")]
        for path in (Path(step) / name for name in sorted(names)):
            try:
                open(path, "rb").close()  # safe_open calls any file absent that it cannot open
                file = safe_open(path, "pt")
                self.zero |= set(parse_json(file.metadata().get("zero", "[]")))
                addresses = parse_json(file.metadata()["fragments"])
                for key in file.keys():  # noqa: SIM118
                    kind, _, name = key.partition("/")
                    if kind == AVERAGE:
                        self.averaged.add(name)
                    elements, address = file.get_slice(key).get_shape(), addresses.get(name)
                    if address and elements != [address["length"]]:
                        raise ValueError(f"{key} has {elements} elements, but its range has {address['length']}")
                for name, address in addresses.items():
                    shape = tuple(address["whole_shape"])
                    if self.shapes.setdefault(name, shape) != shape:
                        raise ValueError(f"{name} has shape {list(shape)}, but {list(self.shapes[name])} elsewhere")
                    pieces = self.shards.setdefault(name, {}).setdefault(read_partition(address["partition"]), [])
                    pieces.append(Piece(file, address["start"], address["length"]))
            except (SafetensorError, *NO_SUCH_FILE, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}: not a rank file of a checkpoint ({error})") from error

    def require(self, name, shape):
        """Raise ValueError if the files hold the parameter ``name`` with another shape than the model's."""
        found = self.shapes.get(name, shape)
        if found != tuple(shape):
            raise ValueError(f"{name} has shape {list(found)} in the files and {list(shape)} in the model")

    def read(self, kind, name, partition=None, start=0, length=None):
        """Return elements [start, start + length) of the flattened shard of ``name`` that ``partition`` describes, in
        fp32.

        By default the whole parameter is returned, in its shape. kind: "master", "exp_avg" or "exp_avg_sq". Padding is
        zero. Raises ValueError if elements are in none of the files.
        """
        if name not in self.shards:
            raise ValueError(f"{kind} of {name}: is in none of the files")
        whole = self.shapes[name]
        rows, columns = matrix(shard_shape(whole, partition))
        stop = rows * columns if length is None else start + length
        is_whole = length is None and partition is None
        if not self.zero.isdisjoint((kind, f"{kind}/{name}")):
            return torch.zeros(whole if is_whole else stop - start)
        first, last = start // columns, -(-stop // columns)  # rows that hold the range
        block = torch.zeros(last - first, columns)
        filled = 0
        for owned, pieces in self.shards[name].items():
            width = matrix(shard_shape(whole, owned))[1]
            shared = list(shared_runs(owned, partition, 1, whole, 0, columns))
            for source_row, row, count in shared_runs(owned, partition, 0, whole, first, last) if shared else ():
                values = read_rows(pieces, f"{kind}/{name}", source_row, count, width)  # [count, width]
                for source_column, column, size in shared:
                    part = values[:, source_column : source_column + size]
                    block[row - first : row - first + count, column : column + size] = part
                    filled += part.numel()
        expected = covered(partition, 0, whole, first, last) * covered(partition, 1, whole, 0, columns)
        if filled != expected:
            raise ValueError(f"{kind} of {name}: {filled} of {expected} elements are in the files")
        values = block.flatten()[start - first * columns : stop - first * columns]
        return values.view(whole) if is_whole else values


def read_rows(pieces, key, row, count, width):
    """Read rows [row, row + count) of a shard of ``width`` columns from its pieces: fp32 [count, width]."""
    first, last = row * width, (row + count) * width
    values, position = torch.empty(last - first), first
    for file, start, length in sorted(pieces, key=lambda piece: piece.start):
        begin, end = max(first, start), min(last, start + length)
        if begin == position < end:
            values[begin - first : end - first] = file.get_slice(key)[begin - start : end - start]
            position = end
    if position != last:
        raise ValueError(f"{key}: element {position} of a shard occurs in no file, or in two")
    return values.view(count, width)


def matrix(shape):
    """View a parameter as a matrix: the first dimension by all others."""
    return shape[0], math.prod(shape[1:])


def shard_shape(whole, partition):
    if partition is None:
        return whole
    return tuple(partition.local_size() if dim == partition.dim else size for dim, size in enumerate(whole))


def runs(partition, dim, whole):
    """Return (position in the shard, in the whole parameter, length) of consecutive rows (dim 0) or columns (1)."""
    if partition is None or partition.dim != dim:
        return [(0, 0, matrix(whole)[dim])]
    position, found = 0, []
    for start, stop in partition.ranges:
        found.append((position, start, stop - start))
        position += stop - start
    return found


def shared_runs(source, target, dim, whole, first, last):
    """Yield (position in the source, in the target, length) of what both hold within [first, last) of the target."""
    for there, whole_there, length_there in runs(source, dim, whole):
        for here, whole_here, length_here in runs(target, dim, whole):
            begin = max(whole_there, whole_here, whole_here + first - here)
            end = min(whole_there + length_there, whole_here + length_here, whole_here + last - here)
            if begin < end:
                yield there + begin - whole_there, here + begin - whole_here, end - begin


def covered(partition, dim, whole, first, last):
    """Count the rows or columns in [first, last) of a shard that are not padding."""
    return sum(max(0, min(last, here + size) - max(first, here)) for here, _, size in runs(partition, dim, whole))


def read_partition(values):
    if values is None:
        return None
    return Partition(values["dim"], values["size"], tuple(map(tuple, values["ranges"])), values["padding"])


def step_config(step):
    """Return the ``Config`` of a step directory, with the model as it is at that step: dense in a dense warm-up."""
    config = Config.load(Path(step) / "config.json")
    if config.model.after(0) == config.model:
        return config
    return replace(config, model=config.model.after(read_json(Path(step) / "state.json")["step"]))


def full_parameters(step):
    """Yield (name, whole fp32 tensor) of every parameter of ``step_config``, in the order of the model."""
    reader = FragmentReader(step)
    with torch.device("meta"):
        model = build_model(step_config(step).model)
    for name, tensor in saved_tensors(model):
        reader.require(name, tensor.shape)
        yield name, reader.read("master", name)


@torch.no_grad()
def load_fragments(step, fragments, progress=lambda: None):
    """Fill this rank's ``fragments`` in place from the files of ``step``, whatever layout wrote them.

    Returns whether the files hold a moving average; if they do not, the average starts from the masters.
    """
    reader = FragmentReader(step)
    for fragment in fragments:
        reader.require(fragment.name, fragment.parameter.whole_shape)
        for kind, tensor in fragment.tensors.items():
            partition = fragment.parameter.tensor_partition
            if kind == AVERAGE and fragment.name not in reader.averaged:
                kind = "master"
            tensor.copy_(reader.read(kind, fragment.name, partition, fragment.start, tensor.numel()))
            progress()
    return bool(reader.averaged)
