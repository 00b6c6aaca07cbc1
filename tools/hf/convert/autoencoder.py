"""The autoencoder of a DiT of latents: an AutoencoderKL in diffusers' form."""

from moh_lm.config import ConfigError
from tools.hf.convert.export_files import read_index


def load_autoencoder(path):
    """The ``AutoencoderKL`` in a directory, for evaluation.

    Raises ConfigError if there is none, or if its weights are not those that its config.json describes.
    """
    from diffusers import AutoencoderKL
    from diffusers.utils import logging

    give = "give the directory of an AutoencoderKL of diffusers"
    if not (path / "config.json").is_file():
        raise ConfigError([f"--vae {path}: has no config.json; {give}"])
    check_indices(path)
    logging.set_verbosity_error()  # it only warns of weights that it draws or leaves out
    try:  # with low_cpu_mem_usage a missing weight is an error of PyTorch's
        settings = dict(local_files_only=True, low_cpu_mem_usage=False, output_loading_info=True)
        vae, found = AutoencoderKL.from_pretrained(path, **settings)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError([f"--vae {path}: cannot be loaded ({reason:.300}); {give}"]) from error
    for key, words in (("missing_keys", "with"), ("unexpected_keys", "without")):
        if found[key]:
            told = f"its config.json describes a model {words} {sorted(found[key])[0]}, unlike its weights"
            raise ConfigError([f"--vae {path}: {told}; copy the whole directory again"])
    return vae.eval().requires_grad_(False)


def check_indices(path):
    """Raise ConfigError if an index in the directory names a file that is not beside it."""
    for index in path.glob("*.index.json"):
        read_index(index)
