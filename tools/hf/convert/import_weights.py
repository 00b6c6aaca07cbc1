"""Converts the weights of a Hugging Face directory to the files of a training checkpoint, block by block.

The parameters have Hugging Face's names in the trainer, and rows in the same order (half-split rotary), so a weight is
read, widened to fp32 and written. ``plan`` says for every parameter where its elements come from:

    the source       unchanged, or with heads in another order: rows of q, columns of o, and the rows of k and v of
                     whole groups (tools/heads/importance.py says which orders are legal)
    vocabulary       rows of the source, then new ones (tools/hf/convert/import_vocabulary.py)
    router           drawn as in a new run, from (seed, name); a Llama has none

Blocks of a few megabytes are in memory at a time, whatever the size of the model.
"""

import math
import zipfile
from argparse import Namespace
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from moh_lm.build import build_model
from moh_lm.config import TWO_STAGE, ConfigError, raise_any
from moh_lm.model.initial_gates import layer_gates
from moh_lm.model.transformer import initialize, saved_tensors
from moh_lm.parallel.layers import make_parameter
from tools.hf.convert.export_files import weight_files

BLOCK = 1 << 22  # elements read at once: 16 MiB in fp32
DTYPES = ("F32", "BF16", "F16", "I32")
REDUNDANT = "rotary_emb.inv_freq"  # a table stored by early versions of transformers; it follows from config.json
RELEASED = {  # parameters of the routers in the authors' code -> here
    "self_attn.wg.weight": "self_attn.router.w_routed",
    "self_attn.wg_0.weight": "self_attn.router.w_type",
    "self_attn.wg_1.weight": "self_attn.router.w_shared",
}
EMBEDDING, POSITIONS, HEAD = "model.embed_tokens.weight", "model.embed_positions.weight", "lm_head.weight"


