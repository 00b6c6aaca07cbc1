"""Gated models in classes that other libraries have: export_hf --as, for a model that loads without remote code.

    qwen3_5    Qwen3_5ForCausalLM of transformers 5: sigmoid(G x) * (softmax(q k) v), then W_O. One projection gives the
               query of a head and, behind it, a gate for each of its features; norms multiply by 1 + w

A head-wise gate g_i = 2 sigmoid(s_i) is such a gate with equal rows, and its 2 goes into W_O. A model that has no such
form is refused with the flags that stand against it. export_check.py compares logits before anything is published.
"""

import torch

from tools.hf.convert.keys import FIXED, MODEL, written_rope


class Qwen35:
    """Weights by the names and in the shapes of ``Qwen3_5ForCausalLM``. model: ``ModelConfig``."""

    model_type, architecture = "qwen3_5_text", "Qwen3_5ForCausalLM"

    def __init__(self, model):
        self.model = model

    def problems(self):
        """Sentences on what the class cannot compute of the model; empty if it can be written."""
        model, heads = self.model, self.model.heads
        gated = heads.head_selection == "mixture" and not model.routed_layers()
        alike = len(model.head_counts) == 1 and not model.head_dims
        found = [
            (not gated, "--head-selection: it gates every head and chooses none, which is gated"),
            (heads.routing != "sigmoid", f"--routing {heads.routing}: its gates are sigmoids"),
            (not model.qk_norm, "without --qk-norm: it normalises queries and keys"),
            (model.post_norm, "--post-norm: it normalises in front of a layer only"),
            (model.attention != "heads", f"--attention {model.attention}: it keeps keys and values of heads"),
            (any(model.window), "--window: its layers see the whole sequence"),
            ({*model.position} != {"rotary"}, "--position: all of its layers have rotary positions"),
            (not alike, "--num-attention-heads, --head-dims: its heads are all alike"),
        ]
        return [f"--as qwen3_5: cannot hold this model; {text}" for wrong, text in found if wrong]

    def config(self):
        """The keys of config.json that describe the model."""
        model, rotated = self.model, int(self.model.head_dim * self.model.rotary_fraction) // 2
        sections = [rotated - 2 * (rotated // 3), rotated // 3, rotated // 3]  # of three equal positions of a token
        rope = written_rope(model)["rope_parameters"]
        return {
            **{entry.key: getattr(model, entry.field) for entry in MODEL},
            "attention_bias": FIXED["attention_bias"],
            "hidden_act": FIXED["hidden_act"],
            "layer_types": ["full_attention"] * model.num_layers,
            "rope_parameters": {
                **rope, "partial_rotary_factor": model.rotary_fraction, "mrope_section": sections,
                "mrope_interleaved": True,
            },
        }  # fmt: skip

    def converted(self, tensors):
        """(name, tensor) of the trainer, in its order -> those of the class."""
        queries = {}  # of layers whose gates are still to come
        for name, tensor in tensors:
            if name.endswith("q_proj.weight"):
                queries[name] = tensor
            elif name.endswith("router.w_shared"):
                name = name.replace("router.w_shared", "q_proj.weight")
                yield name, self.with_gates(queries.pop(name), tensor)
            elif name.endswith("self_attn.o_proj.weight"):
                yield name, 2 * tensor
            else:
                yield name, tensor - 1 if "norm" in name else tensor

    def with_gates(self, query, gates):
        """[h e, d] and [h, d] -> [2 h e, d]: of every head its query's rows, then its gate's row for each feature."""
        heads, features = self.model.num_attention_heads, self.model.head_dim
        repeated = gates[:, None].expand(heads, features, -1)
        return torch.cat((query.unflatten(0, (heads, features)), repeated), 1).flatten(0, 1)

    def original(self, name, read):
        """The trainer's tensor of that name. read: the class's, by its name."""
        heads, features = self.model.num_attention_heads, self.model.head_dim
        if name.endswith(("q_proj.weight", "router.w_shared")):
            joint = read(name.replace("router.w_shared", "q_proj.weight")).unflatten(0, (heads, 2 * features))
            return joint[:, :features].flatten(0, 1) if name.endswith("q_proj.weight") else joint[:, features]
        if name.endswith("self_attn.o_proj.weight"):
            return read(name) / 2
        return read(name) + 1 if "norm" in name else read(name)


CLASSES = {"qwen3_5": Qwen35}
