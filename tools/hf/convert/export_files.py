"""The weights of a model in several safetensors files: which parameter is in which, and reading them again."""

from safetensors import SafetensorError, safe_open

from moh_lm.cli.command import Failure
from moh_lm.config import ConfigError


class ExportError(Failure):
    """The export could not be written, or does not compute what the checkpoint computes."""


def plan_shards(sizes, most):
    """Consecutive names in files of at most ``most`` bytes, or of one parameter that is larger.

    sizes: {name: bytes}.
    """
    shards, filled = [[]], 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def exported_files(directory):
    """Parameter -> the open safetensors file in ``directory`` that holds it. Raises ConfigError for a damaged one."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            file = safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError([f"{path}: not a safetensors file ({error}); export it again"]) from error
        found |= dict.fromkeys(file.keys(), file)
    return found
