"""Images in class folders, in a directory or a tar, and the random numbers by which a run orders and changes them."""

import errno
import hashlib
import io
import os
import stat
import tarfile
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from moh_lm.config import ConfigError
from moh_lm.data.files import ShardError, patient, refuse_unreadable
from moh_lm.vision.augment import MODES

SPLITS = {"train", "val", "valid", "validation", "test"}  # no names of classes
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
ORDER, SAMPLE, MIXED, HELD_OUT, HASHED = range(5)  # uses of random numbers
MOST_HASHED, MOST_BYTES = 2048, 1 << 24  # the most images, and bytes, that are hashed when a data set is opened


class ImagePlace(NamedTuple):
    """The place of an image: ``size`` bytes (-1: all) of a file from ``start`` on. member: its name in a tar."""

    file: str
    member: str
    start: int
    size: int

    def data(self):
        """Return the bytes of the image. Raises OSError."""
        with open(self.file, "rb") as file:
            file.seek(self.start)
            return file.read(self.size)

    @patient
    def read(self, channels):
        """Return the Pillow image, grey or RGB. Raises ShardError if the bytes are not an image."""
        try:
            image = Image.open(io.BytesIO(self.data()))
            if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
                raise ValueError("its pixels have no fixed range")
            if image.mode.startswith("I"):  # 16 bits; Pillow would cut off what is above 255
                pixels = np.asarray(image)
                if pixels.min() < 0 or pixels.max() >= 2**16:
                    raise ValueError("its pixels are whole numbers outside 0..65535")
                image = Image.fromarray((pixels // 256).astype(np.uint8))
            return image.convert(MODES[channels])
        except Exception as error:  # a damaged file may raise anything
            path = "/".join(filter(None, (self.file, self.member)))
            reason = "no known format" if isinstance(error, UnidentifiedImageError) else error
            text = f"{path}: cannot be read as an image ({reason}); remove or restore it"
            raise ShardError(" ".join(text.split())) from error


class Images:
    """The images in the class folders of a directory or tar; the folders may share one parent folder.

    classes: sorted names of the folders. labels: int64 [N], in the order of the images' names. sha256: hash of names
    and labels. sizes, times: hashes of all file sizes and of all modification times; a copy may change the latter.
    sampled: see ``sample_hash``. notes: remarks for the user. Raises ConfigError if there is no usable image.
    """

    content = "image files"

    def __init__(self, path):
        self.path = str(path)
        if not os.path.exists(path):
            raise ConfigError([f"{path}: there is no such directory or tar"])
        self.in_tar = os.path.isfile(path)
        files, links = tar_files(self.path) if self.in_tar else (folder_files(self.path), [])
        self.notes = [
            f"{path}: {len(links)} links are left out, such as {link}; pack the files with tar -h" for link in links[:1]
        ]
        self.names = sorted(filter(is_image, files))  # without hidden folders
        if not any("/" in name for name in self.names):
            raise ConfigError([f"{path}: holds no image in a folder; give a directory or tar of class folders"])
        self.spans = np.array([files[name] for name in self.names], dtype="<i8")
        folders = {name.rpartition("/")[0] for name in self.names}
        top = os.path.commonpath(folders) if len(folders) > 1 else os.path.dirname(*folders)
        names = [name[len(top) + 1 if top else 0 :] for name in self.names]
        if strays := [name for name in names if "/" not in name]:
            raise ConfigError([f"{path}: {strays[0]} lies beside the class folders; move it away"])
        found = [name.split("/")[0] for name in names]
        self.classes = sorted(set(found))
        if len(self.classes) > 1 and SPLITS.issuperset(self.classes):
            raise ConfigError([f"{path}: has {' and '.join(self.classes)} in place of classes; give one of these"])
        number = {name: index for index, name in enumerate(self.classes)}
        self.labels = np.array([number[name] for name in found])
        self.sha256 = names_hash(names, self.labels)
        self.sizes, self.times = (hashlib.sha256(column.tobytes()).hexdigest() for column in self.spans.T[1:])
        try:
            self.sampled = sample_hash(len(names), lambda index: self.place(index).data())
        except OSError as error:
            refuse_unreadable(error)

    def identity(self):
        """Return what distinguishes these images from others, as JSON values."""
        return {"sha256": self.sha256, "sampled": self.sampled, "sizes": self.sizes, "times": self.times}

    def place(self, index):
        name, (start, size, _) = self.names[index], self.spans[index].tolist()
        return ImagePlace(*(self.path, name) if self.in_tar else (os.path.join(self.path, name), ""), start, size)

    def problems(self, model):
        """Return sentences that say why ``model`` cannot read these images."""
        channels = f"--in-channels {model.in_channels}: {self.path} holds images; choose 1 (grey) or 3 (RGB)"
        return [] if model.in_channels in MODES else [channels]


def folder_files(path):
    """Return all images below a directory, {name: (0, bytes, time of modification in seconds)}. Raises ConfigError.

    A link is not followed if it leads back to a folder above it.
    """
    found, walked = {}, {path: set()}  # the folders above each folder that is still to be walked
    for folder, folders, names in os.walk(path, onerror=refuse_unreadable, followlinks=True):
        here, real = os.path.realpath(folder), {name: os.path.realpath(os.path.join(folder, name)) for name in folders}
        above = walked.pop(folder) | {here}
        up = {name for name in folders if os.path.commonpath((here, real[name])) == real[name]}
        folders[:] = [name for name in folders if name not in up and real[name] not in above]
        walked |= {os.path.join(folder, name): above for name in folders}
        inside = folder[len(path) :].strip("/")
        try:
            for name in filter(is_image, names):
                status = os.stat(f"{folder}/{name}")
                if not stat.S_ISREG(status.st_mode):
                    raise OSError(errno.EINVAL, "not a file", f"{folder}/{name}")
                found[f"{inside}/{name}" if inside else name] = 0, status.st_size, int(status.st_mtime)
        except OSError as error:
            refuse_unreadable(error)
    return found


def tar_files(path):
    """Return all files in a tar, {name: (first byte, bytes, time of modification in seconds)}, and the names of links
    that point to no earlier file.

    If a name occurs twice, the last file counts, as it does when the tar is unpacked.
    """
    spans, links = {}, []
    try:
        with tarfile.open(path, "r:") as tar:
            for file in tar:
                name = unpacked(file.name)
                if file.issparse():
                    raise tarfile.ReadError(f"{name} is stored with holes; pack without --sparse")
                if file.isfile():
                    spans[name] = file.offset_data, file.size, int(file.mtime)
                elif file.islnk() and (other := unpacked(file.linkname)) in spans:  # a link to an earlier file
                    spans[name] = spans[other]
                elif file.issym() or file.islnk():
                    links.append(name)
            tar.fileobj.seek(tar.offset)
            end = tar.fileobj.read(tarfile.BLOCKSIZE)
            if len(end) < tarfile.BLOCKSIZE or end.strip(tarfile.NUL):  # tarfile mistakes a damaged header for the end
                raise tarfile.ReadError(f"damaged or cut off at byte {tar.offset}")
            while rest := tar.fileobj.read(1 << 20):
                if rest.strip(tarfile.NUL):
                    raise tarfile.ReadError("more data follow its end, such as another tar")
    except tarfile.ReadError as error:
        text = f"is not a complete uncompressed tar ({error}); give one, or a directory"
        raise ConfigError([f"{path}: {text}"]) from error
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read ({error.strerror.lower()}); make it readable"]) from error
    return spans, links


def unpacked(name):
    """Return the path to which ``tar`` unpacks a name, relative to the directory."""
    return os.path.normpath(name).lstrip("/")


def is_image(name):
    return "/." not in f"/{name}" and name.lower().endswith(SUFFIXES)


def names_hash(names, labels):
    """Return the SHA-256 of the names of images and their labels."""
    lines = "".join(f"{name}\t{label}\n" for name, label in zip(names, labels.tolist(), strict=True))
    return hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()


def sample_hash(count, read, digest=None):
    """Return the SHA-256 of what ``read`` returns for the numbers of ``count`` images.

    Reading all images of a large data set would delay the start of a run. The hash then covers a fixed random choice
    of at most ``MOST_HASHED`` images and ``MOST_BYTES`` bytes, which takes 0.02 s, a third of the time to open 10,000
    small images. digest: a hash to update.
    """
    digest, left = digest or hashlib.sha256(), MOST_BYTES
    for index in generator(HASHED, count).permutation(count)[:MOST_HASHED].tolist():
        data = read(index)
        digest.update(data)
        left -= len(data)
        if left <= 0:
            break
    return digest.hexdigest()


def generator(*numbers):
    """Return an independent random generator for each combination of ``numbers``."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(numbers)))


@lru_cache(maxsize=2)
def order(seed, epoch, count):
    """Return the order of ``count`` images in an epoch, int64 [count]."""
    return generator(ORDER, seed, epoch).permutation(count)
