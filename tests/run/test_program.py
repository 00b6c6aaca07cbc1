"""Errors that end a run."""

import functools
import re
import shutil
from pathlib import Path

import pytest

from tests.distributed import run_ranks
from tests.run.harm import run_and_suffer
from tests.training.runs import arguments


def zero_the_shards(directory):
    for path in directory.glob("*/*.bin"):
        path.write_bytes(bytes(path.stat().st_size))


def test_a_damaged_shard_ends_the_run_in_one_line_with_its_name(data_dir, tmp_path):
    output, data = tmp_path / "output", tmp_path / "data"
    shutil.copytree(data_dir, data)
    harm = functools.partial(zero_the_shards, data)
    with pytest.raises(AssertionError, match=r"exit codes \["):
        run_ranks(run_and_suffer, 2, arguments(data, tmp_path / "run"), 3, harm, output)
    said = "".join(Path(f"{output}-{rank}").read_text() for rank in (0, 1))
    assert re.search(r"moh_lm.pretrain: rank \d: .*unit-\d.bin: block 0, .* is damaged.*; copy it again with", said)
