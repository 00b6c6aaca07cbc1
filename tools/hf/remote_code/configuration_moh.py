"""Configuration of a mixture-of-head Llama (MoH, arXiv 2410.11842), read by transformers 4.46 to 5.x.

The keys are those of ``LlamaConfig`` and these:

    head_selection           all: ordinary attention; mixture: shared heads and a router's top-K of the others;
                             static: only the first (shared + active) heads
    routing                  paper: Eq. 5-6; paper_scaled: the same with gates near 1; released: the authors' vision
                             code; sigmoid: 2 sigmoid of each score; query_norm: query norms, Eq. 9-10; relu: ReLU of
                             each score, whose sign selects; softplus: of each score
    gate_width               channels of its input that a router reads, the first ones; 0: all
    two_stage                weigh shared against routed heads by [a1, a2] of Eq. 6; false: a1 = a2 = 1
    num_shared_heads         one number per layer: the first heads, always on
    num_active_routed_heads  one number per layer: K, the routed heads that a token uses
    routing_unit             head; key_value_group: all heads of a key/value head are selected together; head_in_group:
                             as many heads are shared, and as many selected, in every group of heads that share a
                             key/value head, the shared ones first in the group
    routed_keys              all; selected: a routed head sees, and keeps, only the tokens that select it
    routed_positions         text; head: the position of a token in a routed head is the number of earlier tokens that
                             use the head, for routed_keys selected
    query_dim                the model's head dimension, if an engine's caches need wider heads for routed_keys
                             selected; head_dim is then that of the caches
    attention                heads; latent: keys and values of all heads are computed from one vector per token, with
                             kv_lora_rank features, and qk_rope_head_dim rotated features are added to the head_dim
                             others (arXiv 2405.04434). q_lora_rank: features of the vector of queries; null: none
    qk_norm                  RMSNorm of each head's query and key, with one weight for all heads, before their positions
    element_gates            a gate for each feature of each head, 2 sigmoid(g_proj x); for head_selection all
    post_norm                norms after attention and MLP instead of before them
    head_dims                one number per head of a layer, in all layers: its width; head_dim is then the widest
    layer_heads              one number per layer: its query heads, if they differ. num_attention_heads and
                             num_key_value_heads are then the largest; equally many heads share a key in each layer
    layer_positions          one kind per layer: rotary; cope, positions that queries count (arXiv 2405.18719); none;
                             or in all layers learned, a table added to the embedding
    cope_max_position        the largest position that is counted
    learned_positions        rows of the learned table
    load_balance_bias_rate   select by a bias too, of this size for each of the router's bias_steps; 0: no bias
    routing_top_p            use the fewest routed heads whose probabilities add up to this, at most K; null: always K
    layer_windows            one number per layer: W, token i sees the keys i - W + 1 to i; 0: all before it. Left out
                             if sliding_window and layer_types, as in other models, say the same

The rotary settings may arrive as ``rope_theta`` and ``rope_scaling`` (transformers 4) or as ``rope_parameters``
(transformers 5); both ``rope_theta`` and ``rope_parameters`` are kept, so that every version reads what any wrote.
``partial_rotary_factor`` in ``rope_parameters`` is the share of a head's features, the first ones, that are rotated.
modeling_moh.py describes ``output_router_gates`` and ``balance_loss_weight``. ``load_balance_coefficient`` is the
weight that the balance loss had in the trainer, for tools/import_hf.py; nothing here reads it.
"""

from transformers import PretrainedConfig

from .moh_checks import check_attention, check_layers
from .moh_gates import FORMS
from .moh_rotary import NEEDS

