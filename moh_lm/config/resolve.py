"""Values that follow from others, where they were not given: None and () stand for "not given".

The help of a field promises what it is by default; these functions keep the promise. They take what was given and
return what a configuration then holds, and change nothing themselves.
"""

import math
from dataclasses import replace

from moh_lm.config.fields import ConfigError, flag
from moh_lm.config.heads import GATED


def model_values(model):
    """{field: value} of what is filled in, or written in its shortest form, in a ``ModelConfig``."""
    layers, queries = model.num_layers, model.num_attention_heads
    queries = one_number(queries, layers) if queries not in (None, ()) else 0
    keys = one_number(model.num_key_value_heads, layers) if model.num_key_value_heads not in (None, ()) else queries
    counts = queries if isinstance(queries, tuple) else (queries,)
    head_dim = width_of_head(model, max(counts))
    return {
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": head_dim,
        "base_width": or_else(model.base_width, model.hidden_size),
        **(latent_sizes(model, head_dim) if model.attention == "latent" and head_dim else {}),
        "heads": with_budgets(model.heads, counts, layers, heads_of_a_key(queries, keys)),
        "window": by_layer(model.window or (0,), layers),
        "position": by_layer(model.position or ("rotary",), layers),
    }


def one_number(value, num_layers):
    """A number for a tuple of one number per layer if it is that of all layers; else ``value``."""
    equal = isinstance(value, tuple) and len({*value}) == 1 and len(value) in (1, num_layers)
    return value[0] if equal else value


def heads_of_a_key(queries, keys):
    """Query heads that share a key/value head, in the first layer."""
    queries, keys = (value[0] if isinstance(value, tuple) else value for value in (queries, keys))
    return queries // max(1, keys) or 1


def by_layer(value, num_layers):
    """A value for each layer, if one is given for all of them."""
    return value * num_layers if len(value) == 1 else value


def or_else(value, default):
    return default if value is None else value


def width_of_head(model, most_heads):
    """--head-dim; None where the heads do not divide the width."""
    if model.head_dim is not None:
        return model.head_dim
    if model.head_dims:
        return max(model.head_dims)
    return model.hidden_size // most_heads if most_heads > 0 and model.hidden_size % most_heads == 0 else None


