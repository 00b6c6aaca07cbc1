"""tools/average.py: means of checkpoints of several layouts against NumPy, and what reads the result."""

import json
import shutil

import numpy as np
import pytest

from moh_lm.checkpoint.fragments import FragmentReader
from tests.distributed import run_ranks
from tests.training.runs import arguments, losses, run
from tools import average

STEPS = "--save-interval 1 --log-interval 1 --eval-interval 0 --eval-samples 1 --train-iters".split()
BIAS = ("--routing", "sigmoid", "--load-balance-bias-rate", "0.01")
MIXED = ("--tensor-parallel-size", "2"), ("--pipeline-parallel-size", "2")


def step_of(directory, number):
    return directory / "checkpoints" / f"step-{number}"


@pytest.fixture(scope="module")
def source(data_dir, tmp_path_factory):
    """A run of four steps, two of them in each of two layouts."""
    directory = tmp_path_factory.mktemp("source")
    for layout, last in zip(MIXED, "24", strict=True):
        run_ranks(run, 2, arguments(data_dir, directory, *STEPS, last, *BIAS, *layout))
    return directory


@pytest.fixture(scope="module")
def averaged(source, tmp_path_factory):
    directory = tmp_path_factory.mktemp("made") / "average"
    assert average.main([str(source), "--steps", "4", "1", "2", "--output", str(directory)]) == 0
    return directory


def test_the_masters_are_the_exact_mean_of_layouts(source, averaged):
    readers = [FragmentReader(step_of(source, number)) for number in (1, 2, 4)]
    made, last = FragmentReader(step_of(averaged, 4)), readers[-1]
    assert made.shapes == last.shapes and any(name.endswith("bias_steps") for name in made.shapes)
    for name in made.shapes:
        expected = np.mean([reader.read("master", name).numpy().astype(np.float64) for reader in readers], axis=0)
        expected = np.rint(expected) if name.endswith("bias_steps") else expected
        assert np.array_equal(made.read("master", name).numpy(), expected.astype(np.float32))
        for moment in ("exp_avg", "exp_avg_sq"):
            assert np.array_equal(made.read(moment, name), last.read(moment, name))


def test_a_step_under_the_name_of_another_is_in_no_mean(source, tmp_path, capsys):
    shutil.copytree(source, tmp_path / "run")
    step_of(tmp_path / "run", 9).symlink_to(step_of(source, 4))
    code = average.main([str(tmp_path / "run"), "--steps", "2", "9", "--output", str(tmp_path / "mean")])
    assert code == 2 and "step-9/state.json: belongs to step 4; rename" in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()


def test_every_tool_reads_the_mean(averaged, tool, tmp_path):
    assert json.loads((step_of(averaged, 4) / "state.json").read_text())["averaged"] == [1, 2, 4]
    assert tool("checkpoint", "verify", averaged)[0] == 0
    assert tool("export_hf", "--checkpoint", averaged, "--output", tmp_path / "hf")[0] == 0
    assert tool("checkpoint", "consolidate", averaged, tmp_path / "mean.safetensors")[0] == 0


def test_a_run_goes_on_from_the_mean_in_every_layout(data_dir, averaged, tool, tmp_path):
    found = []
    for number, (world_size, more) in enumerate([(1, ()), (2, MIXED[0])]):
        directory = tmp_path / str(number)
        (directory / "checkpoints").mkdir(parents=True)
        tool("checkpoint", "copy", averaged, directory)
        flags = arguments(data_dir, directory, *STEPS, "6", *BIAS, *more)
        run_ranks(run, world_size, flags, 5)
        run_ranks(run, world_size, flags)
        found.append(losses(directory))
    assert len(found[0]) == 2 and found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize(
    "steps, problem",
    [
        (["2"], "--steps 2: is one checkpoint; give several; "),
        (["2", "2"], "--steps 2: is one checkpoint; give several; "),
        (["2", "9"], "--steps 9: there is no such checkpoint; "),
    ],
)
def test_too_few_checkpoints_are_refused(source, tool, tmp_path, steps, problem):
    code, _, said = tool("average", source, "--steps", *steps, "--output", tmp_path / "new")
    assert code == 2 and problem in said and said.strip().endswith("has 1, 2, 3, 4") and not list(tmp_path.iterdir())


def test_a_damaged_step_leaves_nothing(source, tool, tmp_path):
    for number in (2, 3):
        assert tool("checkpoint", "copy", step_of(source, number), tmp_path / "run" / "checkpoints")[0] == 0
    path = step_of(tmp_path / "run", 2) / "rank-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, _, said = tool("average", tmp_path / "run", "--steps", "2", "3", "--output", tmp_path / "new")
    assert code == 2 and "rank-0.safetensors" in said and not (tmp_path / "new").exists()
    code, _, said = tool("average", source, "--steps", "2", "3", "--output", source)
    assert code == 2 and "has checkpoints already" in said
