"""What attention takes, relative to all heads, in the ways of computing a mixture that a run could choose."""

from dataclasses import replace

from moh_lm.config import BUDGETS
from moh_lm.kernels.choose import head_time


def attention_times(config, problems):
    """Return {words: ``attention_time``} of a run as it is, and with each change of its heads that would save more.

    config: ``Config`` of a mixture. problems: function of a changed ``Config`` that returns why it is refused, [] if it
    is not; refused changes are left out.
    """
    model, now = config.model, attention_time(config.model)
    spread = {**dict.fromkeys(BUDGETS, ()), "head_budget_slope": 0.0}
    changes = {
        "a quarter of the heads": spread | {"head_budget": 0.25},
        "--routed-keys selected": {"routed_keys": "selected"},
        "--routing-unit head_in_group": spread | {"head_budget": model.active_share(), "routing_unit": "head_in_group"},
    }
    times = {"if it computes all heads": 1.0, "if only the selected ones": now}
    for words, fields in changes.items():
        other = replace(config, model=replace(model, heads=replace(model.heads, **fields)))
        found = attention_time(other.model)
        if found < now and not problems(other):
            times[f"with {words}"] = found
    return times


def attention_time(model):
    """Return the time of attention over that of all heads, if only the heads in use are computed."""
    whole = sum(model.of_layer(layer).num_attention_heads for layer in range(model.num_layers))
    shared, active = (sum(getattr(model.heads, name)) / whole for name in BUDGETS)
    if model.heads.routed_keys == "selected" and shared < 1:
        active *= active / (1 - shared)
    return head_time(shared, active, model.chooses_in_groups)
