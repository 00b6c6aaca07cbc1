"""Configuration: what a run is, in eight small dataclasses: those of the model (model.py,
heads.py) and those of a run (run.py).

A field says its name, type, default and meaning once. Flags (``moh_lm.flags``) and the flat ``config.json`` are made
from the fields, so names are unique over all sections. Values that follow from others (the head dimension, one head
budget per layer, the number of iterations) are filled in when a section is made: what the program sees is always
resolved.

Checks return sentences instead of raising: each gives the key, the value, what is allowed and the remedy, and all of
them are shown at once, before any process group is opened. This package needs the standard library only.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from moh_lm.config.fields import ConfigError, as_tuples, build, flag, option, raise_any, walk
from moh_lm.config.heads import BUDGETS, SPREAD, TRAINING_ONLY, TWO_STAGE, HeadsConfig, RoutedLayer, spread_budget
from moh_lm.config.model import ModelConfig
from moh_lm.config.presets import SIZES, preset
from moh_lm.config.run import AlarmConfig, DataConfig, OptimizerConfig, ParallelConfig, ReliabilityConfig, RunConfig
from moh_lm.parsing import parse_json

__all__ = [
    "BUDGETS", "SPREAD", "TRAINING_ONLY", "TWO_STAGE", "AlarmConfig", "Config", "ConfigError", "DataConfig",
    "HeadsConfig", "ModelConfig", "OptimizerConfig", "ParallelConfig", "ReliabilityConfig", "RoutedLayer",
    "RunConfig", "flag", "option", "raise_any", "walk",
]  # fmt: skip


@dataclass(frozen=True)
class Config:
    """A whole run. moh_lm.checks says whether it can start."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    presets, preset = SIZES, staticmethod(preset)
    of_presets = "sizes, numbers of heads, batch, budget and rate that no other flag gives"
    program, unit = "moh_lm.pretrain", "nats per token"  # of its command, and of its losses
    about = "Pretrain a Mixture-of-Head language model. The scripts in launch/ hold the paper's values."
    refused = ()  # fields that this kind of model does not know: --help leaves them out
    of_data = ("reset_at_documents",)  # fields that say what is read, beside those that the data set compares itself

    def __post_init__(self):
        if self.run.window_strategy == "sequence" and not any(self.model.window):
            object.__setattr__(self, "model", replace(self.model, window=(self.half_window(),)))

    def half_window(self):
        """That of --window-strategy sequence."""
        return min(max(self.run.seq_length // 2, self.run.window_min), self.run.window_max)

    @property
    def of_loss(self):
        """Fields that change losses or gradient norms, beside those of the model and of the data."""
        counted = self.model.routed_layers() and self.model.heads.load_balance_scope == "micro_batch"
        return ("z_loss", "micro_batch_size") if counted else ("z_loss",)

    def data_parallel_size(self, world_size):
        return world_size // self.parallel.ranks_of_a_sequence()

    def gradient_accumulation_steps(self, world_size):
        return self.run.global_batch_size // (self.run.micro_batch_size * self.data_parallel_size(world_size))

    def decay_begins(self):
        """The first sample of --decay-mix; None without one."""
        if not self.data.decay_mix or self.optimizer.schedule != "wsd" or self.run.train_iters is None:
            return None
        stable = self.run.train_iters - self.optimizer.decay(self.run.train_iters)
        return stable * self.run.global_batch_size

    def to_dict(self):
        """Every field under its own name, sections joined: the content of config.json."""
        return {field.name: getattr(section, field.name) for section, field in walk(self)}

    @classmethod
    def from_dict(cls, values):
        """The inverse of ``to_dict``; keys that are absent keep their defaults. Raises ConfigError for unknown keys."""
        known = {field.name for _, field in walk(cls())}
        unknown = [f"config key {key!r} is unknown: remove it" for key in values if key not in known]
        raise_any(unknown)
        tp, cp = (values.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "context"))
        if min(tp, cp) > 0 and tp * cp > 1 and not values.get("num_active_routed_heads"):
            shared = as_tuples(values.get("num_shared_heads", ()))
            values = {**values, **spread_budget(build(ModelConfig, values), shared, tp, cp)}
        return build(cls, values)

    @classmethod
    def load(cls, path):
        """The configuration in a config.json. Raises ConfigError if the file is absent or not such a file."""
        try:
            values = parse_json(Path(path).read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError("it holds no settings")
        except (OSError, ValueError) as error:
            raise ConfigError([f"{path}: no configuration ({error}); give a directory made by a run"]) from error
        program = values.get("program", Config.program)
        if program != cls.program:
            advice = f"give one of {cls.program}, or use the command for it"
            raise ConfigError([f"{path}: is of a run of {program}; {advice}"])
        return cls.from_dict(values)
