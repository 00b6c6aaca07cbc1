"""What several tests of image models need: a configuration from flags, a reader of its images, an autoencoder."""

import torch

from moh_lm.flags import config_of, make_parser, parse_flags
from moh_lm.vision.config import KINDS
from moh_lm.vision.loader import ImageLoader, open_images


def parsed(kind, flags):
    return config_of(parse_flags(make_parser(KINDS[kind]), flags, KINDS[kind]))


def loader_of(config, rank=0, size=1):
    return ImageLoader(open_images(config), rank, size, pin_memory=False)


def save_autoencoder(path, channels=4):
    """Write an autoencoder of random weights that divides sides by 2; returns it."""
    from diffusers import AutoencoderKL  # takes 1.5 seconds, which no rank of a run need wait for

    torch.manual_seed(0)
    blocks = dict(down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2)
    vae = AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, latent_channels=channels, **blocks)
    vae.save_pretrained(path)
    return vae.eval()
