"""The autoencoder of a DiT of latents: an AutoencoderKL in diffusers' form."""

from safetensors import SafetensorError, safe_open

from moh_lm.config import ConfigError
from moh_lm.parsing import read_json
from tools.hf.convert.export_files import read_index

GIVE = "give the directory of an AutoencoderKL of diffusers"
WEIGHTS = "diffusion_pytorch_model"


def load_autoencoder(path):
    """The ``AutoencoderKL`` in a directory, for evaluation.

    Raises ConfigError if there is none, or if its weights are not those that its config.json describes.
    """
    from diffusers import AutoencoderKL
    from diffusers.utils import logging

    check_files(path)
    logging.set_verbosity(logging.CRITICAL)  # it only warns of weights that it draws or leaves out
    try:
        vae, found = AutoencoderKL.from_pretrained(path, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError([f"--vae {path}: cannot be loaded ({reason:.300}); {GIVE}"]) from error
    for key, words in (("missing_keys", "with"), ("unexpected_keys", "without")):
        if found[key]:
            told = f"its config.json describes a model {words} {sorted(found[key])[0]}, unlike its weights"
            raise ConfigError([f"--vae {path}: {told}; copy the whole directory again"])
    return vae.eval().requires_grad_(False)


def check_files(path):
    """Raise ConfigError if a directory holds no AutoencoderKL, or an index of tensors that are not beside it."""
    if not (path / "config.json").is_file():
        raise ConfigError([f"--vae {path}: has no config.json; {GIVE}"])
    try:
        name = read_json(path / "config.json").get("_class_name", "AutoencoderKL")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError([f"--vae {path}: its config.json cannot be read ({error}); {GIVE}"]) from error
    if name != "AutoencoderKL":
        raise ConfigError([f"--vae {path}: is of the class {name}; {GIVE}"])
    if not any((path / f"{WEIGHTS}.{end}").is_file() for end in ("safetensors", "safetensors.index.json", "bin")):
        raise ConfigError([f"--vae {path}: has no {WEIGHTS}.safetensors; {GIVE}, and rename a variant such as fp16"])
    for index in path.glob("*.index.json"):
        check_index(index)


def check_index(index):
    """Raise ConfigError if a tensor of an index is not in the file that it names."""
    listed = read_index(index)
    for name in sorted(set(listed.values())):
        try:
            with safe_open(index.with_name(name), "pt") as file:
                held = set(file.keys())
        except (OSError, SafetensorError) as error:
            raise ConfigError([f"{index.with_name(name)}: cannot be read ({error}); fetch it again"]) from error
        for tensor in sorted(key for key, where in listed.items() if where == name and key not in held):
            raise ConfigError([f"{index}: lists {tensor} in {name}, which lacks it; fetch both again"])
