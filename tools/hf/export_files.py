"""The weights of a model in several safetensors files: which parameter is in which, and reading them again."""

from safetensors import safe_open


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
    """Parameter -> the open safetensors file in ``directory`` that holds it."""
    files = (safe_open(path, "pt") for path in sorted(directory.glob("*.safetensors")))
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dictionary
