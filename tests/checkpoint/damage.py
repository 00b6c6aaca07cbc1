"""Harm to the files of a checkpoint, ``harm(step, path)``, and a pickle that shows whether it was read as one."""

import shutil


def truncate(step, path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(step, path):
    path.write_bytes(path.read_bytes() + b"0")


def empty(step, path):
    path.write_bytes(b"")


def remove(step, path):
    path.unlink()


def replace_by_directory(step, path):
    path.unlink()
    path.mkdir()


def swap_ranks(step, path):
    one, other = step / "rank-0.safetensors", step / "rank-1.safetensors"
    one.rename(step / "x")
    other.rename(one)
    (step / "x").rename(other)


def add_a_rank(step, path):
    shutil.copy(step / "rank-1.safetensors", step / "rank-2.safetensors")


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")
