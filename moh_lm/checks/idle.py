"""Names given flags without effect. They are not refused, because a baseline may reuse the flags of a mixture."""

from dataclasses import fields

from moh_lm.config import BUDGETS, SPREAD, TWO_STAGE, HeadsConfig, flag

ROUTER_ONLY = ("router_learning_rate_scale", "router_gradient_clipping")  # optimizer settings for routers


def idle_flags(given, config):
    """Return a sentence for each reason why given flags have no effect. given: the result of ``parse_flags``."""
    idle = {
        "with --schedule cosine": ["decay_shape"] if config.optimizer.schedule == "cosine" else [],
        "without --spike-sigmas": [] if config.reliability.spike_sigmas else ["on_spike"],
        **config.idle_fields(),
        **idle_of_heads(config.model.heads, given.values.get("head_selection") == "gated"),
    }
    given_flags = {where: [flag(name) for name in names if name in given.values] for where, names in idle.items()}
    return [
        f"note: {', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect {where}"
        for where, names in given_flags.items()
        if names
    ]


def idle_of_heads(heads, gated):
    """Return {in words, where: fields of heads and routers that have no effect there}. gated: whether the mixture was
    requested as --head-selection gated."""
    selection = "gated" if gated else heads.head_selection
    if selection == "mixture":
        return {
            f"with --routing {heads.routing}": ([] if heads.routing in TWO_STAGE else ["two_stage"])
            + (["load_balance_coefficient"] if heads.routing == "relu" else []),
            "without --routing-top-p": ["routing_entropy_coefficient"] if heads.routing_top_p is None else [],
        }
    in_whole_groups = heads.head_budget is not None and heads.routing_unit == "key_value_group"
    unit = ("routing_unit",) if in_whole_groups else ()
    used = {
        "all": (),
        "static": (*BUDGETS, *SPREAD, *unit),
        "gated": ("routing", "routing_unit", "gate_width", "dense_warmup_iters", *ROUTER_ONLY),
    }[selection]
    of_routers = [*(entry.name for entry in fields(HeadsConfig)), *ROUTER_ONLY]
    unused = [name for name in of_routers if name not in ("head_selection", *used)]
    return {f"with --head-selection {selection}": unused}
