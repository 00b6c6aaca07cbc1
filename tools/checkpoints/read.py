"""Reads checkpoints outside a run, and compares every byte with the manifest and every element with the model.

Files are hashed by many threads. Parameters and moments are read in pieces of a few megabytes, whatever their size and
whatever layout wrote them, so that nothing here needs memory for a whole model. Nothing is unpickled: the files are
JSON and safetensors.
"""

import hashlib
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors import SafetensorError
from tqdm import tqdm

from moh_lm.build import build_model
from moh_lm.checkpoint.directory import STEP_NAME, list_steps, no_checkpoint, refuse_dangling
from moh_lm.checkpoint.fragments import AVERAGE, MOMENTS, FragmentReader, shard_shape
from moh_lm.checkpoint.manifest import BLOCK_BYTES, read_entries, verify
from moh_lm.config import Config, ConfigError, raise_any
from moh_lm.model.transformer import saved_tensors
from moh_lm.run.state import read_state, state_problems
from moh_lm.vision.config import kind_of_run
from moh_lm.vision.load import MODELS

KINDS = ("master", *MOMENTS, AVERAGE)  # only some runs of image models have the moving average
CHUNK = 1 << 22  # elements read at once: 16 MiB
ANY_STEP = re.compile(r"(damaged-)?step-\d+.*")  # includes steps that were set aside or are half removed


class Step:
    """A step directory. shapes: {name: shape} of every parameter of the model, in its order. segments: segments of the
    data, see moh_lm.data.segments. skipped: recent steps that were skipped. hashed: compare every byte with the
    manifest first. Raises ConfigError, naming damaged files.
    """

    def __init__(self, path, hashed=True):
        self.path = path
        damaged = find_damage(path) if hashed else []
        raise_any([f"{problem}; restore it, or give another checkpoint" for problem in damaged])
        try:
            self.entries = read_entries(path)
            self.config = kind_of_run(path).load(path / "config.json")
            self.state = read_state(path)
            self.segments, self.skipped = self.state["data"]["segments"], self.state["guard"]["skipped"]
            with torch.device("meta"):
                make = build_model if type(self.config) is Config else MODELS[self.config.kind][0]
                model = make(self.config.model)
            self.shapes = {name: tuple(tensor.shape) for name, tensor in saved_tensors(model)}
            self.reader = FragmentReader(path)
        except ConfigError as error:
            named = [text if str(path) in text else f"{path / 'config.json'}: {text}" for text in error.problems]
            raise ConfigError(named) from error
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError([f"{path}: is not a checkpoint of this version ({reason})"]) from error

    def read(self, kind, name):
        """Flat fp32 pieces that together form the whole parameter or moment. Raises ConfigError if a part is in no
        file."""
        size = math.prod(self.shapes[name])
        for start in range(0, size, CHUNK):
            try:
                yield self.reader.read(kind, name, None, start, min(CHUNK, size - start))
            except (ValueError, RuntimeError, SafetensorError) as error:
                raise ConfigError([f"{self.path}: {kind} of {name} cannot be read ({error})"]) from error

    def kinds(self, name):
        """The kinds of tensors that the step holds for a parameter."""
        return KINDS if name in self.reader.averaged else KINDS[:-1]

    def bytes(self):
        """fp32 bytes of all parameters, moments and averages."""
        return 4 * sum(len(self.kinds(name)) * math.prod(shape) for name, shape in self.shapes.items())


def locate(path):
    """The step directory ``path``, or the steps of the run directory ``path``, newest first.

    Raises ConfigError if there is none, or if a newer one is a link whose target does not exist.
    """
    if (path / "checkpoints").is_dir():
        refuse_dangling(path / "checkpoints")
        steps = list_steps(path / "checkpoints")
    else:
        is_step = ANY_STEP.fullmatch(path.name) or (path / "manifest.json").exists()
        steps = [path] if path.is_dir() and is_step else []
    if not steps:
        raise no_checkpoint(path)
    return steps


def layout(config, names):
    """The degrees of parallelism and the ZeRO stage of the ranks that wrote the files of these names."""
    parallel, ranks = config.parallel, sum(name.startswith("rank-") for name in names)
    return {
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "data_parallel_size": config.data_parallel_size(ranks),
        "zero_stage": parallel.zero_stage,
    }


def progress(title, total):
    """Return a progress bar in bytes on a terminal, and nothing elsewhere."""
    return tqdm(desc=title, total=total, unit="B", unit_scale=True, leave=False, disable=None)


def find_damage(step):
    """The sentences of ``moh_lm.checkpoint.manifest.verify``; threads read the files."""
    try:
        entries = read_entries(step)
    except ValueError as error:
        return [str(error)]
    blocks = sum(len(entry["sha256"]) for entry in entries.values())
    with ThreadPoolExecutor() as pool, progress(f"reading {step}", blocks * BLOCK_BYTES) as bar:

        def verify_part(part):
            return verify(step, part, len(entries), lambda: bar.update(BLOCK_BYTES))

        return [problem for found in pool.map(verify_part, range(len(entries))) for problem in found]


