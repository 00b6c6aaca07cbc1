"""Configuration: what a run is, in eight small dataclasses.

task.py has the run of any task, run.py and heads.py the sections that all tasks share. text.py and model.py add what
language models need, moh_lm/vision/config.py what image models need.

A field states its name, type, default and meaning once. Flags (``moh_lm.flags``) and the flat ``config.json`` are made
from the fields, so names are unique over all sections. Values that follow from others, such as the head dimension, are
filled in by resolve.py when a configuration is made, so the program only sees resolved configurations.

Checks return sentences instead of raising. Each gives the key, the value, what is allowed and the remedy, and all of
them are shown at once. This package needs only the standard library.
"""

from moh_lm.config.fields import ConfigError, flag, option, raise_any, walk
from moh_lm.config.heads import (
    BUDGETS,
    FUSED,
    GATED,
    NOT_STATIC,
    SPREAD,
    TRAINING_ONLY,
    TWO_STAGE,
    HeadsConfig,
    RoutedLayer,
)
from moh_lm.config.model import ModelConfig
from moh_lm.config.run import REDUCE_BUCKET, AlarmConfig, OptimizerConfig, ParallelConfig, ReliabilityConfig
from moh_lm.config.task import UNNAMED, TaskConfig
from moh_lm.config.text import Config, DataConfig, RunConfig

__all__ = [
    "BUDGETS", "FUSED", "GATED", "NOT_STATIC", "REDUCE_BUCKET", "SPREAD", "TRAINING_ONLY", "TWO_STAGE", "UNNAMED",
    "AlarmConfig", "Config", "ConfigError", "DataConfig", "HeadsConfig", "ModelConfig", "OptimizerConfig",
    "ParallelConfig", "ReliabilityConfig", "RoutedLayer", "RunConfig", "TaskConfig", "flag", "option", "raise_any",
    "walk",
]  # fmt: skip
