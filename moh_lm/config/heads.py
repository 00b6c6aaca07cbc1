"""Which heads a token uses: this section of the configuration, and what follows from it for each layer."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from moh_lm.config.fields import option, text_option


@dataclass(frozen=True)
class HeadsConfig:
    """heads: which attention heads a token uses (paper, section 3)"""

    head_selection: str = option(
        "mixture",
        "all: ordinary attention; mixture: shared heads plus K heads that a router picks per token; static: always "
        "the first heads; gated: all heads, each scaled by a learned gate",
        choices=("all", "mixture", "static", "gated"),
    )
    num_shared_heads: tuple[int, ...] = option(
        (), "heads that are always active: one value, or one per layer (default: at most a quarter of the heads)"
    )
    num_active_routed_heads: tuple[int, ...] = option(
        (),
        "K, the routed heads that are active per token: one value, or one per layer (default: as many as make "
        "half of the heads with the shared ones)",
        replaces="head_budget",
    )
    head_budget: float | None = text_option(
        None,
        "share of all heads that a token uses; sets K, and the shared heads unless they are given; if "
        "--num-active-routed-heads is given too, the last one takes effect",
        replaces="num_active_routed_heads",
    )
    head_budget_slope: float = text_option(
        0.0, "share of active heads in the last layer minus that in the first, for --head-budget"
    )
    routing: str = option(
        "sigmoid",
        "how scores become gates: softmax shares (paper, Eq. 5-6); the same, scaled to start at 1; the authors' "
        "released code; 2 x sigmoid; query norms (Eq. 9-10); ReLU, where K is an average; or softplus, as in Laguna",
        choices=("paper", "paper_scaled", "released", "sigmoid", "query_norm", "relu", "softplus"),
    )
    gate_width: int = text_option(
        0, "channels of its input that a router reads, the first ones, such as a sixteenth of --hidden-size; 0: all"
    )
    routing_unit: str = text_option(
        "head",
        "what a token selects: single heads, whole key/value groups of grouped-query attention, or as many heads in "
        "every key/value group; budgets always count heads",
        choices=("head", "key_value_group", "head_in_group"),
    )
    routed_keys: str = text_option(
        "all",
        "whether a routed head attends to all tokens or only to those that selected it",
        choices=("all", "selected"),
    )
    routed_positions: str = text_option(
        "text",
        "position of a token in a routed head, for --routed-keys selected: its place in the text, or among the tokens "
        "that selected the head",
        choices=("text", "head"),
    )
    routing_dtype: str = text_option(
        "fp32",
        "precision in which scores are ranked; bf16 reproduces MoH-LLaMA3, where torch.topk breaks ties",
        choices=("fp32", "bf16"),
    )
    routing_top_p: float | None = text_option(
        None, "select the fewest routed heads whose probabilities add up to this share, at most K (default: always K)"
    )
    routing_entropy_coefficient: float = text_option(
        1e-4, "weight of the routers' mean entropy in the loss, for --routing-top-p"
    )
    two_stage: bool = option(
        True, "weigh shared against routed heads by [a1, a2] of Eq. 6, if the routing has them; false: a1 = a2 = 1"
    )
    load_balance_coefficient: float = option(0.01, "weight of the load-balancing loss, beta of Eq. 8")
    router_z_loss: float = option(0.0, "weight of the mean squared logsumexp of the routed scores; 0: none")
    load_balance_scope: str = option(
        "sequence",
        "tokens over which the load-balancing loss (Eq. 7) counts selections: each sequence, each micro-batch, or the "
        "whole previous step",
        choices=("sequence", "micro_batch", "global_batch"),
    )
    router_gumbel_noise: float = option(
        0.0, "scale of the Gumbel noise added to selection scores during training; 0: none"
    )
    dense_warmup_iters: int = option(
        0, "iterations at the start in which all heads are active with gate 1; routers and their losses wait"
    )
    load_balance_bias_rate: float = text_option(
        0.0, "update rate of the balancing bias that is added to selection scores (DeepSeek-V3); 0: no bias"
    )


class HeadsOfLayers:
    """The heads of a model's layers. Subclasses define ``heads``, ``num_layers``, ``head_counts`` (one number for all
    layers, or one per layer), ``routed_layer(layer)`` and ``derived()``.

    heads_per_expert: number of heads that a router selects together. width_ratio: see ``ModelConfig``.
    """

    heads_per_expert, width_ratio = 1, 1.0

    def __post_init__(self):
        """Set the values of ``derived``, for every new model and for copies made with ``replace``."""
        for name, value in self.derived().items():
            object.__setattr__(self, name, value)

    def derived(self):
        """Return {field: value} of what follows from other fields."""
        return {}

    def lists(self):
        """Return {field: number of its entries} of fields that are lists with an entry for each layer, or stage."""
        return dict.fromkeys(BUDGETS, self.num_layers) if self.heads.head_selection != "all" else {}

    def after(self, step):
        """Return the model after ``step`` iterations: with all heads during the dense warm-up of a mixture."""
        warming_up = self.heads.head_selection == "mixture" and step < self.heads.dense_warmup_iters
        return replace(self, heads=replace(self.heads, head_selection="all")) if warming_up else self

    def active_heads(self, layer):
        """Return the number of heads in ``layer`` that a token uses."""
        if self.heads.head_selection == "all":
            return self.head_counts[layer if len(self.head_counts) > 1 else 0]
        return self.heads.num_shared_heads[layer] + self.heads.num_active_routed_heads[layer]

    def active_share(self):
        """Return the share of all heads that a token uses at most."""
        active = sum(map(self.active_heads, range(self.num_layers)))
        return active * len(self.head_counts) / (self.num_layers * sum(self.head_counts))

    def gated_layers(self):
        """Return a ``RoutedLayer`` for every layer with gates, in order."""
        mixture = self.heads.head_selection == "mixture"
        return [self.routed_layer(index) for index in range(self.num_layers)] if mixture else []

    def routed_layers(self):
        """Return the ``gated_layers`` that have routed heads, and so a load to balance."""
        return [layer for layer in self.gated_layers() if layer.num_routed]


BUDGETS = ("num_shared_heads", "num_active_routed_heads")  # fields of HeadsConfig with a number for each layer
TWO_STAGE = ("paper", "paper_scaled", "released")  # routing forms with a1 and a2
GATED = ("sigmoid", "softplus")  # routing forms for --head-selection gated
FUSED = ("sigmoid", "paper", "paper_scaled", "released")  # routing forms that --fused-router computes
NOT_STATIC = "shared heads lead every key/value group, and static keeps the first heads of all; choose all"
SPREAD = ("head_budget", "head_budget_slope")  # fields of HeadsConfig implied by the budgets of the layers
TRAINING_ONLY = (  # fields of HeadsConfig without effect on the trained function
    "load_balance_coefficient", "load_balance_scope", "routing_entropy_coefficient", "router_z_loss",
    "router_gumbel_noise", "dense_warmup_iters",
)  # fmt: skip


class RoutedLayer(NamedTuple):
    """The routing of one layer of a mixture: its index, and its numbers of experts, which are heads or groups of heads.

    num_active: the number of experts that a token selects; the largest with ``top_p``, the mean with ``by_sign``.
    stride: tokens of the first layer per token of this one; later stages of image models have fewer tokens. groups:
    number of groups of experts that compete among themselves, each with its own share of shared and selected experts.
    """

    index: int
    num_shared: int
    num_routed: int
    num_active: int
    heads_per_expert: int = 1
    top_p: float | None = None
    by_sign: bool = False
    stride: int = 1
    groups: int = 1

    def of_group(self):
        """Return the routing within one of the groups."""
        numbers = ("num_shared", "num_routed", "num_active")
        return self._replace(groups=1, **{name: getattr(self, name) // self.groups for name in numbers})

    @property
    def routed_numbers(self):
        """The indices of the routed experts among all experts of the layer."""
        one = self.of_group()
        size = one.num_shared + one.num_routed
        return [first + i for first in range(0, size * self.groups, size) for i in range(one.num_shared, size)]

    @property
    def varies(self):
        """Whether tokens may select different numbers of experts."""
        return self.by_sign or self.top_p is not None

    @property
    def uniform_load(self):
        """The share of tokens that select a routed expert if all are selected equally; 0 without routed experts."""
        return self.num_active / self.num_routed if self.num_routed else 0.0

    def fair_load(self, load):
        """Return the load that each routed expert would have if all loads were equal. load: [E], that of each."""
        return sum(load) / len(load) if self.varies and len(load) else self.uniform_load

    @property
    def unit(self):
        """The name of an expert."""
        return "head" if self.heads_per_expert == 1 else "group"
