"""Checks of a configuration: every reason why a run could not start, found before any process group is opened.

A check returns sentences. Each gives the flag, its value, what is allowed and the remedy; all of them are shown at
once.
"""

from moh_lm.checks import attention, layout, model, run, schedule
from moh_lm.checks.plan import plan_warnings
from moh_lm.data.mixture import data_problems
from moh_lm.kernels import devices

__all__ = ["config_problems", "plan_warnings"]


def config_problems(config, world_size, on_gpu=None):
    """Return sentences for what is wrong with ``config`` on ``world_size`` processes; empty if the run can start.

    on_gpu: whether they have GPUs; by default, whether this machine shows one.
    """
    on_gpu = devices.on_gpu() if on_gpu is None else on_gpu
    return [
        *model.model_problems(config.model),
        *attention.table_problems(config),
        *data_problems(config.data),
        *run.optimizer_problems(config.optimizer),
        *run.split_problems(config),
        *schedule.schedule_problems(config),
        *schedule.decay_mix_problems(config),
        *run.frozen_problems(config),
        *run.router_problems(config),
        *run.run_problems(config.run),
        *run.backend_problems(config, on_gpu),
        *schedule.length_warmup_problems(config),
        *run.projection_problems(config),
        *run.kernel_problems(config, on_gpu),
        *run.graph_problems(config, on_gpu),
        *run.window_problems(config),
        *run.compile_problems(config.run, on_gpu),
        *run.reliability_problems(config.reliability),
        *run.alarm_problems(config.alarms),
        *layout.layout_problems(config, world_size),
    ]
