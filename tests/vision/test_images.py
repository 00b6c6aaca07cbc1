"""Images to micro-batches: which sample is which image, how it is changed, who gets it, and what is refused."""

import errno
import io
import os
import random
import shutil
import signal
import subprocess
import tarfile
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from moh_lm.config import ConfigError
from moh_lm.data import files
from moh_lm.data.files import ShardError
from moh_lm.supervise import stop
from moh_lm.vision import images as reading
from moh_lm.vision.augment import center_crop, mix, normalized, rand_augment, random_crop, random_erasing
from moh_lm.vision.config import DiTTraining, ViTTraining
from moh_lm.vision.images import ImagePlace, Images, sample_hash
from moh_lm.vision.loader import ImageLoader, ignore_stops, open_images
from tests.vision.cases import loader_of

CLASSES, EACH, SIZE, BATCH, MICRO, REPEATS = ("cat", "dog", "fox"), 7, 32, 12, 3, 3
SIDES = (44, 40)  # of an image in the folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of one colour each, by which a batch shows which image it has."""
    root = tmp_path_factory.mktemp("images")
    for number in range(len(CLASSES) * EACH):
        path = root / CLASSES[number // EACH] / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", SIDES, (10 * number, 10, 10)).save(path)
    return root


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


@pytest.mark.parametrize("kind", [ViTTraining, DiTTraining])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_any_number_of_ranks_reads_any_step_alike(folder, kind, size):
    config = training(folder, kind)
    whole = loader_of(config).train_step(3 * BATCH)
    ranks = [loader_of(config, rank, size).train_step(3 * BATCH) for rank in range(size)]
    in_turn = loader_of(config)
    assert same(whole, sum(ranks, [])) and same(whole, [in_turn.train_step(step * BATCH) for step in range(4)][-1])
    assert torch.cat([batch.samples for batch in whole]).tolist() == list(range(3 * BATCH, 4 * BATCH))


def test_workers_read_what_the_process_itself_reads(folder):
    config = training(folder, held_out=folder)
    alone, helped = (loader_of(replace(config, data=replace(config.data, workers=number))) for number in (0, 1))
    try:
        assert all(same(alone.train_step(step * BATCH), helped.train_step(step * BATCH)) for step in range(2))
    finally:
        helped.close()


def test_a_worker_outlives_every_signal_that_stops_a_run():
    before = {number: signal.getsignal(number) for number in stop.SIGNALS}
    try:
        ignore_stops(0)
        assert {signal.getsignal(number) for number in before} == {signal.SIG_IGN} and signal.SIGHUP in before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_repeated_augmentation_repeats_a_third_of_the_images(folder):
    loader, count = loader_of(training(folder, **PLAIN, min_crop_area=1.0)), len(CLASSES) * EACH
    seen = np.array(images_in(sum((loader.train_step(step * BATCH) for step in range(7)), [])))  # 4 epochs of 21
    epochs = seen.reshape(4, count // REPEATS, REPEATS)
    assert (epochs == epochs[:, :, :1]).all()
    assert all(len(set(epoch[:, 0].tolist())) == count // REPEATS for epoch in epochs)
    assert len({tuple(epoch[:, 0].tolist()) for epoch in epochs}) == 4
    once = loader_of(training(folder, **PLAIN, min_crop_area=1.0, repeated_augmentation=1))
    seen = images_in(sum((once.train_step(step * BATCH) for step in range(7)), []))
    assert all(sorted(seen[first : first + count]) == list(range(count)) for first in range(0, 4 * count, count))


def test_labels_are_class_folders_and_targets_are_smoothed(folder):
    config = training(folder, **{**PLAIN, "label_smoothing": 0.1}, min_crop_area=1.0)
    batches = loader_of(config).train_step(0)
    assert torch.cat([batch.labels for batch in batches]).tolist() == [n // EACH for n in images_in(batches)]
    for batch in batches:
        on, off = 0.9 + 0.1 / 3, 0.1 / 3
        expected = [[on if label == row else off for row in range(3)] for label in batch.labels]
        torch.testing.assert_close(batch.inputs[1], torch.tensor(expected))


def test_a_sample_changes_with_its_number_and_the_seed(folder):
    first = loader_of(training(folder)).train_step(0)[0].inputs
    other = loader_of(training(folder, seed=2)).train_step(0)[0].inputs
    for part in (0, 2):
        assert not torch.equal(first[part], other[part]) and not torch.equal(first[part][0], first[part][1])
    draws = torch.cat([batch.inputs[2] for batch in loader_of(training(folder)).train_step(0)])
    assert draws.shape == (BATCH, 2 * 37) and draws.min() >= 0 and draws.max() < 1 and abs(draws.mean() - 0.5) < 0.05


def test_reading_leaves_global_generators_alone(folder):
    random.seed(5), np.random.seed(6), torch.manual_seed(7)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(5), np.random.seed(6), torch.manual_seed(7)
    loader_of(training(folder)).train_step(0)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


@pytest.mark.parametrize("alphas", [(0.8, 0.0), (0.0, 1.0)])
def test_targets_are_mixed_by_the_share_of_pixels(alphas):
    """Partners are half a batch apart. The mean of a mixed image says how much of either is in it."""
    own, others = torch.arange(5.0), torch.tensor([3.0, 4.0, 0.0, 1.0, 2.0])
    images, targets = own[:, None, None, None].expand(5, 3, 12, 12), torch.eye(5)
    for seed in range(8):
        mixed, soft = mix(images, targets, *alphas, np.random.default_rng(seed))
        weight = 1 - soft[0, 3].item()
        torch.testing.assert_close(mixed.mean((1, 2, 3)), own * weight + others * (1 - weight))
        torch.testing.assert_close(soft.sum(1), torch.ones(5))
        values = mixed[0].unique()
        assert len(values) == 1 if alphas[1] == 0 else {*values.tolist()} <= {0.0, 3.0}


@pytest.mark.parametrize("size", [6, 7, 16])
def test_an_image_is_not_mixed_with_its_repetitions(size):
    for first in range(REPEATS):
        which = torch.arange(first, first + size) // REPEATS
        _, soft = mix(torch.rand(size, 1, 8, 8), torch.eye(size)[which], 0.8, 0.0, np.random.default_rng(1))
        assert ((soft > 0).sum(1) == 2).all()


def test_mixup_and_cutmix_take_turns_by_chance():
    images, targets = torch.rand(2, 1, 8, 8), torch.eye(2)
    mixed = [mix(images, targets, 0.8, 1.0, np.random.default_rng(seed))[0] for seed in range(60)]
    cut = sum(bool(((image == images) | (image == images.flip(0))).all()) for image in mixed)
    assert 15 < cut < 45


def test_a_crop_has_the_area_and_the_shape_that_are_allowed():
    """Of a picture whose pixels tell their place."""
    place = np.mgrid[:200, :200].astype(np.uint8)
    image = Image.fromarray(np.stack([place[0], place[1], place[0] * 0], axis=2))
    areas = []
    for seed in range(200):
        pixels = np.asarray(random_crop(image, 50, 0.3, np.random.default_rng(seed)), float)
        height, width = ((pixels[..., axis].max() - pixels[..., axis].min()) * 50 / 49 for axis in (0, 1))
        areas.append(height * width / 200**2)
        assert 0.7 < width / height < 1.45
    assert min(areas) > 0.27 and max(areas) > 0.85 and abs(np.mean(areas) - 0.6) < 0.1


def test_a_crop_has_only_its_own_pixels():
    """The left half of a picture is black, although the right half is white."""
    half = Image.fromarray(np.repeat(np.repeat(np.uint8([0, 255]), 100)[None], 200, 0))
    drawn = iter((0.25, 0))  # the share of the area, and the logarithm of the ratio: 100 x 100 pixels
    corner = SimpleNamespace(uniform=lambda low, high: next(drawn), integers=lambda end: 0)
    assert not np.asarray(random_crop(half, 20, 0.02, corner)).any()


def test_rand_augment_skips_half_and_follows_its_strength():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8))
    original = np.asarray(image)
    kept = 0
    for seed in range(300):
        changed = np.asarray(rand_augment(image, np.random.default_rng(seed), number=1))
        kept += np.array_equal(changed, original)
    assert 110 < kept < 210  # half, and what an operation does not change
    weak = [np.asarray(rand_augment(image, np.random.default_rng(seed), 1, 0, 0, 1.0), int) for seed in range(40)]
    strong = [np.asarray(rand_augment(image, np.random.default_rng(seed), 1, 10, 0, 1.0), int) for seed in range(40)]
    assert np.mean([abs(x - original) for x in weak]) < 0.7 * np.mean([abs(x - original) for x in strong])


def test_random_erasing_puts_noise_into_one_box():
    sizes = []
    for seed in range(100):
        pixels = torch.full((3, 40, 40), 9.0)
        random_erasing(pixels, 1.0, np.random.default_rng(seed))
        rows, columns = (torch.nonzero((pixels[0] != 9).any(axis)).flatten() for axis in (1, 0))
        box = pixels[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert (box != 9).all() and box.numel() == (pixels != 9).sum()
        sizes.append(box[0].numel() / 1600)
    assert min(sizes) > 0.01 and max(sizes) < 0.36 and abs(box.mean()) < 0.3 and 0.8 < box.std() < 1.2
    pixels = torch.zeros(1, 8, 8)
    random_erasing(pixels, 0.0, np.random.default_rng(0))
    assert not pixels.any()


def test_held_out_images_are_dealt_in_turn_and_each_counts_once(folder):
    config = training(folder, held_out=folder)
    parts = [list(loader_of(config, rank, 2).validation(0)) for rank in range(2)]
    assert [len(part) for part in parts] == [4, 4]  # 21 images in micro-batches of 3, dealt to 2 ranks
    batches = sum(parts, [])
    real = torch.cat([batch.labels for batch in batches]) >= 0
    seen = [n for n, counts in zip(images_in(batches), real, strict=True) if counts]
    assert sorted(seen) == list(range(21)) and all(batch.samples is None for batch in batches)
    for batch in batches:
        assert torch.equal(batch.inputs[1], (batch.labels[:, None] == torch.arange(3)).float())
    few = list(loader_of(config).validation(5))
    assert images_in(few)[:5] == images_in([p for pair in zip(*parts, strict=True) for p in pair])[:5]
    assert torch.cat([batch.labels for batch in few]).tolist().count(-1) == 1


def test_evaluation_crops_the_middle():
    values = np.random.default_rng(0).integers(0, 256, (28, 28), dtype=np.uint8)
    expected = torch.from_numpy(values).double()[None] / 255 * 2 - 1
    whole = normalized(center_crop(Image.fromarray(values), 28)).double()
    torch.testing.assert_close(whole, expected, atol=1e-6, rtol=0)
    ramp = Image.fromarray(np.tile(np.arange(64, dtype=np.uint8) * 4, (32, 1)))  # 32 x 64: resized to itself
    middle = normalized(center_crop(ramp, 28))[0, 0] * 127.5 + 127.5
    torch.testing.assert_close(middle, torch.arange(18, 46) * 4.0, atol=0.6, rtol=0)


def test_a_tar_is_read_as_its_folder(folder, tmp_path):
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        tar.add(folder, arcname="train")
    one, other = open_images(training(folder)), open_images(training(tmp_path / "images.tar"))
    assert one.state() == other.state() and one.state()["segments"][0]["images"] == 21
    batches = [ImageLoader(images, 0, 1, False).train_step(0) for images in (one, other)]
    assert same(*batches)


def test_a_tar_with_hard_links_and_later_copies(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "train")
    (tmp_path / "train/dog/link.png").hardlink_to(tmp_path / "train/cat/00.png")
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        tar.add(tmp_path / "train", arcname="train")
        shutil.copy(tmp_path / "train/fox/20.png", tmp_path / "train/cat/03.png")
        tar.add(tmp_path / "train/cat/03.png", arcname="train/cat/03.png")
    one, other = Images(tmp_path / "train"), Images(tmp_path / "images.tar")
    assert one.sha256 == other.sha256 and len(one.labels) == 22
    for index in range(22):
        assert one.place(index).read(3).tobytes() == other.place(index).read(3).tobytes()


def test_a_tar_with_symbolic_links_and_names_written_two_ways(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "train")
    (tmp_path / "train/dog/link.png").symlink_to("../cat/00.png")
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        tar.add(tmp_path / "train", arcname="./train")
        tar.add(folder / "fox/20.png", arcname="train/cat/03.png")
    images = open_images(training(tmp_path / "images.tar"))
    left_out = "1 links are left out, such as train/dog/link.png; pack the files with tar -h"
    assert images.notes == [f"{tmp_path}/images.tar: {left_out}"] and images.num_images == 21
    assert Images(tmp_path / "images.tar").place(3).read(3).tobytes() == Images(folder).place(20).read(3).tobytes()


def test_a_tar_that_was_cut_off_or_cannot_be_read_is_refused(folder, tmp_path, monkeypatch):
    path = tmp_path / "images.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(folder, arcname="train")
        header, data = [(file.offset, file.offset_data) for file in tar if file.isfile()][-1]
    whole = path.read_bytes()
    (tmp_path / "holes").mkdir()
    with open(tmp_path / "holes/a.bmp", "wb") as file:
        file.truncate(1 << 20)
    subprocess.run(["tar", "--sparse", "-cf", path, "-C", tmp_path, "holes"], check=True)
    for tar in (path.read_bytes(), whole + whole, *(whole[:end] for end in (header, header + 100, data + 10))):
        path.write_bytes(tar)
        with pytest.raises(ConfigError, match="images.tar: is not a complete uncompressed tar"):
            Images(path)
    monkeypatch.setattr(tarfile, "open", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(ConfigError, match="images.tar: cannot be read .permission denied.; make it readable"):
        Images(path)


def test_a_tar_with_absolute_names(folder, tmp_path):
    with tarfile.open(tmp_path / "images.tar", "w") as tar:
        for path in folder.glob("*/*.png"):
            file = tar.gettarinfo(path, "")
            file.name = "/" * (path.parent.name == "cat") + f"train/{path.parent.name}/{path.name}"
            tar.addfile(file, io.BytesIO(path.read_bytes()))
    assert Images(tmp_path / "images.tar").sha256 == Images(folder).sha256


def test_a_link_to_a_folder_is_a_class_unless_it_leads_back(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "train")
    (tmp_path / "train/cat/all").symlink_to(tmp_path / "train")
    (tmp_path / "train/vixen").symlink_to(tmp_path / "train/fox")
    images = Images(tmp_path / "train")
    assert images.classes == ["cat", "dog", "fox", "vixen"] and len(images.labels) == 28
    (tmp_path / "train/cat/all").unlink()
    for one, other in (("cat", "dog"), ("dog", "cat")):  # to each other
        (tmp_path / f"train/{one}/link").symlink_to(f"../{other}")
    cats, dogs = (len(list(folder.glob(f"{name}/*.png"))) for name in ("cat", "dog"))
    assert len(Images(tmp_path / "train").labels) == 28 + cats + dogs


def test_a_folder_that_cannot_be_read_is_named(folder, monkeypatch):
    scandir = os.scandir

    def closed(path):  # in place of chmod, which does not stop root
        if path == str(folder / "dog"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(ConfigError, match="dog: cannot be read .permission denied.; make it readable"):
        Images(folder)


def test_pixels_of_any_range_are_refused(tmp_path):
    for number, kind in enumerate((np.float32, np.int32)):
        Image.fromarray(np.full((16, 16), 200, dtype=kind)).save(tmp_path / f"{number}.tif")
        with pytest.raises(ShardError, match="its pixels have no fixed range"):
            ImagePlace(str(tmp_path / f"{number}.tif"), "", 0, -1).read(3)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "CMYK", "RGBA", "I;16", "1"])
def test_images_of_every_mode_keep_their_brightness(mode, tmp_path):
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    whole = Image.new("L", (16, 16), 200)
    deep = Image.fromarray(np.full((16, 16), 200 * 257, dtype=np.uint16))
    (deep if mode == "I;16" else whole.convert("RGB").convert(mode, dither=Image.Dither.NONE)).save(path)
    expected = 255 if mode == "1" else 200
    for channels, shape in ((1, (16, 16)), (3, (16, 16, 3))):
        values = np.asarray(ImagePlace(str(path), "", 0, -1).read(channels))
        assert values.shape == shape and abs(values.astype(int) - expected).max() <= 5, values


def test_an_image_that_cannot_be_read_for_a_moment_is_read_again(tmp_path, monkeypatch):
    path, away, pauses = tmp_path / "a.png", ["/proc/self/mem"], []  # whose first byte cannot be read
    Image.new("L", (64, 64), 200).save(path)

    def opened(path, mode):
        return open(away.pop() if away else path, mode)

    monkeypatch.setattr(reading, "open", opened, raising=False)
    monkeypatch.setattr(files, "sleep", pauses.append)
    assert np.asarray(ImagePlace(str(path), "", 0, -1).read(1)).mean() == 200
    assert pauses == [1]
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ShardError, match="a.png: cannot be read as an image"):
        ImagePlace(str(path), "", 0, -1).read(1)
    assert pauses == [1]


def test_a_file_that_is_no_image_is_named_in_one_line(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.jpg").write_bytes(b"not an image\n")
    config = training(tmp_path)
    loader = loader_of(replace(config, model=replace(config.model, num_classes=1)))
    with pytest.raises(ShardError) as caught:
        loader.train_step(0)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path}/a/x.jpg: cannot be read as an image (") and "\n" not in message
    assert message.endswith("; remove or restore it")


def test_other_images_than_those_of_a_checkpoint_are_said(folder, tmp_path):
    images = open_images(training(folder))
    assert images.changes(images.state(), 5) == [] and images.continue_from(images.state(), 5) is images
    for path in folder.glob("*/*.png"):
        (tmp_path / path.parent.name).mkdir(exist_ok=True)
        (tmp_path / path.parent.name / path.name).write_bytes(path.read_bytes())
    (tmp_path / "cat" / "00.png").rename(tmp_path / "cat" / "new.png")
    (change,) = open_images(training(tmp_path)).changes(images.state(), 5)
    assert change.endswith("has 21 images of 3 classes, as before, but under other names")
    (tmp_path / "cat" / "new.png").unlink()
    (change,) = open_images(training(tmp_path)).changes(images.state(), 5)
    assert change == f"--data-dir {tmp_path} had 21 images of 3 classes and has 20 images of 3 classes"


def test_other_pixels_under_the_same_names_are_said(folder, tmp_path):
    held_out = tmp_path / "held-out"
    for copy in (tmp_path / "same", tmp_path / "other", held_out):
        shutil.copytree(folder, copy)
    Image.new("RGB", SIDES, (0, 0, 200)).save(tmp_path / "other/fox/18.png")
    with tarfile.open(tmp_path / "other.tar", "w") as tar:
        tar.add(tmp_path / "other", arcname="train")
    saved = open_images(training(folder, held_out=held_out)).state()
    earlier = {"segments": [{key: saved["segments"][0][key] for key in ("images", "classes", "sha256", "names")}]}
    assert open_images(training(tmp_path / "same", held_out=held_out)).changes(saved) == []
    for name in ("other", "other.tar"):
        (change,) = open_images(training(tmp_path / name)).changes(saved)
        assert change == f"--data-dir {tmp_path}/{name} has other image files than before, under the same names"
        assert open_images(training(tmp_path / name)).changes(earlier) == []  # a checkpoint that knows names only
    (change,) = open_images(training(folder, held_out=tmp_path / "other")).changes(saved)
    assert change.startswith(f"--validation-dir {tmp_path}/other has other image files than before")


def test_a_change_outside_of_the_sample_is_said_too(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("moh_lm.vision.images.MOST_HASHED", 1)
    said = []
    monkeypatch.setattr("moh_lm.vision.loader.log_rank0", said.append)
    for name in ("copied", "edited", "other"):
        shutil.copytree(folder, tmp_path / name)  # which keeps the times
    os.utime(tmp_path / "copied/dog/10.png", (0, 0))
    edited = tmp_path / "edited/fox/18.png"
    edited.write_bytes(edited.read_bytes()[:-1] + b"x")
    os.utime(edited, (0, 0))
    with open(tmp_path / "other/cat/03.png", "ab") as file:
        file.write(b"x")
    os.utime(tmp_path / "other/cat/03.png", (0, 0))
    saved = open_images(training(folder)).state()
    (change,) = open_images(training(tmp_path / "other")).changes(saved)
    assert change.endswith("other has other image files than before, under the same names")
    for name in ("copied", "edited"):  # without reading all of them, these cannot be told apart
        images = open_images(training(tmp_path / name))
        assert images.changes(saved) == [] and images.continue_from(saved, 5) is images
        assert said.pop().startswith(f"note: {tmp_path / name}: images were modified or copied since the checkpoint")
    for place in (folder, tmp_path / "other"):  # where nothing changed, and where a change was allowed
        assert open_images(training(place)).continue_from(saved, 5) and not said


def test_a_large_data_set_is_known_by_a_sample_of_its_images():
    """Reading stops after 2,048 images or 16 MiB; the images are the same each time, and lie all over the set."""
    for size, most in ((100, 2048), (1 << 20, 16)):
        read = []
        sample_hash(100_000, lambda index, read=read, size=size: read.append(index) or bytes(size))
        assert len(set(read)) == most and min(read) < 100_000 / 4 < 75_000 < max(read)
        again = []
        sample_hash(100_000, lambda index, again=again, size=size: again.append(index) or bytes(size))
        assert read == again
    values = {sample_hash(3, lambda index, changed=changed: bytes([index, index == changed])) for changed in range(4)}
    assert len(values) == 4


def test_what_is_wrong_is_said_together(folder, tmp_path):
    for name in ("cat", "dog", "owl"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "a.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.tar").write_text("x")
    wrong = training(folder, held_out=tmp_path)
    cases = (
        (replace(wrong, model=replace(wrong.model, num_classes=5)),
         ["--num-classes 5: ", "has class folder owl, which is not in --data-dir",
          "has no class folder fox, which is in --data-dir"]),
        (training(tmp_path / "nosuch", held_out=tmp_path / "empty"),
         ["--data-dir", "there is no such directory or tar", "--validation-dir", "holds no image in a folder"]),
        (training(tmp_path / "text.tar"), ["is not a complete uncompressed tar"]),
        (replace(wrong, model=replace(wrong.model, in_channels=4)), ["--in-channels 4: ", "choose 1 (grey) or 3"]),
    )  # fmt: skip
    for config, words in cases:
        with pytest.raises(ConfigError) as caught:
            open_images(config)
        assert all(word in "\n".join(caught.value.problems) for word in words), caught.value.problems


def test_the_strongest_augmentation_works_on_grey_images(folder):
    config = training(folder, rand_augment=10.0, random_erasing=1.0)
    config = replace(config, model=replace(config.model, in_channels=1))
    loader = loader_of(config)
    batches = sum((loader.train_step(step * BATCH) for step in range(20)), [])
    assert batches[0].inputs[0].shape == (MICRO, 1, SIZE, SIZE) and not Images(folder).problems(config.model)
    assert all(batch.inputs[0].isfinite().all() for batch in batches)


def test_a_pipe_among_the_images_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "0.png")
    with pytest.raises(ConfigError, match="a/0.png: cannot be read .not a file"):
        Images(tmp_path)


def test_an_image_beside_the_class_folders_is_refused(tmp_path):
    (tmp_path / "cat").mkdir()
    for place in ("cat/a.png", "stray.png"):
        Image.new("L", (8, 8)).save(tmp_path / place)
    with pytest.raises(ConfigError, match="stray.png lies beside the class folders; move it away"):
        Images(tmp_path)
    (tmp_path / "train").mkdir()
    for name in ("cat", "stray.png"):
        (tmp_path / name).rename(tmp_path / "train" / name)
    with pytest.raises(ConfigError, match="stray.png lies beside the class folders; move it away"):
        Images(tmp_path)
    shutil.rmtree(tmp_path / "train/cat")
    with pytest.raises(ConfigError, match="holds no image in a folder; give a directory or tar of class folders"):
        Images(tmp_path / "train")
