"""Writes gated models in classes of other libraries: export_hf --as, for a model that loads without remote code.

    qwen3_5    Qwen3_5ForCausalLM of transformers 5: sigmoid(G x) * (softmax(q k) v), then W_O. One projection gives the
               query of a head and, behind it, a gate for each feature; norms multiply by 1 + w. Gates of features fit
               directly; a head-wise gate g_i = 2 sigmoid(s_i) becomes equal rows, with the 2 in W_O
    laguna     LagunaForCausalLM of transformers 5.7: g_i = softplus(s_i) for each head, windows, and layers with
               different numbers of query heads but equal numbers of keys: those of smaller layers are repeated

A gate that reads a part of its input has zeros for the rest. A model without such a form is refused with the flags that
prevent it. export_check.py compares logits before anything is published; import_stock.py reads these models again.
"""

import math

import torch
import torch.nn.functional as F

from tools.hf.convert.keys import FIXED, FULL, MODEL, SLIDING, written_rope

GATES, FEATURES = "router.w_shared", "g_proj.weight"  # names in the trainer
QUERIES = "self_attn.q_proj.weight"


class StockClass:
    """Weights by the names and in the shapes of a class of transformers. model: ``ModelConfig``.

    name: of --as. routing: the form whose gates the class has, gates: their name in a sentence. inert: keys that
    ``save_pretrained`` adds to config.json, none of which matters to layers of the types in ``config()``.
    """

    name = model_type = architecture = routing = gates = None
    gates_features = False  # whether each feature has its own gate
    inert = ()

    def __init__(self, model):
        self.model = model

    def problems(self):
        """Return sentences on what the class cannot compute for the model; empty if it can be written."""
        model, heads = self.model, self.model.heads
        gated = heads.head_selection == "mixture" and not model.routed_layers()
        own = self.gates_features and model.element_gates
        found = [
            (not (gated or own), "--head-selection: it gates every head and chooses none, so it must be gated"),
            (heads.routing != self.routing and not own, f"--routing {heads.routing}: its gates are {self.gates}"),
            (not model.qk_norm, "without --qk-norm: it normalises queries and keys"),
            (model.post_norm, "--post-norm: it normalises in front of a layer only"),
            (model.attention != "heads", f"--attention {model.attention}: it keeps keys and values of heads"),
            ({*model.position} != {"rotary"}, "--position: all of its layers have rotary positions"),
            *self.own_problems(),
        ]
        return [f"--as {self.name}: cannot hold this model; {text}" for wrong, text in found if wrong]

    def config(self):
        """The keys of config.json that describe the model."""
        return {
            **{entry.key: getattr(self.model, entry.field) for entry in MODEL},
            "attention_bias": FIXED["attention_bias"],
            "hidden_act": FIXED["hidden_act"],
            "layer_types": [SLIDING if width else FULL for width in self.model.window],
        }

    def wide(self, gates):
        """The rows of gates [h, w], with zeros for the channels of their input that they do not read: [h, d]."""
        return F.pad(gates, (0, self.model.hidden_size - gates.shape[1]))

    def narrow(self, gates):
        """Undo ``wide``."""
        return gates[:, : self.model.heads.gate_width or None]


