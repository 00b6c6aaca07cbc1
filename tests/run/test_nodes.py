"""Nodes that work on different things."""

import os
from pathlib import Path

import pytest

from tests.distributed import run_ranks
from tests.training.runs import arguments, run


def run_on_own_directory(flags):
    own = Path(flags[-1]) / os.environ["RANK"]
    own.mkdir(parents=True, exist_ok=True)
    run([*flags, "--checkpoint-dir", str(own)])


def run_with_own_seed(flags):
    run([*flags, "--seed", os.environ["RANK"]])


def test_nodes_with_other_directories_or_settings_are_refused(data_dir, tmp_path):
    with pytest.raises(AssertionError, match="rank 1 on .* does not see rank 0's directory"):
        run_ranks(run_on_own_directory, 2, arguments(data_dir, tmp_path))
    with pytest.raises(AssertionError, match="rank 1 on .* has another seed than rank 0"):
        run_ranks(run_with_own_seed, 2, arguments(data_dir, tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
