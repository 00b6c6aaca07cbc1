"""What a diffusion model reads: latents as an autoencoder gives them, small images, time steps, classes and noise."""

import errno
import json
import math
import os
import shutil
import zlib
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from moh_lm.config import ConfigError
from moh_lm.data.files import ShardError
from moh_lm.supervise import run_directory
from moh_lm.vision.config import DiTTraining, ViTTraining
from moh_lm.vision.latents import LatentPlace, center_crop, content_hash, pixels, quarters
from moh_lm.vision.loader import open_images
from tests.vision.cases import loader_of, save_autoencoder
from tools import encode_latents

COUNT, SIZE = 6, 16


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with images, an autoencoder of random weights that divides sides by 2, and their latents."""
    root, rng = tmp_path_factory.mktemp("latents"), np.random.default_rng(0)
    for number in range(COUNT):
        path = root / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (21 + 9 * number, 40, 3), dtype=np.uint8)).save(path)
    save_autoencoder(root / "vae")
    assert encode_latents.main(call(root)) == 0
    return root


def call(root, output="fp32", **flags):
    flags = dict(images=root / "images", vae=root / "vae", image_size=SIZE, output=root / output, dtype="fp32") | flags
    return [text for key, value in flags.items() for text in (f"--{key.replace('_', '-')}", str(value))]


def training(path, **model):
    model = dict(input_size=8, in_channels=4, num_classes=2, class_dropout=0.25) | model
    data = dict(data_dir=str(path), validation_dir=str(path), workers=0)
    return DiTTraining.from_dict(dict(batch_size=8, micro_batch_size=4, seed=3) | model | data)


def steps(config, count):
    """The parts of the inputs of the first steps, end to end, and their sources and labels."""
    loader = loader_of(config)
    batches = sum((loader.train_step(step * 8) for step in range(count)), [])
    inputs = [torch.cat(parts) for parts in zip(*(batch.inputs for batch in batches), strict=True)]
    return inputs, torch.cat([batch.sources for batch in batches]), torch.cat([batch.labels for batch in batches])


def test_held_out_latents_number_classes_in_the_same_order(place, tmp_path):
    shutil.copytree(place / "fp32", tmp_path / "other")
    facts = json.loads((tmp_path / "other" / "latents.json").read_text())
    write_facts(tmp_path / "other", facts | {"classes": ["b", "a"]})
    config = training(place / "fp32")
    with pytest.raises(ConfigError, match="numbers its classes in another order than --data-dir"):
        open_images(replace(config, data=replace(config.data, validation_dir=str(tmp_path / "other"))))


def test_images_beside_latents_are_not_called_another_encoding(place):
    config = training(place / "fp32")
    config = replace(config, data=replace(config.data, validation_dir=str(place / "images")))
    with pytest.raises(ConfigError) as refusal:
        open_images(config)
    said = "\n".join(refusal.value.problems)
    assert "one of it and --data-dir holds images, the other latents" in said and "autoencoder" not in said


def test_latents_are_the_moments_of_images_and_their_mirrors(place):
    latents, vae = np.load(place / "fp32" / "latents.npy"), AutoencoderKL.from_pretrained(place / "vae")
    files = sorted((place / "images").glob("*/*.png"))
    assert latents.shape == (COUNT, 2, 8, 8, 8)
    for number, file in enumerate(files):
        image = pixels(center_crop(Image.open(file), SIZE))
        for mirrored, picture in enumerate((image, image[:, :, ::-1].copy())):
            with torch.no_grad():
                expected = vae.encode(torch.from_numpy(picture)[None]).latent_dist
            moments = torch.from_numpy(latents[number, mirrored].copy())
            torch.testing.assert_close(moments[:4], expected.mean[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(moments[4:].clip(-30, 20), expected.logvar[0], atol=1e-5, rtol=1e-5)
    assert np.load(place / "fp32" / "labels.npy").tolist() == ["ab".index(file.parent.name) for file in files]
    assert encode_latents.main(call(place, "fp16", dtype="fp16")) == 0
    assert np.array_equal(np.load(place / "fp16" / "latents.npy"), latents.astype(np.float16))


def test_a_stopped_encoding_goes_on_and_ends_with_the_same_file(place, monkeypatch, capsys):
    encode, done = encode_latents.encode, []

    def stopped(vae, batch):
        done.append(len(batch))
        if len(done) == 4:  # one for the shape
            raise KeyboardInterrupt
        return encode(vae, batch)

    monkeypatch.setattr(encode_latents, "encode", stopped)
    monkeypatch.setattr(encode_latents, "FLUSHED", 1)
    flags = dict(output="stopped", batch_size=2)
    assert encode_latents.main(call(place, **flags)) == 130
    assert capsys.readouterr().err.endswith("encode_latents: stopped; run the same command again to resume\n")
    monkeypatch.setattr(run_directory, "LOCK_SECONDS", 0)
    with run_directory.lock_run_directory(place / "stopped"):
        assert encode_latents.main(call(place, **flags)) == 2
    assert "another run is writing to it" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="has not finished; run the same command again"):
        open_images(training(place / "stopped"))
    assert encode_latents.main(call(place, **flags, image_size=8)) == 2
    assert "has latents of other image_size; give another directory" in capsys.readouterr().err
    done[:] = [0] * 9
    assert encode_latents.main(call(place, **flags)) == 0
    assert done[9:] == [2]  # four of six were on the disk
    for name in ("latents.npy", "labels.npy", "checksums.npy", "latents.json"):
        assert (place / "stopped" / name).read_bytes() == (place / "fp32" / name).read_bytes()
    assert not (place / "stopped" / "latents.partial").exists()
    (place / "stopped" / ".lock").unlink()
    assert encode_latents.main(call(place, **flags)) == 0
    assert capsys.readouterr().out.endswith("is complete: 6 images\n")
    assert not (place / "stopped" / ".lock").exists()  # complete latents may be read-only
    np.save(place / "stopped" / "latents.npy", np.load(place / "fp32" / "latents.npy")[:4])
    for facts in ((place / "stopped" / "latents.json").read_text(), "[]"):
        (place / "stopped" / "latents.json").write_text(facts)
        assert encode_latents.main(call(place, **flags)) == 2
        assert "stopped: is damaged (" in capsys.readouterr().err


def write_facts(path, facts):
    """Write latents.json with the hash that belongs to ``facts`` and the other files."""
    labels, checksums = np.load(path / "labels.npy"), np.load(path / "checksums.npy")
    (path / "latents.json").write_text(json.dumps({**facts, "content": content_hash(facts, labels, checksums)}))


@pytest.mark.parametrize("label", [2, -1, 7])
def test_a_label_that_is_no_class_is_refused_at_the_start(place, tmp_path, label):
    path = tmp_path / "latents"
    shutil.copytree(place / "fp32", path)
    labels = np.load(path / "labels.npy")
    labels[3] = label
    np.save(path / "labels.npy", labels)
    with pytest.raises(ConfigError, match="differ from their hash"):
        open_images(training(path))
    write_facts(path, json.loads((path / "latents.json").read_text()))
    with pytest.raises(ConfigError, match=f"label {label} of image 3 must be between 0 and 1"):
        open_images(training(path))


def test_damaged_latents_are_named_when_they_are_read(place, tmp_path):
    path = tmp_path / "latents"
    shutil.copytree(place / "fp32", path)
    latents = np.lib.format.open_memmap(path / "latents.npy", mode="r+")
    latents[4, 1, 3, 2, 1] += 0.25
    latents.flush()
    read = loader_of(training(path)).dataset.training.place(4)
    read.draw(False, np.random.default_rng(0))  # the image itself is sound
    with pytest.raises(ShardError, match="latents.npy: the latents of image 4 are damaged"):
        read.draw(True, np.random.default_rng(0))


def test_other_latents_under_the_same_names_are_said(place, tmp_path):
    before = open_images(training(place / "fp32")).state()
    earlier = {"segments": [{k: before["segments"][0][k] for k in ("images", "classes", "sha256", "names")}]}
    for name, change in (("latents", lambda values: values + 0.5), ("labels", lambda values: 1 - values)):
        path = tmp_path / name
        shutil.copytree(place / "fp32", path)
        np.save(path / f"{name}.npy", change(np.load(path / f"{name}.npy")))
        write_facts(path, json.loads((path / "latents.json").read_text()))
        training_data, held_out = open_images(training(path)).changes(before)
        said = "has other latents or labels than before, under the same names"
        assert training_data == f"--data-dir {path} {said}" and held_out == f"--validation-dir {path} {said}"
        assert open_images(training(path)).changes(earlier) == []


def test_a_complete_directory_that_is_damaged_is_not_taken_for_complete(place, tmp_path, capsys):
    path = tmp_path / "latents"
    shutil.copytree(place / "fp32", path)
    assert encode_latents.main(call(place, path)) == 0
    (path / "labels.npy").unlink()
    assert encode_latents.main(call(place, path)) == 2
    assert "latents: its latents cannot be read (" in capsys.readouterr().err


def test_latents_of_other_pixels_are_not_taken_for_complete(place, tmp_path, capsys):
    shutil.copytree(place / "images", tmp_path / "images")
    Image.new("RGB", (40, 40)).save(tmp_path / "images/a/0.png")
    assert encode_latents.main(call(place, images=tmp_path / "images")) == 2
    assert "fp32: has latents of other image files; give another directory" in capsys.readouterr().err


def test_a_full_disk_is_noticed_before_any_latent_is_made(place, monkeypatch, capsys):
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert encode_latents.main(call(place, "full")) == 1
    assert capsys.readouterr().err == f"encode_latents: {place}/full/latents.npy: no space left on device\n"
    assert not list((place / "full").glob("[!.]*"))


def test_files_of_somebody_else_are_not_written_over(place, capsys):
    for name, link in (("latents.npy", False), ("labels.npy", False), ("latents.npy", True), ("labels.npy", True)):
        output, mine = place / f"mine-{name}-{link}", place / "mine.npy"
        output.mkdir()
        mine.write_bytes(b"mine")
        (output / name).symlink_to(mine) if link else mine.rename(output / name)
        assert encode_latents.main(call(place, output.name)) == 2
        assert f"{name} is {'a link' if link else 'a file that this program did not write'}" in capsys.readouterr().err
        assert (output / name).read_bytes() == b"mine" and len(list(output.glob("[!.]*"))) == 1


def test_latents_are_drawn_from_their_gaussian(place):
    moments = np.load(place / "fp32" / "latents.npy")[2].astype(np.float64)
    moments[:, 4:] += 3  # wide enough to be seen
    (place / "wide").mkdir()
    np.save(place / "wide" / "latents.npy", moments[None])
    rng = np.random.default_rng(0)
    for mirrored in (False, True):
        where = LatentPlace(str(place / "wide"), 0, 0.5, [zlib.crc32(part.tobytes()) for part in moments])
        draws = np.stack([where.draw(mirrored, rng) for _ in range(4000)]).astype(np.float64)
        mean, deviation = moments[int(mirrored), :4] * 0.5, np.exp(moments[int(mirrored), 4:] / 2) * 0.5
        assert abs((draws.mean(0) - mean) / deviation).max() < 5 / np.sqrt(4000)
        assert abs(draws.std(0) / deviation - 1).max() < 0.07


def test_time_steps_classes_and_noise_have_their_distributions(place):
    (x, t, y, noise), sources, labels = steps(training(place / "fp32"), 250)
    assert (x.shape, noise.shape) == ((2000, 4, 8, 8),) * 2 and (x.dtype, t.dtype, y.dtype) == (
        torch.float32, torch.int64, torch.int64,
    )  # fmt: skip
    assert t.min() >= 0 and 990 < t.max() < 1000
    assert torch.equal(sources, t // 250) and (sources.bincount() / 2000 - 0.25).abs().max() < 0.05
    dropped = y == 2
    assert torch.equal(y[~dropped], labels[~dropped]) and abs(dropped.double().mean() - 0.25) < 0.05
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01 and len(noise.flatten(1).unique(dim=0)) == 2000
    assert len(x.flatten(1).unique(dim=0)) == 2000


def test_held_out_samples_do_not_depend_on_the_seed(place):
    config = training(place / "fp32", class_dropout=1.0)
    other = replace(config, run=replace(config.run, seed=4))
    first, second = (list(loader_of(c).validation(0)) for c in (config, other))
    labels = torch.cat([batch.labels for batch in first])
    assert sorted(labels.tolist()) == [-1, -1, 0, 0, 0, 1, 1, 1]
    assert torch.equal(torch.cat([batch.inputs[2] for batch in first])[labels >= 0], labels[labels >= 0])
    for one, again in zip(first, second, strict=True):
        assert all(torch.equal(part, same) for part, same in zip(one.inputs, again.inputs, strict=True))


def test_small_images_are_mirrored_half_of_the_time(place):
    (x, *_), _, _ = steps(training(place / "images", in_channels=3), 25)
    files = sorted((place / "images").glob("*/*.png"))
    images = torch.stack([torch.from_numpy(pixels(center_crop(Image.open(file), 8))) for file in files])
    plain, mirrored = ((x[:, None] == kind).flatten(2).all(2).any(1) for kind in (images, images.flip(-1)))
    assert torch.equal(plain, ~mirrored) and abs(mirrored.double().mean() - 0.5) < 0.12
    black_white = pixels(Image.fromarray(np.array([[0, 255]], dtype=np.uint8)))
    assert black_white.tolist() == [[[-1.0, 1.0]]]


def test_the_middle_of_a_gradient_stays_where_it_is():
    ramp = np.tile(np.linspace(0, 255, 96), (40, 1))  # shorter side 40: halved to 20, resized to 16
    middle = np.asarray(center_crop(Image.fromarray(ramp.astype(np.uint8)), 16)).astype(float)
    scale = 40 / 16  # of the picture's pixels to a pixel
    centers = 96 / 2 + (np.arange(16) - 7.5) * scale - 0.5
    assert middle.shape == (16, 16) and abs(middle - centers * 255 / 95).max() < 3


def test_quarters_are_the_sources_of_their_time_steps():
    assert quarters(1000) == ["t 0-249", "t 250-499", "t 500-749", "t 750-999"]
    for total in (4, 10, 30, 1000):
        for quarter, name in enumerate(quarters(total)):
            first, last = map(int, name[2:].split("-"))
            assert [4 * t // total for t in range(first, last + 1)] == [quarter] * (last + 1 - first)


def fewer(path):
    np.save(path, np.load(path)[1:])


def test_what_does_not_fit_is_said(place):
    (place / "broken").mkdir()
    (place / "broken" / "latents.json").write_text(json.dumps({"classes": ["a"], "sha256": "", "factor": 1}))
    changes = {"empty": lambda path: path.write_bytes(b""), "fewer": fewer}
    changes["complex"] = lambda path: np.save(path, np.load(path).astype(np.complex64))
    for name, change in changes.items():
        shutil.copytree(place / "fp32", place / name)
        change(place / name / "latents.npy")
    facts = json.loads((place / "fp32" / "latents.json").read_text())
    for name in ("factor", "header", "pipe"):
        shutil.copytree(place / "fp32", place / name)
    (place / "factor" / "latents.json").write_text(json.dumps({**facts, "factor": math.nan}))
    with open(place / "header" / "labels.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (10**15,)})
    (place / "pipe" / "labels.npy").unlink()
    os.mkfifo(place / "pipe" / "labels.npy")
    cases = (
        (training(place / "empty"), "its latents cannot be read (No data left in file)"),
        (training(place / "fewer"), "its latents cannot be read (latents [5, 2, 8, 8, 8], but labels [6])"),
        (training(place / "complex"), "latents.npy holds complex64, and latents must be fp16 or fp32"),
        (training(place / "factor"), "the factor is nan, and must be above 0"),
        (training(place / "header"), "its latents cannot be read (Unable to allocate"),
        (training(place / "pipe"), "its latents cannot be read (there is no file labels.npy)"),
        (training(place / "fp32", in_channels=3), "--in-channels 3 --input-size 8: "),
        (training(place / "fp32", input_size=16), "set --in-channels 4 --input-size 8"),
        (training(place / "images"), "--in-channels 4: "),
        (training(place / "broken"), "its latents cannot be read"),
        (ViTTraining(data=training(place / "fp32").data), "holds latents, and a ViT reads images"),
    )
    for config, words in cases:
        with pytest.raises(ConfigError) as caught:
            open_images(config)
        assert words in "\n".join(caught.value.problems), caught.value.problems


def test_wrong_calls_of_the_command(place, capsys):
    (place / "images" / "a" / "bad.png").write_bytes(b"x")
    for flags, code, words in (
        (dict(images=place / "nosuch"), 2, "--images"),
        (dict(vae=place / "images"), 2, "has no config.json; give the directory of an AutoencoderKL"),
        (dict(image_size=15), 2, "--image-size 15: must be a multiple of 2"),
        (dict(output=place / "bad"), 1, "a/bad.png: cannot be read as an image (no known format)"),
    ):
        assert encode_latents.main(call(place, **flags)) == code
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1, error