def latent_sizes(model, head_dim):
    return {
        "kv_lora_rank": or_else(model.kv_lora_rank, 4 * head_dim),
        "qk_rope_head_dim": or_else(model.qk_rope_head_dim, head_dim // 2),
    }


def with_budgets(heads, counts, num_layers, group):
    """A ``HeadsConfig`` with a number of shared and of routed heads for each layer: by default half, and a quarter.

    Where groups of heads are routed, both are whole groups. counts: heads, one number or one per layer. group: heads
    that share a key/value head.
    """
    if heads.head_selection == "gated":
        heads = gated_mixture(heads, counts)
    if not heads.num_active_routed_heads:
        budgets = spread_budget(heads, by_layer(counts, num_layers), group, heads.num_shared_heads)
        heads = replace(heads, **budgets)
    budgets = [default_budget(heads, number, group) for number in counts]
    shared = heads.num_shared_heads or tuple(shared for shared, _ in budgets)
    routed = heads.num_active_routed_heads or tuple(routed for _, routed in budgets)
    return replace(
        heads, num_shared_heads=by_layer(shared, num_layers), num_active_routed_heads=by_layer(routed, num_layers)
    )


def default_budget(heads, number, group):
    """(shared heads, routed heads per token) of a layer with so many heads: half and a quarter, where two experts are
    left to choose from among groups, or inside of each."""
    mixture, unit = heads.head_selection == "mixture", 1
    if mixture and heads.routing_unit == "head_in_group":
        size = max(1, group)  # of what is chosen from, in each of number // size groups
        groups = max(1, number // size)
        return groups * max(0, min(size // 2, size - 2)), groups * max(1, size // 4)
    if mixture and heads.routing_unit == "key_value_group":
        unit = group
    limit = max(0, number // unit - 2) if unit > 1 else number
    return min(number // 2 // unit, limit) * unit, max(1, number // 4 // unit) * unit


def gated_mixture(heads, counts):
    """--head-selection gated, as it is kept: a mixture whose heads are all shared has the same gates and the same
    parameters, so that its files need no name of their own. Raises ConfigError for what contradicts it."""
    if heads.routing not in GATED:
        given = f"--head-selection gated: contradicts --routing {heads.routing}, since its gates"
        raise ConfigError([f"{given} are those of sigmoid or softplus; add --routing sigmoid"])
    for name in ("head_budget", "routing_top_p"):
        value = getattr(heads, name)
        if value is not None:
            raise ConfigError([f"{flag(name)} {value:g}: --head-selection gated uses all heads; leave it out"])
    return replace(heads, head_selection="mixture", num_shared_heads=counts, num_active_routed_heads=(0,))


def spread_budget(heads, numbers, group, shared, tp=1, cp=1):
    """{field of HeadsConfig: a number per layer} of --head-budget B and --head-budget-slope S.

    The share of layer l of L is B + S (l / (L - 1) - 1/2). Whole heads, or groups of them, come as near as they can to
    the sum of the shares so far; then they are sorted, since rounding leaves a few out of order. Heads that are always
    on come in what each of the tensor-parallel and context-parallel ranks can hold, unless ``shared`` gives their
    numbers. {} where the shares, or the heads, are none that moh_lm.checks lets pass.

    numbers: heads of each layer. group: of them that share a key/value head.
    """
    layers = len(numbers)
    if not (0 < (heads.head_budget or 0) <= 1 and abs(heads.head_budget_slope) <= 1 and min(numbers, default=0) >= 1):
        return {}
    together = [heads_together(heads, number, group, tp, cp) for number in numbers]
    active, due = [], 0.0
    for layer, (number, (unit, _)) in enumerate(zip(numbers, together, strict=True)):
        due += number * (heads.head_budget + heads.head_budget_slope * (layer / max(1, layers - 1) - 0.5))
        active.append(min(max(round((due - sum(active)) / unit) * unit, unit), number))
    if len({*numbers}) == 1:
        active.sort(reverse=heads.head_budget_slope < 0)
    all_of = list(zip(active, numbers, together, strict=True))
    shared = shared or tuple(
        max(0, count - max(unit, number // 4)) // step * step for count, number, (unit, step) in all_of
    )
    shared = by_layer(shared, layers)
    rest = (
        min(max(count - on, unit), number - on)
        for (count, number, (unit, _)), on in zip(all_of, shared, strict=False)
    )
    return {"num_shared_heads": shared, "num_active_routed_heads": tuple(rest)}


def heads_together(heads, number, group, tp, cp):
    """(in what multiples a token uses heads, in what multiples heads are always on) in a layer of ``number`` heads."""
    if heads.routing_unit == "head_in_group" and heads.head_selection == "mixture":
        return (max(1, number // group),) * 2  # as many in every group
    unit = step = group if heads.routing_unit == "key_value_group" else 1
    if tp * cp > 1:
        step = math.lcm(tp * group if tp > 1 else step, tp * cp)
    return (step, step) if heads.head_selection == "static" else (unit, step)


def spread_over_ranks(model, shared, tp, cp):
    """``spread_budget`` for ranks that share layers (tp) and sequences (cp)."""
    group = heads_of_a_key(model.num_attention_heads, model.num_key_value_heads)
    return spread_budget(model.heads, by_layer(model.head_counts, model.num_layers), group, shared, tp, cp)


def run_values(run):
    """{field: value} of the budget of a ``RunConfig``, in iterations and in tokens: each follows from the other."""
    iterations, tokens = run.train_iters, run.train_tokens
    if iterations is None and tokens is not None and run.tokens_per_iteration > 0:
        iterations = run.iterations(math.ceil(tokens / run.seq_length))
    if tokens is None and iterations is not None:
        tokens = run.samples_after(iterations) * run.seq_length
    return {"train_iters": iterations, "train_tokens": tokens}
