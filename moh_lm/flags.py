"""Command-line flags, made from the fields of the configuration.

Every field becomes one flag of its name (``num_layers`` -> ``--num-layers``), grouped by section in ``--help``. All
unknown flags and unreadable values are collected and shown together. What happens to flags that are given several
times, or in a file, is in moh_lm/cli/actions.py.
"""

import argparse
from pathlib import Path
from typing import get_args

from moh_lm.checkpoint.directory import newest_model
from moh_lm.cli.actions import FlagsOfFile, LaterWins
from moh_lm.cli.parser import Parser
from moh_lm.config import BUDGETS, SPREAD, Config, ConfigError, flag, raise_any, walk
from moh_lm.cost.devices import device_name
from moh_lm.units import at_least, duration, duration_text, in_64_bits, integer, quantity, real, words, wrapped

MIXES = ("data_mix", "decay_mix")  # fields that are weights of sources


def parse_config(arguments):
    """Return (Config, dry_run) from command-line arguments. Raises ConfigError; exits itself only for ``--help``."""
    given = parse_flags(make_parser(), arguments)
    return config_of(given), given.dry_run


def parse_flags(parser, arguments, config_type=Config):
    """Parse ``arguments`` into a namespace whose ``values`` are {field: value} of the configuration's flags among them.

    parser: has the flags of ``add_config_flags`` for this ``config_type``. Raises ConfigError.
    """
    parser.strict = True
    namespace, unknown = parser.parse_known_args(arguments)
    problems = parser.all_problems(unknown)
    namespace.values, namespace.config_type = {}, config_type
    for _, entry in walk(config_type()):
        texts = getattr(namespace, entry.name)
        if texts is not None:
            try:
                namespace.values[entry.name] = read_value(entry, texts)
            except ValueError as error:
                shown = texts if isinstance(texts, str) else " ".join(texts)
                problems.append(f"{flag(entry.name)} {shown}: {error}")
    for name in ("save_config", "devices", "device_name"):
        value = getattr(namespace, name, None)
        if value and not namespace.dry_run:
            problems.append(f"{flag(name)} {getattr(value, 'name', value)}: needs --dry-run; add it")
    if config_type.scripts_have_sizes and namespace.preset and getattr(namespace, "script", None):
        advice = "use it with python -m moh_lm.pretrain"
        problems.append(f"--preset {namespace.preset}: {namespace.script} has its sizes; {advice}")
    raise_any(problems)
    return namespace


def config_of(given):
    """Return the ``Config`` for the result of ``parse_flags``.

    Model settings that are not given come from the newest checkpoint in --checkpoint-dir, or else from --preset. So
    does the warm-up of a preset once the run has steps.
    """
    config_type = given.config_type
    model = without_replaced(model_of_run(given.values.get("checkpoint_dir"), config_type), given.values)
    if given.values.get("head_selection") == "gated":
        model.pop("routing", None)  # which gated decides; moh_lm.run.resume says what the run has
    known = {**model, **given.values}
    preset = config_type.preset(given.preset, known) if given.preset else {}
    if "warmup_iters" in preset:  # which follows from a budget that a resume may change
        preset |= warmup_of_run(known.get("checkpoint_dir"), config_type)
    return config_type.from_dict({**of_device(given), **preset, **known})


def of_device(given):
    """Return {field: value} that launch scripts and presets of language models leave to the device: a GPU compiles,
    which was measured to be faster (docs/results.md)."""
    from moh_lm.kernels.devices import on_gpu  # not above: it imports torch, which --help does not need

    planned = getattr(given, "device_name", None) or getattr(given, "gpus", None)  # of a dry run, of tools/plan.py
    return {"compile": True} if (planned or on_gpu()) and compiles_on_gpu(given) else {}


def compiles_on_gpu(given):
    """Return whether a launch script or a preset of a language model would compile these flags on a GPU."""
    named = given.preset or getattr(given, "script", None)
    return given.config_type is Config and named and given.values.get("window_strategy") != "entropy"


def without_replaced(model, given):
    """Return {field: value} of a run's model, without the head numbers or budget that ``given`` replaces."""
    if "num_active_routed_heads" in given:
        replaced = SPREAD
    elif any(given[name] != model.get(name) for name in SPREAD if name in given):
        replaced = BUDGETS
    else:
        return model
    return {name: value for name, value in model.items() if name not in replaced}


def changes(arguments, config_type=Config):
    """Return lines on what ``arguments`` change in the launch script's flags, the preset or the defaults."""
    places = [place for place, text in enumerate(arguments) if text == "--script"]
    place = places[-1] if places else 0
    parts = arguments[:place], arguments[place:]
    before, after = (parse_flags(make_parser(config_type), part, config_type) for part in parts)
    known = {entry.name: entry.default for _, entry in walk(config_type())}
    preset = after.preset or before.preset
    known |= (config_type.preset(preset, {}) if preset else {}) | before.values
    lines = [f"given      {f'after {after.script}' if after.script else 'besides the defaults'}:"]
    lines += [f"  --preset {after.preset}"] if after.preset else []
    for _, entry in walk(config_type()):
        now, value = getattr(after, entry.name), of_all_layers(known[entry.name])
        if now is None or of_all_layers(after.values[entry.name]) == value:
            continue
        was = getattr(before, entry.name) or ("not given" if value in (None, (), "") else value)
        replaced = entry.metadata.get("replaces")
        if value is None and replaced and known[replaced] is not None:
            was = f"{flag(replaced)} {words(getattr(before, replaced) or known[replaced])}"
        lines.append(wrapped(f"  {flag(entry.name)} {words(now)}, was {words(was)}", 4))
    return lines


