"""Reads gated models in classes of transformers, as written by ``export_hf --as``, under the trainer's names.

config.json is read as that of a mixture whose heads are all shared. The keys that the class would write for this model
must then equal those in the file. Others may only be those that transformers adds when it saves the model again and
that have no effect on it. Everything that would change the model's function, such as a layer of linear
attention, experts, or varying numbers of heads, is therefore refused by name.
"""

import torch

from moh_lm.build import build_model
from moh_lm.config import ConfigError, raise_any
from moh_lm.model.transformer import saved_tensors
from tools.hf.convert import keys
from tools.hf.convert.import_config import model_config, type_problems
from tools.hf.convert.import_weights import Source
from tools.hf.convert.stock_classes import CLASSES, FEATURES, GATES

SILENT = (  # keys that do not affect the function, or that are checked separately
    "architectures", "model_type", "max_position_embeddings", "initializer_range", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id", "tokenizer_class", "torch_dtype", "dtype", "transformers_version",
)  # fmt: skip
OFF = ("attention_dropout", "output_router_logits")  # keys that have no effect if they are 0 or false
KINDS = {kind.model_type: kind for kind in CLASSES.values()}


def read_stock(values, directory):
    """Return (config.json's ``values`` in the keys of a moh_llama, the ``StockClass`` for which they were written).
    directory: has the weights, which distinguish gates of features from those of heads.

    Values of any other model are returned unchanged, with None. Raises ConfigError with everything that cannot be read.
    """
    kind = KINDS.get(values.get("model_type"))
    if kind is None:
        return values, None
    try:
        layers = len(values["layer_types"])
        plain = {key: value for key, value in values.items() if key in (*SILENT, "sliding_window", "layer_types")}
        plain |= {entry.key: values[entry.key] for entry in keys.MODEL if entry.key in values}
        plain |= kind.plain_keys(values)
        shared = [values["num_attention_heads"]] * layers
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError([f"config.json: a key is missing or invalid ({error}); fix it"]) from error
    per_layer = values.get("num_attention_heads_per_layer")
    if isinstance(per_layer, list) and len({*map(str, per_layer)}) > 1:
        problem = f"num_attention_heads_per_layer {per_layer}: layers with other numbers of heads are not read back"
        raise ConfigError([f"config.json: {problem}; import an export without --as"])
    plain |= {"model_type": "moh_llama", "architectures": [keys.ARCHITECTURES["moh_llama"]], "qk_norm": True}
    plain |= {"head_selection": "mixture", "routing": kind.routing, "two_stage": True}
    plain |= {"num_shared_heads": shared, "num_active_routed_heads": [0] * layers}
    raise_any([f"config.json: {problem}; fix it" for problem in type_problems(plain)])
    stock = kind(model_config(plain))
    written = {"architectures": [kind.architecture], **stock.config()}
    problems = [
        f"{key} {values.get(key)!r}: can only be {value!r}"
        for key, value in written.items()
        if values.get(key) != value
    ]
    others = values.keys() - written.keys() - {*SILENT, *kind.inert}
    odd = sorted(key for key in others if values[key] is not None and not (key in OFF and values[key] == 0))
    problems += [f"{key} {values[key]!r}: has no counterpart here" for key in odd]
    readable = "only what export_hf --as has written can be read, as it is or saved again by transformers"
    raise_any([f"config.json: {problem}; {readable}" for problem in problems])
    if kind.gates_features and gates_differ(StockSource(directory, stock)):
        for entry in keys.HEADS:
            plain.pop(entry.key, None)
        plain |= {"head_selection": "all", "element_gates": True}
        stock = kind(model_config(plain))
    return plain, stock


def gates_differ(source):
    """Return whether some head of the ``StockSource`` has different gates for its features."""
    heads, names = source.stock.model.num_attention_heads, [name for name in source.shapes if name.endswith(GATES)]
    layers = (source.rows(name.replace(GATES, FEATURES)).unflatten(0, (heads, -1)) for name in names)
    return not all(gates.eq(gates[:, :1]).all() for gates in layers)


class StockSource(Source):
    """The safetensors of such a directory, by the trainer's names. Raises ConfigError unless all exist."""

    def __init__(self, directory, stock):
        super().__init__(directory)
        self.stock, there = stock, self.shapes
        with torch.device("meta"):
            tensors = list(saved_tensors(build_model(stock.model)))
            wanted = {name: tuple(tensor.shape) for name, tensor in stock.converted(tensors)}
        problems = [
            f"{name} has shape {list(there.get(name, ()))}, but config.json says {list(wanted.get(name, ()))}"
            for name in sorted(there.keys() | wanted.keys())
            if there.get(name) != wanted.get(name)
        ]
        raise_any([f"{directory}: {problem}; export it again" for problem in problems[:8]])
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors}

    def rows(self, name, start=0, stop=None):
        read = super().rows
        if self.stock.is_arranged(name):
            return self.stock.original(name, read)[start:stop]
        return self.stock.original(name, lambda there: read(there, start, stop))
