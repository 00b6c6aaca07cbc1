"""Drawn images beside real ones: distances against a formula of their own, and what is refused."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from moh_lm.vision import packages  # noqa: F401 - before torch-fidelity
from tools import evaluate_vision

pytest.importorskip("torch_fidelity", reason="the extra fid is not installed")

from tools.tasks import image_metrics  # noqa: E402

# isort: split
from torch_fidelity import feature_extractor_inceptionv3 as inception  # noqa: E402


def test_a_directory_of_pngs_is_read_as_images_are_in_training(tmp_path):
    (tmp_path / "there").mkdir()
    deep = np.full((8, 8), 200 * 257, dtype=np.uint16)  # 16 bits
    for name in [*(f"{number}.png" for number in range(9)), "a.PNG", "there/b.png"]:
        Image.fromarray(deep).save(tmp_path / name)
    (tmp_path / "link").symlink_to("there")
    images = image_metrics.Pictures("--samples", tmp_path)
    assert len(images) == 12 and all((image == 200).all() for image in images)


def test_grey_images_get_three_equal_channels(tmp_path):
    grey = pictures(0, 256)[..., :1]
    np.savez(tmp_path / "grey.npz", arr_0=grey)  # as tools/sample_images.py writes them
    images = torch.stack(list(image_metrics.Pictures("--samples", tmp_path / "grey.npz")))
    assert np.array_equal(images.permute(0, 2, 3, 1), grey.repeat(3, axis=-1))


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
    monkeypatch.setattr(image_metrics, "MOST", 11)
    samples, real = pictures(0, 256), pictures(1, 120)
    for name, part in (("a", samples[:5]), ("b", samples[5:])):
        np.savez(tmp_path / f"{name}.npz", arr_0=part)
    (tmp_path / "real").mkdir()
    for number, image in enumerate(real):
        Image.fromarray(image).save(tmp_path / "real" / f"{number}.png")
    command = [*(str(tmp_path / name) for name in ("a.npz", "b.npz")), "--reference", str(tmp_path / "real")]
    assert evaluate_vision.main(["--samples", *command, "--inception", str(path)]) == 0
    features = [model(torch.from_numpy(part).permute(0, 3, 1, 2))[0].double() for part in (samples, real)]
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"12 samples of {command[0]} {command[1]}, 12 images")
    of_all, of_some = (dict(re.findall(r"(\S[\w ]*?) (-?[\d.]+)(?:   |$)", line)) for line in lines)
    assert list(of_all) == ["FID", "KID", "Inception Score"] and list(of_some) == ["precision", "recall"]
    distance = frechet_distance(*features)
    assert distance > 0.1 and float(of_all["FID"]) == pytest.approx(distance, rel=1e-3)
    assert (float(of_some["precision"]), float(of_some["recall"])) == (0, 0)  # dark and bright images
    assert lines[1].endswith("   against 11 images of the reference")


@pytest.mark.parametrize(
    "texts, words",
    [
        ("", "give either RUN_OR_STEP and --images, or --samples, --reference and --inception"),
        ("run --samples good.npz --images x", "give either RUN_OR_STEP and --images"),
        ("--samples good.npz --reference good.npz", "give either RUN_OR_STEP and --images"),
        ("--samples text.npz --reference good.npz --inception text.npz", "text.npz: is neither an .npz with"),
        ("--samples good.npz --reference few.npz --inception text.npz", "--reference few.npz: has 3 images; give at"),
        ("--samples grey.npz --reference good.npz --inception text.npz", "--samples grey.npz: arr_0 is uint8 [32, 32]"),
        ("--samples good.npz --reference good.npz --inception text.npz", "--inception text.npz: does not hold weights"),
        ("--samples good.npz --reference good.npz --inception other.pt", "other.pt: is not the Inception"),
        ("--samples bad --reference good.npz --inception weights.pt", "--samples bad/0.png: cannot be read as an"),
        ("--samples photos --reference good.npz --inception weights.pt", "--samples photos: has 0 PNGs, and 2 other"),
        ("--samples uneven --reference good.npz --inception weights.pt", "5.png: is 40 x 32, and the images before it"),
    ],
)
def test_a_wrong_call_is_one_line(texts, words, extractor, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    good = pictures(0, 256)
    (tmp_path / "bad").mkdir()
    for number in range(10):
        (tmp_path / f"bad/{number}.png").write_text("none")
    for folder, name, size in (("photos", "a.jpg", 32), ("photos", "b.jpeg", 32), *(
        ("uneven", f"{number}.png", 40 if number == 5 else 32) for number in range(10))):  # fmt: skip
        (tmp_path / folder).mkdir(exist_ok=True)
        Image.new("RGB", (size, 32)).save(tmp_path / folder / name)
    torch.save({"fc.weight": torch.zeros(1)}, "other.pt")
    for name, images in ("good.npz", good), ("few.npz", good[:3]), ("grey.npz", good[..., 0]):
        np.savez(name, arr_0=images)
    (tmp_path / "text.npz").write_text("text")
    (tmp_path / "weights.pt").symlink_to(extractor[1])
    assert evaluate_vision.main(texts.split()) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