ROPE_KEYS = {  # fields of ``Rotary`` in moh_rotary.py -> keys of ``rope_parameters``
    "theta": "rope_theta",
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
YARN_KEYS = {  # keys of transformers' yarn -> supported values
    "beta_fast": 32, "beta_slow": 1, "truncate": True, "attention_factor": None, "mscale": None, "mscale_all_dim": None,
}  # fmt: skip

DEFAULTS = {  # defaults of keys that are kept unchanged
    "vocab_size": 65536,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "use_cache": True,
    "head_selection": "mixture",
    "routing": "paper",
    "two_stage": True,
    "gate_width": 0,
    "routing_unit": "head",
    "routed_keys": "all",
    "routed_positions": "text",
    "routing_dtype": "fp32",
    "routing_top_p": None,
    "cope_max_position": 64,
    "learned_positions": None,
    "attention": "heads",
    "kv_lora_rank": None,
    "q_lora_rank": None,
    "qk_rope_head_dim": None,
    "qk_norm": False,
    "element_gates": False,
    "post_norm": False,
    "load_balance_bias_rate": 0.0,
    "output_router_gates": False,
    "balance_loss_weight": 0.0,
    "load_balance_coefficient": 0.01,
}


class MoHLlamaConfig(PretrainedConfig):
    """Shape of the decoder and head budgets. Raises ValueError for a model that ``modeling_moh`` cannot compute."""

    model_type = "moh_llama"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # the names before transformers 5.24, and since

    # How the projections are split over tensor-parallel ranks; the router stays whole on every rank.
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    # Every key has a legal default: transformers builds a configuration without arguments when it saves one.
    def __init__(
        self,
        num_key_value_heads=None,
        head_dim=None,
        rope_theta=None,
        rope_scaling=None,
        rope_parameters=None,
        num_shared_heads=None,
        num_active_routed_heads=None,
        query_dim=None,
        sliding_window=None,
        layer_types=None,
        layer_windows=None,
        layer_positions=None,
        layer_heads=None,
        head_dims=None,
        **kwargs,
    ):
        for key, default in DEFAULTS.items():
            setattr(self, key, kwargs.pop(key, default))
        self.num_key_value_heads = num_key_value_heads or self.num_attention_heads
        self.head_dim = head_dim or self.hidden_size // self.num_attention_heads

        # ``rope_scaling`` is not set as an attribute: in transformers 5 it is an alias of ``rope_parameters``.
        rope = {**(rope_scaling or {}), **(rope_parameters or {})}
        rope_type = rope.pop("type", "default")  # the spelling of early 4.x files
        self.rope_parameters = {"rope_type": rope_type, "rope_theta": rope_theta or 10000.0, **rope}
        self.rope_theta = self.rope_parameters["rope_theta"]

        of_type = {"sliding_attention": sliding_window or 0, "full_attention": 0}
        kinds = layer_types or ["sliding_attention"] * self.num_hidden_layers
        self.layer_windows = list(layer_windows or [of_type[kind] for kind in kinds])
        if any(self.layer_windows):  # caches and vLLM read it
            self.sliding_window = max(self.layer_windows)
            self.layer_types = ["sliding_attention" if width else "full_attention" for width in self.layer_windows]

        self.head_dims = list(head_dims or [])
        self.layer_positions = list(layer_positions or ["rotary"] * self.num_hidden_layers)

        self.query_dim = query_dim or self.head_dim
        self.layer_heads = list(layer_heads or [self.num_attention_heads] * self.num_hidden_layers)
        if self.head_selection == "all":  # every head is always on
            num_shared_heads, num_active_routed_heads = self.layer_heads, [0] * self.num_hidden_layers
        shared = list(num_shared_heads or [number // 8 * 2 or number // 4 for number in self.layer_heads])
        halves = [max(1, number // 2 - on) for number, on in zip(self.layer_heads, shared, strict=False)]
        self.num_shared_heads = shared
        self.num_active_routed_heads = list(num_active_routed_heads or halves)
        self.check()
        if self.attention == "latent" or self.head_dims:  # their projections are not split
            plan = type(self).base_model_tp_plan
            self.base_model_tp_plan = {name: way for name, way in plan.items() if ".mlp." in name}

        if self.element_gates:
            self.base_model_tp_plan = {**self.base_model_tp_plan, "layers.*.self_attn.g_proj": "colwise"}

        # auto_map and other keys travel in kwargs; without them a saved model could not be loaded again.
        absent = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        super().__init__(**{**absent, **kwargs})

    def __setattr__(self, key, value):
        """Keep ``rope_theta`` and ``rope_parameters`` equal: from_pretrained(DIR, rope_theta=X) sets either of them."""
        if key == "rope_parameters" and hasattr(self, "rope_theta"):
            value = {"rope_type": "default", "rope_theta": self.rope_theta, **value}
            check_rope(value)
            super().__setattr__("rope_theta", value["rope_theta"])
        elif key == "rope_theta" and self.rope_parameters["rope_theta"] != value:
            super().__setattr__("rope_parameters", {**self.rope_parameters, "rope_theta": value})
        super().__setattr__(key, value)

    @property
    def turning_dim(self):
        """The rotated features of a query, besides the head_dim others."""
        return self.qk_rope_head_dim if self.attention == "latent" else 0

    @property
    def queries_per_key(self):
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def heads_per_expert(self):
        """The number of heads that a router selects together."""
        return self.queries_per_key if self.routing_unit == "key_value_group" else 1

    def competing_groups(self, layer):
        """Return the number of groups in which the heads of ``layer`` compete; 1: all compete."""
        in_groups = self.head_selection == "mixture" and self.routing_unit == "head_in_group"
        return self.layer_heads[layer] // self.queries_per_key if in_groups else 1

    def check(self):
        """Raise ValueError for what the model cannot compute."""
        if self.hidden_act != "silu" or self.attention_bias or self.mlp_bias:
            raise ValueError("moh_llama has SiLU and no biases: hidden_act, attention_bias and mlp_bias say otherwise")
        for key, default in DEFAULTS.items():
            if isinstance(default, bool) and not isinstance(getattr(self, key), bool):
                raise ValueError(f"{key} {getattr(self, key)!r}: must be true or false")
        check_rope(self.rope_parameters)
        check_attention(self)
        self.check_router()
        check_layers(self)

    def check_router(self):
        """Raise ValueError for what contradicts the routing form, or choosing heads inside groups."""
        if self.routing not in FORMS:
            raise ValueError(f"routing {self.routing!r}: must be one of {', '.join(FORMS)}")
        form, top_p = FORMS[self.routing], self.routing_top_p
        if not 0 <= self.gate_width <= self.hidden_size:
            raise ValueError(f"gate_width {self.gate_width}: must be between 0, for all, and {self.hidden_size}")
        if top_p is not None and not (0 < top_p <= 1 and form.has_types):  # other scores do not show how certain it is
            raise ValueError(
                f"routing_top_p {top_p}: must be above 0 and at most 1, and null with routing query_norm, sigmoid, "
                "softplus and relu"
            )
        if self.routing_unit == "head_in_group" and (
            self.attention == "latent" or self.head_dims or self.routed_keys == "selected" or top_p is not None
            or form.by_sign
        ):  # fmt: skip
            raise ValueError(
                "routing_unit head_in_group: leave out latent attention, head_dims, routed_keys selected, "
                "routing_top_p and routing relu"
            )
        if self.load_balance_bias_rate and (top_p is not None or form.by_sign):
            raise ValueError(
                f"load_balance_bias_rate {self.load_balance_bias_rate}: must be 0 with routing_top_p and routing relu"
            )


def check_rope(rope):
    """Raise ValueError if ``rope_parameters`` request something that is not supported here."""
    rope_type = rope["rope_type"]
    if rope_type not in NEEDS:
        raise ValueError(f"rope_type {rope_type!r}: must be one of {', '.join(NEEDS)}")
    missing = [ROPE_KEYS[field] for field in NEEDS[rope_type] if rope.get(ROPE_KEYS[field]) is None]
    if missing:
        raise ValueError(f"rope_type {rope_type!r}: needs {', '.join(missing)} too")
    for key, computed in YARN_KEYS.items() if rope_type == "yarn" else ():
        if rope.get(key) not in (None, computed):
            raise ValueError(f"{key} {rope[key]} of rope_type 'yarn': is not computed here; leave it out")
