"""The folder of images of one colour each."""

import pytest
from PIL import Image

from tests.vision.coloured import CLASSES, EACH, SIDES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of one colour each, by which a batch shows which image it has."""
    root = tmp_path_factory.mktemp("images")
    for number in range(len(CLASSES) * EACH):
        path = root / CLASSES[number // EACH] / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", SIDES, (10 * number, 10, 10)).save(path)
    return root
