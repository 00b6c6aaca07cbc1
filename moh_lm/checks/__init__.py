"""Checks of a configuration: every reason why a run could not start, found before any process group is opened.

A check returns sentences. Each gives the flag, its value, what is allowed and the remedy; all of them are shown at
once.
"""

from moh_lm.checks.layout import layout_problems, tensor_problems
from moh_lm.checks.model import model_problems, table_problems
from moh_lm.checks.plan import plan_warnings
from moh_lm.checks.ranges import below
from moh_lm.checks.run import (
    alarm_problems,
    backend_problems,
    compile_problems,
    frozen_problems,
    optimizer_problems,
    reliability_problems,
    router_problems,
    run_problems,
    schedule_problems,
    window_problems,
)
from moh_lm.data.mixture import data_problems

__all__ = [
    "below", "config_problems", "layout_problems", "model_problems", "optimizer_problems", "plan_warnings",
    "schedule_problems", "tensor_problems",
]  # fmt: skip


def config_problems(config, world_size):
    """Sentences for what is wrong with ``config`` on ``world_size`` processes; empty if the run can start."""
    return [
        *model_problems(config.model),
        *table_problems(config),
        *data_problems(config.data),
        *optimizer_problems(config.optimizer),
        *schedule_problems(config),
        *frozen_problems(config),
        *router_problems(config),
        *run_problems(config.run),
        *backend_problems(config),
        *window_problems(config),
        *compile_problems(config),
        *reliability_problems(config.reliability),
        *alarm_problems(config.alarms),
        *layout_problems(config, world_size),
    ]
