"""Configuration: what a run is, in eight small dataclasses.

The whole run of any task is in task.py, with the sections that all tasks share in run.py and heads.py; what language
models have is in text.py and model.py, what image models have in moh_lm/vision/config.py.

A field says its name, type, default and meaning once. Flags (``moh_lm.flags``) and the flat ``config.json`` are made
from the fields, so names are unique over all sections. Values that follow from others (the head dimension, one head
budget per layer, the number of iterations) are filled in as resolve.py says when a configuration is made: what the
program sees is always resolved.

Checks return sentences instead of raising: each gives the key, the value, what is allowed and the remedy, and all of
them are shown at once, before any process group is opened. This package needs the standard library only.
"""

from moh_lm.config.fields import ConfigError, flag, option, raise_any, walk
from moh_lm.config.heads import BUDGETS, FUSED, GATED, SPREAD, TRAINING_ONLY, TWO_STAGE, HeadsConfig, RoutedLayer
from moh_lm.config.model import ModelConfig
from moh_lm.config.run import REDUCE_BUCKET, AlarmConfig, OptimizerConfig, ParallelConfig, ReliabilityConfig
from moh_lm.config.task import UNNAMED, TaskConfig
from moh_lm.config.text import Config, DataConfig, RunConfig

__all__ = [
    "BUDGETS", "FUSED", "GATED", "REDUCE_BUCKET", "SPREAD", "TRAINING_ONLY", "TWO_STAGE", "UNNAMED", "AlarmConfig",
    "Config", "ConfigError", "DataConfig", "HeadsConfig", "ModelConfig", "OptimizerConfig", "ParallelConfig",
    "ReliabilityConfig", "RoutedLayer", "RunConfig", "TaskConfig", "flag", "option", "raise_any", "walk",
]  # fmt: skip
