"""Files of images: folders and tars are read alike, changes are said, and what cannot be read is refused."""

import errno
import io
import os
import shutil
import subprocess
import tarfile
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from moh_lm.config import ConfigError
from moh_lm.data import files
from moh_lm.data.files import ShardError
from moh_lm.vision import images as reading
from moh_lm.vision.images import ImagePlace, Images, sample_hash
from moh_lm.vision.loader import ImageLoader, open_images
from tests.vision.cases import loader_of
from tests.vision.coloured import SIDES, same, training

# --- Folders and tars ---


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


# --- Changes since a checkpoint ---


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


# --- What is refused ---


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


def test_the_parent_of_training_and_held_out_images_is_refused(tmp_path):
    for place in ("train/cat", "train/dog", "val/cat"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / place / "0.png")
    with pytest.raises(ConfigError, match="has train and val in place of classes; give one of these"):
        Images(tmp_path)
    assert Images(tmp_path / "train").classes == ["cat", "dog"]
    assert Images(tmp_path / "val").classes == ["cat"]
