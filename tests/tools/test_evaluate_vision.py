"""tools/evaluate_vision.py: accuracy and loss are those of each image alone, and distances those of the features."""


import contextlib
import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from moh_lm.vision.augment import center_crop, normalized
from tests.tools.test_export_vision import DIT, VIT, make_run
from tools import evaluate_vision


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    directory = tmp_path_factory.mktemp("classifier") / "run"
    return directory, make_run(directory, VIT)


def make_folders(directory, classes=7):
    """Three images of each class, of several sizes; returns their pictures and labels."""
    rng, made = np.random.default_rng(0), []
    for label in range(classes):
        (directory / f"class-{label}").mkdir(parents=True)
        for number, size in enumerate([(64, 64), (90, 70), (80, 130)]):
            image = Image.fromarray(rng.integers(256, size=(*size, 3), dtype=np.uint8))
            image.save(directory / f"class-{label}" / f"{number}.png")
            made.append((image, label))
    return made


def test_accuracy_and_loss_are_those_of_each_image_alone(classifier, tmp_path, capsys):
    run, model = classifier
    first, top, loss, made = 0, 0, 0.0, make_folders(tmp_path / "images")
    for image, label in made:
        with torch.no_grad():
            logits = model(normalized(center_crop(image, 64))[None])[0].tolist()
        better = sum(value > logits[label] for value in logits)
        first, top = first + (better < 1), top + (better < 5)
        loss += np.log(np.exp(logits).sum()) - logits[label]
    assert 0 < first < top < len(made)
    command = [str(run), "--images", str(tmp_path / "images"), "--batch-size", "4", "--workers", "0"]
    assert evaluate_vision.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "21 images of" in lines[0]
    assert lines[1] == f"top-1 {first / 21:.2%}   top-5 {top / 21:.2%}   loss {loss / 21:.4f}"


def test_a_broken_image_is_named(classifier, tmp_path, capsys):
    make_folders(tmp_path / "images")
    (tmp_path / "images/class-3/1.png").write_text("none")
    assert evaluate_vision.main([str(classifier[0]), "--images", str(tmp_path / "images"), "--workers", "0"]) == 2
    error = capsys.readouterr().err
    assert "images/class-3/1.png: cannot be read as an image" in error and error.count("\n") == 1


def test_what_cannot_be_evaluated_is_one_line(classifier, tmp_path, capsys):
    make_folders(tmp_path / "images", classes=2)
    make_run(tmp_path / "dit", DIT)
    for run, folder, words in (
        (classifier[0], "images", "images: has 2 classes, but the model has 7; give"),
        (classifier[0], "nosuch", "nosuch: there is no such directory"),
        (tmp_path / "dit", "images", "is not a classifier; draw images with tools/sample_images.py"),
    ):
        assert evaluate_vision.main([str(run), "--images", str(tmp_path / folder)]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_the_extra_that_is_named_is_that_of_the_form(monkeypatch):
    monkeypatch.setattr(evaluate_vision, "run_file", lambda *arguments, extra, **more: extra)
    lines = (["--samples", "x"], ["--samples=x"], ["run"])
    assert [evaluate_vision.main(texts) for texts in lines] == ["fid", "fid", "vision"]


def test_images_are_compared_on_the_gpu_that_is_named(tmp_path, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def current(name):
        seen.append(name)
        yield
        seen.append("done")

    def calculate_metrics(cuda, input2, prc=False, **settings):
        seen.append((cuda, prc, len(input2)))
        return dict.fromkeys((*image_metrics.OF_ALL.values(), *image_metrics.OF_SOME.values()), 0.0)

    monkeypatch.setitem(sys.modules, "torch_fidelity", SimpleNamespace(calculate_metrics=calculate_metrics))
    monkeypatch.delitem(sys.modules, "tools.tasks.image_metrics", raising=False)
    image_metrics = importlib.import_module("tools.tasks.image_metrics")
    monkeypatch.delitem(sys.modules, "tools.tasks.image_metrics")  # it is made for this test
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(image_metrics, "MOST", 7)
    np.savez(tmp_path / "images.npz", arr_0=np.zeros((10, 8, 8, 3), np.uint8))
    torch.save({"Mixed_7c.branch_pool.bn.weight": torch.zeros(1)}, tmp_path / "weights.pt")
    files = dict(samples=[tmp_path / "images.npz"], reference=tmp_path / "images.npz")
    arguments = SimpleNamespace(**files, inception=tmp_path / "weights.pt", batch_size=4)
    for device in ("cuda:1", "cpu"):
        image_metrics.compare(arguments, device)
    assert seen == ["cuda:1", (True, False, 10), (True, True, 7), "done", (False, False, 10), (False, True, 7)]
