"""How flags that are given several times, or in a file, become the values of a command line.

A later flag wins over an earlier one, so that arguments appended to a launch script override it. ``--config`` inserts
the flags of a YAML file in its place, which ``save_config`` of moh_lm/flags.py writes.
"""

import argparse
from pathlib import Path

from moh_lm.cli.parser import nearest
from moh_lm.config import ConfigError


class LaterWins(argparse.Action):
    """Stores the texts of a flag, and forgets those of the flag that it ``replaces``."""

    def __init__(self, *args, replaces, **kwargs):
        super().__init__(*args, **kwargs)
        self.replaces = replaces

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, values)
        if self.replaces:
            setattr(namespace, self.replaces, None)


class FlagsOfFile(argparse.Action):
    """Reads the flags of a YAML file as if they stood on the command line in its place. Raises ConfigError."""

    def __call__(self, parser, namespace, path, option_string=None):
        import yaml  # here, so that pretrain.py can say that it is not installed

        from moh_lm.cli.yaml_texts import Texts, as_texts

        try:
            values = yaml.load(Path(path).read_text(encoding="utf-8"), Texts)
        except (OSError, ValueError, LookupError, AttributeError, RecursionError, yaml.YAMLError) as error:
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            if isinstance(error, LookupError | AttributeError | RecursionError):
                reason = "nested too deeply, or a value does not fit its tag"
            raise ConfigError([f"--config {path}: cannot be read ({reason}); give a file of --save-config"]) from error
        if not isinstance(values, dict):
            raise ConfigError([f"--config {path}: write NAME: VALUE on each line, such as num_layers: 12"])
        actions = {action.dest: action for action in parser._actions if isinstance(action, LaterWins)}
        if unknown := [name for name in values if name not in actions]:
            given = f"--config {path}"
            raise ConfigError([f"{given}: {name} is unknown: {nearest(str(name), actions)}" for name in unknown])
        for name, value in values.items():
            action = actions[name]
            if problem := value_problem(action, value):
                raise ConfigError([f"--config {path}: {name}: {problem}"])
            texts = as_texts(value, action.nargs == "+")
            parser._check_value(action, texts)
            action(parser, namespace, texts)


def value_problem(action, value):
    """Return what is wrong with a YAML value for a flag, whatever texts the flag takes, or None."""
    from moh_lm.cli.yaml_texts import Switch, as_texts

    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if any(isinstance(item, dict | list) for item in items):  # with aliases such a list can be endless
        return "holds a list inside of a list; give plain values"
    if action.nargs != "+" and isinstance(value, dict | list):
        example = action.metavar or next(iter(action.choices))
        return f"[{', '.join(as_texts(value, True))}]: takes one value, {action.dest}: {example}"
    if isinstance(value, Switch) and action.metavar in ("PATH", "PROJECT", "COMMAND"):
        return "YAML reads yes, no, on and off as true or false; quote the text"
    if value is None or None in items or (isinstance(value, dict) and None in value):
        return "has no value; give one, or leave the line out"
    together = "".join(as_texts(value, True))
    if "\0" in together or together != together.encode(errors="replace").decode():
        return "contains NUL or half of a surrogate pair; remove it"
    return None