def of_all_layers(value):
    """Return one number if ``value`` is a tuple with that number in all layers, else ``value``."""
    equal = isinstance(value, tuple) and len(set(value)) == 1 and not isinstance(value[0], tuple)
    return value[0] if equal else value


def warmup_of_run(directory, config_type):
    """Return {"warmup_iters": those of the newest checkpoint}, {} for a run without steps."""
    step = newest_model(directory, config_type)[0]
    begun = step is not None and step.name != "step-0"
    return {"warmup_iters": config_type.load(step / "config.json").optimizer.warmup_iters} if begun else {}


def model_of_run(directory, config_type=Config):
    """Return {field: value} of the model in the newest checkpoint of a run directory, {} without checkpoints."""
    model = newest_model(directory, config_type)[1]
    return {} if model is None else {entry.name: getattr(section, entry.name) for section, entry in walk(model)}


def save_config(given, path):
    """Write the given flags to a file for ``--config``. A comment names what their launch script adds on a GPU. Raises
    ConfigError."""
    import yaml

    values = {"preset": given.preset} if given.preset else {}
    values |= {name: dict(value) if name in MIXES else value for name, value in given.values.items()}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    note = ""
    if given.script and compiles_on_gpu(given) and "compile" not in given.values:
        note = f"# On a GPU {given.script} adds --compile. With this file, give it yourself.\n"
    try:
        Path(path).write_text(note + yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"--save-config {path}: cannot be written ({error.strerror}); give another file"]) from error


def yaml_file(text):
    """Read --save-config. PyYAML is imported here, so that its absence is told before a run starts."""
    import yaml  # noqa: F401

    return text


def make_parser(config_type=Config):
    """Return the parser of a task's training command."""
    parser = Parser(prog=f"python -m {config_type.program}", usage="%(prog)s [flags]", description=config_type.about)
    add_config_flags(parser, config_type)
    parser.add_argument("--dry-run", action="store_true", help="print what the run would do, and exit")
    help_of_file = "with --dry-run: file to write for --config"
    parser.add_argument("--save-config", type=yaml_file, metavar="FILE.yaml", help=help_of_file)
    help_of_devices = "with --dry-run: plan for this many devices (default: those that were started)"
    parser.add_argument("--devices", type=at_least(1), metavar="N", help=help_of_devices)
    help_of_name = "with --dry-run: plan for these GPUs, such as H100, even on a machine without any"
    parser.add_argument("--device-name", type=device_name, metavar="NAME", help=help_of_name)
    parser.add_argument("--script", help=argparse.SUPPRESS)  # a launch script's name, before the user's flags
    # The deepspeed launcher appends it to every rank's arguments; LOCAL_RANK is what counts.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    return parser


def add_config_flags(parser, config_type=Config):
    """Add --preset, --config, and a flag for each field of a configuration, in groups."""
    groups = {}
    for section, entry in walk(config_type()):
        title = type(section).__doc__
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(
            flag(entry.name),
            action=LaterWins,
            replaces=entry.metadata.get("replaces"),
            nargs="+" if is_list(entry) else "?" if entry.type is bool else None,
            const="true" if entry.type is bool else None,
            metavar=placeholder(entry),
            help=argparse.SUPPRESS if config_type.hides(entry) else help_text(entry),
        )
    presets = dict(choices=config_type.presets, help=config_type.of_presets)
    parser.add_argument("--preset", action=LaterWins, replaces=None, **presets)
    parser.add_argument("--config", action=FlagsOfFile, metavar="FILE.yaml", help="file with lines NAME: VALUE")


def read_value(entry, texts):
    """Return the value of a field from the texts after its flag. Raises a ValueError that says what is allowed."""
    parse = value_parser(entry)
    values = tuple(map(parse, texts)) if is_list(entry) else (parse(texts),)
    for value in (value for value in values if isinstance(value, int)):
        in_64_bits(value)
    if is_list(entry):
        return values
    (value,) = values
    allowed = entry.metadata.get("choices")
    if allowed and value not in allowed:
        raise ValueError(f"choose one of {', '.join(map(str, allowed))}")
    return value


def is_list(entry):
    return isinstance(entry.default, tuple)


def value_parser(entry):
    if "binary" in entry.metadata:
        return quantity(1024 if entry.metadata["binary"] else 1000)
    if "duration" in entry.metadata:
        return duration
    if entry.name in MIXES:
        return name_and_weight
    return {bool: boolean, int: integer, float: real, str: str}[type_of(entry)]


def type_of(entry):
    """Return the type of one value: int for ``int | None`` and for ``tuple[int, ...]``."""
    return next(iter(get_args(entry.type)), entry.type)


def boolean(text):
    known = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if text.lower() not in known:
        raise ValueError("write true or false, or the flag alone for true")
    return known[text.lower()]


def name_and_weight(text):
    name, separator, weight = text.rpartition("=")
    if not separator:
        raise ValueError("write NAME=WEIGHT for each source, such as books=4.24 arxiv=4.37")
    return name, weight


def placeholder(entry):
    if "choices" in entry.metadata:
        return "{" + ",".join(map(str, entry.metadata["choices"])) + "}"
    if entry.type is bool:
        return "{true,false}"
    if "duration" in entry.metadata:
        return "TIME"
    if entry.name in MIXES:
        return "NAME=WEIGHT"
    if "metavar" in entry.metadata:
        return entry.metadata["metavar"]
    return {str: "PATH", float: "X"}.get(type_of(entry), "N")


def help_text(entry):
    shown = " ".join(map(str, entry.default)) if is_list(entry) else str(entry.default)
    shown = shown.lower() if isinstance(entry.default, bool) else shown
    shown = duration_text(entry.default) if "duration" in entry.metadata and entry.default else shown
    default = "" if entry.default in (None, (), "") else f" (default: {shown})"
    return (entry.metadata["help"] + default).replace("%", "%%")
