"""Fixtures shared by the tests: a small data directory, Triton's interpreter, and a machine left as it was found."""

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from moh_lm.data.shards import ShardWriter, write_manifest
from tests.ready_python import ready_python

VOCAB_SIZE = 64


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Two sources, "even" and "odd", of documents that count up in steps of 2; a few thousand tokens each."""
    directory = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for parity, source in enumerate(("even", "odd")):
        for unit in range(2):
            (directory / source).mkdir(exist_ok=True)
            with ShardWriter(directory / source / f"unit-{unit}", VOCAB_SIZE) as shard:
                for _ in range(60):
                    first = generator.integers(2, VOCAB_SIZE // 2) * 2 + parity
                    words = (first + 2 * np.arange(generator.integers(20, 60))) % (VOCAB_SIZE - 4) + 3
                    shard.add([*words.tolist(), 2])
                shard.commit({"tokenizer": {"sha256": "none", "vocab_size": VOCAB_SIZE, "eos_id": 2}, "inputs": []})
    write_manifest(directory)
    return directory


@pytest.fixture(scope="session", autouse=True)
def nothing_of_deepspeed_left_in_shared_memory():
    before = set(Path("/dev/shm").glob("deepspeed*"))
    yield
    assert set(Path("/dev/shm").glob("deepspeed*")) <= before


@pytest.fixture
def threads():
    """A test may change the number of torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """A folder for PATH: python, deepspeed and torchrun that start with the slow imports done."""
    with ready_python(tmp_path_factory.mktemp("programs")) as folder:
        yield folder


@pytest.fixture(scope="module")
def interpreter():
    """Runs a function of the tests with its arguments where Triton interprets, in a process of its own: the interpreter
    is chosen when Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pool = multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (1,))
    finally:
        del os.environ["TRITON_INTERPRET"]
    with pool:
        yield lambda function, *arguments: pool.apply(function, arguments)
