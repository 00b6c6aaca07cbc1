"""The weights of a model in several safetensors files: the file of each parameter, and reading them again."""

from pathlib import PurePath

from safetensors import SafetensorError, safe_open

from moh_lm.cli.command import Failure
from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE = (
    "; a pytorch_model.bin is a pickle, which can run code, and is not read: load the model with transformers and "
    "write it again with save_pretrained(..., safe_serialization=True)"
)


class ExportError(Failure):
    """The export could not be written, or does not compute what the checkpoint computes."""


def plan_shards(sizes, most):
    """Lists of consecutive names for files of at most ``most`` bytes each, or of a single larger parameter.

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


def weight_files(directory):
    """Return {tensor: the open safetensors file in ``directory`` that holds it}.

    Only an index says which file that is. Raises ConfigError for a damaged file, an absent tensor, or one that several
    files have: a copy left by an earlier model could be mistaken for it.
    """
    single, index = directory / SINGLE, directory / INDEX
    listed = read_index(index) if index.exists() else None
    if listed is not None and single.is_file() and SINGLE not in listed.values():
        raise ConfigError([f"{directory}: has {SINGLE} beside {INDEX}, so one of them is stale; remove that one"])
    names = sorted({*listed.values()}) if listed else [SINGLE]
    remedy = f", but {INDEX} names it; fetch what is missing" if listed else "; give a model in Hugging Face form"
    remedy = PICKLE if not listed and list(directory.glob("pytorch_model*.bin")) else remedy
    raise_any([f"{directory / name}: is absent{remedy}" for name in names if not (directory / name).is_file()])
    found, problems = {}, []
    for name in names:
        path = directory / name
        try:
            file = safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise ConfigError([f"{path}: not a safetensors file ({error}); fetch it again"]) from error
        for tensor in file.keys():  # noqa: SIM118 - not a dictionary
            if tensor in found or (listed and listed.get(tensor, name) != name):
                problems.append(f"{path}: has {tensor}, which another file has too; restore the files of one model")
            found[tensor] = file
    problems += [f"{index}: names {tensor}, which is in no file" for tensor in sorted((listed or {}).keys() - found)]
    raise_any(problems)
    return found


def read_index(path):
    """{tensor: name of its file} of an index. Raises ConfigError."""
    try:
        files = read_json(path)["weight_map"]
        names = files.values() if isinstance(files, dict) else ()
        if not names or not all(isinstance(name, str) and name == PurePath(name).name != "" for name in names):
            raise ValueError("weight_map must give the name of a file beside it for each tensor")
        return files
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError([f"{path}: not an index ({error}); fetch it again"]) from error
