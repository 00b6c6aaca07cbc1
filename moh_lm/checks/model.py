"""What is wrong with the sizes of a model, its positions, its windows and its heads."""

import math
from dataclasses import fields

from moh_lm.checks.ranges import below, divisors
from moh_lm.config import flag
from moh_lm.config.model import OF_LAYERS
from moh_lm.model.rotary import NEEDS
from moh_lm.model.routing import FORMS, gates_of_one, layer_gates

OF_POSITION = {  # setting -> its kind of positions
    "cope_max_position": "cope", "learned_positions": "learned", "rotary_fraction": "rotary", "rope_type": "rotary",
}  # fmt: skip


def model_problems(model):
    found = below(model, 1, "num_layers", "hidden_size", "intermediate_size", "vocab_size", "base_width")
    found = found or head_count_problems(model)
    if found:
        return found
    heads = max(model.head_counts)
    turned = (model.qk_rope_head_dim if model.attention == "latent" else model.head_dim) * model.rotary_fraction
    if model.hidden_size % heads and model.head_dim == model.hidden_size // heads:
        found.append(
            f"--num-attention-heads {heads}: does not divide --hidden-size {model.hidden_size}; "
            f"choose one of {divisors(model.hidden_size, 64)}, or give --head-dim"
        )
    elif model.head_dim < 1 or ("rotary" in model.position and (turned < 2 or turned // 1 % 2)):
        share = f" and --rotary-fraction {model.rotary_fraction:g}" * (model.rotary_fraction != 1)
        found.append(f"--head-dim {model.head_dim}{share}: rotary embeddings pair features; choose an even number")
    found += latent_problems(model) + width_problems(model)
    found += position_problems(model)
    for key in ("rope_theta", "rms_norm_eps"):
        if not 0 < getattr(model, key) < math.inf:
            found.append(f"{flag(key)} {getattr(model, key):g}: must be above 0")
    found += rope_problems(model)
    if len(model.window) != model.num_layers:
        found.append(f"--window has {len(model.window)} numbers: {per_layer(model)}")
    found += [
        f"--window {width}: must be 0, for the whole sequence, or at least 2; with 1 a token sees itself only"
        for width in sorted({*model.window})
        if width < 0 or width == 1
    ]
    found += below(model.heads, 0, "load_balance_coefficient", "routing_entropy_coefficient", "router_z_loss")
    found += below(model.heads, 0, "router_gumbel_noise", "load_balance_bias_rate")
    found += bias_problems(model)
    found += own_keys_problems(model)
    if model.heads.head_selection == "mixture":
        found += top_p_problems(model.heads)
        form = FORMS[model.heads.routing]
        for key, reason in (("router_z_loss", form.refuses_z_loss), ("router_gumbel_noise", form.refuses_noise)):
            value = getattr(model.heads, key)
            if reason and value > 0:
                found.append(f"{flag(key)} {value:g}: --routing {model.heads.routing} {reason}; leave it out")
        budgets = budget_problems(model)
        return found + (budgets or warmup_problems(model))
    return found if model.heads.head_selection == "all" else found + budget_problems(model)


def head_count_problems(model):
    """Query heads and key/value heads of each layer."""
    found = [
        f"{flag(key)} {value}: must be 1 or above"
        for key in OF_LAYERS
        for value in sorted({*as_tuple(getattr(model, key))})
        if value < 1
    ]
    found += [
        f"{flag(key)} has {len(values)} numbers: {per_layer(model)}"
        for key in OF_LAYERS
        if len(values := as_tuple(getattr(model, key))) not in (1, model.num_layers)
    ]
    if found:
        return found[:1]  # the others follow from it, or are seen next
    pairs = dict.fromkeys(
        (of.num_attention_heads, of.num_key_value_heads) for of in map(model.of_layer, range(len(model.head_counts)))
    )
    found = [
        f"--num-key-value-heads {keys}: must divide --num-attention-heads {heads}; choose one of "
        f"{divisors(heads, heads)}"
        for heads, keys in pairs
        if heads % keys
    ]
    if not found and len({heads // keys for heads, keys in pairs}) > 1:
        given = " ".join(map(str, as_tuple(model.num_key_value_heads)))
        advice = "as many query heads must share a key/value head in every layer; give a number for each layer"
        found.append(f"--num-key-value-heads {given}: {advice}")
    return found


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def per_layer(model):
    return f"give one for all layers, or one for each of --num-layers {model.num_layers}"


def latent_problems(model):
    """What latent attention needs, or contradicts."""
    given, sizes = "--attention latent", ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
    if model.attention == "heads":
        return [
            f"{flag(key)} {getattr(model, key)}: has no meaning without {given}; leave it out"
            for key in sizes
            if getattr(model, key) is not None
        ]
    found = below(model, 1, *(key for key in sizes if getattr(model, key) is not None))
    if model.qk_rope_head_dim % 2:
        found.append(f"--qk-rope-head-dim {model.qk_rope_head_dim}: features turn in pairs; choose an even number")
    others = (
        ("--num-key-value-heads", model.num_key_value_heads, model.num_attention_heads, "heads share no keys"),
        ("--rotary-fraction", model.rotary_fraction, 1.0, "--qk-rope-head-dim says what turns"),
        ("--qk-norm", model.qk_norm, False, "the latents have norms"),
        ("--routed-keys", model.heads.routed_keys, "all", "a token keeps one vector for all heads"),
        ("--position", "cope" in model.position and "cope", False, "its table fits heads of --head-dim"),
    )
    return found + refusals(given, others)


def width_problems(model):
    """Heads of several widths, and what has no meaning with them."""
    widths, given = model.head_dims, "--head-dims"
    if not widths:
        return []
    if isinstance(model.num_attention_heads, tuple) or len(widths) != model.num_attention_heads:
        heads = " ".join(map(str, model.head_counts))
        return [f"{given} has {len(widths)} numbers: give one for each of --num-attention-heads {heads}"]
    found = [
        f"{given} {width}: the first {turned} of its features would turn, in pairs; choose an even number, 2 or above"
        for width in sorted({*widths})
        if (turned := int(width * model.rotary_fraction)) < 2 or turned % 2
    ]
    others = (
        ("--head-dim", model.head_dim, max(widths), "it is the widest"),
        ("--attention", model.attention, "heads", "there is one width of latents"),
        ("--num-key-value-heads", model.num_key_value_heads, model.num_attention_heads, "heads share no keys"),
        ("--qk-norm", model.qk_norm, False, "one weight would have to serve heads of all widths"),
        ("--routed-keys", model.heads.routed_keys, "all", "its marks are for heads of one width"),
        ("--position", "cope" in model.position and "cope", False, "its tables are for heads of one width"),
    )
    return found + refusals(given, others)


def refusals(given, others):
    """others: [(flag, its value, the only value that goes with the flags ``given``, why)]."""
    return [f"{name} {value}: with {given}, {why}; leave it out" for name, value, free, why in others if value != free]


def position_problems(model):
    """The kinds of positions, and what each of them needs; settings of a kind that no layer has say nothing."""
    kinds, known = {*model.position}, {entry.name: entry for entry in fields(model)}
    allowed, given = known["position"].metadata["choices"], f"--position {' '.join(sorted(kinds))}"
    if not kinds <= {*allowed}:
        return [f"{given}: choose among {', '.join(allowed)}"]
    found = below(model, 1, "cope_max_position")
    if len(model.position) != model.num_layers:
        found.append(f"--position has {len(model.position)} names: {per_layer(model)}")
    if "learned" in kinds and len(kinds) > 1:
        found.append(f"{given}: the table of learned serves all layers; give learned alone")
    if "learned" in kinds and (model.learned_positions or 0) < 1:
        found.append(f"--learned-positions {model.learned_positions}: {given} needs a number, at least --seq-length")
    found += [
        f"{flag(key)} {getattr(model, key)}: has no meaning with {given}; leave it out"
        for key, kind in OF_POSITION.items()
        if kind not in kinds and getattr(model, key) != known[key].default
    ]
    if not 0 < model.rotary_fraction <= 1:
        found.append(f"--rotary-fraction {model.rotary_fraction:g}: must be above 0 and at most 1, such as 0.5")
    return found


def table_problems(config):
    """A table of positions must have one for each token of a sequence."""
    rows, length = config.model.learned_positions, config.run.seq_length
    if rows is None or rows < 1 or rows >= length or "learned" not in config.model.position:
        return []
    return [f"--learned-positions {rows}: --seq-length {length} needs as many; choose at least {length}"]


def rope_problems(model):
    """The scaling of rotary embeddings: each type needs its own flags, and has no use for the others."""
    keys = ("rope_factor", "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_length")
    needed = [f"rope_{name}" for name in NEEDS[model.rope_type]]
    found = [
        f"{flag(key)} is missing: --rope-type {model.rope_type} needs it"
        for key in needed
        if getattr(model, key) is None
    ]
    found += [
        f"{flag(key)} {getattr(model, key):g}: has no meaning with --rope-type {model.rope_type}; leave it out"
        for key in keys
        if key not in needed and getattr(model, key) is not None
    ]
    if found:
        return found
    found = below(model, 1, *(key for key in needed if key in ("rope_factor", "rope_original_length")))
    if model.rope_type == "yarn" and not model.rope_theta > 1:
        found.append(f"--rope-theta {model.rope_theta:g}: must be above 1 with --rope-type yarn, such as 10000")
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if model.rope_type == "llama3" and not 0 < low < high < math.inf:
        found.append(
            f"--rope-low-freq-factor {low:g} and --rope-high-freq-factor {high:g}: must be above 0, the first below "
            "the second; LLaMA 3.1 has 1 and 4"
        )
    return found


def warmup_problems(model):
    """A dense warm-up must end with gates near those that it had: 1."""
    iterations, heads = model.heads.dense_warmup_iters, model.heads
    found = below(heads, 0, "dense_warmup_iters")
    if iterations <= 0 or found or gates_of_one(model):
        return found
    shared, selected = layer_gates(model, 0)
    return [
        f"--dense-warmup-iters {iterations}: the gates of --routing {heads.routing} begin near {shared:.3g} (shared) "
        f"and {selected:.3g} (selected), so that the output of attention would shrink to that part of itself where "
        f"gates of 1 end; choose --routing paper_scaled, which has the same gates times a constant, or released"
    ]


def top_p_problems(heads):
    top_p = heads.routing_top_p
    if top_p is None:
        return []
    if heads.routing_dtype != "fp32":
        return [f"--routing-top-p {top_p:g}: probabilities in {heads.routing_dtype} do not add up; leave one flag out"]
    reason = FORMS[heads.routing].refuses_top_p
    if reason:
        return [
            f"--routing-top-p {top_p:g}: --routing {heads.routing} {reason}; leave it out, or choose --routing paper "
            "or released"
        ]
    return [] if 0 < top_p <= 1 else [f"--routing-top-p {top_p:g}: must be above 0 and at most 1, such as 0.4"]


def spread_problems(model):
    """--head-budget and its slope: shares between none and all of the heads, and those that the layers have."""
    rate, slope = model.heads.head_budget, model.heads.head_budget_slope
    if rate is None:
        return [] if slope == 0 else [f"--head-budget-slope {slope:g}: needs --head-budget, such as 0.75"]
    if not 0 < rate <= 1:
        return [f"--head-budget {rate:g}: must be above 0 and at most 1, such as 0.75"]
    most, share = 2 * min(rate, 1 - rate), model.active_share()
    if not abs(slope) <= most + 1e-9:
        return [
            f"--head-budget-slope {slope:g}: shares from {rate - slope / 2:.3g} to {rate + slope / 2:.3g} are not all "
            f"between 0 and 1; choose at most {most:.3g}"
        ]
    if abs(share - rate) > model.heads_per_expert / min(model.head_counts):
        return [
            f"--head-budget {rate:g}: the numbers of shared and routed heads use {share:.1%} of all; choose another "
            "share, or leave out --num-shared-heads or --num-active-routed-heads"
        ]
    return []


def own_keys_problems(model):
    given = "--routed-keys selected"
    if model.heads.routed_keys == "all" or model.heads.head_selection in ("all", "static"):
        return []  # a mixture with its own keys may go on without routers
    if budget_problems(model):
        return []
    own = [kind for layer, kind in enumerate(model.position) if model.own_keys(layer)]
    if "cope" in own:
        return [f"{given}: --position cope counts all keys; give a layer with routed heads another position"]
    return [] if own else [f"{given}: no layer has routed heads; leave it out"]


def bias_problems(model):
    heads = model.heads
    if not heads.load_balance_bias_rate > 0 or heads.head_selection in ("all", "static"):
        return []  # a mixture with a bias may go on without routers
    given = f"--load-balance-bias-rate {heads.load_balance_bias_rate:g}"
    if heads.routing_top_p is not None:
        return [
            f"{given}: --routing-top-p {heads.routing_top_p:g} adds up the probabilities of what is selected, and a "
            "bias changes their order; leave one of them out"
        ]
    reason = FORMS[heads.routing].refuses_bias
    if reason:
        return [f"{given}: --routing {heads.routing} {reason}; leave it out"]
    if model.routed_layers() or budget_problems(model):
        return []
    return [f"{given}: no layer has routed heads; leave it out"]


def budget_problems(model):
    """The numbers of shared and routed heads, layer by layer."""
    size = max(1, model.heads_per_expert) if model.heads.head_selection == "mixture" else 1
    budgets = {key: getattr(model.heads, key) for key in ("num_shared_heads", "num_active_routed_heads")}
    found = [
        f"{flag(key)} has {len(budget)} numbers: {per_layer(model)}"
        for key, budget in budgets.items()
        if len(budget) != model.num_layers
    ]
    if found:
        return found
    first_layer = {}  # of each sentence: the same mistake in every layer is said once
    for layer, (shared, active) in enumerate(zip(*budgets.values(), strict=True)):
        heads = model.of_layer(layer).num_attention_heads
        routed = heads - shared
        if not 0 <= shared <= heads:
            sentence = (
                f"--num-shared-heads {shared}: must be between 0 and --num-attention-heads {heads}; "
                f"half of them, {heads // 2}, is the share of the paper's LLaMA3"
            )
        elif not min(1, routed) <= active <= routed:
            sentence = (
                f"--num-active-routed-heads {active}: must be between {min(1, routed)} and {routed}, "
                f"the heads that --num-shared-heads {shared} leaves of {heads}"
            )
        elif shared % size or active % size:
            sentence = (
                f"--num-shared-heads {shared} and --num-active-routed-heads {active}: --routing-unit key_value_group "
                f"selects {size} heads together; choose multiples of {size}"
            )
        else:
            continue
        first_layer.setdefault(sentence, layer)
    return [f"{sentence} (layer {layer})" for sentence, layer in first_layer.items()] or spread_problems(model)
