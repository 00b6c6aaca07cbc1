"""What the tests of images share: trainings on a folder of images of one colour each, and what batches hold."""

import torch

from moh_lm.vision.config import ViTTraining

CLASSES, EACH, SIZE, BATCH, MICRO, REPEATS = ("cat", "dog", "fox"), 7, 32, 12, 3, 3
SIDES = (44, 40)  # of an image in the folder


def training(folder, kind=ViTTraining, held_out=None, workers=0, seed=1, **data):
    model = dict(image_size=SIZE) if kind is ViTTraining else dict(input_size=8, in_channels=3, class_dropout=0.3)
    data |= dict(data_dir=str(folder), validation_dir=str(held_out or ""), workers=workers)
    return kind.from_dict(dict(num_classes=3, batch_size=BATCH, micro_batch_size=MICRO, seed=seed) | model | data)


PLAIN = dict(rand_augment=0.0, mixup=0.0, cutmix=0.0, random_erasing=0.0, horizontal_flip=0.0, label_smoothing=0.0)


def images_in(batches):
    """The number of each image of one colour."""
    return [round(float(red * 0.229 + 0.485) * 255 / 10) for batch in batches for red in batch.inputs[0][:, 0, 0, 0]]


def same(first, second):
    return all(
        torch.equal(x, y)
        for one, other in zip(first, second, strict=True)
        for x, y in zip((*one.inputs, *one[1:]), (*other.inputs, *other[1:]), strict=True)
    )
