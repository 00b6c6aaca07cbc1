"""The configuration of a run of any task: its sections, its file, and what a run asks of it whatever is trained."""

from dataclasses import dataclass, field
from pathlib import Path

from moh_lm.config.fields import ConfigError, build, raise_any, walk
from moh_lm.config.heads import HeadsOfLayers
from moh_lm.config.run import AlarmConfig, OptimizerConfig, ParallelConfig, ReliabilityConfig, RunBase
from moh_lm.parsing import parse_json

UNNAMED = "moh_lm.pretrain"  # the command of a run whose config.json names none


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A whole run. The sections ``model``, ``data`` and ``run`` are those of a subclass, as is ``seq_length``: the
    tokens of a sample. The data have ``data_dir`` and ``allow_data_change``.

    program, about          its command, and how --help begins
    presets, of_presets     names for --preset, and what it sets, in words
    scripts_have_sizes      whether a launch script is for one size of a model, and --preset for runs without a script
    unit, sample_name       what losses are in, and what samples are called
    of_data, of_loss        fields beside those of the model that say what is read (and that the data set does not
                            compare itself), and that change losses or gradient norms
    moving                  fields of the model that the steps of the run change
    """

    scripts_have_sizes = False
    of_data = of_loss = moving = ()

    model: HeadsOfLayers
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: object
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunBase
    reliability: ReliabilityConfig = field(default_factory=ReliabilityConfig)
    alarms: AlarmConfig = field(default_factory=AlarmConfig)

    @staticmethod
    def hides(entry):
        """Whether a field is not for this task: it keeps its default, and --help leaves it out."""
        return False

    @classmethod
    def preset(cls, name, given):
        """{field: value} of what the preset ``name`` sets and ``given``, {field: value}, does not."""
        return {key: value for key, value in cls.presets[name].items() if key not in given}

    def idle_fields(self):
        """{what of this run makes no use of them, in words: [fields]}, beside those of heads and optimizer."""
        return {}

    def decay_begins(self):
        """The first sample that is read with other data than those before it; None if they stay the same."""
        return None

    @property
    def tokens_per_iteration(self):
        return self.run.global_batch_size * self.seq_length

    def data_parallel_size(self, world_size):
        return world_size // self.parallel.ranks_of_a_sequence()

    def tokens_after(self, steps):
        """Tokens of the first ``steps`` iterations."""
        return self.run.samples_after(steps) * self.seq_length

    def gradient_accumulation_steps(self, world_size, samples=None):
        """Micro-batches of a rank in the iteration after so many samples; by default in one with the whole batch."""
        batch = self.run.global_batch_size if samples is None else self.run.batch_at(samples)
        return batch // (self.run.micro_batch_size * self.data_parallel_size(world_size))

    def to_dict(self):
        """Every field under its own name, sections joined: the content of config.json."""
        return {entry.name: getattr(section, entry.name) for section, entry in walk(self)}

    @classmethod
    def from_dict(cls, values):
        """The inverse of ``to_dict``; keys that are absent keep their defaults. Raises ConfigError for unknown keys."""
        known = {entry.name for _, entry in walk(cls())}
        raise_any([f"config key {key!r} is unknown: remove it" for key in values if key not in known])
        return build(cls, values).resolved()

    def resolved(self):
        """This configuration, with the values that one section derives from another."""
        return self

    @classmethod
    def load(cls, path):
        """The configuration in a config.json. Raises ConfigError if the file is absent or not such a file."""
        try:
            values = parse_json(Path(path).read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError("it holds no settings")
        except (OSError, ValueError) as error:
            raise ConfigError([f"{path}: is not a configuration ({error}); give a directory made by a run"]) from error
        program = values.get("program", UNNAMED)
        if program != cls.program:
            advice = f"give one of {cls.program}, or use the command for it"
            raise ConfigError([f"{path}: belongs to a run of {program}; {advice}"])
        return cls.from_dict(values)