class Qwen35(StockClass):
    name, model_type, architecture = "qwen3_5", "qwen3_5_text", "Qwen3_5ForCausalLM"
    routing, gates, gates_features = "sigmoid", "sigmoids", True
    inert = (
        "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
        "linear_num_value_heads",
    )  # fmt: skip

    def own_problems(self):
        alike = len(self.model.head_counts) == 1 and not self.model.head_dims
        return [
            (any(self.model.window), "--window: its layers see the whole sequence"),
            (not alike, "--num-attention-heads, --head-dims: its heads are all alike"),
        ]

    def config(self):
        model, rotated = self.model, int(self.model.head_dim * self.model.rotary_fraction) // 2
        sections = [rotated - 2 * (rotated // 3), rotated // 3, rotated // 3]  # for three equal positions of a token
        rope = written_rope(model)["rope_parameters"]
        return super().config() | {
            "rope_parameters": {
                **rope, "partial_rotary_factor": model.rotary_fraction, "mrope_section": sections,
                "mrope_interleaved": True,
            },
        }  # fmt: skip

    @staticmethod
    def plain_keys(values):
        """Return the keys of config.json ``values`` that other models spell differently, in the form of a moh_llama."""
        rope = values["rope_parameters"].items()
        return {"rope_parameters": {key: value for key, value in rope if not key.startswith("mrope_")}}

    def converted(self, tensors):
        """Convert (name, tensor) pairs of the trainer, in its order, to those of the class."""
        queries = {}  # queries of layers whose gates follow later
        for name, tensor in tensors:
            if name.endswith("q_proj.weight"):
                queries[name] = tensor
            elif name.endswith((GATES, FEATURES)):
                name = name.partition("self_attn.")[0] + QUERIES
                yield name, self.with_gates(queries.pop(name), self.wide(tensor))
            elif name.endswith("self_attn.o_proj.weight"):
                yield name, 2 * tensor
            else:
                yield name, tensor - 1 if "norm" in name else tensor

    def with_gates(self, query, gates):
        """Join [h e, d] and [h or h e, d] to [2 h e, d]: each head's rows of the query, then its gates of features."""
        heads, features = self.model.num_attention_heads, self.model.head_dim
        repeated = gates.unflatten(0, (heads, -1)).expand(heads, features, -1)
        return torch.cat((query.unflatten(0, (heads, features)), repeated), 1).flatten(0, 1)

    def original(self, name, read):
        """Return the trainer's tensor ``name``. read: returns the class's tensor of a name."""
        heads, features = self.model.num_attention_heads, self.model.head_dim
        if self.is_arranged(name):
            joint = read(name.partition("self_attn.")[0] + QUERIES)
            queries, gates = joint.unflatten(0, (heads, -1)).split(features, 1)
            if name.endswith(GATES):
                return self.narrow(gates[:, 0])
            return (gates if name.endswith(FEATURES) else queries).flatten(0, 1)
        if name.endswith("self_attn.o_proj.weight"):
            return read(name) / 2
        return read(name) + 1 if "norm" in name else read(name)

    def is_arranged(self, name):
        """Return whether the trainer's tensor ``name`` has other rows than the class's, or another order of rows."""
        return name.endswith(("q_proj.weight", GATES, FEATURES))


class Laguna(StockClass):
    name, model_type, architecture = "laguna", "laguna", "LagunaForCausalLM"
    routing, gates = "softplus", "softplus of scores"
    inert = (
        "sliding_window", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "router_aux_loss_coef",
        "shared_expert_intermediate_size", "moe_routed_scaling_factor", "moe_apply_router_weight_on_input",
        "moe_router_logit_softcapping",
    )  # fmt: skip

    def __init__(self, model):
        super().__init__(model)
        layers = [model.of_layer(index) for index in range(model.num_layers)]
        self.heads = [of.num_attention_heads for of in layers]
        self.num_keys = math.lcm(*(of.num_key_value_heads for of in layers))  # key/value heads of every layer
        self.copies = [self.num_keys // of.num_key_value_heads for of in layers]  # copies of each key

    def own_problems(self):
        unequal = any(heads % self.num_keys for heads in self.heads)
        return [
            (len({*self.model.window} - {0}) > 1, "--window: its windows are of one width"),
            (self.model.head_dims, "--head-dims: its heads are of one width"),
            (unequal, f"--num-key-value-heads: all layers need {self.num_keys}, which must divide their query heads"),
        ]

    def config(self):
        rope = written_rope(self.model)["rope_parameters"] | {"partial_rotary_factor": self.model.rotary_fraction}
        window = {"sliding_window": max(self.model.window)} if any(self.model.window) else {}
        return super().config() | window | {
            "num_attention_heads": max(self.heads),
            "num_key_value_heads": self.num_keys,
            "num_attention_heads_per_layer": self.heads,
            "mlp_layer_types": ["dense"] * self.model.num_layers,
            "gating": "per-head",
            "rope_parameters": {FULL: rope, SLIDING: rope},
        }

    @staticmethod
    def plain_keys(values):
        return {"rope_parameters": values["rope_parameters"][FULL]}

    def converted(self, tensors):
        for name, tensor in tensors:
            if name.endswith(GATES):
                yield name.replace(GATES, "g_proj.weight"), self.wide(tensor)
            elif self.is_arranged(name):
                each = tensor.unflatten(0, (-1, self.model.head_dim))
                yield name, each.repeat_interleave(self.copies_of(name), 0).flatten(0, 1)
            else:
                yield name, tensor

    def original(self, name, read):
        if name.endswith(GATES):
            return self.narrow(read(name.replace(GATES, "g_proj.weight")))
        if self.is_arranged(name):
            return read(name).unflatten(0, (-1, self.model.head_dim))[:: self.copies_of(name)].flatten(0, 1)
        return read(name)

    def is_arranged(self, name):
        return name.endswith(("k_proj.weight", "v_proj.weight")) and self.copies_of(name) > 1

    def copies_of(self, name):
        return self.copies[int(name.split(".")[2])]


CLASSES = {kind.name: kind for kind in (Qwen35, Laguna)}
