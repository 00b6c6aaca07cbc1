"""Checks that held-out images match those with which a model was trained."""

from moh_lm.vision.loader import name_problems


def image_problems(step, model, images):
    """Sentences for ``images``, of --images, that are not like those of the training of the ``model`` of ``step``."""
    yield from images.problems(model)
    found, known = len(images.classes), model.num_classes
    if found != known:
        like = "give images like those of its training"
        yield f"--images {images.path}: has {found} classes, but the model has {known}; {like}"
    yield from name_problems(step, images)
