"""Checks the numbers and widths of heads, latent attention, and positions."""

import math
from dataclasses import fields

from moh_lm.checks.ranges import below, divisors, not_default
from moh_lm.config import flag
from moh_lm.config.fields import tuple_of
from moh_lm.config.model import OF_LAYERS
from moh_lm.model.rotary import NEEDS

OF_POSITION = {  # setting -> its kind of positions
    "cope_max_position": "cope", "learned_positions": "learned", "rotary_fraction": "rotary", "rope_type": "rotary",
}  # fmt: skip


def length_problems(model):
    """Check that settings with an entry for each layer have as many entries as there are layers.

    Only the first wrong one is reported, because the others may follow from it.
    """
    values = {**vars(model), **vars(model.heads)}
    return [
        f"{flag(key)} has {len(given)} {'names' if key == 'position' else 'numbers'}: {per_layer(model)}"
        for key, count in model.lists().items()
        if len(given := tuple_of(values[key])) not in (1, count)
    ][:1]


def head_count_problems(model):
    """Check the query heads and key/value heads of each layer."""
    found = [
        f"{flag(key)} {value}: must be 1 or above"
        for key in OF_LAYERS
        for value in sorted({*tuple_of(getattr(model, key))})
        if value < 1
    ]
    if found:
        return found[:1]  # the others follow from it
    pairs = dict.fromkeys(
        (of.num_attention_heads, of.num_key_value_heads) for of in map(model.of_layer, range(model.num_layers))
    )
    found = [
        f"--num-key-value-heads {keys}: must divide --num-attention-heads {heads}; choose one of "
        f"{divisors(heads, heads)}"
        for heads, keys in pairs
        if heads % keys
    ]
    if not found and len({heads // keys for heads, keys in pairs}) > 1:
        given = " ".join(map(str, tuple_of(model.num_key_value_heads)))
        advice = "as many query heads must share a key/value head in every layer; give a number for each layer"
        found.append(f"--num-key-value-heads {given}: {advice}")
    return found


def latent_problems(model):
    """Check what latent attention needs or contradicts."""
    given, sizes = "--attention latent", ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim")
    if model.attention == "heads":
        return not_default(model, sizes, f"has no meaning without {given}; leave it out")
    found = below(model, 1, *sizes)
    if "rotary" in model.position and model.qk_rope_head_dim and model.qk_rope_head_dim % 2:
        found.append(f"--qk-rope-head-dim {model.qk_rope_head_dim}: features rotate in pairs; choose an even number")
    others = (
        ("--num-key-value-heads", model.num_key_value_heads, model.num_attention_heads, "its heads share no keys"),
        ("--rotary-fraction", model.rotary_fraction, 1.0, "--qk-rope-head-dim says how many features are rotated"),
        ("--qk-norm", model.qk_norm, False, "its latents have norms already"),
        ("--routed-keys", model.heads.routed_keys, "all", "a token keeps one vector for all heads"),
        ("--position", "cope" in model.position and "cope", False, "its table fits heads of --head-dim"),
    )
    return found + refusals(given, others)


def width_problems(model):
    """Check heads of several widths, and settings that have no meaning with them."""
    widths, given = model.head_dims, "--head-dims"
    if not widths:
        return []
    if isinstance(model.num_attention_heads, tuple) or len(widths) != model.num_attention_heads:
        heads = " ".join(map(str, model.head_counts))
        return [f"{given} has {len(widths)} numbers: give one for each of --num-attention-heads {heads}"]
    found = [
        f"{given} {width}: the first {turned} of its features rotate in pairs; choose an even number, 2 or above"
        for width in sorted({*widths})
        if "rotary" in model.position and 0 < model.rotary_fraction <= 1
        if (turned := int(width * model.rotary_fraction)) < 2 or turned % 2
    ]
    others = (
        ("--head-dim", model.head_dim, max(widths), "it has to be the widest of them"),
        ("--attention", model.attention, "heads", "its latents have one width"),
        ("--num-key-value-heads", model.num_key_value_heads, model.num_attention_heads, "its heads share no keys"),
        ("--qk-norm", model.qk_norm, False, "one weight would have to serve heads of all widths"),
        ("--routed-keys", model.heads.routed_keys, "all", "its marks are for heads of one width"),
        ("--position", "cope" in model.position and "cope", False, "its tables are for heads of one width"),
    )
    return found + refusals(given, others)


def element_gate_problems(model):
    """Check what gates of features contradict."""
    given = "--element-gates"
    if not model.element_gates:
        return []
    found = [f"{given}: needs all heads; add --head-selection all"] * (model.heads.head_selection != "all")
    others = (
        ("--attention", model.attention, "heads", "latent attention has no such gates"),
        ("--head-dims", " ".join(map(str, model.head_dims)), "", "it needs heads of one width"),
    )
    return found + refusals(given, others)


def refusals(given, others):
    """Return sentences for what contradicts the flags ``given``. others: [(flag, value, the only one allowed, why)]."""
    typed = [(name if value is True else f"{name} {value}", why) for name, value, free, why in others if value != free]
    return [f"{one}: does not work with {given}, because {why}; leave one of them out" for one, why in typed]


def position_problems(model):
    """Check the kinds of positions and what each of them needs. Settings of a kind that no layer has are ignored."""
    kinds, (position,) = {*model.position}, [entry for entry in fields(model) if entry.name == "position"]
    allowed, given = position.metadata["choices"], f"--position {' '.join(sorted(kinds))}"
    if not kinds <= {*allowed}:
        return [f"{given}: choose among {', '.join(allowed)}"]
    found = below(model, 1, "cope_max_position")
    if "learned" in kinds and len(kinds) > 1:
        found.append(f"{given}: a learned table is for all layers; give --position learned alone")
    if "learned" in kinds and model.learned_positions is None:
        found.append(f"--learned-positions is missing: {given} needs it; give at least --seq-length")
    elif "learned" in kinds:
        found += below(model, 1, "learned_positions")
    others = [key for key, kind in OF_POSITION.items() if kind not in kinds]
    found += not_default(model, others, f"has no meaning with {given}; leave it out")
    if not 0 < model.rotary_fraction <= 1:
        found.append(f"--rotary-fraction {model.rotary_fraction:g}: must be above 0 and at most 1, such as 0.5")
    return found


def table_problems(config):
    """Check that a table of positions has one for each token of a sequence."""
    rows, length = config.model.learned_positions, config.run.seq_length
    if rows is None or rows < 1 or rows >= length or "learned" not in config.model.position:
        return []
    return [f"--learned-positions {rows}: must be at least --seq-length {length}"]


def rope_problems(model):
    """Check the scaling of rotary embeddings: each type needs its own flags and has no use for the others."""
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


def per_layer(model):
    return f"give one for all layers, or one for each of --num-layers {model.num_layers}"