def find_gaps(step):
    """Return sentences if undamaged files are not a complete model, in which each element exists once, is finite, and
    belongs to the step."""
    yield from misnamed(step.path, step.state)
    yield from (f"{step.path / 'state.json'}: {problem}" for problem in state_problems(step.state, step.config.model))
    for name in sorted(step.reader.shapes.keys() - step.shapes.keys()):
        yield f"{step.path}: {name} is not a parameter of the model"
    with progress(f"checking {step.path}", step.bytes()) as bar:
        for name, shape in step.shapes.items():
            gap = uncovered(shape, step.reader.shapes.get(name), step.reader.shards.get(name))
            for kind in step.kinds(name) if gap is None else ():
                try:
                    for values in step.read(kind, name):
                        if not all(map(math.isfinite, values.aminmax())):
                            gap = f"{kind} is not finite"
                        bar.update(values.nbytes)
                except ConfigError as error:
                    yield from error.problems
            if gap:
                yield f"{step.path}: {name}: {gap}"


def misnamed(path, state):
    """Return a list of one sentence if no run resumes from the directory or link ``path`` with this ``state``, because
    it is named after another step; else []."""
    name = path.absolute().name
    name = name if STEP_NAME.fullmatch(name) else path.resolve().name
    is_other = STEP_NAME.fullmatch(name) and name != f"step-{state['step']}"
    return [f"{path / 'state.json'}: belongs to step {state['step']}"] if is_other else []


def uncovered(shape, found_shape, shards):
    """The reason why a parameter of ``shape`` is not in the files exactly once; None if it is.

    shards: {Partition or None: [Piece]} of moh_lm.checkpoint.fragments.
    """
    if not shards:
        return "is in none of the files"
    if found_shape != shape:
        return f"has shape {list(found_shape)}, but {list(shape)} in the model"
    dims = {None if partition is None else partition.dim for partition in shards}
    cuts = sorted(cut for partition in shards if partition for cut in partition.ranges)
    if len(dims) > 1 or (cuts and not tiles(cuts, shape[dims.pop()])):
        return "its slices do not form the whole parameter"
    for partition, pieces in shards.items():
        spans = sorted((piece.start, piece.start + piece.length) for piece in pieces)
        if not tiles(spans, math.prod(shard_shape(shape, partition))):
            return f"its ranges {spans} leave gaps, or overlap"
    return None


def tiles(spans, size):
    """Return whether the sorted (start, stop) cover [0, size) without gap or overlap."""
    return [*(start for start, _ in spans), size] == [0, *(stop for _, stop in spans)]


def state_hash(step):
    """SHA-256 of all weights and moments, the same for every layout that wrote them.

    It covers master, exp_avg, exp_avg_sq and, if there is one, ema of each parameter in the order of the model: the
    JSON text ["KIND", "NAME", [SHAPE]] and a line feed, then the elements as little-endian fp32.
    """
    digest = hashlib.sha256()
    with progress("hashing the state", step.bytes()) as bar:
        for name, shape in step.shapes.items():
            for kind in step.kinds(name):
                digest.update(json.dumps([kind, name, list(shape)]).encode() + b"\n")
                for values in step.read(kind, name):
                    digest.update(values.numpy())
                    bar.update(values.nbytes)
    return digest.hexdigest()


def norms(step):
    """Return {name: {"shape", and the L2 norm of each kind}} of every parameter."""
    found = {}
    with progress("reading the state", step.bytes()) as bar:
        for name, shape in step.shapes.items():
            found[name] = {"shape": list(shape)}
            for kind in step.kinds(name):
                squares = 0.0
                for values in step.read(kind, name):
                    squares += torch.linalg.vector_norm(values, dtype=torch.float64).square().item()
                    bar.update(values.nbytes)
                found[name][kind] = math.sqrt(squares)
    return found


def changes(first, second):
    """Return [{"name", "shape", KIND: {"equal", "absolute", "relative"}}] of common parameters, most changed first.

    equal: bitwise. absolute: the largest |b - a|. relative: absolute over the largest |a|. None: not finite, or
    relative to zero.
    """
    rows = []
    with progress("comparing", first.bytes()) as bar:
        for name, shape in first.shapes.items():
            if second.shapes.get(name) == shape:
                row = {"name": name, "shape": list(shape)}
                for kind in min(first.kinds(name), second.kinds(name), key=len):
                    row[kind] = change(first.read(kind, name), second.read(kind, name), bar)
                rows.append(row)
    unknown = {None: math.inf}  # sorts first

    def order(row):
        return [-unknown.get(row[kind]["relative"], row[kind]["relative"]) for kind in KINDS if kind in row]

    return sorted(rows, key=order)


def change(first, second, bar):
    equal, absolute, largest = True, 0.0, 0.0
    for a, b in zip(first, second, strict=True):
        largest = max(largest, a.abs().max().item())
        if not torch.equal(a.view(torch.int32), b.view(torch.int32)):
            distance = (b.double() - a.double()).abs().nan_to_num(nan=math.inf)
            equal, absolute = False, max(absolute, distance.max().item())
        bar.update(a.nbytes)
    relative = absolute / largest if largest else math.inf if absolute else 0.0
    finite = {"absolute": absolute, "relative": relative}
    return {"equal": equal, **{key: value if math.isfinite(value) else None for key, value in finite.items()}}
