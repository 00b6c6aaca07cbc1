"""Checks the sizes of a model, its positions, its windows and its heads."""

import math

from moh_lm.checks import attention
from moh_lm.checks.ranges import below, between, divisors
from moh_lm.config import flag
from moh_lm.model.initial_gates import gates_of_one, layer_gates

# Options that do not suit a routing form, and why.
SIGN = "selects every head with a score above 0"
CLOSES = "has gates that this loss would close, since it is smallest where every score is -ln E"
ALONE = {
    "routing_top_p": "has gates that do not compete, so they do not show how certain the router is",
    "router_z_loss": CLOSES,
}
REFUSED = {
    "sigmoid": ALONE,
    "softplus": ALONE,
    "relu": {
        "routing_top_p": SIGN,
        "router_z_loss": CLOSES,
        "load_balance_bias_rate": SIGN,
        "router_gumbel_noise": SIGN,
    },
    "query_norm": {
        "routing_top_p": "divides scores by their deviation, so probabilities do not show how certain the router is",
        "router_z_loss": "divides its scores by their deviation, so no loss can make them small",
    },
}


def model_problems(model):
    """Return all problems of a new model."""
    return structure_problems(model) or spread_problems(model)


def structure_problems(model):
    found = below(model, 1, "num_layers", "hidden_size", "intermediate_size", "vocab_size", "base_width")
    found = found or attention.length_problems(model) or attention.head_count_problems(model)
    if found:
        return found
    heads = max(model.head_counts)
    turns = "rotary" in model.position and model.attention != "latent"  # whose features are checked below
    turned = (model.rotary_dim or 0) * model.rotary_fraction
    if model.head_dim is None:
        return [
            f"--num-attention-heads {heads}: does not divide --hidden-size {model.hidden_size}; "
            f"choose one of {divisors(model.hidden_size, 64)}, or give --head-dim"
        ]
    if model.head_dim < 1 or (turns and (turned < 2 or turned // 1 % 2)):
        share = f" and --rotary-fraction {model.rotary_fraction:g}" * (model.rotary_fraction != 1)
        found.append(f"--head-dim {model.head_dim}{share}: rotary embeddings pair features; choose an even number")
    found += attention.latent_problems(model) + attention.width_problems(model) + attention.position_problems(model)
    found += attention.element_gate_problems(model)
    for key in ("rope_theta", "rms_norm_eps"):
        if not 0 < getattr(model, key) < math.inf:
            found.append(f"{flag(key)} {getattr(model, key):g}: must be above 0")
    found += attention.rope_problems(model)
    found += [
        f"--window {width}: must be 0, for the whole sequence, or at least 2; with 1 a token sees itself only"
        for width in sorted({*model.window})
        if width < 0 or width == 1
    ]
    found += below(model.heads, 0, "load_balance_coefficient", "routing_entropy_coefficient", "router_z_loss")
    found += below(model.heads, 0, "router_gumbel_noise", "load_balance_bias_rate")
    if not 0 <= model.heads.gate_width <= model.hidden_size:
        found.append(
            f"--gate-width {model.heads.gate_width}: must be between 0, for all, and --hidden-size {model.hidden_size}"
        )
    found += bias_problems(model)
    found += own_keys_problems(model)
    if model.heads.head_selection == "mixture":
        found += top_p_problems(model.heads) + form_problems(model.heads, model.post_norm)
        budgets = group_problems(model) or budget_problems(model)
        return found + (budgets or dense_warmup_problems(model))
    return found if model.heads.head_selection == "all" else found + budget_problems(model)


def form_problems(heads, post_norm=False):
    """Check the settings that a mixture's routing form refuses, and give the reason."""
    given, reasons = f"--routing {heads.routing}", REFUSED.get(heads.routing, {})
    found = [
        f"{flag(key)} {getattr(heads, key):g}: {given} {reasons[key]}; leave it out, or choose another --routing"
        for key in ("router_z_loss", "router_gumbel_noise")
        if key in reasons and getattr(heads, key) > 0
    ]
    if post_norm and heads.routing == "relu":
        why = "its gates begin at 1 for normalised inputs; --post-norm does not normalise them"
        found.append(f"{given}: {why}; leave one flag out")
    if heads.gate_width and heads.routing == "query_norm":
        found.append(f"--gate-width {heads.gate_width}: {given} reads queries and has no router weights; leave it out")
    if heads.routing_dtype != "fp32" and heads.routing == "relu":
        found.append(f"--routing-dtype {heads.routing_dtype}: {given} ranks nothing; leave it out")
    return found


def group_problems(model):
    """Check what contradicts choosing heads inside their key/value groups."""
    if not model.chooses_in_groups:
        return []
    given, heads = "--routing-unit head_in_group", model.heads
    fixed = "the number of heads varies, and each group needs a fixed one"
    found = attention.refusals(
        given,
        (
            ("--attention", model.attention, "heads", "heads share keys, and latent attention has none to share"),
            ("--head-dims", " ".join(map(str, model.head_dims)), "", "heads that share keys have one width"),
            ("--routed-keys", heads.routed_keys, "all", "ordinary attention computes the heads, and sees all keys"),
            ("--routing-top-p", heads.routing_top_p, None, fixed),
            ("--routing", heads.routing == "relu" and "relu", False, fixed),
        ),
    )
    if not found and model.queries_per_key == 1:
        fewer = f"give fewer --num-key-value-heads than --num-attention-heads {max(model.head_counts)}"
        found.append(f"{given}: chooses among the query heads that share a key/value head, and none do; {fewer}")
    return found


def dense_warmup_problems(model):
    """Check that the gates after a dense warm-up begin near 1, their value during it."""
    iterations, heads = model.heads.dense_warmup_iters, model.heads
    found = below(heads, 0, "dense_warmup_iters")
    if iterations <= 0 or found or gates_of_one(model):
        return found
    shared, selected = layer_gates(model, 0)
    return [
        f"--dense-warmup-iters {iterations}: gates of --routing {heads.routing} begin near {shared:.3g} (shared) and "
        f"{selected:.3g} (selected), so the output of attention would shrink by that factor when the warm-up, with "
        f"gates of 1, ends; choose --routing paper_scaled or sigmoid, whose gates begin with 1"
    ]


def top_p_problems(heads):
    top_p = heads.routing_top_p
    if top_p is None:
        return []
    if heads.routing_dtype != "fp32":
        return [f"--routing-top-p {top_p:g}: probabilities in {heads.routing_dtype} do not add up; leave one flag out"]
    if heads.router_gumbel_noise > 0:
        given = f"--routing-top-p {top_p:g}"
        return [f"{given}: in training, fewer heads add up to it with --router-gumbel-noise; leave one flag out"]
    reason = REFUSED.get(heads.routing, {}).get("routing_top_p")
    if reason:
        return [
            f"--routing-top-p {top_p:g}: --routing {heads.routing} {reason}; leave it out, or choose --routing "
            "paper_scaled, paper or released"
        ]
    return [] if 0 < top_p <= 1 else [f"--routing-top-p {top_p:g}: must be above 0 and at most 1, such as 0.4"]


def spread_problems(model):
    """Check that --head-budget and its slope give shares that layers can use and that match their heads."""
    rate, slope = model.heads.head_budget, model.heads.head_budget_slope
    if rate is None:
        advice = "needs --head-budget, such as 0.75, which a later --num-active-routed-heads replaces"
        return [] if slope == 0 else [f"--head-budget-slope {slope:g}: {advice}"]
    if not 0 < rate <= 1:
        return [f"--head-budget {rate:g}: must be above 0 and at most 1, such as 0.75"]
    least, share = least_share(model, max(model.head_counts)), model.active_share()
    if rate < least - 0.005:  # a third may be written as 0.33
        unit = "" if model.heads.routing_unit == "head" else f" with --routing-unit {model.heads.routing_unit}"
        near = f"{math.ceil(100 * least) / 100:g}" + (unit and ", or --routing-unit head")
        return [f"--head-budget {rate:g}: a layer uses at least {least:.1%} of its heads{unit}; choose at least {near}"]
    if slope and model.num_layers == 1:
        return [f"--head-budget-slope {slope:g}: a model with one layer has no slope; leave it out"]
    most = max(0.0, 2 * min(rate - least, 1 - rate))
    if not abs(slope) <= most + 1e-9:
        return [
            f"--head-budget-slope {slope:g}: shares from {rate - slope / 2:.3g} to {rate + slope / 2:.3g} are not all "
            f"between {least:.3g} and 1; choose at most {most:.3g}, or another --head-budget"
        ]
    if abs(share - rate) >= least_share(model, min(model.head_counts)):
        return [
            f"--head-budget {rate:g}: the numbers of shared and routed heads use {share:.1%} of all; choose another "
            "share, or another --num-shared-heads"
        ]
    if slope and len({*map(model.active_heads, range(model.num_layers))}) == len(model.head_counts) == 1:
        return [
            f"--head-budget-slope {slope:g}: every layer uses {share:.1%} of its heads, since one can only use "
            f"multiples of {least:.1%}; choose a larger slope, another --head-budget, or leave it out"
        ]
    return []


def least_share(model, heads):
    """Return the smallest share of its ``heads`` that a layer can use: one, or those that are selected together."""
    return 1 / model.queries_per_key if model.chooses_in_groups else model.heads_per_expert / heads


def own_keys_problems(model):
    given, counted = "--routed-keys selected", "--routed-positions head"
    by_head = model.heads.routed_positions == "head"
    if by_head and model.heads.routed_keys == "all":
        return [f"{counted}: counts the tokens that a routed head sees, which are all; add {given}, or leave it out"]
    if model.heads.routed_keys == "all" or model.heads.head_selection in ("all", "static"):
        return []  # a mixture with its own keys may resume without routers
    if budget_problems(model):
        return []
    own = [kind for layer, kind in enumerate(model.position) if model.own_keys(layer)]
    if "cope" in own:
        return [f"{given}: --position cope counts all keys; give a layer with routed heads another position"]
    if by_head and own and "rotary" not in own:
        return [f"{counted}: no layer with routed heads has --position rotary; leave it out"]
    if by_head and model.heads_per_expert != model.queries_per_key:
        return [f"{counted}: heads that share a key/value head must count as one; add --routing-unit key_value_group"]
    return [] if own else [f"{given}: no layer has routed heads; leave it out"]


def bias_problems(model):
    heads = model.heads
    if not heads.load_balance_bias_rate > 0 or heads.head_selection in ("all", "static"):
        return []  # a mixture with a bias may resume without routers
    given = f"--load-balance-bias-rate {heads.load_balance_bias_rate:g}"
    if heads.routing_top_p is not None:
        return [
            f"{given}: --routing-top-p {heads.routing_top_p:g} adds up the probabilities of selected heads, and a "
            "bias changes their order; leave one of them out"
        ]
    if heads.routing_dtype != "fp32":
        return [f"{given}: is too fine for a ranking in {heads.routing_dtype}; leave --routing-dtype out"]
    reason = REFUSED.get(heads.routing, {}).get("load_balance_bias_rate")
    if reason:
        return [f"{given}: --routing {heads.routing} {reason}; leave it out"]
    if model.routed_layers() or budget_problems(model):
        return []
    return [f"{given}: no layer has routed heads; leave it out"]


def budget_problems(model):
    """Check the numbers of shared and routed heads, layer by layer."""
    size = max(1, model.heads_per_expert) if model.heads.head_selection == "mixture" else 1
    budgets = zip(model.heads.num_shared_heads, model.heads.num_active_routed_heads, strict=True)
    first_layer = {}  # {sentence: first layer}, so that a mistake in every layer is reported once
    for layer, (shared, active) in enumerate(budgets):
        heads = model.of_layer(layer).num_attention_heads
        routed = heads - shared
        least = min(1, routed) if model.heads.head_selection == "mixture" else int(shared == 0)  # a router needs one
        if not 0 <= shared <= heads:
            sentence = (
                f"--num-shared-heads {shared}: must be between 0 and --num-attention-heads {heads}; "
                f"half of them, {heads // 2}, is the share of the paper's LLaMA3"
            )
        elif not least <= active <= routed:
            sentence = (
                f"--num-active-routed-heads {active}: {between(least, routed)}: --num-shared-heads {shared} "
                f"leaves {routed} of {heads} heads"
            )
        elif model.chooses_in_groups and (uneven := uneven_budget(model, layer)):
            sentence = uneven
        elif shared % size or active % size:
            sentence = (
                f"--num-shared-heads {shared} and --num-active-routed-heads {active}: --routing-unit key_value_group "
                f"selects {size} heads together; choose multiples of {size}"
            )
        else:
            continue
        first_layer.setdefault(sentence, layer)
    problems = [f"{sentence} (layer {layer})" for sentence, layer in first_layer.items()]
    return problems or unrouted_problems(model)


def unrouted_problems(model):
    """Check that not all routed groups of heads are used by every token, in every layer."""
    if model.heads.head_selection != "mixture" or model.heads.routing_unit != "key_value_group":
        return []
    if any(layer.varies or layer.num_active < layer.num_routed for layer in model.routed_layers()):
        return []
    first = model.routed_layer(0)
    return [
        f"--routing-unit key_value_group: every token uses all {first.num_shared + first.num_routed} groups, so none "
        "is routed; choose fewer --num-shared-heads or --num-active-routed-heads, or --routing-unit head"
    ]


def uneven_budget(model, layer):
    """Return a sentence if the groups of a layer cannot have equal numbers of shared and of selected heads, or None."""
    keys, r = model.of_layer(layer).num_key_value_heads, model.queries_per_key
    shared, active = model.heads.num_shared_heads[layer], model.heads.num_active_routed_heads[layer]
    if not (shared % keys or active % keys):
        return None
    near = min(shared // keys, r - 1)
    return (
        f"--num-shared-heads {shared} and --num-active-routed-heads {active}: --routing-unit head_in_group has "
        f"equally many in each of {keys} groups; choose multiples of {keys}, such as {near * keys} and "
        f"{min(max(1, active // keys), r - near) * keys}"
    )
