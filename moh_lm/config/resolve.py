"""Fills in values that follow from others and were not given; None and () mean "not given".

The functions compute the defaults that the help of each field promises, and change nothing themselves.
"""

import math
from dataclasses import replace

from moh_lm.config.fields import ConfigError, flag, tuple_of
from moh_lm.config.heads import GATED

MOST_LAYERS = 4096


def model_values(model):
    """Return {field: value} of what is filled in or shortened in a ``ModelConfig``."""
    layers, queries = few_enough(model.num_layers), model.num_attention_heads
    queries = one_number(queries, layers) if queries not in (None, ()) else 0
    keys = one_number(model.num_key_value_heads, layers) if model.num_key_value_heads not in (None, ()) else queries
    counts = tuple_of(queries)
    head_dim = width_of_head(model, max(counts))
    return {
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": head_dim,
        "base_width": or_else(model.base_width, model.hidden_size),
        **(latent_sizes(model, head_dim) if model.attention == "latent" and head_dim else {}),
        "heads": with_budgets(model.heads, counts, layers, heads_of_a_key(queries, keys)),
        "window": for_every_layer(model.window or (0,), layers),
        "position": for_every_layer(model.position or ("rotary",), layers),
    }


def few_enough(layers):
    """Return the number of ``layers``, each of which has entries in lists. Raises ConfigError if there are too many."""
    if layers > MOST_LAYERS:
        raise ConfigError([f"--num-layers {layers}: must be at most {MOST_LAYERS}"])
    return layers


def one_number(value, num_layers):
    """Return one number for a tuple of equal numbers, one per layer; else ``value``."""
    equal = isinstance(value, tuple) and len({*value}) == 1 and len(value) in (1, num_layers)
    return value[0] if equal else value


def heads_of_a_key(queries, keys):
    """Return the number of query heads that share a key/value head in the first layer."""
    return tuple_of(queries)[0] // max(1, tuple_of(keys)[0]) or 1


def for_every_layer(value, num_layers):
    """Return one value per layer, even if a single value was given for all of them."""
    return value * num_layers if len(value) == 1 else value


def or_else(value, default):
    return default if value is None else value


def width_of_head(model, most_heads):
    """Return --head-dim; None if the heads do not divide the width."""
    if model.head_dim is not None:
        return model.head_dim
    if model.head_dims:
        return max(model.head_dims)
    return model.hidden_size // most_heads if most_heads > 0 and model.hidden_size % most_heads == 0 else None


