"""Checks that held-out images match those with which a model was trained."""

from moh_lm.vision.loader import name_problems


def image_problems(step, model, images):
    """Sentences if ``images``, given by --images, do not match those with which the ``model`` of ``step`` was
    trained."""
    yield from images.problems(model)
    found, known = len(images.classes), model.num_classes
    if found != known:
        like = "give images like those of its training"
        yield f"--images {images.path}: has {found} classes, but the model has {known}; {like}"
    yield from name_problems(step, images)
