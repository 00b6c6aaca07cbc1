"""The sections of the configuration that say what the model is: its sizes, and which heads a token uses."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from moh_lm.config.fields import ConfigError, option


@dataclass(frozen=True)
class HeadsConfig:
    """heads: which attention heads a token uses (paper, section 3)"""

    head_selection: str = option(
        "mixture",
        "all: ordinary attention; mixture: shared heads and a router's top-K of the others; static: the first heads; "
        "gated: all heads, each with a gate of --routing sigmoid, which is a mixture of shared heads only",
        choices=("all", "mixture", "static", "gated"),
    )
    num_shared_heads: tuple[int, ...] = option(
        (), "heads that are always on: one number, or one per layer (default: half of the heads)", parse=int
    )
    num_active_routed_heads: tuple[int, ...] = option(
        (), "K, routed heads per token: one number, or one per layer (default: a quarter of the heads)", parse=int
    )
    head_budget: float | None = option(
        None, "share of the heads that a token uses, of all layers: gives the numbers above that are not", parse=float
    )
    head_budget_slope: float = option(0.0, "of --head-budget: share in the last layer minus that in the first")
    routing: str = option(
        "paper",
        "gates as in Eq. 5-6; times a constant, so that they begin at 1; as in the authors' released code; "
        "2 sigmoid of each score; from query norms (Eq. 9-10); ReLU of each score, K then being an average; or a "
        "control, in which heads choose tokens",
        choices=("paper", "paper_scaled", "released", "sigmoid", "query_norm", "relu", "expert_choice"),
    )
    routing_unit: str = option(
        "head",
        "what a token selects: heads, or whole key/value groups of grouped-query attention; budgets count heads",
        choices=("head", "key_value_group"),
    )
    routed_keys: str = option(
        "all",
        "keys that a routed head sees, and keeps: of all tokens, or of those only that select it",
        choices=("all", "selected"),
    )
    routing_dtype: str = option(
        "fp32", "in which scores are ranked; bf16: as in MoH-LLaMA3, equal ones by torch.topk", choices=("fp32", "bf16")
    )
    routing_top_p: float | None = option(
        None,
        "select the fewest routed heads whose probabilities add up to this, at most K (default: always K)",
        parse=float,
    )
    routing_entropy_coefficient: float = option(1e-4, "of the mean entropy of the routers, with --routing-top-p")
    two_stage: bool = option(True, "weigh shared against routed heads by [a1, a2] of Eq. 6; false: a1 = a2 = 1")
    load_balance_coefficient: float = option(0.01, "beta of Eq. 8")
    router_z_loss: float = option(0.0, "of the mean squared logsumexp of the routed scores; 0: none")
    load_balance_scope: str = option(
        "sequence",
        "tokens over which Eq. 7 counts selections: each sequence (our choice of its T), or the whole previous step",
        choices=("sequence", "micro_batch", "global_batch"),
    )
    router_gumbel_noise: float = option(0.0, "scale of Gumbel noise on the scores that select in training; 0: none")
    dense_warmup_iters: int = option(
        0, "first iterations of a mixture in which all heads have gate 1, without a balance loss; routers rest"
    )
    load_balance_bias_rate: float = option(
        0.0, "select by a bias too, which moves so far in each step, up for heads below the mean load; 0: no bias"
    )


OF_LAYERS = ("num_attention_heads", "num_key_value_heads")  # of ModelConfig: a number, or a tuple of one per layer
SPREAD = ("head_budget", "head_budget_slope")  # of HeadsConfig: said again by the budgets of the layers
TRAINING_ONLY = (  # of HeadsConfig: no part of the function that is trained
    "load_balance_coefficient", "load_balance_scope", "routing_entropy_coefficient", "router_z_loss",
    "router_gumbel_noise", "dense_warmup_iters",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """model: shape of the decoder (defaults: LLM-S of the paper)"""

    # num_attention_heads and num_key_value_heads become a number where it is that of all layers; see ``of_layer``.

    num_layers: int = option(12, "decoder layers")
    hidden_size: int = option(768, "width of the residual stream")
    intermediate_size: int = option(2048, "width of the SwiGLU MLP")
    num_attention_heads: tuple[int, ...] = option((12,), "query heads: one number, or one per layer", parse=int)
    num_key_value_heads: tuple[int, ...] = option(
        (), "key/value heads: one number, or one per layer (default: one per query head)", parse=int
    )
    head_dim: int | None = option(None, "width of a head (default: hidden size / attention heads)", parse=int)
    head_dims: tuple[int, ...] = option(
        (), "or the width of each head of a layer, shared heads first", parse=int, metavar="N"
    )
    attention: str = option(
        "heads",
        "keys and values of each head, or of heads that share them; or latent: made of one short vector of a token, "
        "which is what a cache keeps (DeepSeek-V2)",
        choices=("heads", "latent"),
    )
    kv_lora_rank: int | None = option(None, "of latent: features of that vector (default: 4 heads)", parse=int)
    q_lora_rank: int | None = option(
        None, "of latent: features of a vector that queries are made of (default: of the input itself)", parse=int
    )
    qk_rope_head_dim: int | None = option(
        None, "of latent: features that turn, beside the --head-dim others (default: half of them)", parse=int
    )
    base_width: int | None = option(
        None, "hidden size at which learning rates and first weights are as given; others follow (default: this one)",
        parse=int,
    )
    vocab_size: int = option(65_536, "rows of the embedding; at least the tokenizer's pieces")
    position: tuple[str, ...] = option(
        (),
        "where tokens are: by rotary embeddings, by counts of the keys that matter (CoPE), by a learned table, or by "
        "nothing but the causal mask; one kind, or one per layer (default: rotary)",
        choices=("rotary", "cope", "learned", "none"),
        parse=str,
    )
    cope_max_position: int = option(64, "of cope: the largest position")
    learned_positions: int | None = option(None, "of learned: rows of the table, for tokens of a sequence", parse=int)
    rotary_fraction: float = option(1.0, "of rotary: share of the features of a head that turn, which are the first")
    rope_theta: float = option(10_000.0, "base of the rotary frequencies")
    rope_type: str = option(
        "default",
        "rotary frequencies as they are, divided by --rope-factor, as in LLaMA 3.1, or by YaRN",
        choices=("default", "linear", "llama3", "yarn"),
    )
    rope_factor: float | None = option(None, "how much slower rotary embeddings turn, at most", parse=float)
    rope_low_freq_factor: float | None = option(None, "of llama3: waves longer than L / this are slower", parse=float)
    rope_high_freq_factor: float | None = option(None, "of llama3: waves shorter than L / this stay", parse=float)
    rope_original_length: int | None = option(None, "L of llama3, yarn: sequence length before it", parse=int)
    window: tuple[int, ...] = option(
        (),
        "keys that a token sees, its own the last of them (Mistral's sliding window: token i sees i-W+1 to i); one "
        "number, or one per layer; 0: the whole sequence (default: 0)",
        parse=int,
    )
    rms_norm_eps: float = option(1e-5, "epsilon under the root of RMSNorm")
    tie_embeddings: bool = option(False, "use the embedding matrix as output head")
    qk_norm: bool = option(False, "RMSNorm of each head's query and key, before their positions, as in Qwen3")
    post_norm: bool = option(False, "norms after attention and MLP instead of before them, as in OLMo 2")
    heads: HeadsConfig = field(default_factory=HeadsConfig)

    def __post_init__(self):
        for key in OF_LAYERS:
            value = getattr(self, key)
            value = self.num_attention_heads if value is None or value == () else value
            equal = isinstance(value, tuple) and len({*value}) == 1
            object.__setattr__(self, key, value[0] if equal else value)
        counts = self.head_counts
        heads = max(counts)
        if self.head_dims and self.head_dim is None:
            object.__setattr__(self, "head_dim", max(self.head_dims))
        if self.base_width is None:
            object.__setattr__(self, "base_width", self.hidden_size)
        if self.head_dim is None and heads > 0:
            object.__setattr__(self, "head_dim", self.hidden_size // heads)
        if self.attention == "latent":
            for key, default in (("kv_lora_rank", 4 * self.head_dim), ("qk_rope_head_dim", self.head_dim // 2)):
                if getattr(self, key) is None:
                    object.__setattr__(self, key, default)
        if self.heads.head_selection == "gated":
            if self.heads.routing not in (HeadsConfig.routing, "sigmoid"):
                given = f"--head-selection gated: contradicts --routing {self.heads.routing}"
                raise ConfigError([f"{given}, for its gates are those of sigmoid; leave one of them out"])
            gated = dict(head_selection="mixture", routing="sigmoid", num_shared_heads=counts)
            object.__setattr__(self, "heads", replace(self.heads, **gated, num_active_routed_heads=(0,)))
        if not self.heads.num_active_routed_heads:
            object.__setattr__(self, "heads", replace(self.heads, **spread_budget(self, self.heads.num_shared_heads)))
        budgets = {
            "num_shared_heads": self.heads.num_shared_heads or tuple(n // 2 for n in counts),
            "num_active_routed_heads": self.heads.num_active_routed_heads or tuple(max(1, n // 4) for n in counts),
        }
        per_layer = {key: value * self.num_layers if len(value) == 1 else value for key, value in budgets.items()}
        object.__setattr__(self, "heads", replace(self.heads, **per_layer))
        for key, default in (("window", 0), ("position", "rotary")):
            value = getattr(self, key) or (default,)
            object.__setattr__(self, key, value * self.num_layers if len(value) == 1 else value)

    @property
    def head_counts(self):
        """Query heads: one number for all layers, or one per layer."""
        value = self.num_attention_heads
        return value if isinstance(value, tuple) else (value,)

    def of_layer(self, layer):
        """The model with the heads of this layer in all layers."""
        several = {key: getattr(self, key) for key in OF_LAYERS if isinstance(getattr(self, key), tuple)}
        return replace(self, **{key: values[layer] for key, values in several.items()}) if several else self

    def widths_of_heads(self):
        """Of each head of a layer; of a model as ``of_layer`` gives it."""
        return self.head_dims or (self.head_dim,) * self.num_attention_heads

    @property
    def query_dim(self):
        """Features of a head's query, and of its key."""
        return self.head_dim + (self.qk_rope_head_dim if self.attention == "latent" else 0)

    @property
    def width_ratio(self):
        """W / d of docs/training.md, by which --base-width W scales a model of the width d."""
        return self.base_width / self.hidden_size

    def leading_heads(self, layer):
        """Heads of ``layer`` that are always on, at the front of the order: the shared, or the static, ones."""
        heads = self.heads
        if heads.head_selection == "all":
            return 0
        routed = heads.num_active_routed_heads[layer] if heads.head_selection == "static" else 0
        return heads.num_shared_heads[layer] + routed

    def active_heads(self, layer):
        """Heads of ``layer`` that a token uses."""
        heads = self.heads
        if heads.head_selection == "all":
            return self.of_layer(layer).num_attention_heads
        return heads.num_shared_heads[layer] + heads.num_active_routed_heads[layer]

    def after(self, step):
        """The model as it is after ``step`` iterations: with all heads in the dense warm-up of a mixture."""
        warming_up = self.heads.head_selection == "mixture" and step < self.heads.dense_warmup_iters
        return replace(self, heads=replace(self.heads, head_selection="all")) if warming_up else self

    def active_share(self):
        """Share of all heads that a token uses, at most."""
        active = sum(map(self.active_heads, range(self.num_layers)))
        return active * len(self.head_counts) / (self.num_layers * sum(self.head_counts))

    @property
    def heads_per_expert(self):
        """Heads that a router selects together: one, or all that share a key/value head."""
        return self.queries_per_key if self.heads.routing_unit == "key_value_group" else 1

    @property
    def queries_per_key(self):
        """Query heads that share a key/value head, in every layer."""
        first = self.of_layer(0)
        return first.num_attention_heads // first.num_key_value_heads

    def routed_layer(self, index):
        """The ``RoutedLayer`` of a layer of a mixture."""
        size, shared = self.heads_per_expert, self.heads.num_shared_heads[index]
        active, routed = self.heads.num_active_routed_heads[index], self.of_layer(index).num_attention_heads - shared
        by_sign = self.heads.routing == "relu"
        budget = (shared // size, routed // size, active // size)
        return RoutedLayer(index, *budget, size, self.heads.routing_top_p, by_sign)

    def own_keys(self, layer):
        """Whether routed heads of ``layer`` see the tokens only that select them."""
        heads = self.heads
        if heads.head_selection != "mixture" or heads.routed_keys != "selected":
            return False
        return heads.num_shared_heads[layer] < self.of_layer(layer).num_attention_heads

    def routed_layers(self):
        """A ``RoutedLayer`` for every layer that balances the load of routed heads, in order."""
        if self.heads.head_selection != "mixture":
            return []
        layers = map(self.routed_layer, range(self.num_layers))
        return [layer for layer in layers if layer.num_routed]


def spread_budget(model, shared, tensor_parallel_size=1):
    """{field of HeadsConfig: a number per layer} of --head-budget B and --head-budget-slope S.

    The share of layer l of L is B + S (l / (L - 1) - 1/2). Whole heads, or groups of them, come as near as they can to
    the sum of the shares so far; then they are sorted, since rounding leaves a few out of order. Heads that are always
    on come in what every tensor-parallel rank can hold, unless ``shared`` gives their numbers. {} where the shares, or
    the heads, are none that moh_lm.checks lets pass.
    """
    heads, numbers, layers = model.heads, model.head_counts, model.num_layers
    numbers = numbers * layers if len(numbers) == 1 else numbers
    if not (0 < (heads.head_budget or 0) <= 1 and abs(heads.head_budget_slope) <= 1 and min(numbers) >= 1):
        return {}
    group = numbers[0] // max(1, model.of_layer(0).num_key_value_heads) or 1
    unit = step = group if heads.routing_unit == "key_value_group" else 1
    if tensor_parallel_size > 1:
        step = tensor_parallel_size * group
    if heads.head_selection == "static":
        unit = step
    active, due = [], 0.0
    for layer, number in enumerate(numbers):
        due += number * (heads.head_budget + heads.head_budget_slope * (layer / max(1, layers - 1) - 0.5))
        active.append(min(max(round((due - sum(active)) / unit) * unit, unit), number))
    if len({*numbers}) == 1:
        active.sort(reverse=heads.head_budget_slope < 0)
    both = list(zip(active, numbers, strict=True))
    shared = shared or tuple(max(0, count - max(unit, number // 4)) // step * step for count, number in both)
    shared = shared * layers if len(shared) == 1 else shared
    rest = (min(max(count - on, unit), number - on) for (count, number), on in zip(both, shared, strict=False))
    return {"num_shared_heads": shared, "num_active_routed_heads": tuple(rest)}


class RoutedLayer(NamedTuple):
    """What a layer of a mixture routes: its number, and its numbers of experts, which are heads or groups of them.

    With ``top_p``, num_active is the most that a token selects; ``by_sign``, what tokens select on average.
    """

    index: int
    num_shared: int
    num_routed: int
    num_active: int
    heads_per_expert: int = 1
    top_p: float | None = None
    by_sign: bool = False

    @property
    def varies(self):
        """Whether a token selects more experts than another."""
        return self.by_sign or self.top_p is not None

    @property
    def unit(self):
        """What an expert is called."""
        return "head" if self.heads_per_expert == 1 else "group"