def latent_sizes(model, head_dim):
    rank = 4 * head_dim * model.hidden_size // (model.base_width or model.hidden_size or 1)
    return {
        "kv_lora_rank": or_else(model.kv_lora_rank, rank),
        "qk_rope_head_dim": or_else(model.qk_rope_head_dim, head_dim // 2),
    }


def with_budgets(heads, counts, num_layers, group):
    """Return a ``HeadsConfig`` with the numbers of shared and routed heads of each layer.

    By default a token uses half of the heads (docs/history/study.md, rule 4), of which at most half are shared. If
    groups of heads are routed, both are whole groups. counts: heads, one number or one per layer. group: number of
    heads that share a key/value head.
    """
    if heads.head_selection == "gated":
        heads = gated_mixture(heads, counts)
    if not heads.num_active_routed_heads:
        budgets = spread_budget(heads, for_every_layer(counts, num_layers), group, heads.num_shared_heads)
        heads = replace(heads, **budgets)
    experts = [experts_of(heads, number, group) for number in for_every_layer(counts, num_layers)]
    shared = heads.num_shared_heads or tuple(shared_by_default(number) * size for number, size in experts)
    shared = for_every_layer(shared, num_layers)
    routed = heads.num_active_routed_heads or tuple(
        min(max(size, number // 2 * size - on), number * size - on)
        for (number, size), on in zip(experts, shared, strict=False)
    )
    return replace(heads, num_shared_heads=shared, num_active_routed_heads=for_every_layer(routed, num_layers))


def experts_of(heads, number, group):
    """Return from how many experts the router of a layer chooses, in each group if it chooses inside groups, and how
    many heads each choice adds."""
    if heads.head_selection != "mixture" or heads.routing_unit == "head":
        return number, 1
    groups, size = number // max(1, group), max(1, group)
    return (size, groups) if heads.routing_unit == "head_in_group" else (groups, size)


def shared_by_default(experts):
    """Return a quarter of the experts, and from two on an even number: without grouped queries, two tensor-parallel
    ranks can then hold equally many."""
    return experts // 8 * 2 or experts // 4


def gated_mixture(heads, counts):
    """Return --head-selection gated as a mixture in which all heads are shared. Gates and parameters are the same, so
    files need no other form. Raises ConfigError if other settings contradict it."""
    if heads.routing not in GATED:
        given = f"--head-selection gated: contradicts --routing {heads.routing}, since its gates"
        raise ConfigError([f"{given} are those of sigmoid or softplus; add --routing sigmoid"])
    for name in ("head_budget", "routing_top_p"):
        value = getattr(heads, name)
        if value is not None:
            raise ConfigError([f"{flag(name)} {value:g}: --head-selection gated uses all heads; leave it out"])
    return replace(heads, head_selection="mixture", num_shared_heads=counts, num_active_routed_heads=(0,))


def spread_budget(heads, numbers, group, shared, tp=1, cp=1):
    """Return {field of HeadsConfig: a number per layer} for --head-budget B and --head-budget-slope S; {} if
    moh_lm.checks would refuse them.

    The share of layer l of L is B + S (l / (L - 1) - 1/2). Numbers of whole heads, or groups, follow the running sum of
    the shares and are then sorted, since rounding leaves a few out of order. Unless ``shared`` gives them, always-on
    heads come in multiples that tensor-parallel and context-parallel ranks can split.

    numbers: heads of each layer. group: number of heads that share a key/value head.
    """
    layers = len(numbers)
    if not (0 < (heads.head_budget or 0) <= 1 and abs(heads.head_budget_slope) <= 1 and min(numbers, default=0) >= 1):
        return {}
    together = [heads_together(heads, number, group, tp, cp) for number in numbers]
    active, due = [], 0.0
    for layer, (number, (unit, _)) in enumerate(zip(numbers, together, strict=True)):
        place = layer / (layers - 1) - 0.5 if layers > 1 else 0
        due += number * (heads.head_budget + heads.head_budget_slope * place)
        active.append(min(max(round((due - sum(active)) / unit) * unit, unit), number))
    if len({*numbers}) == 1:
        active.sort(reverse=heads.head_budget_slope < 0)
    all_of = list(zip(active, numbers, together, strict=True))
    shared = shared or tuple(
        max(0, count - max(unit, number // 4)) // step * step for count, number, (unit, step) in all_of
    )
    shared = for_every_layer(shared, layers)
    rest = (
        min(max(count - on, unit), number - on)
        for (count, number, (unit, _)), on in zip(all_of, shared, strict=False)
    )
    return {"num_shared_heads": shared, "num_active_routed_heads": tuple(rest)}


def heads_together(heads, number, group, tp, cp):
    """Return the multiples in which a layer of ``number`` heads uses heads, and in which heads are always on."""
    if heads.routing_unit == "head_in_group" and heads.head_selection == "mixture":
        return (max(1, number // group),) * 2  # the same number in every group
    unit = group if heads.routing_unit == "key_value_group" else 1
    whole_groups = 1 < tp <= number // group  # else a rank holds a part of one
    step = math.lcm(tp * group if whole_groups else unit, tp * cp)
    return (step, step) if heads.head_selection == "static" else (unit, step)


def spread_over_ranks(model, shared, tp, cp):
    """Return the ``spread_budget`` for ranks that share layers (tp) and sequences (cp)."""
    group = heads_of_a_key(model.num_attention_heads, model.num_key_value_heads)
    return spread_budget(model.heads, for_every_layer(model.head_counts, model.num_layers), group, shared, tp, cp)


def run_values(run):
    """Return {field: value} of a ``RunConfig``'s budget, in iterations and in tokens, each from the other."""
    iterations, tokens = run.train_iters, run.train_tokens
    if iterations is None and tokens is not None and run.tokens_per_iteration > 0:
        iterations = run.iterations(math.ceil(tokens / run.seq_length))
    if tokens is None and iterations is not None:
        tokens = run.samples_after(iterations) * run.seq_length
    return {"train_iters": iterations, "train_tokens": tokens}
