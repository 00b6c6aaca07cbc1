"""The autoencoder of a DiT of latents: an AutoencoderKL in diffusers' form."""

from moh_lm.config import ConfigError
from tools.hf.convert.export_files import read_index


def load_autoencoder(path):
    """The ``AutoencoderKL`` in a directory, for evaluation. Raises ConfigError if there is none."""
    from diffusers import AutoencoderKL

    if not (path / "config.json").is_file():
        raise ConfigError([f"--vae {path}: has no config.json; give the directory of an AutoencoderKL of diffusers"])
    check_indices(path)
    return AutoencoderKL.from_pretrained(path, local_files_only=True).eval().requires_grad_(False)


def check_indices(path):
    """Raise ConfigError if an index in the directory names a file that is not beside it."""
    for index in path.glob("*.index.json"):
        read_index(index)
