"""tools/evaluate_vision.py: accuracy and loss are those of each image alone, and distances those of the features."""

import re

from moh_lm.vision import packages  # noqa: F401 - before torch-fidelity

# isort: split
import numpy as np
import pytest
import torch
from PIL import Image
from torch_fidelity import feature_extractor_inceptionv3 as inception

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
        (classifier[0], "images", "--num-classes 7: "),
        (classifier[0], "nosuch", "nosuch: there is no such directory"),
        (tmp_path / "dit", "images", "is no classifier; draw images by tools/sample_images.py"),
    ):
        assert evaluate_vision.main([str(run), "--images", str(tmp_path / folder)]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


@pytest.fixture(scope="module")
def extractor(tmp_path_factory):
    """torch-fidelity's Inception with random weights that keep signals as large as they are, and their file."""
    path = tmp_path_factory.mktemp("inception") / "weights.pt"
    kind = inception.FeatureExtractorInceptionV3
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inception, "load_state_dict_from_url", lambda *more, **settings: {})
        patch.setattr(kind, "load_state_dict", lambda model, state: None)
        model = kind("inception-v3-compat", ["64"])
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight)
    torch.save(model.state_dict(), path)
    return model, path


def pictures(seed, brightness):
    return np.random.default_rng(seed).integers(brightness, size=(12, 32, 32, 3), dtype=np.uint8)


def frechet_distance(a, b):
    """Of features float64 [n, d]: the trace of the root of the product of covariances by a small matrix."""
    (mean_a, a), (mean_b, b) = ((part.mean(0), (part - part.mean(0)) / (len(part) - 1) ** 0.5) for part in (a, b))
    root = torch.linalg.svdvals(a @ b.T).sum()
    return ((mean_a - mean_b).square().sum() + a.square().sum() + b.square().sum() - 2 * root).item()


def test_distances_are_those_of_the_features(extractor, tmp_path, monkeypatch, capsys):
    model, path = extractor
    layers = {"isc": "logits_unbiased", "fid": "64", "kid": "64", "prc": "64"}  # few features: a small matrix
    monkeypatch.setattr(type(model), "get_default_feature_layer_for_metric", staticmethod(layers.get))
    samples, real = pictures(0, 256), pictures(1, 120)
    np.savez(tmp_path / "samples.npz", arr_0=samples)
    (tmp_path / "real").mkdir()
    for number, image in enumerate(real):
        Image.fromarray(image).save(tmp_path / "real" / f"{number}.png")
    command = ["--samples", str(tmp_path / "samples.npz"), "--reference", str(tmp_path / "real"), "--inception"]
    assert evaluate_vision.main([*command, str(path)]) == 0
    features = [model(torch.from_numpy(part).permute(0, 3, 1, 2))[0].double() for part in (samples, real)]
    shown = dict(re.findall(r"(\S[\w ]*?) (-?[\d.]+)(?:   |$)", capsys.readouterr().out.splitlines()[1]))
    assert list(shown) == ["FID", "KID", "Inception Score", "precision", "recall"]
    distance = frechet_distance(*features)
    assert distance > 0.1 and float(shown["FID"]) == pytest.approx(distance, rel=1e-3)
    assert (float(shown["precision"]), float(shown["recall"])) == (0, 0)  # dark and bright images


@pytest.mark.parametrize(
    "texts, words",
    [
        ("", "give either RUN_OR_STEP and --images, or --samples, --reference and --inception"),
        ("run --samples good.npz --images x", "give either RUN_OR_STEP and --images"),
        ("--samples good.npz --reference good.npz", "give either RUN_OR_STEP and --images"),
        ("--samples text.npz --reference good.npz --inception text.npz", "--samples text.npz: no .npz with arr_0"),
        ("--samples good.npz --reference few.npz --inception text.npz", "--reference few.npz: has 3 images; give at"),
        ("--samples grey.npz --reference good.npz --inception text.npz", "--samples grey.npz: arr_0 is uint8 [32, 32]"),
        ("--samples good.npz --reference good.npz --inception text.npz", "--inception text.npz: holds no weights"),
        ("--samples good.npz --reference good.npz --inception other.pt", "--inception other.pt: is no Inception of"),
        ("--samples bad --reference good.npz --inception weights.pt", "--samples bad/0.png: cannot be read as an"),
    ],
)
def test_a_wrong_call_is_one_line(texts, words, extractor, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    good = pictures(0, 256)
    (tmp_path / "bad").mkdir()
    for number in range(10):
        (tmp_path / f"bad/{number}.png").write_text("none")
    torch.save({"fc.weight": torch.zeros(1)}, "other.pt")
    for name, images in ("good.npz", good), ("few.npz", good[:3]), ("grey.npz", good[..., 0]):
        np.savez(name, arr_0=images)
    (tmp_path / "text.npz").write_text("text")
    (tmp_path / "weights.pt").symlink_to(extractor[1])
    assert evaluate_vision.main(texts.split()) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
