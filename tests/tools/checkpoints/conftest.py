"""The run directory of three steps, a copy of it for harm, and the command that reads checkpoints."""

import shutil
from functools import partial

import pytest

from tests.training.test_layouts import train
from tools.checkpoints import read


@pytest.fixture(scope="session")
def source(data_dir, tmp_path_factory):
    """The run directory of three steps on two ranks, all of them kept."""
    return train((1, 1, 2, 1, 4, False, "paper"), data_dir, tmp_path_factory.mktemp("source"))


@pytest.fixture
def copied(source, tmp_path):
    shutil.copytree(source, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def checkpoint(tool, monkeypatch):
    """``tool`` for checkpoint, which reads parameters in many pieces."""
    monkeypatch.setattr(read, "CHUNK", 997)
    return partial(tool, "checkpoint")
