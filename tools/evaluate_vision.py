"""Evaluates an image model: the accuracy of a classifier, or how close generated images are to real ones.

    python tools/evaluate_vision.py RUN_OR_STEP --images DIR_OR_TAR
    python tools/evaluate_vision.py --samples A.npz [B.npz ...] --reference C.npz --inception FILE

The first form prints top-1 and top-5 accuracy and loss over class folders. There must be one folder per class of the
model, in the order of their names.

The second form compares two sets of images, each an .npz (arr_0, uint8 [n, H, W, 3 or 1]) or a directory of PNGs.
torch-fidelity computes FID, KID, the Inception Score of the samples, and precision and recall of Inception's features,
but not sFID. Numbers depend on n; published ones use 50,000 samples. Precision and recall compare the samples with at
most 10,000 images of the reference, drawn by chance but always the same, as many as ADM's evaluator uses.

Exit codes: 0; 1 torch-fidelity failed; 2 an argument, the checkpoint or an image must be fixed.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":  # the root of the checkout, in place of this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from moh_lm.cli.command import device, run_file
from moh_lm.config import ConfigError, raise_any
from moh_lm.data.files import ShardError
from moh_lm.units import at_least

INCEPTION = "github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth"
TOP = 5


def main(texts):
    compares = any(text.split("=")[0] == "--samples" for text in texts)
    extra, failures = "fid" if compares else "vision", (OSError, ValueError, RuntimeError)
    return run_file(__file__, __doc__, add_flags, run, texts, check=check, failures=failures, extra=extra)


def add_flags(parser):
    add = parser.add_argument
    add("model", nargs="?", type=Path, metavar="RUN_OR_STEP", help="run directory of a classifier, or its "
        "checkpoints/step-N")  # fmt: skip
    add("--images", type=Path, metavar="DIR", help="class folders, in a directory or a tar")
    add("--weights", choices=("master", "ema"), help="weights, or their moving average (default: ema if kept)")
    add("--workers", type=at_least(0), default=min(4, os.cpu_count()), metavar="N", help="processes that read images "
        "(default: %(default)s)")  # fmt: skip
    add("--samples", type=Path, nargs="+", metavar="FILE", help="generated images: .npz files, or a directory of PNGs")
    add("--reference", type=Path, metavar="FILE", help="real images: an .npz, or a directory of PNGs")
    add("--inception", type=Path, metavar="FILE", help=f"weights of Inception v3, from https://{INCEPTION}")
    add("--batch-size", type=at_least(1), default=64, metavar="N", help="images at a time (default: %(default)s)")
    add("--device", type=device, metavar="NAME", help="cpu, cuda, or cuda:N (default: cuda if available, else cpu)")


def check(arguments):
    forms = [(arguments.model, arguments.images), (arguments.samples, arguments.reference, arguments.inception)]
    if [all(form) for form in forms] != [any(form) for form in forms] or all(forms[0]) == all(forms[1]):
        raise ConfigError(["give either RUN_OR_STEP and --images, or --samples, --reference and --inception"])


def run(arguments):
    from moh_lm.cli.devices import usable_device

    device = usable_device(arguments.device)
    if arguments.samples:
        from tools.tasks.image_metrics import compare

        compare(arguments, device)
    else:
        evaluate(arguments, device)


def evaluate(arguments, device):
    """Print the accuracy of a classifier on held-out images."""
    from tqdm import tqdm

    from moh_lm.checkpoint.saver import find_step
    from moh_lm.vision.images import Images
    from moh_lm.vision.load import load_model
    from moh_lm.vision.loader import ImageLoader, ImageSet, held_out_problems

    step = find_step(arguments.model)
    config, model = load_model(step, arguments.weights)
    if config.kind != "vit":
        draw = "draw images with tools/sample_images.py, and give them with --samples"
        raise ConfigError([f"{step}: is not a classifier; {draw}"])
    images = Images(arguments.images)
    for note in images.notes:
        print(f"note: {note}")
    raise_any(list(held_out_problems(step, config.model, images)))
    data = replace(config.data, workers=arguments.workers)
    config = replace(config, data=data, run=replace(config.run, micro_batch_size=arguments.batch_size))
    batches = ImageLoader(ImageSet(config, images, images), 0, 1, device != "cpu").validation(0)
    try:
        top_1, top_k, loss = classify(model.to(device), tqdm(batches, leave=False, disable=None))
    except ShardError as error:
        raise ConfigError([str(error)]) from error
    print(f"{step}: {len(images.labels):,} images of {arguments.images}")
    print(f"top-1 {top_1:.2%}   top-{TOP} {top_k:.2%}   loss {loss:.4f}")


def classify(model, batches):
    """Shares of images whose class is the first, or among the first ``TOP``, and their mean loss; images with label -1
    do not count. batches: an iterable of ``ImageBatch``.
    """
    import torch
    import torch.nn.functional as F

    sums, count, device = torch.zeros(3, dtype=torch.float64), 0, model.head.weight.device
    for batch in batches:
        there = batch.labels >= 0
        with torch.no_grad():
            logits, labels = model(batch.inputs[0].to(device)).cpu()[there], batch.labels[there]
        best = logits.topk(min(TOP, logits.shape[1])).indices == labels[:, None]
        loss = F.cross_entropy(logits.double(), labels, reduction="sum")
        sums += torch.stack((best[:, 0].sum(), best.sum(), loss))
        count += len(labels)
    return (sums / count).tolist()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
