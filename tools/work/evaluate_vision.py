"""The work of tools/evaluate_vision.py; drawn images are compared by tools/work/image_metrics.py."""

import importlib
from dataclasses import replace

import torch
import torch.nn.functional as F
from tqdm import tqdm

from moh_lm.checkpoint.saver import find_step
from moh_lm.cli.devices import usable_device
from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import ShardError
from moh_lm.vision.images import Images
from moh_lm.vision.load import load_model
from moh_lm.vision.loader import ImageLoader, ImageSet, name_problems

TOP = 5
FAILURES = (OSError, ValueError, RuntimeError)


def run(arguments):
    device = usable_device(arguments.device)
    if arguments.samples:
        return importlib.import_module("tools.work.image_metrics").compare(arguments, device)  # needs torch-fidelity
    step = find_step(arguments.model)
    config, model = load_model(step, arguments.weights)
    if config.kind != "vit":
        raise ConfigError([f"{step}: is no classifier; draw images by tools/sample_images.py, and give --samples"])
    images = Images(arguments.images)
    for note in images.notes:
        print(f"note: {note}")
    raise_any(list(image_problems(step, config.model, images)))
    data = replace(config.data, workers=arguments.workers)
    config = replace(config, data=data, run=replace(config.run, micro_batch_size=arguments.batch_size))
    batches = ImageLoader(ImageSet(config, images, images), 0, 1, device != "cpu").validation(0)
    try:
        top_1, top_k, loss = classify(model.to(device), tqdm(batches, leave=False, disable=None))
    except ShardError as error:
        raise ConfigError([str(error)]) from error
    print(f"{step}: {len(images.labels):,} images of {arguments.images}")
    print(f"top-1 {top_1:.2%}   top-{TOP} {top_k:.2%}   loss {loss:.4f}")


def image_problems(step, model, images):
    """Sentences for ``images``, of --images, that are not like those of the training of the ``model`` of ``step``."""
    yield from images.problems(model)
    found, known = len(images.classes), model.num_classes
    if found != known:
        like = "give images like those of its training"
        yield f"--images {images.path}: has {found} classes, and the model {known}; {like}"
    yield from name_problems(step, images)


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