class Source:
    """The safetensors of a Hugging Face directory. shapes: {name: shape}. dtypes: those that occur, sorted.

    Routers of the authors' released code are renamed to our names. Raises ConfigError unless every named tensor can be
    read.
    """

    def __init__(self, directory):
        self.directory = directory
        self.slices, self.shapes, dtypes = {}, {}, set()
        for name, file in weight_files(directory).items():
            part, (layer, dot, last) = file.get_slice(name), name.partition("self_attn.")
            here = layer + RELEASED.get(dot + last, dot + last)
            self.slices[here], self.shapes[here] = (file, name), tuple(part.get_shape())
            dtypes.add(part.get_dtype())
        kinds = sorted(dtypes - {*DTYPES})
        raise_any([f"{directory}: dtype {kind}; only {', '.join(DTYPES)} can be read" for kind in kinds])
        self.dtypes = sorted(dtypes)

    def rows(self, name, start=0, stop=None):
        """Return rows [start, stop) of a tensor, fp32. Raises ConfigError if they are not finite."""
        file, there = self.slices[name]
        values = file.get_slice(there)[start:stop].float()
        if not values.isfinite().all():
            raise ConfigError([f"{self.directory}: {name} is not finite in rows {start} to {start + len(values)}"])
        return values

    def blocks(self, name, stop=None):
        """The whole tensor, or its rows before ``stop``, in consecutive rows, about BLOCK elements at a time."""
        size = stop or self.shapes[name][0]
        step = max(1, BLOCK // math.prod(self.shapes[name][1:]))
        for start in range(0, size, step):
            yield self.rows(name, start, min(size, start + step))

    def whole(self, name):
        """The tensor, fp32, in memory."""
        values, filled = torch.empty(self.shapes[name]), 0
        for block in self.blocks(name):
            values[filled : filled + len(block)] = block
            filled += len(block)
        return values


class Part(NamedTuple):
    """A parameter of the checkpoint. blocks: returns an iterator over its rows, fp32. origin: its source, in words."""

    name: str
    shape: tuple[int, ...]
    blocks: Callable
    origin: str

    def fitted(self, values):
        """The parameter with other ``values``, see tools/heads/calibration.py."""
        return self._replace(blocks=lambda: [values], origin=f"{self.origin}, then fitted to the sample")


def plan(config, source, old_vocab_size, orders, extend, router_seed, trained=None):
    """Return [Part] for every parameter of the model, in order. Raises ConfigError naming absent or foreign tensors.

    config: ModelConfig of the checkpoint. old_vocab_size: the source's. orders: {layer: source heads in their new
    order}, or {}. extend: (rows of a vocabulary matrix that stay, name -> an iterable of those after them), or None.
    router_seed: for the routers of a model without any; None if the source must have them. trained: ModelConfig of
    the source; if a mixture becomes a model without routers, the outputs of its heads are scaled by their approximate
    gates.
    """
    with torch.device("meta"):
        wanted = dict(saved_tensors(build_model(config)))
    shapes = {name: tuple(parameter.shape) for name, parameter in wanted.items()}
    parts, problems = [], []
    kept, new = extend or (None, None)
    has_routers = any(".router." in name for name in source.shapes)
    loses_routers = trained and trained.heads.head_selection == "mixture" != config.heads.head_selection
    for name, shape in shapes.items():
        is_vocabulary = name in (EMBEDDING, HEAD)
        there = source.shapes.get(name)
        expected = (old_vocab_size, *shape[1:]) if is_vocabulary else shape
        if there is None and ".router." in name and router_seed is not None and not has_routers:
            parts.append(Part(name, shape, lambda n=name: [drawn(n, wanted[n], router_seed)], "drawn"))
        elif there is None and name.endswith("w_shared") and shape[0] == 1 and config.heads.routing in TWO_STAGE:
            parts.append(Part(name, shape, lambda s=shape: [torch.zeros(s)], "without effect: one shared head"))
        elif there is None:
            problems.append(f"{name} is missing")
        elif there != expected:
            problems.append(f"{name} has shape {list(there)}, but config.json says {list(expected)}")
        elif is_vocabulary and new:
            count = f"{shape[0] - kept} new rows"
            parts.append(Part(name, shape, lambda n=name: chain(source.blocks(n, kept), new(n)), count))
        elif loses_routers and name.endswith("o_proj.weight"):
            parts.append(Part(name, shape, *weighed(source, name, trained)))
        else:
            order = orders.get(layer_of(name))
            blocks, origin = arranged(source, name, order, config) if order else (None, "as it is")
            parts.append(Part(name, shape, blocks or (lambda n=name: source.blocks(n)), origin))
    known = {*shapes, *([HEAD] if config.tie_embeddings else [])}
    known |= {name for name in source.shapes if loses_routers and ".router." in name}
    odd = sorted(name for name in source.shapes.keys() - known if not name.endswith(REDUNDANT))
    problems += [f"{name} has no counterpart here" for name in odd[:8]]
    problems += [f"and {len(odd) - 8} more tensors have none"] if odd[8:] else []
    if not problems and config.tie_embeddings and HEAD in source.shapes and not equal(source, HEAD, EMBEDDING):
        problems.append(f"{HEAD} differs from {EMBEDDING}, and config.json ties them; set tie_word_embeddings to false")
    raise_any([f"{source.directory}: {problem}" for problem in problems])
    return parts


def layer_of(name):
    """The number of the decoder layer of a parameter, or None."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else None


def drawn(name, like, seed):
    if not like.is_floating_point():  # the counts of a router's bias
        return torch.zeros(like.shape)
    parameter = make_parameter(tuple(like.shape), like.init_std)
    initialize([(name, parameter)], seed)
    return parameter.detach()


def arranged(source, name, order, config):
    """(blocks, origin) of a projection with its heads in another ``order``; (None, "as it is") for other parameters."""
    e, kind = config.head_dim, name.split(".")[-2]
    shared_by = config.queries_per_key
    if kind == "o_proj":

        def columns():
            for block in source.blocks(name):
                yield block.unflatten(1, (-1, e))[:, order].flatten(1)

        return columns, "heads reordered"
    if kind == "cope":
        return lambda: (source.rows(name, head, head + 1) for head in order), "heads reordered"
    if kind not in ("q_proj", "k_proj", "v_proj"):
        return None, "as it is"
    heads = order if kind == "q_proj" else [head // shared_by for head in order[::shared_by]]
    return lambda: (source.rows(name, head * e, (head + 1) * e) for head in heads), "heads reordered"


def weighed(source, name, trained):
    """(blocks, origin) of an output projection, its columns times the gates of their heads at equal scores."""
    layer = layer_of(name)
    shared, routed = layer_gates(trained, layer)
    widths = torch.tensor(trained.of_layer(layer).widths_of_heads())
    gates = torch.full(widths.shape, routed)
    gates[trained.numbers_always_on(layer)] = shared
    columns = gates.repeat_interleave(widths)
    return lambda: (block * columns for block in source.blocks(name)), "times the gates at equal scores"


def equal(source, one, other):
    same = source.shapes[one] == source.shapes[other]
    return same and all(map(torch.equal, source.blocks(one), source.blocks(other)))


def read_released(path):
    """Return the content of a released .pth, .pt or .safetensors file: tensors, numbers, texts and containers of them.

    Raises ConfigError for a file that holds anything else, or cannot be read.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals([Namespace]):  # the arguments of the training
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise ConfigError([f"cannot be read ({error.strerror or error}); give another file"]) from error
    except Exception as error:  # a damaged file may raise anything
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        raise ConfigError([f"does not hold weights alone ({reason}); give a file with nothing but weights"]) from error
