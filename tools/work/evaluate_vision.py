"""The work of tools/evaluate_vision.py."""

import zipfile
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tqdm import tqdm

from moh_lm.checkpoint.saver import find_step
from moh_lm.config import ConfigError
from moh_lm.data.files import ShardError
from moh_lm.vision import packages  # noqa: F401 - before torch-fidelity
from moh_lm.vision.images import Images
from moh_lm.vision.load import load_model
from moh_lm.vision.loader import ImageSet, class_problems
from tools.devices import usable_device
from tools.work.import_vision import read

# isort: split
from torch_fidelity import calculate_metrics

TOP = 5
FEWEST = 10  # images of a set: the Inception Score has so many parts
METRICS = {
    "FID": "frechet_inception_distance", "KID": "kernel_inception_distance_mean",
    "Inception Score": "inception_score_mean", "precision": "precision", "recall": "recall",
}  # fmt: skip
FAILURES = (OSError, ValueError, RuntimeError)


def run(arguments):
    device = usable_device(arguments.device)
    if arguments.samples:
        return compare(arguments, device)
    step = find_step(arguments.model)
    config, model = load_model(step, arguments.weights)
    if config.kind != "vit":
        raise ConfigError([f"{step}: is no classifier; draw images by tools/sample_images.py, and give --samples"])
    images = Images(arguments.images)
    if problems := [*images.problems(config.model), *class_problems(config.model.num_classes, images)]:
        raise ConfigError(problems)
    data = replace(config.data, workers=arguments.workers)
    config = replace(config, data=data, run=replace(config.run, micro_batch_size=arguments.batch_size))
    batches = ImageSet(config, images, images).loader(config, 0, 1, device != "cpu").validation(0)
    try:
        top_1, top_k, loss = classify(model.to(device), tqdm(batches, leave=False, disable=None))
    except ShardError as error:
        raise ConfigError([str(error)]) from error
    print(f"{step}: {len(images.labels):,} images of {arguments.images}")
    print(f"top-1 {top_1:.2%}   top-{TOP} {top_k:.2%}   loss {loss:.4f}")


@torch.no_grad()
def classify(model, batches):
    """Shares of images whose class is the first, or among the first ``TOP``, and their mean loss; labels -1 are none.

    batches: of ``ImageBatch``.
    """
    sums, count, device = torch.zeros(3, dtype=torch.float64), 0, model.head.weight.device
    for batch in batches:
        there = batch.labels >= 0
        logits, labels = model(batch.inputs[0].to(device)).cpu()[there], batch.labels[there]
        best = logits.topk(min(TOP, logits.shape[1])).indices == labels[:, None]
        loss = F.cross_entropy(logits.double(), labels, reduction="sum")
        sums += torch.stack((best[:, 0].sum(), best.sum(), loss))
        count += len(labels)
    return (sums / count).tolist()


class Pictures(torch.utils.data.Dataset):
    """The images of an .npz or of a directory of PNGs, uint8 [3, H, W]. Raises ConfigError; ``flag`` is named in it."""

    def __init__(self, flag, path):
        self.flag = flag
        try:
            self.images = sorted(path.rglob("*.png")) if path.is_dir() else np.load(path)["arr_0"]
        except (OSError, ValueError, KeyError, EOFError, TypeError, IndexError, zipfile.BadZipFile) as error:
            raise ConfigError([f"{flag} {path}: no .npz with arr_0 and no directory of PNGs ({error})"]) from error
        if len(self.images) < FEWEST:
            raise ConfigError([f"{flag} {path}: has {len(self.images)} images; give at least {FEWEST}"])
        shape = () if path.is_dir() else self.images.shape[1:]
        if not path.is_dir() and (self.images.dtype != np.uint8 or len(shape) != 3 or shape[2] != 3):
            raise ConfigError([f"{flag} {path}: arr_0 is {self.images.dtype} {list(shape)}; give uint8 [n, H, W, 3]"])

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if not isinstance(image, np.ndarray):
            try:
                image = np.asarray(Image.open(image).convert("RGB"))
            except Exception as error:  # a damaged file may raise anything
                raise ConfigError([f"{self.flag} {image}: cannot be read as an image; remove or restore it"]) from error
        return torch.from_numpy(image.copy()).permute(2, 0, 1)


def compare(arguments, device):
    """Print how near the samples are to the reference."""
    samples, reference = Pictures("--samples", arguments.samples), Pictures("--reference", arguments.reference)
    try:
        weights = read(arguments.inception)  # torch-fidelity would run code that is in it
    except ConfigError as error:
        raise ConfigError([f"--inception {arguments.inception}: {error.problems[0]}"]) from error
    if "Mixed_7c.branch_pool.bn.weight" not in weights:
        raise ConfigError([f"--inception {arguments.inception}: is no Inception of torch-fidelity; see --help"])
    found = calculate_metrics(
        input1=samples, input2=reference, fid=True, kid=True, isc=True, prc=True, cuda=device != "cpu", cache=False,
        feature_extractor="inception-v3-compat", feature_extractor_weights_path=str(arguments.inception),
        batch_size=arguments.batch_size, kid_subset_size=min(1000, len(samples), len(reference)),
        save_cpu_ram=True, verbose=False,
    )  # fmt: skip
    print(f"{len(samples):,} samples of {arguments.samples}, {len(reference):,} images of {arguments.reference}")
    print("   ".join(f"{name} {found[key]:.4f}" for name, key in METRICS.items()))
