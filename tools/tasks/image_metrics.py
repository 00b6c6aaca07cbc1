"""Measures how close generated images are to real ones, by features of Inception from torch-fidelity."""

import contextlib
import os
import zipfile

import numpy as np
import torch

from moh_lm.config import ConfigError
from moh_lm.data.files import ShardError
from moh_lm.vision import packages  # noqa: F401 - before torch-fidelity
from moh_lm.vision.images import ImagePlace, folder_files, order
from moh_lm.vision.loader import IN_ORDER
from tools.hf.convert.import_weights import read_released

# isort: split
from torch_fidelity import calculate_metrics

FEWEST = 10  # fewest images in a set: the number of parts of the Inception Score
MOST = 10_000  # most reference images for precision and recall, which compare each with every other
OF_ALL = {
    "FID": "frechet_inception_distance", "KID": "kernel_inception_distance_mean",
    "Inception Score": "inception_score_mean",
}  # fmt: skip
OF_SOME = {"precision": "precision", "recall": "recall"}


class Pictures(torch.utils.data.Dataset):
    """The images of an .npz or of a directory of PNGs, uint8 [3, H, W]. Raises ConfigError; ``flag`` is named in it."""

    def __init__(self, flag, path):
        self.flag, self.size = flag, None
        try:
            self.images = pngs(path) if path.is_dir() else np.load(path)["arr_0"]
        except ConfigError as error:
            raise ConfigError([f"{flag} {path}: {error.problems[0]}"]) from error
        except (OSError, ValueError, KeyError, EOFError, TypeError, IndexError, zipfile.BadZipFile) as error:
            neither = f"is neither an .npz with arr_0 nor a directory of PNGs ({error})"
            raise ConfigError([f"{flag} {path}: {neither}"]) from error
        shape = () if path.is_dir() else self.images.shape[1:]
        if not path.is_dir() and (self.images.dtype != np.uint8 or len(shape) != 3 or shape[2] not in (1, 3)):
            given = f"{flag} {path}: arr_0 is {self.images.dtype} {list(shape)}"
            raise ConfigError([f"{given}; give uint8 [n, H, W, 3], or [n, H, W, 1] for grey"])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if not isinstance(image, np.ndarray):
            try:
                picture = ImagePlace(image, "", 0, -1).read(3)
            except ShardError as error:
                raise ConfigError([f"{self.flag} {error}"]) from error
            self.size = self.size or picture.size
            if picture.size != self.size:
                sizes = ("{} x {}".format(*size) for size in (picture.size, self.size))
                given = "{}, and the images before it are {}".format(*sizes)
                raise ConfigError([f"{self.flag} {image}: is {given}; give images of one size"])
            image = np.asarray(picture)
        return torch.from_numpy(image.copy()).permute(2, 0, 1).expand(3, -1, -1)


def pngs(directory):
    """Paths of the PNGs below a directory, sorted. Raises ConfigError if it has none, but other images."""
    every = sorted(folder_files(str(directory)))
    names = [name for name in every if name.lower().endswith(".png")]
    if every and not names:
        advice = "give PNGs of one size, as what JPEG loses counts too"
        raise ConfigError([f"has 0 PNGs, and {len(every)} other images; {advice}"])
    return [os.path.join(directory, name) for name in names]


def whole(flag, *paths):
    """The images of several ``Pictures``, one after the other. Raises ConfigError if they are too few."""
    pictures = torch.utils.data.ConcatDataset([Pictures(flag, path) for path in paths])
    if len(pictures) < FEWEST:
        given = " ".join(map(str, paths))
        raise ConfigError([f"{flag} {given}: has {len(pictures)} images; give at least {FEWEST}"])
    return pictures


def compare(arguments, device):
    """Print how close the samples are to the reference."""
    samples, reference = whole("--samples", *arguments.samples), whole("--reference", arguments.reference)
    try:
        weights = read_released(arguments.inception)  # torch-fidelity would run code in the file
    except ConfigError as error:
        raise ConfigError([f"--inception {arguments.inception}: {error.problems[0]}"]) from error
    if "Mixed_7c.branch_pool.bn.weight" not in weights:
        raise ConfigError([f"--inception {arguments.inception}: is not the Inception of torch-fidelity; see --help"])
    on_gpu = device != "cpu"
    settings = dict(
        feature_extractor="inception-v3-compat", feature_extractor_weights_path=str(arguments.inception),
        batch_size=arguments.batch_size, kid_subset_size=min(1000, len(samples), len(reference)),
        cuda=on_gpu, cache=False, save_cpu_ram=True, verbose=False,
    )  # fmt: skip
    some = torch.utils.data.Subset(reference, order(IN_ORDER, 0, len(reference))[:MOST])
    of = " ".join(map(str, arguments.samples))
    print(f"{len(samples):,} samples of {of}, {len(reference):,} images of {arguments.reference}", flush=True)
    with torch.cuda.device(device) if on_gpu else contextlib.nullcontext():  # torch-fidelity uses the current GPU
        found = calculate_metrics(input1=samples, input2=reference, fid=True, kid=True, isc=True, **settings)
        print(shown(OF_ALL, found), flush=True)
        found = calculate_metrics(input1=samples, input2=some, prc=True, **settings)
        print(f"{shown(OF_SOME, found)}   against {len(some):,} images of the reference")


def shown(metrics, found):
    return "   ".join(f"{name} {found[key]:.4f}" for name, key in metrics.items())
