"""The model section of the configuration: sizes, attention and positions."""

from dataclasses import dataclass, field, replace

from moh_lm.config.fields import option, tuple_of
from moh_lm.config.heads import HeadsConfig, HeadsOfLayers, RoutedLayer
from moh_lm.config.resolve import model_values

OF_LAYERS = ("num_attention_heads", "num_key_value_heads")  # fields of ModelConfig with one number, or one per layer


@dataclass(frozen=True)
class ModelConfig(HeadsOfLayers):
    """model: shape of the decoder (defaults: LLM-S of the paper)"""

    # num_attention_heads and num_key_value_heads are one number if all layers have it; see ``of_layer``.

    num_layers: int = option(12, "decoder layers")
    hidden_size: int = option(768, "width of the residual stream")
    intermediate_size: int = option(2048, "width of the SwiGLU MLP")
    num_attention_heads: tuple[int, ...] = option((12,), "query heads: one number, or one per layer")
    num_key_value_heads: tuple[int, ...] = option(
        (), "key/value heads: one number, or one per layer (default: one per query head)"
    )
    head_dim: int | None = option(None, "width of a head (default: hidden size / attention heads)")
    head_dims: tuple[int, ...] = option(
        (),
        "width of each head of a layer, shared heads first; use this in place of --head-dim if widths differ",
        metavar="N",
    )
    attention: str = option(
        "heads",
        "heads: multi-head or grouped-query attention; latent: multi-head latent attention, which caches one short "
        "vector per token (DeepSeek-V2)",
        choices=("heads", "latent"),
    )
    kv_lora_rank: int | None = option(
        None,
        "dimension of the compressed key/value latent, for --attention latent (default: 4 x head dim, times "
        "--hidden-size / --base-width)",
    )
    q_lora_rank: int | None = option(
        None, "rank of the query projection, for --attention latent (default: none, a full projection)"
    )
    qk_rope_head_dim: int | None = option(
        None, "rotary features per head in addition to --head-dim, for --attention latent (default: half of --head-dim)"
    )
    base_width: int | None = option(
        None,
        "hidden size for which the learning rates and initial weights were tuned; they are rescaled to this width "
        "(default: --hidden-size)",
    )
    vocab_size: int = option(65_536, "rows of the embedding; must be at least the size of the tokenizer")
    position: tuple[str, ...] = option(
        (),
        "how positions are encoded: rotary embeddings, contextual counts (CoPE), a learned table, or none beyond the "
        "causal mask; one value, or one per layer",
        choices=("rotary", "cope", "learned", "none"),
    )
    cope_max_position: int = option(64, "largest position, for --position cope")
    learned_positions: int | None = option(
        None, "rows of the table, for --position learned; at least the sequence length"
    )
    rotary_fraction: float = option(1.0, "share of each head's features that are rotated, starting with the first")
    rope_theta: float = option(10_000.0, "base of the rotary frequencies")
    rope_type: str = option(
        "default",
        "scaling of the rotary frequencies: none, divided by --rope-factor, as in LLaMA 3.1, or YaRN",
        choices=("default", "linear", "llama3", "yarn"),
    )
    rope_factor: float | None = option(
        None, "factor by which the context is extended, for --rope-type other than default"
    )
    rope_low_freq_factor: float | None = option(
        None, "wavelengths above --rope-original-length / this factor are scaled fully, for --rope-type llama3"
    )
    rope_high_freq_factor: float | None = option(
        None, "wavelengths below --rope-original-length / this factor are left alone, for --rope-type llama3"
    )
    rope_original_length: int | None = option(
        None, "sequence length before the extension, for --rope-type llama3 and yarn"
    )
    window: tuple[int, ...] = option(
        (),
        "sliding window in tokens, including the token itself: token i sees i-W+1 to i; one value, or one per layer; "
        "0: full attention",
    )
    rms_norm_eps: float = option(1e-5, "epsilon under the square root of RMSNorm")
    tie_embeddings: bool = option(False, "use the embedding matrix as output head")
    qk_norm: bool = option(False, "apply RMSNorm to each head's query and key before the positions, as Qwen3 does")
    element_gates: bool = option(
        False, "scale each feature of every head by a gate, 2 x sigmoid, as Qwen3-Next does; for --head-selection all"
    )
    post_norm: bool = option(
        False, "normalize the outputs of attention and MLP instead of their inputs, as OLMo 2 does"
    )
    heads: HeadsConfig = field(default_factory=HeadsConfig)

    def derived(self):
        return model_values(self)

    def lists(self):
        return dict.fromkeys((*OF_LAYERS, "window", "position"), self.num_layers) | super().lists()

    @property
    def head_counts(self):
        """Number of query heads: one number for all layers, or one per layer."""
        return tuple_of(self.num_attention_heads)

    def of_layer(self, layer):
        """Return the model with the heads of this layer in all layers."""
        several = {key: getattr(self, key) for key in OF_LAYERS if isinstance(getattr(self, key), tuple)}
        return replace(self, **{key: values[layer] for key, values in several.items()}) if several else self

    def widths_of_heads(self):
        """Return the width of each head of a layer. Call it on the result of ``of_layer``."""
        return self.head_dims or (self.head_dim,) * self.num_attention_heads

    @property
    def rotary_dim(self):
        """The number of features of the widest head that rotary positions may rotate."""
        return self.qk_rope_head_dim if self.attention == "latent" else self.head_dim

    @property
    def query_dim(self):
        """The number of features of a head's query and key."""
        return self.head_dim + self.qk_rope_head_dim if self.attention == "latent" and self.head_dim else self.head_dim

    @property
    def width_ratio(self):
        """W / d of docs/training.md, by which --base-width W scales a model of width d."""
        return self.base_width / self.hidden_size

    def always_on_heads(self, layer):
        """Return how many leading heads of ``layer`` are always on; 0 if some lead every key/value group."""
        heads = self.heads
        if heads.head_selection == "all" or self.chooses_in_groups:
            return 0
        routed = heads.num_active_routed_heads[layer] if heads.head_selection == "static" else 0
        return heads.num_shared_heads[layer] + routed

    def numbers_always_on(self, layer):
        """Return the indices of the heads of ``layer`` that are always on."""
        if not self.chooses_in_groups:
            return [*range(self.always_on_heads(layer))]
        routed = {*self.routed_layer(layer).routed_numbers}
        return [head for head in range(self.of_layer(layer).num_attention_heads) if head not in routed]

    @property
    def chooses_in_groups(self):
        """Whether a token chooses the same number of heads within every key/value group."""
        return self.heads.head_selection == "mixture" and self.heads.routing_unit == "head_in_group"

    @property
    def heads_per_expert(self):
        """The number of heads that a router selects together: one, or all that share a key/value head."""
        return self.queries_per_key if self.heads.routing_unit == "key_value_group" else 1

    @property
    def queries_per_key(self):
        """The number of query heads that share a key/value head, in every layer."""
        first = self.of_layer(0)
        return first.num_attention_heads // first.num_key_value_heads

    def routed_layer(self, index):
        """Return the ``RoutedLayer`` of a layer of a mixture."""
        size, shared = self.heads_per_expert, self.heads.num_shared_heads[index]
        active, routed = self.heads.num_active_routed_heads[index], self.of_layer(index).num_attention_heads - shared
        by_sign = self.heads.routing == "relu"
        budget = (shared // size, routed // size, active // size)
        groups = self.of_layer(index).num_key_value_heads if self.chooses_in_groups else 1
        return RoutedLayer(index, *budget, size, self.heads.routing_top_p, by_sign, groups=groups)

    def own_keys(self, layer):
        """Return whether routed heads of ``layer`` see only the tokens that select them."""
        heads = self.heads
        if heads.head_selection != "mixture" or heads.routed_keys != "selected":
            return False
        return heads.num_shared_heads[layer] < self.of_layer(layer).num_attention_heads

    def own_positions(self, layer):
        """Return whether rotary positions in ``layer`` count the tokens of each head."""
        counted = self.heads.routed_positions == "head" and self.position[layer] == "rotary"
        return counted and self.own_keys(layer)
