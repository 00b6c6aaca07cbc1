"""The configuration of a run of any task: its sections, its file, and what the run needs from it."""

from dataclasses import dataclass, field

from moh_lm.config.fields import ConfigError, build, fits, in_words, raise_any, walk
from moh_lm.config.heads import HeadsOfLayers
from moh_lm.config.model import OF_LAYERS
from moh_lm.config.run import AlarmConfig, OptimizerConfig, ParallelConfig, ReliabilityConfig, RunBase
from moh_lm.parsing import read_json

UNNAMED = "moh_lm.pretrain"  # the command of a run if its config.json names none


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A whole run. Subclasses define the sections ``model``, ``data`` (with ``data_dir`` and ``allow_data_change``) and
    ``run``, and ``seq_length``, the number of tokens of a sample.

    program, about          its command, and the beginning of --help
    presets, of_presets     the names for --preset, and what it sets, in words
    scripts_have_sizes      whether launch scripts are for one size of a model, and --preset for runs without a script
    unit, sample_name       the unit of losses, and the name of a sample
    of_data, of_loss        fields that say what is read (and that the data set does not compare itself), and that
                            change losses or gradient norms but not the trained function
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
        """Return whether this task hides a field from --help and keeps its default."""
        return False

    @classmethod
    def preset(cls, name, given):
        """Return {field: value} of what the preset ``name`` sets, except for the fields in ``given``."""
        return {key: value for key, value in cls.presets[name].items() if key not in given}

    def may_change(self, name, was):
        """Return whether a resume may change the field ``name`` of the model from the value ``was``."""
        return False

    def idle_fields(self):
        """Return {reason: [fields]} of settings without effect on this run, beside those of heads and optimizer."""
        return {}

    def length_at(self, samples):
        """Return the length of the parts in the step after ``samples`` samples."""
        return self.seq_length

    def decay_begins(self):
        """Return the first sample that is read with a new data mix; None if the mix never changes."""
        return None

    def data_parallel_size(self, world_size):
        return world_size // self.parallel.ranks_of_a_sequence()

    def tokens_after(self, steps):
        """Return the number of tokens in the first ``steps`` iterations."""
        return self.run.samples_after(steps) * self.seq_length

    def gradient_accumulation_steps(self, world_size, samples=None):
        """Return a rank's micro-batches in the iteration after ``samples`` samples, by default with the whole batch."""
        batch = self.run.global_batch_size if samples is None else self.run.batch_at(samples)
        return batch // (self.run.micro_batch_size * self.data_parallel_size(world_size))

    def to_dict(self):
        """Return every field under its own name, without sections: the content of config.json."""
        return {entry.name: getattr(section, entry.name) for section, entry in walk(self)}

    @classmethod
    def from_dict(cls, values):
        """Invert ``to_dict``. Absent keys keep their defaults. Raises ConfigError for unknown keys."""
        known = {entry.name for _, entry in walk(cls())}
        raise_any([f"config key {key!r} is unknown: remove it" for key in values if key not in known])
        return build(cls, values).resolved()

    def resolved(self):
        """Return this configuration with the values that one section derives from another."""
        return self

    @classmethod
    def load(cls, path):
        """Read a config.json. Raises ConfigError if the file is absent or invalid."""
        try:
            values = read_json(path)
            if not isinstance(values, dict):
                raise ValueError("it holds no settings")
        except (OSError, ValueError) as error:
            raise ConfigError([f"{path}: is not a configuration ({error}); give a directory made by a run"]) from error
        program = values.get("program", UNNAMED)
        if program != cls.program:
            advice = f"give one of {cls.program}, or use its own command (docs/vision.md has those for images)"
            raise ConfigError([f"{path}: belongs to a run of {program}; {advice}"])
        kinds = {entry.name: entry.type for _, entry in walk(cls()) if entry.name in values}
        kinds |= {name: int | kinds[name] for name in OF_LAYERS if name in kinds}
        raise_any([
            f"{path}: {name} is {values[name]!r:.60}, and must be {in_words(kind, values[name])}; restore the file"
            for name, kind in kinds.items()
            if not fits(values[name], kind)
        ])
        try:
            config = cls.from_dict(values)
        except ConfigError as error:
            raise ConfigError([f"{path}: {problem}" for problem in error.problems]) from error
        raise_any([f"{path}: {problem}; restore the file" for problem in uneven(config.model)])
        return config


def uneven(model):
    """Return sentences about lists of a model that do not fit its layers, and about layers without a head."""
    values, found = vars(model) | vars(model.heads), []
    for name, count in model.lists().items():
        if isinstance(values[name], tuple) and len(values[name]) != count:
            found.append(f"{name} has {len(values[name])} entries, not {count}")
    if not found and min(model.head_counts) < 1:
        found.append(f"num_attention_heads is {model.num_attention_heads}, and must be 1 or above")
    return found
